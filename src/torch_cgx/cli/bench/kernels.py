"""`cgx bench kernels`: the arguments, the run, and the output.

The timed cases are in kernel_cases.py and kernel_peers.py, the timing in alternate.py, the JSON and the tables in
kernel_report.py, and the plot in plot.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_cgx.cli import registry
from torch_cgx.cli.registry import CommandFailed, UsageError, command

if TYPE_CHECKING:
    from torch_cgx.cli.bench.kernel_cases import Level
    from torch_cgx.cli.bench.report import Cell
    from torch_cgx.cli.progress import Progress
    from torch_cgx.codecs import Codec

PEERS = ("fbgemm", "piquant")


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return an argument type for a comma-separated list of items that `parse` takes, without repetition."""

    def parse_all(text: str) -> tuple[Any, ...]:
        items = tuple(parse(part) for part in text.split(","))
        if len(set(items)) < len(items):
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed: each may stand there once")
        return items

    return parse_all


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed: {', '.join(names)}")
        return text

    return parse


def against(text: str) -> tuple[str, ...]:
    """Return the peers to compare with. `none` means memcpy alone."""
    return () if text == "none" else _list_of(_one_of(*PEERS, "none"))(text)


def saved_report(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not there: allowed is a file that --json has written")
    return path


def add_kernels_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--sizes",
        type=_list_of(registry.size),
        default=registry.sizes("64M,4M"),
        metavar="SIZE,...",
        help="bytes of the float32 buffer, K = 1024 (64M,4M)",
    )
    add(
        "--bits",
        type=_list_of(registry.whole_number(1, 8)),
        metavar="BITS,...",
        help="1 to 8 bits a value (all that the quantizer has)",
    )
    registry.add_compression_arguments(parser)
    add(
        "--dtypes",
        type=_list_of(_one_of(*registry.DTYPES)),
        default=tuple(registry.DTYPES),
        metavar="DTYPE,...",
        help="of the values (float32,float16,bfloat16)",
    )
    add("--simd", metavar="LEVEL,...", help="force SIMD levels, or all of this processor (the best; or CGX_SIMD)")
    add(
        "--threads",
        type=_list_of(registry.whole_number(1, 256)),
        default=(1,),
        metavar="N,...",
        help="threads of one call of ours; the peers have one (1)",
    )
    add("--against", type=against, metavar="PEER,...", help="fbgemm, piquant, or none (what is installed)")
    add("--seconds", type=registry.positive_seconds, default=0.25, help="about how long to measure each case (0.25)")
    add("--markdown", action="store_true", help="print the tables in Markdown")
    add("--json", type=registry.output_file, metavar="FILE", help="write everything, raw samples too")
    add("--plot", type=registry.plot_file, metavar="FILE.png", help="draw the ratios to memcpy")
    add(
        "--from",
        type=saved_report,
        dest="saved",
        metavar="FILE",
        help="measure nothing: print and draw what --json wrote",
    )


@command("bench", "kernels", summary="time the quantizer against memcpy and others", arguments=add_kernels_arguments)
def bench_kernels(options: argparse.Namespace) -> int:
    """Check every kernel's result, then time all kernels of one size and width in turn, with memcpy among them.

    GB/s       float32 bytes / median: values * 4 / seconds, also for 16-bit values
    x memcpy   how many times faster than torch's copy of the float32 buffer, on one thread
    x fbgemm   than torch's embedding_bag_{byte,4bit,2bit}_prepack and _unpack, on rows of the bucket size
    x piquant  than pypiquant: it has one range for the whole tensor; finding that range is in its time
    x nearest  than quantize with plain rounding to nearest
    x float32  than as many float32 values

    Everything runs on one thread, except ours where --threads says more. Outputs are allocated before, except
    FBGEMM's, which has no such call: the memory it frees is kept for it, so that it does not pay for new pages.
    """
    result = _saved(options.saved) if options.saved else _measure(options)
    from torch_cgx.cli.bench.kernel_report import format_kernels

    print(format_kernels(result, markdown=options.markdown))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")
        print(f"raw samples: {options.json}")
    if options.plot:
        from torch_cgx.cli.bench.plot import draw_kernels

        draw_kernels(result, options.plot)
        print(f"plot: {options.plot}")
    return 0


