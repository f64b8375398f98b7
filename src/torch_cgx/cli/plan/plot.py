"""The plot of `cgx plan`: share of ideal scaling, and cost, by the number of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_cgx.cli.plan.model import CONTESTANTS, EXACT, FP16

__all__ = ["draw"]

# Exact and fp16 in greys and blues, bits from dark to light.
_COLOURS = {EXACT: "#222222", FP16: "#30638e"}
_WIDTHS = ("#67001f", "#8f0f2e", "#b2182b", "#c94741", "#d1495b", "#e28743", "#edae49", "#f5cf7c")
_DRAWN = (EXACT, FP16, "8 bits", "4 bits", "2 bits", "1 bit")


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the share of ideal scaling on the left. Draw the cost on the right, or without a price the speedup."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter, ScalarFormatter

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    shares, costs = figure.subplots(1, 2)
    ranks = report["settings"]["gpus"]
    priced = report["settings"]["price"] is not None
    for place, contestant in enumerate(CONTESTANTS):
        if contestant not in _DRAWN:
            continue
        cells = [cell for cell in report["curves"] if cell["contestant"] == contestant]
        nodes = [cell["nodes"] for cell in cells]
        colour = _COLOURS.get(contestant) or _WIDTHS[place - 2]
        style = {"marker": "o", "markersize": 4, "color": colour, "label": contestant}
        shares.plot(nodes, [cell["ideal_share"] for cell in cells], **style)
        figures = [cell["cost"] if priced else cell["nodes"] * ranks * cell["ideal_share"] for cell in cells]
        costs.plot(nodes, figures, **style)
    for axes in (shares, costs):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xticks([cell["nodes"] for cell in report["curves"] if cell["contestant"] == EXACT])
        axes.tick_params(axis="x", labelrotation=45)
        axes.axvline(report["settings"]["nodes"], color="black", linewidth=1, linestyle=":")
        axes.set_xlabel(f"nodes of {ranks} rank{'s' * (ranks > 1)}")
        axes.grid(True, alpha=0.3)
    shares.set_ylim(0, 1.05)
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares.set_ylabel("share of ideal scaling")
    shares.axhline(1.0, color="#00798c", linewidth=1.5, linestyle="--", label="ideal")
    costs.set_yscale("log", base=10)
    if priced:
        costs.set_ylabel("cost of the same training (same samples)")
        ideal = [cell for cell in report["curves"] if cell["contestant"] == EXACT]
        at = [cell["nodes"] for cell in ideal]
        costs.plot(at, [cell["ideal_cost"] for cell in ideal], "--", color="#00798c", linewidth=1.5, label="ideal")
    else:
        costs.set_yscale("log", base=2)
        at = sorted({cell["nodes"] for cell in report["curves"]})
        costs.plot(at, [n * ranks for n in at], "--", color="#00798c", linewidth=1.5, label="ideal")
        costs.set_ylabel("times as fast as one rank")
        costs.yaxis.set_major_formatter(ScalarFormatter())
    shares.legend(ncols=2, fontsize=9)
    costs.legend(ncols=2, fontsize=9)
    figure.suptitle(f"predicted by cgx plan: {report['title']}", fontsize=11)
    figure.savefig(path, dpi=130, format="png")
