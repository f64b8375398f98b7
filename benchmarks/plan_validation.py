"""Hold `cgx plan` against what was measured and against what was published: the tables of docs/plan-validation.md.

    python benchmarks/plan_validation.py [FILE.json ...] [--doc docs/plan-validation.md]

Without files, the newest runs of plan_runs.py. Nothing is fitted to a row that is judged. A machine's constants come
from the kernels' own benchmark there and from allreduces on two nodes at 10 Gbit/s, where processors and not links are
the limit. Each constant is fitted to the row that tells most of it (FITS). Rates of links are those that were set.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from markers import short_cpu, write_between
from results import machine_of, newest, newest_of_each
from torch_cgx.cli.bench.train_report import IDEAL
from torch_cgx.cli.plan.inputs import input_of_run, link_rate, workload_of_numbers
from torch_cgx.cli.plan.model import EXACT, FP16, Bucket, Plan, Site, Way, Workload
from torch_cgx.cli.plan.sites import make_site, read_speeds
from torch_cgx.cli.table import format_markdown, format_nbytes, format_seconds
from torch_cgx.plan.costs import ETHERNET, HOST, Speeds, Wire

KERNELS = "plan-kernels.json"
CALIBRATION = ("plan-calibration-4-bits.json", "plan-calibration-exact.json")
MEASURED = ("<!-- measured: begin (python benchmarks/plan_validation.py) -->", "<!-- measured: end -->")
PUBLISHED = ("<!-- published: begin (python benchmarks/plan_validation.py) -->", "<!-- published: end -->")
LATENCY_S = 50e-6  # of a message between two namespaces of one host
BUSY = 0.5  # cores at the start: others had the processors, whatever was predicted
FAST = 10e9  # from this rate on, 30 % off is allowed; below, 15 %
_WITHOUT_RATE = 100e9
_SWEEPS = 8


LARGE, SMALL = 64 << 20, 64 << 10
# Which constant is fitted to which row of the calibration: (backend, bits, bytes), and the most that it can be.
FITS = {
    "gloo_byte_s": (("gloo", 32, LARGE), 1e-8),
    "gloo_start_s": (("gloo", 32, SMALL), 1e-2),
    "byte_s": (("cgx", 32, LARGE), 1e-8),
    "message_s": (("cgx", 4, LARGE), 1e-2),
    "start_s": (("cgx", 4, SMALL), 1e-2),
}


@dataclass(frozen=True)
class Constants:
    """Of a machine: seconds, of a processor where a byte or a message costs them at each end."""

    speeds: Speeds
    gloo_byte_s: float = 0.0
    gloo_start_s: float = 0.0  # until an operation of Gloo begins
    byte_s: float = 0.0
    message_s: float = 0.0
    start_s: float = 0.0


def site_of(run: dict[str, Any], constants: Constants) -> Site:
    """The machine that the run was made on: nodes of cores of their own, or that share all."""
    settings, link = run["settings"], run["link"]
    ranks, nodes = settings["nproc"], settings["nodes"] or 1
    rate = (link_rate(link["rate"]) if link["rate"] else _WITHOUT_RATE) / 8 * ETHERNET
    return Site(
        ranks,
        "cpu",
        {"SHM": HOST.within},
        {"TCP": Wire(rate, LATENCY_S, constants.message_s, constants.byte_s)},
        constants.speeds,
        Wire(_WITHOUT_RATE / 8, LATENCY_S, 0.0, constants.gloo_byte_s),
        Wire(rate, LATENCY_S, 0.0, constants.gloo_byte_s),
        cores=(link.get("node_cores") or run["machine"]["cores"] / nodes) / ranks,
        block=settings["bucket_size"],
        steals_kernels=True,
        steals_transport=True,
        start_s=constants.start_s,
        exact_start_s=constants.gloo_start_s,
    )


def way_of(name: str) -> Way:
    """As the run was made; its settings do not tell, but its file's name does."""
    algorithm = next((each for each in ("GRID", "RING") if name.endswith(each.lower())), "SRA")
    return Way(algorithm, inner="SHM", cross="TCP")


