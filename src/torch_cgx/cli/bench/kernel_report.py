"""The results of `cgx bench kernels`: the cells of its JSON, the tables, and the goals.

The head of the JSON is that of every benchmark (report.py), with kind "kernels". Further fields:

    settings        sizes, bits, bucket_size, quantizer, dtypes, simd, threads, against, seconds; older files have no
                    quantizer: it is maxmin
    peers           {measured peer: its version}
    missing         {peer that was not measured: the reason}
    cells           one per size, width and case; those of one size and width were measured in turn, and each such
                    group has its own memcpy:
        nbytes, numel       of the float32 buffer; a 16-bit dtype has as many values
        group_bits          the width of the group
        backend             "cgx", "memcpy", "fbgemm" or "piquant"
        operation           see kernel_cases.py
        dtype, bits, bucket_size, simd, threads     null if it has no meaning
        check               relative_error, max_error_share (of the allowed error, of one value or, if rotated, of all
                            together; see kernel_check.py)
        ops_per_batch       consecutive operations of one batch
        batch_ns            nanoseconds of every batch
        median_s, p95_s     of batch_ns / ops_per_batch
        gb_per_s            1e-9 * 4 * numel / median_s: of float32 bytes, whatever the dtype
        ratio               {other: its median_s / this median_s}, in cells of backend cgx. Others: "memcpy"; the
                            peers, at the same operation and dtype; "nearest" (of a quantize that is not plain);
                            "float32"; "1 thread"; the first SIMD level of the run
    layers          one per size, SIMD level, number of threads and operation, in float32:
        nbytes, numel, operation, dtype, simd, threads
        layers              in the one call, with widths `bits`
        one_call, call_per_width    check, ops_per_batch, batch_ns, median_s, p95_s
        overhead            one_call.median_s / call_per_width.median_s - 1
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_cgx.cli.bench.report import Cell, caution, quantile, quantizer_prefix
from torch_cgx.cli.table import format_bits, format_markdown, format_nbytes, format_ratio, format_seconds, format_table

OPERATIONS = ("quantize", "dequantize", "dequantize-add", "reduce", "quantize-stochastic", "quantize-residual")
GOAL_NBYTES, GOAL_BLOCK = 64 << 20, 1024


@dataclass(frozen=True, slots=True)
class Goal:
    """The least ratio that we want for max-min kernels, at 64 MB, 1024 values per block, one thread, with AVX-512."""

    operations: tuple[str, ...]
    other: str
    ratio: float


GOALS = (
    Goal(("quantize",), "memcpy", 1.3),
    Goal(("dequantize",), "memcpy", 1.3),
    Goal(("reduce",), "memcpy", 0.8),
    Goal(("quantize-stochastic",), "nearest", 0.5),
    Goal(OPERATIONS, "float32", 1.0),
    Goal(OPERATIONS, "fbgemm", 1.0),
    Goal(OPERATIONS, "piquant", 1.0),
)
AVX2_SHARE = 0.7
"""The share of a goal against memcpy that holds with AVX2."""
MOST_OVERHEAD = 0.10


def least_ratio(report: dict[str, Any], nbytes: int, operation: str, other: str, simd: str) -> float | None:
    """Return the goal for an operation at a size and SIMD level, or None if there is none."""
    settings = report["settings"]
    if nbytes != GOAL_NBYTES or settings["bucket_size"] != GOAL_BLOCK or quantizer_prefix(settings):
        return None
    share = {"avx512": 1.0, "avx2": AVX2_SHARE if other == "memcpy" else 1.0}.get(simd)
    for goal in GOALS:
        if operation in goal.operations and other == goal.other and share is not None:
            return goal.ratio * share
    return None


def summary(samples: Any) -> Cell:
    """Return the fields of a cell that come from the samples of a case."""
    each = [nanoseconds / samples.ops_per_batch * 1e-9 for nanoseconds in samples.batch_ns]
    return {
        "ops_per_batch": samples.ops_per_batch,
        "batch_ns": samples.batch_ns,
        "median_s": statistics.median(each),
        "p95_s": quantile(each, 0.95),
    }


def add_ratios(cells: Sequence[Cell], first_simd: str) -> None:
    """Compare every cell of ours with the others of its group."""

    def median_s(**fields: object) -> float | None:
        return next((c["median_s"] for c in cells if all(c[key] == value for key, value in fields.items())), None)

    for cell in cells:
        if cell["backend"] != "cgx":
            continue
        own = {key: cell[key] for key in ("backend", "operation", "dtype", "simd", "threads")}
        same = {"operation": cell["operation"], "dtype": cell["dtype"]}
        others = {
            "memcpy": median_s(backend="memcpy"),
            **{name: median_s(backend=name, **same) for name in ("fbgemm", "piquant")},
            "nearest": None if cell["operation"] in OPERATIONS[:4] else median_s(**{**own, "operation": "quantize"}),
            "float32": None if cell["dtype"] == "float32" else median_s(**{**own, "dtype": "float32"}),
            "1 thread": None if cell["threads"] == 1 else median_s(**{**own, "threads": 1}),
            first_simd: None if cell["simd"] == first_simd else median_s(**{**own, "simd": first_simd}),
        }
        cell["ratio"] = {name: other / cell["median_s"] for name, other in others.items() if other is not None}


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    left: int


def format_kernels(result: dict[str, Any], *, markdown: bool = False) -> str:
    """Return the printed text: the machine, the tables, and the peers that were not measured."""
    machine, settings = result["machine"], result["settings"]
    lines = [
        f"{quantizer_prefix(settings)}kernels on {machine['cpu']}, torch {machine['torch']}, "
        f"bucket size {settings['bucket_size']}; "
        "GB/s of float32 bytes (values * 4 / second), medians",
        *(f"peer {name}: {version}" for name, version in result["peers"].items()),
        *(f"without {name}: {reason}" for name, reason in result["missing"].items()),
    ]
    lines += caution(result)
    form = format_markdown if markdown else format_table
    for table in (*_width_tables(result), *_layer_tables(result), *_goal_tables(result)):
        title = f"**{table.title}**\n" if markdown else table.title
        lines += ["", title, form(table.header, table.rows, left=table.left)]
    return "\n".join(lines)


def distinct(cells: Sequence[Cell], *keys: str) -> list[tuple[Any, ...]]:
    """Return the combinations of these fields among our own cells, in order of appearance."""
    return list(dict.fromkeys(tuple(cell[key] for key in keys) for cell in cells if cell["backend"] == "cgx"))


def _width_tables(result: dict[str, Any]) -> list[Table]:
    """Return a table for each size, SIMD level, number of threads and dtype: operations down, widths across."""
    widths = result["settings"]["bits"]
    tables = []
    for nbytes, simd, threads, dtype in distinct(result["cells"], "nbytes", "simd", "threads", "dtype"):
        groups = {
            bits: [cell for cell in result["cells"] if (cell["nbytes"], cell["group_bits"]) == (nbytes, bits)]
            for bits in widths
        }
        memcpy = [next(cell for cell in groups[bits] if cell["backend"] == "memcpy") for bits in widths]
        rows = [["memcpy", "GB/s", *(_digits(cell["gb_per_s"]) for cell in memcpy)]]
        for operation in OPERATIONS:
            key = ("cgx", operation, simd, threads, dtype)
            ours = [
                cell
                for bits in widths
                for cell in groups[bits]
                if tuple(cell[name] for name in ("backend", "operation", "simd", "threads", "dtype")) == key
            ]
            if not ours:
                continue
            rows.append([operation, "GB/s", *(_digits(cell["gb_per_s"]) for cell in ours)])
            for other in dict.fromkeys(name for cell in ours for name in cell["ratio"]):
                ratios = (cell["ratio"].get(other) for cell in ours)
                rows.append([operation, f"x {other}", *("" if x is None else f"{x:.2f}" for x in ratios)])
        title = f"{_buffer(nbytes, dtype)}, {simd}, {_threads(threads)}"
        header = ["operation", "", *map(format_bits, widths)]
        tables.append(Table(title, header, rows, 2))
    return tables


def _layer_tables(result: dict[str, Any]) -> list[Table]:
    if not result["layers"]:
        return []
    rows = [
        [
            format_nbytes(cell["nbytes"]),
            cell["simd"],
            _threads(cell["threads"]),
            cell["operation"],
            format_seconds(cell["one_call"]["median_s"]),
            format_seconds(cell["call_per_width"]["median_s"]),
            f"{100 * cell['overhead']:+.1f} %",
        ]
        for cell in result["layers"]
    ]
    first = result["layers"][0]
    title = (
        f"one call for {first['layers']} layers of mixed widths, against one call for each width with as many values; "
        f"at most {100 * MOST_OVERHEAD:+.0f} % is the goal"
    )
    return [Table(title, ["size", "simd", "", "operation", "layers", "widths", "overhead"], rows, 4)]


def _goal_tables(result: dict[str, Any]) -> list[Table]:
    """Return a table of the lowest ratio of each kind on one thread, next to its goal."""
    rows = []
    for nbytes, simd in distinct(result["cells"], "nbytes", "simd"):
        cells = [
            cell
            for cell in result["cells"]
            if (cell["backend"], cell["nbytes"], cell["simd"], cell["threads"]) == ("cgx", nbytes, simd, 1)
        ]
        for goal in GOALS:
            found = [
                cell
                for cell in cells
                if cell["operation"] in goal.operations
                and goal.other in cell["ratio"]
                and (goal.other != "memcpy" or cell["dtype"] == "float32")
            ]
            if not found:
                continue
            worst = min(found, key=_ratio_to(goal.other))
            least = least_ratio(result, nbytes, worst["operation"], goal.other, simd)
            lowest = worst["ratio"][goal.other]
            rows.append(
                [
                    format_nbytes(nbytes),
                    simd,
                    f"{worst['operation'] if len(goal.operations) == 1 else 'any'} / {goal.other}",
                    f"{worst['operation']}, {worst['dtype']}, {format_bits(worst['bits'])}",
                    format_ratio(lowest),
                    "" if least is None else format_ratio(least),
                    "" if least is None else "yes" if lowest >= least else "NO",
                ]
            )
    if not rows:
        return []
    return [
        Table("lowest ratios on one thread", ["size", "simd", "ratio", "where", "lowest", "goal", "met"], rows, 4),
    ]


def _ratio_to(other: str) -> Callable[[Cell], float]:
    return lambda cell: float(cell["ratio"][other])


def _buffer(nbytes: int, dtype: str) -> str:
    size = format_nbytes(nbytes)
    return f"{size} of float32" if dtype == "float32" else f"as many values of {dtype} as {size} of float32 have"


def _threads(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 99.5 else f"{value:.0f}"
