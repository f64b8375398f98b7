"""Plots of a benchmark's report (report.py) as a PNG. This module needs matplotlib and measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_cgx.cli.bench.kernel_report import distinct, least_ratio
from torch_cgx.cli.bench.report import Cell, quantizer_prefix
from torch_cgx.cli.table import format_nbytes, format_ratio, format_seconds

COLOURS = ("#d1495b", "#30638e", "#edae49", "#00798c")


def draw_allreduce(report: dict[str, Any], path: Path) -> None:
    """Draw the time of one operation by size, with p95 above the median, and on the right the speedup of cgx."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    backends = list(dict.fromkeys(cell["backend"] for cell in report["cells"]))
    nbytes = list(dict.fromkeys(cell["nbytes"] for cell in report["cells"]))
    others = backends[1:]
    figure = Figure(figsize=(11 if others else 6, 4.4), layout="constrained")
    times = figure.add_subplot(1, 2 if others else 1, 1)
    for backend, colour in zip(backends, COLOURS, strict=False):
        cells: list[Cell] = [cell for cell in report["cells"] if cell["backend"] == backend]
        median_s = [cell["median_s"] for cell in cells]
        above_s = [max(0.0, cell["p95_s"] - cell["median_s"]) for cell in cells]
        sizes = [cell["nbytes"] for cell in cells]
        label = f"cgx, {settings_text(report)}" if backend == "cgx" else backend
        times.errorbar(
            sizes,
            median_s,
            yerr=[[0.0] * len(cells), above_s],
            marker="o",
            capsize=4,
            color=colour,
            label=label,
        )
    times.set_xscale("log", base=2)
    times.set_yscale("log")
    times.set_xticks(nbytes, [format_nbytes(size) for size in nbytes])
    times.minorticks_off()
    times.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    times.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_seconds(seconds)))
    times.set_xlabel("tensor on each rank")
    times.set_ylabel("one all_reduce: median, whisker to p95")
    times.grid(True, alpha=0.3)
    times.legend()

    if others:
        ratios = figure.add_subplot(1, 2, 2)
        width = 0.8 / len(others)
        ours = [cell for cell in report["cells"] if cell["backend"] == "cgx"]
        for index, other in enumerate(others):
            values = [cell["ratio"][other] for cell in ours]
            places = [place + (index - (len(others) - 1) / 2) * width for place in range(len(ours))]
            bars = ratios.bar(
                places, values, width, color=COLOURS[1 + index % 3], label=f"time of {other} / time of cgx"
            )
            ratios.bar_label(bars, [format_ratio(value) for value in values], padding=2)
        ratios.axhline(1.0, color="black", linewidth=1, linestyle="--")
        ratios.set_xticks(range(len(ours)), [format_nbytes(cell["nbytes"]) for cell in ours])
        ratios.set_ylim(0, 1.2 * max(1.0, *(value for cell in ours for value in cell["ratio"].values())))
        ratios.set_xlabel("tensor on each rank")
        ratios.set_ylabel("times faster")
        ratios.legend()

    settings, machine = report["settings"], report["machine"]
    figure.suptitle(
        f"all_reduce of {settings['dtype']} on {where_text(report)}, {machine['cpu']}, {machine['cores']} cores",
        fontsize=11,
    )
    figure.savefig(path, dpi=130, format="png")


DRAWN_KERNELS = ("quantize", "dequantize", "reduce")
SHADES = {"float32": "#30638e", "float16": "#7ba7cc", "bfloat16": "#bcd4e6"}
MARKS = {"fbgemm": ("D", "#d1495b"), "piquant": ("o", "#edae49")}