def allreduce_rows(run: dict[str, Any], name: str, constants: Constants) -> Iterator[tuple[str, float, float]]:
    plan = Plan(site_of(run, constants), Workload(0, 1, 0, (Bucket(1, 0),)))
    for cell in run["cells"]:
        ours = cell["backend"] == "cgx"
        contestant = f"{cell['bits']} bits" if cell["bits"] < 32 else EXACT
        way = way_of(name) if ours else None
        predicted = plan.duration(contestant, cell["numel"], run["settings"]["nodes"], way).seconds
        title = f"cgx {contestant}{'' if way_of(name).algorithm == 'SRA' else f', {way_of(name).algorithm}'}"
        what = f"all_reduce {format_nbytes(cell['nbytes'])}, {title if ours else cell['backend']}"
        yield what, predicted, cell["median_s"]


def in_step(workload: Workload, run: Mapping[str, Any]) -> Workload:
    """As long as steps without communication take that all ranks end together.

    The ideal one of the same run is ended by each for itself, while others may be anywhere in theirs. Files from before
    that was measured, where ranks share cores: as long as the processor's time of all.
    """
    ranks = run["settings"]["nodes"] * run["settings"]["nproc"]
    ideal = next(cell for cell in run["cells"] if cell["contestant"] == IDEAL)
    needed_s = ideal.get("in_step_s") or ideal["processor_s"] * ranks / run["machine"]["cores"]
    longer = max(1.0, needed_s / workload.ideal_s)
    return Workload(
        workload.forward_s * longer,
        workload.backward_s * longer,
        workload.optimizer_s * longer,
        tuple(replace(bucket, ready_s=bucket.ready_s * longer) for bucket in workload.buckets),
    )


def train_rows(run: dict[str, Any], name: str, constants: Constants) -> Iterator[tuple[str, float, float]]:
    plan = Plan(site_of(run, constants), in_step(input_of_run(run).workload, run))
    nodes = run["settings"]["nodes"]
    for cell in run["cells"]:
        contestant, way = cell["contestant"], None
        if contestant.startswith("cgx-") and contestant != "cgx-32":
            contestant, way = f"{contestant[4:]} bit{'s' * (contestant != 'cgx-1')}", way_of(name)
        elif contestant in ("gloo", "fp16"):
            contestant = EXACT if contestant == "gloo" else FP16
        else:
            continue  # ideal is what is given; of the others, plan knows nothing
        predicted = plan.predict(contestant, nodes, way).step_s
        yield f"step of {run['model']['name']}, {cell['contestant']}", predicted, cell["median_s"]


ROWS: dict[str, Callable[[dict[str, Any], str, Constants], Iterator[tuple[str, float, float]]]] = {
    "allreduce": allreduce_rows,
    "train": train_rows,
}


def calibrate(runs: Sequence[dict[str, Any]], speeds: Speeds) -> Constants:
    """By halving, each constant by the row that tells most of it, until they agree with each other."""
    cells = {(cell["backend"], cell["bits"], cell["nbytes"]): (run, cell) for run in runs for cell in run["cells"]}

    def excess_s(constants: Constants, row: tuple[str, int, int]) -> float:
        run, cell = cells[row]
        ((_, found, measured),) = allreduce_rows({**run, "cells": [cell]}, "", constants)
        return found - measured

    constants = Constants(speeds)
    for _ in range(_SWEEPS):
        for name, (row, most) in FITS.items():
            low, high = 0.0, most
            for _ in range(30):
                constants = replace(constants, **{name: (low + high) / 2})
                if excess_s(constants, row) > 0:
                    high = (low + high) / 2
                else:
                    low = (low + high) / 2
    for name, (row, _) in FITS.items():
        off = excess_s(constants, row) / cells[row][1]["median_s"]
        assert abs(off) < 0.01 or getattr(constants, name) < 1e-12, f"{name}: {row} is {off:.1%} off"
    return constants


