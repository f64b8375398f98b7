"""`cgx bench train`: the arguments, the run of the ranks, and what is printed and written.

What the ranks do is in train.py, who takes part in train_contestants.py, the JSON in train_report.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch_cgx.cli import hosts, registry
from torch_cgx.cli.registry import CommandFailed, UsageError, command

MODEL_NAMES = ("gpt", "resnet", "vit", "mlp")
OTHERS = ("gloo", "nccl", "fp16", "powersgd")


def against(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    if any(name not in OTHERS for name in names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: some of {', '.join(OTHERS)}, or none")
    return names


def ours(text: str) -> tuple[str, ...]:
    """`8,4,adaptive` -> the names of contestants."""
    names = []
    for part in text.split(","):
        try:
            names.append("adaptive" if part == "adaptive" else f"cgx-{registry.bits(part)}")
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not allowed: widths from 1 to 8, 32 for exact, or adaptive, as in 8,4,adaptive"
            ) from None
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: it has the same twice")
    return tuple(names)


def megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a number of megabytes above 0, such as 25")
    return value


def readable_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return path.resolve()


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=MODEL_NAMES, default="gpt", help="what is trained (gpt)")
    add(
        "--nproc",
        type=registry.whole_number(1, 256),
        metavar="N",
        help="processes, on this host (2) or on each node (1)",
    )
    add(
        "--nodes",
        type=registry.whole_number(2, hosts.MAX_NODES),
        metavar="N",
        help="run on so many hosts, made of network namespaces for the time; needs root and iproute2",
    )
    add("--rate", type=registry.rate, metavar="RATE", help="of each node's link, as in 100mbit, 1gbit (unlimited)")
    add("--against", type=against, metavar="NAME,...", help="gloo, nccl, fp16, powersgd, or none (gloo,fp16,powersgd)")
    add("--bits", type=ours, default=("cgx-4",), metavar="N,...", help="of cgx, as in 8,4,2,adaptive (4)")
    add("--bucket-size", type=registry.whole_number(1, 65536), default=1024, metavar="N", help="of cgx (1024)")
    add("--bucket-mb", type=megabytes, metavar="MB", help="of DDP's grad buckets (25, the first one 1)")
    add("--batch", type=registry.whole_number(1, 65536), metavar="N", help="a process and step (by model)")
    add("--rounds", type=registry.whole_number(1, 10000), default=6, metavar="N", help="turns of each (6)")
    add("--steps", type=registry.whole_number(1, 1000), default=3, metavar="N", help="timed steps of a turn (3)")
    add(
        "--data",
        type=readable_file,
        metavar="FILE",
        help="a text for the GPT (Python's own library), an .npz of images for the others (made up)",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where models are; cuda: a GPU each process (cpu)")
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
    from torch_cgx.cli import machine, train_report
    from torch_cgx.cli.link import measure_goodput
    from torch_cgx.cli.processes import RankFailed, run_ranks
    from torch_cgx.cli.progress import Progress
    from torch_cgx.cli.train_models import MODELS

    nproc, contestants = _who(options)
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
    load = machine.load()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    link: dict[str, Any] | None = None
    try:
        with (
            hosts.Hosts(options.nodes, options.rate) if options.nodes else nullcontext() as made,
            Progress("cgx bench train") as progress,
        ):
            nodes = made.nodes if made is not None else ()
            if nodes:
                progress.update(0.0, "measuring the link")
                there, back = measure_goodput(nodes[0], nodes[1])
                link = {"nodes": len(nodes), "rate": options.rate, "goodput_bit_per_s": [there, back]}
            of_ranks = run_ranks(
                "torch_cgx.cli.train:run",
                settings,
                nproc,
                lambda rank, message: progress.update(message["fraction"], message["stage"]),
                nodes,
            )
    except hosts.HostsUnavailable as error:
        raise CommandFailed(str(error)) from error
    except RankFailed as error:
        sys.stderr.write(error.details)
        raise CommandFailed(str(error)) from error

    settings["data"] = options.data.name if options.data else None
    result = train_report.merge(
        of_ranks,
        date=date,
        command=sys.argv[1:],
        machine=dict(machine.facts()),
        load=load,
        settings={"nproc": nproc, **settings, "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "1")},
        link=link,
    )
    print(train_report.format_train(result))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")
        print(f"all rounds: {options.json}")
    if options.plot:
        from torch_cgx.cli.train_plot import draw_train

        draw_train(result, options.plot)
        print(f"plot: {options.plot}")
    return 0


def _who(options: argparse.Namespace) -> tuple[int, list[str]]:
    """Processes on each node, and the contestants; or what is wrong with the arguments."""
    from torch_cgx.cli import gpus

    if options.rate and not options.nodes:
        raise UsageError("argument --rate: a rate is of the links between nodes, so it needs --nodes as well")
    exact = "nccl" if options.device == "cuda" else "gloo"
    wrong = "gloo" if options.device == "cuda" else "nccl"
    others = options.against if options.against is not None else (exact, "fp16", "powersgd")
    if wrong in others:
        raise UsageError(f"argument --against: {wrong} is not allowed with --device {options.device}")
    if options.device == "cuda":
        if options.nodes:
            raise UsageError("argument --device: cuda is not allowed with --nodes, whose hosts share this one's GPUs")
        count = gpus.all_gpus().count()
        options.nproc = options.nproc or count
        if not 2 <= options.nproc <= count:
            raise UsageError(f"argument --device: cuda needs a GPU for each of 2 or more processes; torch sees {count}")
    nproc = options.nproc or (1 if options.nodes else 2)
    if nproc == 1 and not options.nodes:
        raise UsageError("argument --nproc: 1 is not allowed: a whole number from 2 to 256, or --nodes as well")
    return nproc, ["ideal", *others, *options.bits]
