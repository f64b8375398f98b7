"""The plot of `cgx bench train` as a PNG. This module needs matplotlib and measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_cgx.cli.bench.plot import where_text
from torch_cgx.cli.bench.train_report import IDEAL, names_of

__all__ = ["colour_of", "draw_train"]

_COLOURS = {
    IDEAL: "#5c5c5c",
    "gloo": "#30638e",
    "nccl": "#30638e",
    "fp16": "#7ba7cc",
    "powersgd": "#edae49",
    "adaptive": "#00798c",
    "cgx-8": "#f2a3ad",
    "cgx-4": "#d1495b",
    "cgx-2": "#8f1d2c",
    "rotated-4": "#9d7bc4",
    "rotated-3": "#7a4fb0",
    "rotated-2": "#4b2a7b",
}


def colour_of(contestant: str) -> str:
    return _COLOURS.get(contestant, "#b36a77")


def draw_train(result: dict[str, Any], path: Path) -> None:
    """Draw the share of ideal scaling on the left, with whiskers over rounds, and the loss by own time on the right."""
    from matplotlib.figure import Figure

    cells = [cell for cell in result["cells"] if cell["contestant"] != IDEAL]
    (ideal,) = (cell for cell in result["cells"] if cell["contestant"] == IDEAL)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    shares, losses = figure.subplots(1, 2)
    for place, cell in enumerate(reversed(cells)):
        of_rounds = sorted(100 * best / step for best, step in zip(ideal["step_s"], cell["step_s"], strict=True))
        quarter = len(of_rounds) // 4
        low, high = of_rounds[quarter], of_rounds[-1 - quarter]
        share = 100 * cell["ideal_share"]
        whisker = [[max(0.0, share - low)], [max(0.0, high - share)]]
        shares.barh(place, share, color=colour_of(cell["contestant"]), xerr=whisker, ecolor="black", capsize=3)
        shares.text(2, place, f"{share:.0f} %,  {cell['steps_per_s']:.2f} steps/s", va="center", color="white")
    shares.set_yticks(range(len(cells)), [names_of(cell["contestant"]) for cell in reversed(cells)])
    shares.axvline(100, color=colour_of(IDEAL), linestyle="--", linewidth=1)
    shares.set_xlim(0, 108)
    shares.set_xlabel(f"speed, % of ideal ({ideal['steps_per_s']:.2f} steps/s, nothing sent); whisker: middle half")
    for cell in cells:
        seconds, values = zip(*cell["loss"], strict=True)
        style = {"color": colour_of(cell["contestant"]), "label": names_of(cell["contestant"])}
        losses.plot(seconds, values, marker=".", markersize=4, linewidth=1.5, **style)
    losses.set_xlabel("seconds of training")
    losses.set_ylabel("loss on text or images held out")
    losses.grid(True, alpha=0.3)
    losses.legend(fontsize=9)
    model = result["model"]
    figure.suptitle(
        f"{model['name'].upper()} of {model['parameters'] / 1e6:.1f} million parameters on {where_text(result)}",
        fontsize=11,
    )
    figure.savefig(path, dpi=130, format="png")