def draw_kernels(report: dict[str, Any], path: Path) -> None:
    """Draw the speed by width, as a multiple of memcpy's, in a row per size and a column per operation.

    If there are several SIMD levels or numbers of threads, draw the first.
    """
    from matplotlib.figure import Figure

    simd, threads = distinct(report["cells"], "simd", "threads")[0]
    sizes = [nbytes for (nbytes,) in distinct(report["cells"], "nbytes")]
    figure = Figure(figsize=(13, 0.9 + 3.3 * len(sizes)), layout="constrained")
    axes = figure.subplots(len(sizes), len(DRAWN_KERNELS), squeeze=False, sharey="row")
    for row, nbytes in zip(axes, sizes, strict=True):
        cells = [
            cell
            for cell in report["cells"]
            if cell["nbytes"] == nbytes and cell["simd"] in (simd, None) and cell["threads"] in (threads, 1)
        ]
        for place, operation in zip(row, DRAWN_KERNELS, strict=True):
            _draw_operation(place, cells, operation, threads)
            goal = least_ratio(report, nbytes, operation, "memcpy", simd)
            if goal is not None:
                place.axhline(goal, color="#00798c", linewidth=1.5, linestyle="--", label="goal, float32")
            wanted = "" if goal is None else f" (goal {goal:.3g})"
            place.set_title(f"{operation}, {format_nbytes(nbytes)}{wanted}", fontsize=10)
        row[0].set_ylabel("speed, memcpy of float32 = 1")
    for place in axes[-1]:
        place.set_xlabel("bits a value")
    labels: dict[str, Any] = {}
    for place in axes.flat:
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    names = sorted(labels, key=lambda name: (not name.startswith("cgx"), "goal" in name))
    figure.legend([labels[name] for name in names], names, loc="outside lower center", ncols=len(names), fontsize=9)
    machine, settings = report["machine"], report["settings"]
    figure.suptitle(
        f"{quantizer_prefix(settings)}kernels ({simd}, {threads} thread{'s' * (threads > 1)}, "
        f"bucket size {settings['bucket_size']}), "
        f"{machine['cpu']}",
        fontsize=11,
    )
    figure.savefig(path, dpi=130, format="png")


def _draw_operation(place: Any, cells: list[Cell], operation: str, threads: int) -> None:
    """Draw one bar per dtype for ours, and a mark in float32 for each peer that has the width."""
    widths = list(dict.fromkeys(cell["group_bits"] for cell in cells))
    memcpy_s = {cell["group_bits"]: cell["median_s"] for cell in cells if cell["backend"] == "memcpy"}

    def ratios(backend: str, operation: str, dtype: str, threads: int) -> dict[int, float]:
        key = (backend, operation, dtype, threads)
        return {
            cell["group_bits"]: memcpy_s[cell["group_bits"]] / cell["median_s"]
            for cell in cells
            if tuple(cell[name] for name in ("backend", "operation", "dtype", "threads")) == key
        }

    dtypes = [dtype for (dtype,) in distinct(cells, "dtype")]
    width = 0.8 / len(dtypes)
    for index, dtype in enumerate(dtypes):
        ours = ratios("cgx", operation, dtype, threads)
        x = [widths.index(bits) + (index - (len(dtypes) - 1) / 2) * width for bits in ours]
        place.bar(x, list(ours.values()), width, color=SHADES[dtype], label=f"cgx {dtype}")
        if operation == "quantize":
            rough = ratios("cgx", "quantize-stochastic", dtype, threads)
            ends = [at - width / 2 for at in x], [at + width / 2 for at in x]
            place.hlines(list(rough.values()), *ends, color="black", linewidth=1.5, label="cgx, stochastic")
    # Peers are drawn over the float32 bar, which they are compared with, slightly apart from each other.
    centre = (dtypes.index("float32") if "float32" in dtypes else (len(dtypes) - 1) / 2) - (len(dtypes) - 1) / 2
    for (name, (marker, colour)), aside in zip(MARKS.items(), (-0.2, 0.2), strict=True):
        theirs = ratios(name, operation, "float32", 1)
        if theirs:
            x = [widths.index(bits) + (centre + aside) * width for bits in theirs]
            style = {"color": colour, "markeredgecolor": "black", "markersize": 6, "label": f"{name} float32"}
            place.plot(x, list(theirs.values()), marker, **style)
    place.axhline(1.0, color="black", linewidth=1)
    place.set_xticks(range(len(widths)), [str(bits) for bits in widths])
    place.grid(True, axis="y", alpha=0.3)
    place.set_axisbelow(True)


def settings_text(report: dict[str, Any]) -> str:
    settings = report["settings"]
    if settings["bits"] == 32:
        return "exact"
    return f"{quantizer_prefix(settings)}{settings['bits']} bits, bucket size {settings['bucket_size']}"


def where_text(report: dict[str, Any]) -> str:
    """Return text such as `2 processes` or `2 nodes of 1 process, links of 1gbit`."""
    nproc, link = report["settings"]["nproc"], report.get("link")
    processes = f"{nproc} process{'es' if nproc > 1 else ''}"
    if not link:
        return processes
    return f"{link['nodes']} nodes of {processes}, links of {link['rate'] or 'no set rate'}"
