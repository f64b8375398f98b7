"""The processes and hosts of `cgx bench allreduce` and `cgx bench train`: their arguments, checks and run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch_cgx.cli import hosts, registry
from torch_cgx.cli.registry import CommandFailed, UsageError

if TYPE_CHECKING:
    from torch_cgx.cli.processes import Message

__all__ = ["add_place_arguments", "format_link", "processes_of", "run_there"]

Link = dict[str, Any]


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
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
        help="run on so many hosts, made of network namespaces for the time; needs root, iproute2 and util-linux",
    )
    add("--rate", type=registry.rate, metavar="RATE", help="of each node's link, as in 100mbit, 1gbit (unlimited)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors are; cuda: a GPU each process (cpu)")


def processes_of(options: argparse.Namespace) -> int:
    """Return the processes per node, or raise `UsageError`. On CUDA without --nproc, all GPUs are used."""
    if options.rate and not options.nodes:
        raise UsageError("argument --rate: a rate is of the links between nodes, so it needs --nodes as well")
    if options.device == "cuda":
        return _gpus_of(options)
    nproc: int = options.nproc or (1 if options.nodes else 2)
    if nproc == 1 and not options.nodes:
        raise UsageError("argument --nproc: 1 is not allowed: a whole number from 2 to 256, or --nodes as well")
    return nproc


def _gpus_of(options: argparse.Namespace) -> int:
    from torch_cgx.cli import gpus

    if options.nodes:
        raise UsageError("argument --device: cuda is not allowed with --nodes, whose hosts share this one's GPUs")
    count = gpus.all_gpus().count()
    nproc: int = options.nproc or count
    if not 2 <= nproc <= count:
        raise UsageError(f"argument --device: cuda needs a GPU for each of 2 or more processes; torch sees {count}")
    return nproc


def run_there(
    title: str,
    target: str,
    settings: Mapping[str, object],
    nproc: int,
    options: argparse.Namespace,
    stage: Callable[[Message], str],
    goodput_s: float = 2.0,
) -> tuple[list[Message], Link | None]:
    """Run the ranks. Return each rank's result, and the goodput of the link between the first two nodes.

    The link is measured before the ranks start. `stage` turns a rank's progress message into text.
    """
    from torch_cgx.cli.link import measure_goodput
    from torch_cgx.cli.processes import RankFailed, run_ranks
    from torch_cgx.cli.progress import Progress

    link: Link | None = None
    try:
        with (
            hosts.Hosts(options.nodes, options.rate) if options.nodes else nullcontext() as made,
            Progress(title) as progress,
        ):
            nodes = made.nodes if made is not None else ()
            if nodes:
                progress.update(0.0, "measuring the link")
                there, back = measure_goodput(nodes[0], nodes[1], goodput_s)
                link = {
                    "nodes": len(nodes),
                    "node_cores": len(nodes[0].cores) or None,
                    "rate": options.rate,
                    "goodput_bit_per_s": [there, back],
                }
            progress.update(0.0, "starting")
            of_ranks = run_ranks(
                target,
                settings,
                nproc,
                lambda rank, message: progress.update(message["fraction"], stage(message)),
                nodes,
            )
    except hosts.HostsUnavailable as error:
        raise CommandFailed(str(error)) from error
    except RankFailed as error:
        sys.stderr.write(error.details)
        raise CommandFailed(str(error)) from error
    return of_ranks, link


def format_link(link: Link) -> str:
    there, back = (f"{bits / 1e6:.0f}" for bits in link["goodput_bit_per_s"])
    return f"link of {link['rate'] or 'no set rate'}: TCP goodput {there} Mbit/s and, at the same time, {back} back"
