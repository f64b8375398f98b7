"""Draws a benchmark's report (report.py) to a PNG. Needs matplotlib; measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_cgx.cli.report import Cell
from torch_cgx.cli.table import format_nbytes, format_ratio, format_seconds

COLOURS = ("#d1495b", "#30638e", "#edae49", "#00798c")


def draw_allreduce(report: dict[str, Any], path: Path) -> None:
    """Left: time of one operation by size, with p95 above the median. Right: how many times faster cgx is."""
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
        f"all_reduce of {settings['dtype']} on {settings['nproc']} processes, "
        f"{machine['cpu']}, {machine['cores']} cores",
        fontsize=11,
    )
    figure.savefig(path, dpi=130, format="png")


def settings_text(report: dict[str, Any]) -> str:
    settings = report["settings"]
    return "exact" if settings["bits"] == 32 else f"{settings['bits']} bits, bucket size {settings['bucket_size']}"