def calibration_of(machine: str) -> list[Path]:
    """Return the runs that this machine's constants are fitted to."""
    return [newest(name, machine) for name in CALIBRATION]


def constants_of(machine: str) -> Constants:
    runs = [json.loads(path.read_text()) for path in calibration_of(machine)]
    return calibrate(runs, read_speeds(newest(KERNELS, machine)))


def load_of(run: Mapping[str, Any]) -> tuple[str, bool]:
    """How busy the machine was at the start, and whether that was too much."""
    return f"{run['busy_cores']:.1f} cores", run["busy_cores"] > BUSY


@dataclass(frozen=True)
class Row:
    """One prediction beside what was measured."""

    cpu: str
    place: str  # nodes x ranks
    rate: str
    what: str
    predicted_s: float
    measured_s: float
    goal: float
    unjudged: str | None  # why
    load: str
    path: Path

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def within(self) -> bool:
        return abs(self.error) <= self.goal

    @property
    def verdict(self) -> str:
        return self.unjudged or ("yes" if self.within else "no")


def rows_of(path: Path, machines: dict[str, Constants]) -> Iterator[Row]:
    """Of one file; a machine that is met for the first time is calibrated."""
    run = json.loads(path.read_text())
    if not run.get("link") or run["kind"] not in ROWS:
        return
    settings, rate, machine = run["settings"], run["link"]["rate"], machine_of(run["machine"])
    constants = machines[machine] = machines.get(machine) or constants_of(machine)
    goal = 0.30 if link_rate(rate) >= FAST else 0.15
    load, busy = load_of(run)
    for what, predicted_s, measured_s in ROWS[run["kind"]](run, path.stem, constants):
        unjudged = "seen" if path.name in CALIBRATION else "busy" if busy else None
        place = f"{settings['nodes']} x {settings['nproc']}"
        yield Row(run["machine"]["cpu"], place, rate, what, predicted_s, measured_s, goal, unjudged, load, path)


def measured_tables(paths: Sequence[Path]) -> str:
    machines: dict[str, Constants] = {}
    rows = [row for path in paths for row in rows_of(path, machines)]
    told = [
        f"Calibrated on the {machine.title()}: of a processor, a message of ours costs {constants.message_s * 1e6:.1f} "
        f"us and {constants.byte_s * 1e9:.2f} ns per byte at each end, and Gloo's {constants.gloo_byte_s * 1e9:.2f} ns "
        f"per byte. An operation begins after {constants.start_s * 1e6:.0f} us, one of Gloo's after "
        f"{constants.gloo_start_s * 1e6:.0f} us."
        for machine, constants in machines.items()
    ]
    judged = [row for row in rows if not row.unjudged]
    told.append(f"{sum(row.within for row in judged)} of the {len(judged)} rows that are judged are within their goal:")
    header = ["nodes x ranks", "rate", "what", "predicted", "measured", "error", "goal", "within", "load", "file"]
    lines = [
        [
            *(row.place, row.rate, row.what, format_seconds(row.predicted_s), format_seconds(row.measured_s)),
            *(f"{row.error:+.0%}", f"{row.goal:.0%}", row.verdict, row.load, _name(row.path)),
        ]
        for row in rows
    ]
    every = [
        '<details markdown="1"><summary>All rows</summary>',
        "",
        format_markdown(header, lines, left=3),
        "",
        "</details>",
    ]
    return "\n".join([*told, "", _summary(judged), "", *every])


def _summary(judged: Sequence[Row]) -> str:
    """How many of each kind are within their goal, and how far off."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in judged:
        kind = "steps" if row.what.startswith("step") else "all_reduces"
        kinds.setdefault((row.cpu, row.place, row.rate, kind), []).append(row)
    lines = []
    for kind, rows in sorted(
        kinds.items(), key=lambda each: (each[0][3], each[0][0], each[0][1], link_rate(each[0][2]))
    ):
        errors = [row.error for row in rows]
        within = f"{sum(row.within for row in rows)} of {len(rows)}"
        worst = max(errors, key=abs)
        lines.append([short_cpu(kind[0]), *kind[1:], within, f"{median(errors):+.0%}", f"{worst:+.0%}"])
    header = ["machine", "nodes x ranks", "rate", "of", "within goal", "median error", "worst"]
    return format_markdown(header, lines, left=4)


def _name(path: Path) -> str:
    """Return the file's name with the folder of benchmarks/results that it is in."""
    return f"{path.resolve().parent.name}/{path.name}"