def _saved(path: Path) -> dict[str, Any]:
    from torch_cgx.cli.bench import report

    try:
        result: dict[str, Any] = json.loads(path.read_text())
        head = result["schema"], result["schema_version"], result["kind"]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"{path} is not a report of cgx bench kernels") from error
    if head != (report.SCHEMA, report.SCHEMA_VERSION, "kernels"):
        raise CommandFailed(f"{path} is not a report of cgx bench kernels, but {' '.join(map(str, head))}")
    return result


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    options.bits = options.bits or registry.widths_of(options.quantizer)
    codecs = [registry.check_compression(bits, options.bucket_size, options.quantizer).codec() for bits in options.bits]
    block_nbytes = 4 * options.bucket_size
    for nbytes in options.sizes:
        if nbytes % block_nbytes:
            raise UsageError(
                f"argument --sizes: {nbytes} is not a multiple of {block_nbytes}, the bytes of "
                f"{options.bucket_size} float32 values: allowed are whole blocks"
            )
    from torch_cgx.cli import machine
    from torch_cgx.cli.bench import report
    from torch_cgx.cli.bench.kernel_cases import Level
    from torch_cgx.cli.bench.kernel_peers import PEERS as KNOWN
    from torch_cgx.cli.progress import Progress

    levels = [Level(simd, threads) for simd in _simd_levels(options.simd) for threads in options.threads]
    missing = {name: reason for name in PEERS if (reason := KNOWN[name].missing()) is not None}
    for name in options.against or ():
        if name in missing:
            raise UsageError(f"argument --against: {name} is {missing[name]}")
    peers = options.against if options.against is not None else tuple(name for name in PEERS if name not in missing)
    load, busy_cores = machine.load(), machine.busy_cores()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with _one_thread(), Progress("cgx bench kernels") as progress:
        cells, layers = _run(options, codecs, levels, peers, progress)
    keys = ("sizes", "bits", "bucket_size", "quantizer", "dtypes", "threads", "seconds")
    return {
        "schema": report.SCHEMA,
        "schema_version": report.SCHEMA_VERSION,
        "kind": "kernels",
        "date": date,
        "command": sys.argv[1:],
        "machine": machine.facts(),
        "load": load,
        "busy_cores": busy_cores,
        "settings": {
            **{key: getattr(options, key) for key in keys},
            "simd": list(dict.fromkeys(level.simd for level in levels)),
            "against": peers,
        },
        "peers": {name: KNOWN[name].version() for name in peers},
        "missing": {} if options.against is not None else missing,
        "cells": cells,
        "layers": layers,
    }


def _run(
    options: argparse.Namespace,
    codecs: list[Codec],
    levels: list[Level],
    peers: tuple[str, ...],
    progress: Progress,
) -> tuple[list[Cell], list[Cell]]:
    """Return the cells of all sizes and widths, and the cells of the calls with many layers."""
    import torch

    from torch_cgx.cli.bench.alternate import alternate
    from torch_cgx.cli.bench.kernel_cases import LAYERS, Buffers, Case, group_cases, layer_cases
    from torch_cgx.cli.bench.kernel_report import add_ratios, summary
    from torch_cgx.cli.table import format_bits, format_nbytes

    dtypes = [getattr(torch, name) for name in options.dtypes]
    mixed = [codec for codec in codecs if codec.bits > 1] or codecs
    groups = len(options.sizes) * (len(codecs) + 1)
    cells: list[Cell] = []
    layers: list[Cell] = []
    done = 0

    def measure(cases: list[Case], nbytes: int, stage: str) -> list[Cell]:
        progress.update(done / groups, stage)
        size = {"nbytes": nbytes, "numel": nbytes // 4}
        measured = [{**size, **case.labels, "check": asdict(case.check())} for case in cases]
        samples = alternate(cases, options.seconds, lambda fraction: progress.update((done + fraction) / groups, stage))
        for cell, of_cell in zip(measured, samples, strict=True):
            cell.update(summary(of_cell))
        return measured

    for nbytes in options.sizes:
        buffers = Buffers(nbytes // 4, dtypes)
        for codec in codecs:
            cases = group_cases(buffers, codec, dtypes, levels, peers)
            group = measure(cases, nbytes, f"{format_nbytes(nbytes)}, {format_bits(codec.bits)}")
            for cell in group:
                cell.update(group_bits=codec.bits, gb_per_s=4e-9 * cell["numel"] / cell["median_s"])
            add_ratios(group, levels[0].simd)
            cells += group
            done += 1
        pairs = measure(
            layer_cases(buffers, mixed, levels),
            nbytes,
            f"{format_nbytes(nbytes)}, {LAYERS} layers",
        )
        done += 1
        for one, each in zip(pairs[::2], pairs[1::2], strict=True):
            kept = ("nbytes", "numel", "operation", "dtype", "simd", "threads", "layers")
            timed = ("check", "ops_per_batch", "batch_ns", "median_s", "p95_s")
            layers.append(
                {
                    **{key: one[key] for key in kept},
                    "bits": [codec.bits for codec in mixed],
                    "one_call": {key: one[key] for key in timed},
                    "call_per_width": {key: each[key] for key in timed},
                    "overhead": one["median_s"] / each["median_s"] - 1,
                }
            )
    return cells, layers


def _simd_levels(text: str | None) -> list[str]:
    """Return the requested levels, the best first."""
    from torch_cgx.config import Settings
    from torch_cgx.kernels import native

    if not native.available():
        raise CommandFailed("torch_cgx was installed without its native library: there is nothing to measure")
    have = native.simd_levels()
    if text is None:
        try:
            return [native.simd_level(Settings.from_environ().simd)]
        except ValueError as error:
            raise UsageError(str(error)) from error
    asked = have if text == "all" else text.split(",")
    if any(name not in have for name in asked) or len(set(asked)) < len(asked):
        raise UsageError(f"argument --simd: {text!r} is not allowed: {', '.join(have)} (this processor), or all")
    return sorted(asked, key=have.index, reverse=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread, for memcpy and FBGEMM."""
    import torch

    from torch_cgx.cli.bench.kernel_peers import reused_memory

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with reused_memory():
            yield
    finally:
        torch.set_num_threads(before)
