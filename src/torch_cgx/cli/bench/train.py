"""`cgx bench train`: the arguments, the run of the ranks, and the output.

The ranks' work is in train_ranks.py, the contestants in train_contestants.py, the JSON in train_report.py, and the
hosts they run on in places.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch_cgx.cli import registry
from torch_cgx.cli.bench import train_report
from torch_cgx.cli.bench.places import add_place_arguments, processes_of, run_there
from torch_cgx.cli.registry import UsageError, command
from torch_cgx.config import DEFAULT_QUANTIZER

MODEL_NAMES = ("gpt", "resnet", "vit", "mlp")
OTHERS = ("gloo", "nccl", "fp16", "powersgd")


def against(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    if any(name not in OTHERS for name in names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: some of {', '.join(OTHERS)}, or none")
    return names


def ours(text: str) -> tuple[str, ...]:
    """Return the names of contestants for a list such as `8,rotated-2,adaptive`."""
    names = [_ours(part) for part in text.split(",")]
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: it has the same twice")
    return tuple(names)


def _ours(text: str) -> str:
    if text == "adaptive":
        return text
    quantizer, dash, width = text.rpartition("-")
    try:
        if not dash:
            return f"cgx-{registry.bits(width)}"
        if quantizer != DEFAULT_QUANTIZER and registry.bits(width) in registry.widths_of(quantizer):
            return text
    except (argparse.ArgumentTypeError, ValueError):  # from the bits or the quantizer
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is not allowed: widths from 1 to 8, 32 for exact, rotated-1 to rotated-4, or adaptive, "
        "as in 4,rotated-2,adaptive"
    )


def readable_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return path.resolve()


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=MODEL_NAMES, default="gpt", help="what is trained (gpt)")
    add_place_arguments(parser)
    add("--against", type=against, metavar="NAME,...", help="gloo, nccl, fp16, powersgd, or none (gloo,fp16,powersgd)")
    add(
        "--bits",
        type=ours,
        default=("cgx-4",),
        metavar="N,...",
        help="of cgx: max-min widths, rotated-1 to rotated-4, adaptive, as in 4,2,rotated-2 (4)",
    )
    add("--bucket-size", type=registry.whole_number(1, 65536), default=1024, metavar="N", help="of cgx (1024)")
    add(
        "--bucket-mb",
        type=registry.above_zero("megabytes", "25", most=4096),
        metavar="MB",
        help="of DDP's grad buckets (25, the first one 1)",
    )
    add("--batch", type=registry.whole_number(1, 65536), metavar="N", help="a process and step (by model)")
    add("--rounds", type=registry.whole_number(1, 10000), default=6, metavar="N", help="turns of each (6)")
    add("--steps", type=registry.whole_number(1, 1000), default=3, metavar="N", help="timed steps of a turn (3)")
    add(
        "--data",
        type=readable_file,
        metavar="FILE",
        help="a text for the GPT (Python's own library), an .npz of images for the others (made up)",
    )
    add("--json", type=registry.output_file, metavar="FILE", help="write everything, every round's times too")
    add("--plot", type=registry.plot_file, metavar="FILE.png", help="draw shares of ideal scaling, and losses by time")


@command("bench", "train", summary="time training against other ways to send gradients", arguments=add_train_arguments)
def bench_train(options: argparse.Namespace) -> int:
    """Train copies of one model in turns, each with its own way to average gradients, on the same data.

    step      seconds of a whole step: median over rounds, of the slowest rank
    ideal     share of ideal scaling: the step with communication left out / this step, median over rounds
    busy      seconds a step in which gradients are on their way
    exposed   what communication adds to the step; hidden: busy - exposed, what backward covers
    CPU       processor seconds of rank 0 a step, all its threads
    sent      bytes one rank sends a step, by layout
    link      bytes a step on the busiest node's link, by its device's count (with --nodes)
    loss      on what was held out, when all have trained for as long as the one with the least time
    """
    contestants, nproc = _contestants(options), processes_of(options)
    from torch_cgx.cli import machine
    from torch_cgx.cli.bench.train_models import MODELS

    settings: dict[str, Any] = {
        "model": options.model,
        "contestants": contestants,
        "batch": options.batch or MODELS[options.model].batch,
        "rounds": options.rounds,
        "steps": options.steps,
        "bucket_size": options.bucket_size,
        "bucket_mb": options.bucket_mb,
        "data": str(options.data) if options.data else None,
        "device": options.device,
        "nodes": options.nodes or 1,
    }
    load, busy_cores = machine.load(), machine.busy_cores()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    of_ranks, link = run_there(
        "cgx bench train",
        "torch_cgx.cli.bench.train_ranks:run",
        settings,
        nproc,
        options,
        lambda message: str(message["stage"]),
    )

    settings["data"] = options.data.name if options.data else None
    result = train_report.merge(
        of_ranks,
        date=date,
        command=sys.argv[1:],
        machine=dict(machine.facts()),
        load=load,
        busy_cores=busy_cores,
        settings={"nproc": nproc, **settings, "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "1")},
        link=link,
    )
    print(train_report.format_train(result))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")
        print(f"all rounds: {options.json}")
    if options.plot:
        from torch_cgx.cli.bench.train_plot import draw_train

        draw_train(result, options.plot)
        print(f"plot: {options.plot}")
    return 0


def _contestants(options: argparse.Namespace) -> list[str]:
    exact, wrong = ("nccl", "gloo") if options.device == "cuda" else ("gloo", "nccl")
    others = options.against if options.against is not None else (exact, "fp16", "powersgd")
    if wrong in others:
        raise UsageError(f"argument --against: {wrong} is not allowed with --device {options.device}")
    for compression in filter(None, map(train_report.compression_of, options.bits)):
        registry.check_compression(compression[1], options.bucket_size, compression[0])
    return ["ideal", *others, *options.bits]
