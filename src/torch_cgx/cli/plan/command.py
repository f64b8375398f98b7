"""`cgx plan`: the arguments, the printed tables, and the recommendation.

The model of time is in model.py, its constants in sites.py, the training run in inputs.py, the picture in plot.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_cgx.cli import registry
from torch_cgx.cli.registry import UsageError, command
from torch_cgx.config import DEFAULT_QUANTIZER

if TYPE_CHECKING:
    from torch_cgx.cli.plan.inputs import Input
    from torch_cgx.cli.plan.model import Plan, Prediction, Way

SCHEMA, SCHEMA_VERSION = "cgx-plan", 1
MOST_NODES = 1024
NEAR = 1.02
"""A step time within this factor of the fastest counts as equally fast."""
_HOURS = 24.0
_SHOWN = ("exact", "fp16", "8 bits", "4 bits", "2 bits", "1 bit")


def _lazily(name: str) -> Any:
    """Return an argument type of inputs.py. It is imported on first use, so that `cgx --help` skips the simulator."""

    def parse(text: str) -> Any:
        from torch_cgx.cli.plan import inputs

        return getattr(inputs, name)(text)

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    positive = registry.above_zero()
    add("--params", type=_lazily("count"), metavar="N", help="parameters of the model, as in 25.6M, 335M, 7B")
    add("--from-run", type=Path, metavar="FILE", help="a run of `cgx bench train --json`, with its measured step")
    add("--model", metavar="MODULE:FUNCTION", help="a function that builds the model, whose parameters are counted")
    add("--step-ms", type=positive, metavar="MS", help="a step of one rank without communication (not with --from-run)")
    add("--gpus", type=registry.whole_number(1, 1024), metavar="N", help="ranks on each node (8)")
    add("--nodes", type=registry.whole_number(1, MOST_NODES), metavar="N", help=f"nodes, 1 to {MOST_NODES} (4)")
    add("--intra", type=_lazily("link_rate"), metavar="RATE", help="of a rank's link inside its node (32gbit)")
    add("--inter", type=_lazily("link_rate"), metavar="RATE", help="of a node's link to others (10gbit)")
    add("--latency-us", type=positive, metavar="US", help="of a message between nodes (by communicator)")
    add(
        "--kernels",
        metavar="WHAT",
        help="what encodes: rtx3090, a100, h100, cpu, or a file of `cgx bench kernels --json` "
        "(rtx3090; with --from-run cpu)",
    )
    add("--cores", type=positive, metavar="N", help="CPU cores that a rank has; with 1, all share it (2)")
    registry.add_compression_arguments(parser)
    add("--price", type=positive, metavar="P", help="of a node for an hour, in any currency")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=_lazily("count"), metavar="N", help="that the training has on these nodes")
    length.add_argument(
        "--hours", type=positive, help=f"that it would take on these nodes, if scaling were ideal ({_HOURS:g})"
    )
    add("--json", type=registry.output_file, metavar="FILE", help="write everything")
    add("--plot", type=registry.plot_file, metavar="FILE.png", help=f"draw scaling curves to {MOST_NODES:,} nodes")


@command("plan", summary="predict what a training would gain on a cluster", arguments=add_arguments)
def plan(options: argparse.Namespace) -> int:
    """Predict step time, share of ideal scaling and cost of a training: exact, fp16, and cgx at 1 to 8 bits.

    With --quantizer rotated, 1 to 4 bits are rotated and 5 to 8 max-min. That changes the bytes a little; kernels of
    both are taken to be as fast.

    The very programs that cgx would run are run by clocks, with the algorithm that cgx would choose between nodes.
    Exact means a ring, as NCCL and Gloo have it. docs/plan-validation.md has what this assumes, and how well it has
    predicted what was measured.

    step     predicted
    share    of ideal scaling: the step without communication / step
    exposed  communication that is not hidden behind backward
    link     bytes that a node sends to others in a step

        cgx plan --params 335M --step-ms 180 --gpus 8 --nodes 4 --intra 32gbit --inter 10gbit --price 10.4
        cgx plan --from-run bench.json --nodes 16
        cgx plan --model my.module:build --step-ms 95
    """
    from torch_cgx.cli.plan.inputs import read_run, workload_of_model, workload_of_numbers
    from torch_cgx.cli.plan.model import CONTESTANTS, Plan
    from torch_cgx.cli.plan.sites import make_site
    from torch_cgx.cli.progress import Progress

    registry.check_compression(1, options.bucket_size, options.quantizer)
    given = [name for name in ("params", "from_run", "model") if getattr(options, name) is not None]
    if len(given) != 1:
        got = " and ".join(f"--{name.replace('_', '-')}" for name in given) or "none"
        raise UsageError(f"expected one of --params, --from-run and --model, got {got}")
    if given == ["from_run"]:
        if options.step_ms is not None:
            raise UsageError("argument --step-ms: not allowed with --from-run, which has a measured step")
        source = read_run(options.from_run)
    elif options.step_ms is None:
        raise UsageError(f"argument --{given[0]}: needs --step-ms as well, a step's time without communication")
    elif given == ["params"]:
        source = workload_of_numbers(options.params, options.step_ms / 1e3)
    else:
        source = workload_of_model(options.model, options.step_ms / 1e3)

    _fill_in(options, source)
    site = make_site(
        options.kernels,
        options.gpus,
        options.intra,
        options.inter,
        latency_s=None if options.latency_us is None else options.latency_us / 1e6,
        cores=options.cores,
        block=options.bucket_size,
        quantizer=options.quantizer,
    )
    made = Plan(site, source.workload)
    curve_nodes = sorted({2**power for power in range(11)} | {options.nodes})
    curves = []
    with Progress("cgx plan") as progress:
        for place, nodes in enumerate(curve_nodes):
            progress.update(place / len(curve_nodes), f"{nodes} node{'s' * (nodes > 1)}")
            curves += [made.predict(contestant, nodes) for contestant in CONTESTANTS]
    table = [prediction for prediction in curves if prediction.nodes == options.nodes]
    advice = advise(made, table, options.nodes)
    report = _report(options, source, made, table, curves, advice)
    print(format_plan(report))
    if options.json:
        options.json.write_text(json.dumps(report) + "\n")
        print(f"everything: {options.json}")
    if options.plot:
        from torch_cgx.cli.plan.plot import draw

        draw(report, options.plot)
        print(f"plot: {options.plot}")
    return 0


def _fill_in(options: argparse.Namespace, source: Input) -> None:
    """Fill in the defaults, from the measured run if there is one."""
    of_run = options.from_run is not None
    options.gpus = options.gpus or source.ranks or 8
    options.nodes = options.nodes or source.nodes or 4
    options.intra = options.intra or 32e9
    options.inter = options.inter or source.inter_bit_per_s or 10e9
    options.kernels = options.kernels or ("cpu" if of_run else "rtx3090")


def fastest(cells: Sequence[Prediction]) -> Prediction:
    """Return the most precise of exact, 8 to 4 bits and fp16 that is within 2 % of the fastest of them."""
    by_name = {prediction.contestant: prediction for prediction in cells}
    order = ("exact", *(f"{bits} bits" for bits in range(8, 3, -1)), "fp16")
    fast_s = min(by_name[name].step_s for name in order)
    return next(by_name[name] for name in order if by_name[name].step_s <= NEAR * fast_s)


def advise(made: Plan, table: list[Prediction], nodes: int) -> dict[str, Any]:
    """Recommend the most precise of the fastest contestants, and the communicators for it."""
    by_name = {prediction.contestant: prediction for prediction in table}
    chosen = fastest(table)
    if chosen.way is None:
        best = min((each for each in table if each.way), key=lambda each: each.step_s)
        ours = {"contestant": best.contestant, "step_s": best.step_s}
        return {"contestant": chosen.contestant, "way": None, "alternatives": [], "lower": None, "compressed": ours}
    others = [(way, made.predict(chosen.contestant, nodes, way)) for way in _ways(made, nodes, chosen.way)]
    best_way = min(others, key=lambda each: each[1].step_s)[1].way
    fewer = min((by_name[f"{bits} bit{'s' * (bits > 1)}"] for bits in (3, 2, 1)), key=lambda each: each.step_s)
    return {
        "contestant": chosen.contestant,
        "way": _way_dict(best_way),
        "alternatives": [{**_way_dict(way), "step_s": found.step_s} for way, found in others],
        "lower": fewer.contestant if fewer.step_s * 1.05 < chosen.step_s else None,
        "compressed": None,
    }


def _ways(made: Plan, nodes: int, way: Way) -> list[Way]:
    """Return the way with every communicator that makes a difference: those within a node, if there is only one."""
    from dataclasses import replace

    return [replace(way, inner=inner) for inner in made.site.within] if nodes == 1 else [way]


def _way_dict(way: Way | None) -> dict[str, Any]:
    assert way is not None
    return {"algorithm": way.algorithm, "broadcast": way.broadcast, "inner": way.inner, "cross": way.cross}


def _report(
    options: argparse.Namespace,
    source: Input,
    made: Plan,
    table: list[Prediction],
    curves: list[Prediction],
    advice: dict[str, Any],
) -> dict[str, Any]:
    ideal_s = made.workload.ideal_s
    steps = options.steps or (options.hours or _HOURS) * 3600 / ideal_s

    def cell(prediction: Prediction) -> dict[str, Any]:
        # The number of samples is fixed, so more nodes need fewer steps.
        node_hours = steps * options.nodes * prediction.step_s / 3600
        ideal_hours = steps * options.nodes * ideal_s / 3600
        price = options.price
        return {
            "contestant": prediction.contestant,
            "nodes": prediction.nodes,
            "step_s": prediction.step_s,
            "ideal_share": prediction.share,
            "exposed_s": prediction.exposed_s,
            "communication_s": prediction.communication_s,
            "link_nbytes": prediction.link_nbytes,
            "hours": node_hours / prediction.nodes,
            "cost": None if price is None else node_hours * price,
            "ideal_cost": None if price is None else ideal_hours * price,
            "way": None if prediction.way is None else _way_dict(prediction.way),
        }

    site = made.site
    where = f"{options.nodes} node{'s' * (options.nodes > 1)} of {options.gpus} rank{'s' * (options.gpus > 1)}"
    links = f"{format_rate(options.intra)} within, {format_rate(options.inter)} between"
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "title": f"{source.name}, step {ideal_s * 1e3:.4g} ms; {where}, {links}; kernels {Path(options.kernels).name}",
        "settings": {
            "gpus": options.gpus,
            "nodes": options.nodes,
            "intra_bit_per_s": options.intra,
            "inter_bit_per_s": options.inter,
            "kernels": options.kernels,
            "cores": site.cores,
            "bucket_size": options.bucket_size,
            "quantizer": options.quantizer,
            "price": options.price,
            "steps": steps,
            "ideal_step_s": ideal_s,
            "buckets": [[bucket.numel, bucket.ready_s] for bucket in made.workload.buckets],
        },
        "cells": [cell(prediction) for prediction in table],
        "curves": [cell(prediction) for prediction in curves],
        "fastest": {
            str(nodes): fastest([each for each in curves if each.nodes == nodes]).contestant
            for nodes in sorted({each.nodes for each in curves})
        },
        "advice": advice,
    }


def format_plan(report: dict[str, Any]) -> str:
    from torch_cgx.cli.table import format_nbytes, format_seconds, format_table

    settings = report["settings"]
    priced = settings["price"] is not None
    rows = []
    for cell in report["cells"]:
        row = [
            cell["contestant"],
            format_seconds(cell["step_s"]),
            f"{cell['ideal_share']:.0%}",
            format_seconds(cell["exposed_s"]),
            format_nbytes(cell["link_nbytes"]),
            f"{cell['hours']:.1f}",
        ]
        rows.append([*row, f"{cell['cost']:,.0f}"] if priced else row)
    ideal_hours = settings["steps"] * settings["ideal_step_s"] / 3600
    ideal = ["ideal", format_seconds(settings["ideal_step_s"]), "100%", format_seconds(0), "", f"{ideal_hours:.1f}"]
    rows.append([*ideal, f"{report['cells'][0]['ideal_cost']:,.0f}"] if priced else ideal)
    header = ["sends", "step", "share", "exposed", "link", "hours", *(["cost"] if priced else [])]
    nodes = sorted({cell["nodes"] for cell in report["curves"]})
    share = {(cell["nodes"], cell["contestant"]): f"{cell['ideal_share']:.0%}" for cell in report["curves"]}
    by = {cell["nodes"]: cell["way"]["algorithm"] for cell in report["curves"] if cell["contestant"] == "4 bits"}
    first = report["fastest"]
    scaling = [[str(count), *(share[count, name] for name in _SHOWN), by[count], first[str(count)]] for count in nodes]
    return "\n".join(
        [
            report["title"],
            f"training: {settings['steps']:,.0f} steps on these nodes; predicted, see docs/plan-validation.md",
            "",
            format_table(header, rows),
            "",
            format_advice(report),
            "",
            "share of ideal scaling, by nodes:",
            format_table(["nodes", *_SHOWN, "4 bits by", "fastest"], scaling),
        ]
    )


def format_advice(report: dict[str, Any]) -> str:
    from torch_cgx.cli.table import format_seconds

    advice = report["advice"]
    if advice["way"] is None:
        ours = advice["compressed"]
        own_s = next(cell["step_s"] for cell in report["cells"] if cell["contestant"] == advice["contestant"])
        return (
            f"recommended: {advice['contestant']}, {format_seconds(own_s)} a step. Compression does not pay here: the "
            f"fastest with cgx, {ours['contestant']}, takes {format_seconds(ours['step_s'])}"
        )
    way, settings = advice["way"], report["settings"]
    bits = advice["contestant"].split()[0]
    variables = [f"CGX_COMPRESSION_QUANTIZATION_BITS={bits}"]
    rotated = settings["quantizer"] != DEFAULT_QUANTIZER and int(bits) in registry.widths_of(settings["quantizer"])
    if rotated:
        variables.append(f"CGX_COMPRESSION_QUANTIZER={settings['quantizer']}")
    if settings["gpus"] > 1 and len(advice["alternatives"]) > 1:
        variables.append(f"CGX_INNER_COMMUNICATOR_TYPE={way['inner']}")
    if settings["nodes"] > 1:
        variables.append(f"CGX_LINK_COSTS={format_rate(settings['inter_bit_per_s'])}")
    if settings["gpus"] > 1 and settings["nodes"] > 1:
        variables.append(f"CGX_INTRA_BROADCAST={int(way['broadcast'])}")
    lines = [f"recommended: {advice['contestant']}", *(f"    {variable}" for variable in variables)]
    if len(advice["alternatives"]) > 1:
        told = ", ".join(f"{each['inner']} {format_seconds(each['step_s'])}" for each in advice["alternatives"])
        lines.append(f"communicators, step: {told}")
    if way["algorithm"] == "GRID":
        lines.append("cgx will sum in a GRID of nodes, which quantizes once more than SRA: look at the loss")
    if advice["lower"]:
        adaptive = "" if rotated else "try adaptive bits, and "
        lines.append(
            f"{advice['lower']} would be faster still, but loses more of each gradient: {adaptive}look at the loss"
        )
    return "\n".join(lines)


def format_rate(bit_per_s: float) -> str:
    factor, unit = (1e9, "gbit") if bit_per_s >= 1e9 else (1e6, "mbit")
    return f"{bit_per_s / factor:g}{unit}"
