"""`cgx bench allreduce`: the arguments, the run of the ranks, and the output.

The ranks' work is in allreduce_ranks.py and busy.py, the hosts they run on in places.py, the JSON in report.py, and the
plot in plot.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import datetime, timezone
from typing import Any

from torch_cgx.cli import registry
from torch_cgx.cli.bench.places import add_place_arguments, format_link, processes_of, run_there
from torch_cgx.cli.registry import UsageError, command

SETTINGS = ("bits", "bucket_size", "quantizer", "dtype", "device", "sizes", "against", "seconds", "busy")
"""The arguments that are sent to the ranks."""


def against(text: str) -> tuple[str, ...]:
    """Return the backends to compare with. `none` means cgx alone."""
    names = () if text == "none" else tuple(text.split(","))
    if not set(names) <= {"gloo", "mpi", "nccl"} or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: gloo, mpi, nccl or none")
    for name in names:
        if name != "gloo" and not _in_torch(name):
            raise argparse.ArgumentTypeError(f"{name!r} is not allowed: this torch was built without it")
    return names


def _in_torch(backend: str) -> bool:
    import torch.distributed as dist

    return dist.is_mpi_available() if backend == "mpi" else dist.is_nccl_available()


def add_allreduce_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_place_arguments(parser)
    add("--bits", type=registry.bits, default=4, help="1 to 8 bits a value, or 32 for exact (4)")
    registry.add_compression_arguments(parser)
    add("--dtype", choices=list(registry.DTYPES), default="float32", help="of the tensor (float32)")
    add(
        "--sizes",
        type=registry.sizes,
        default=registry.sizes("64K,4M,25M,64M"),
        metavar="SIZE,...",
        help="bytes of the tensor, K = 1024 (64K,4M,25M,64M)",
    )
    add("--against", type=against, metavar="BACKEND", help="gloo, nccl, or none (gloo; with --device cuda nccl)")
    add(
        "--seconds",
        type=registry.positive_seconds,
        default=2.0,
        help="about how long to measure each size of each backend (2)",
    )
    add("--busy", action="store_true", help="also measure operations while the main thread computes in Python")
    add("--json", type=registry.output_file, metavar="FILE", help="write everything, raw samples too")
    add("--plot", type=registry.plot_file, metavar="FILE.png", help="draw times and ratios")


@command("bench", "allreduce", summary="time all_reduce against another backend", arguments=add_allreduce_arguments)
def bench_allreduce(options: argparse.Namespace) -> int:
    """Start processes, check all_reduce of every backend against an exact sum, then time them in turn.

    median   of batches of consecutive operations, per operation (slowest rank)
    p95      of single operations
    GB/s     bytes of the tensor / median
    ratio    the other backend's median / that of cgx
    error    relative, against the sum in float64
    sent     bytes one rank sends for one operation, by its backend's count

    With --nodes, the TCP goodput of the link between nodes 0 and 1 is measured first, both ways at once, and

    link     bytes one operation puts on a node's link, by its device's count (the busiest node, the busier way)
    limit    share of the limit: the time in which the goodput moves the fewest bytes that an all_reduce between
             N nodes needs, 2 (N - 1) / N times the tensor's payload, / median
    """
    from torch_cgx.cli import machine
    from torch_cgx.cli.bench import report
    from torch_cgx.cli.table import format_nbytes

    itemsize = registry.DTYPES[options.dtype]
    for nbytes in options.sizes:
        if nbytes % itemsize:
            raise UsageError(
                f"argument --sizes: {nbytes} is not a multiple of {itemsize}, the bytes of a {options.dtype}"
            )

    compression = registry.check_compression(options.bits, options.bucket_size, options.quantizer)
    if options.device == "cuda":
        _check_cuda(options)
    if options.against is None:
        options.against = ("nccl",) if options.device == "cuda" else ("gloo",)
    nproc = processes_of(options)

    settings = {key: getattr(options, key) for key in SETTINGS} | {"nodes": options.nodes or 1}
    load, busy_cores = machine.load(), machine.busy_cores()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    of_ranks, link = run_there(
        "cgx bench allreduce",
        "torch_cgx.cli.bench.allreduce_ranks:run",
        settings,
        nproc,
        options,
        lambda message: format_nbytes(message["nbytes"]),
        goodput_s=min(2.0, max(0.5, options.seconds)),
    )
    if link:
        print(format_link(link), flush=True)

    result: dict[str, Any] = {
        "schema": report.SCHEMA,
        "schema_version": report.SCHEMA_VERSION,
        "kind": "allreduce",
        "date": date,
        "command": sys.argv[1:],
        "machine": machine.facts(),
        "load": load,
        "busy_cores": busy_cores,
        "settings": {
            "nproc": nproc,
            **settings,
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "1"),
        },
        "link": link,
        "cells": report.merge_cells([of_rank["cells"] for of_rank in of_ranks], compression=compression, link=link),
        "busy": report.merge_busy([of_rank["busy"] for of_rank in of_ranks]),
    }
    print(format_allreduce(result))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")
        print(f"raw samples: {options.json}")
    if options.plot:
        from torch_cgx.cli.bench.plot import draw_allreduce

        draw_allreduce(result, options.plot)
        print(f"plot: {options.plot}")
    return 0


def _check_cuda(options: argparse.Namespace) -> None:
    if options.busy:
        raise UsageError("argument --busy: it measures how CPU tensors fare; not allowed with --device cuda")
    if options.against and "nccl" not in options.against:
        raise UsageError("argument --against: with --device cuda allowed are nccl and none")


def format_allreduce(result: dict[str, Any]) -> str:
    from torch_cgx.cli.bench.plot import settings_text, where_text
    from torch_cgx.cli.bench.report import caution
    from torch_cgx.cli.table import format_nbytes, format_ratio, format_seconds, format_table

    settings, machine = result["settings"], result["machine"]
    link_header = ["link", "limit"] if result["link"] else []
    kernels = machine["simd"] or "in plain torch"
    lines = [
        f"all_reduce of {settings['dtype']} on {where_text(result)}; cgx: {settings_text(result)}",
        f"{machine['cpu']}, {machine['cores']} cores, kernels {kernels}, torch {machine['torch']}",
        "",
        format_table(
            ["size", "backend", "median", "p95", "GB/s", "ratio", "error", "same bits", "sent", *link_header],
            [
                [
                    format_nbytes(cell["nbytes"]),
                    cell["backend"],
                    format_seconds(cell["median_s"]),
                    format_seconds(cell["p95_s"]),
                    f"{cell['gb_per_s']:.3g}",
                    " ".join(map(format_ratio, cell.get("ratio", {}).values())),
                    f"{cell['check']['relative_error']:.1e}",
                    "yes" if cell["check"]["same_bits"] else "NO",
                    format_nbytes(cell["check"]["sent_nbytes"]),
                    *format_link_cell(cell),
                ]
                for cell in result["cells"]
            ],
            left=2,
        ),
    ]
    lines += caution(result)
    if result["busy"]:
        lines += [
            "",
            "asynchronous all_reduce, main thread quiet or busy in Python, median",
            format_table(
                ["size", "backend", "quiet", "busy", "busy/quiet", "clock"],
                [
                    [
                        format_nbytes(cell["nbytes"]),
                        cell["backend"],
                        format_seconds(cell["quiet_s"]),
                        format_seconds(cell["busy_s"]),
                        format_ratio(cell["ratio"]),
                        cell["clock"],
                    ]
                    for cell in result["busy"]
                ],
                left=2,
            ),
        ]
        if any(cell["clock"] == "callback" for cell in result["busy"]):
            lines.append("clock callback: the Work has no native time stamps; the future's callback waits for the GIL")
    return "\n".join(lines)


def format_link_cell(cell: dict[str, Any]) -> list[str]:
    from torch_cgx.cli.table import format_nbytes

    if "limit_share" not in cell:
        return []
    return [format_nbytes(cell["link_nbytes"]), f"{100 * cell['limit_share']:.0f} %"]