@dataclass(frozen=True)
class Model:
    """Samples (or tokens) a second of 8 GPUs, as published, and what is assumed of the training."""

    name: str
    numel: int
    batch: int  # samples (or tokens) of one GPU in a step
    nccl: float
    cgx: float
    ideal: float


# Parameters are the publication's. It has rates, and no batches: those are assumptions, of usual recipes.
MODELS = (
    Model("ResNet50", 25_600_000, 32, 2500, 2960, 3100),
    Model("ViT-B", 86_600_000, 72, 1720, 1910, 1990),
    Model("Transformer-XL base", 192_000_000, 32 * 192, 171e3, 267e3, 311e3),
    Model("BERT", 335_000_000, 3 * 384, 16.7e3, 38.2e3, 51.9e3),
)
GPUS_EACH = 8


def plan_of(model: Model, intra_bit_per_s: float) -> Plan:
    step_s = model.batch * GPUS_EACH / model.ideal
    return Plan(
        make_site("rtx3090", GPUS_EACH, intra_bit_per_s, 10e9), workload_of_numbers(model.numel, step_s).workload
    )


def rate_of(model: Model, contestant: str, intra_bit_per_s: float) -> float:
    return model.batch * GPUS_EACH / plan_of(model, intra_bit_per_s).predict(contestant, 1).step_s


def fitted_rate(models: Sequence[Model]) -> float:
    """The one bandwidth that comes nearest to these models' NCCL figures."""

    def error(rate: float) -> float:
        return sum(math.log(rate_of(model, EXACT, rate) / model.nccl) ** 2 for model in models)

    low, high = 1e9, 200e9
    for _ in range(40):  # by thirds, of logarithms
        third = (high / low) ** (1 / 3)
        if error(low * third) < error(high / third):
            high /= third
        else:
            low *= third
    return math.sqrt(low * high)


def published_table() -> str:
    common = fitted_rate(MODELS)
    rows = []
    for model in MODELS:
        own = fitted_rate([model])
        row = [model.name, f"{model.numel / 1e6:.0f} M", f"{model.batch}", _rate(model.ideal)]
        for contestant, published, rate in (
            (EXACT, model.nccl, common),
            ("4 bits", model.cgx, common),
            ("4 bits", model.cgx, own),
        ):
            predicted = rate_of(model, contestant, rate)
            if contestant != "4 bits" or rate == common:
                row.append(_rate(published))
            row += [_rate(predicted), f"{predicted / published - 1:+.0%}"]
            if rate == own:
                row.append(f"{own / 8e9:.2f} GB/s")
        rows.append(row)
    header = ["model", "parameters", "batch", "ideal", "NCCL", "predicted", "error", "CGX", "predicted", "error"]
    header += ["predicted, own link", "error", "own link"]
    return (
        f"One link for all, {common / 8e9:.2f} GB/s a GPU each way, fitted to the four NCCL figures; last three "
        f"columns: a link for each model, fitted to its NCCL figure alone.\n\n{format_markdown(header, rows)}"
    )


def _rate(value: float) -> str:
    return f"{value / 1e3:.1f}k" if value >= 1e4 else f"{value:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="of `cgx bench allreduce` or `train`, between nodes")
    parser.add_argument("--doc", type=Path, help="write the tables into this file, between its markers")
    options = parser.parse_args()
    files = options.files or newest_of_each("plan-*.json")
    tables = {MEASURED: measured_tables(files), PUBLISHED: published_table()}
    for (begin, end), table in tables.items():
        print(table, end="\n\n")
        if options.doc:
            write_between(options.doc, begin, end, table)


if __name__ == "__main__":
    main()
