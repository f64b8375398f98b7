"""`cgx bits`: the bits that a training run has chosen for its layers, and when, from a report of its `CGXState`."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_cgx.cli import registry
from torch_cgx.cli.registry import CommandFailed, command
from torch_cgx.cli.table import format_table

EXACT = 32
WIDTHS = (*range(1, 9), EXACT)
COLOURS = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725", "#d0d0d0")
MOST_NAME = 48
MOST_LABELS = 64  # layers; if there are more, only some are named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", type=Path, metavar="REPORT.json", help="what state.report().as_dict() holds, as JSON")
    parser.add_argument("--plot", type=registry.plot_file, metavar="FILE.png", help="draw bits by layer and step")


@command("bits", summary="the bits that a training has chosen", arguments=add_arguments)
def bits(options: argparse.Namespace) -> int:
    """Print when a training with CGXState(adaptive=...) has chosen bits, how many and why; or draw them.

    In the training, on one rank:

        json.dump(state.report().as_dict(), file)
    """
    history = read(options.report)
    rows = [[str(choice.step), history.average_text(choice), choice.reason] for choice in history.choices]
    if options.plot:
        draw(history, options.plot)
    print(format_table(["step", "bits on average", "reason"], rows, left=3))
    return 0


@dataclass(frozen=True, slots=True)
class Choice:
    step: int
    reason: str
    bits: dict[str, int]  # by layer name


@dataclass(frozen=True, slots=True)
class History:
    """The choices of one training run."""

    choices: list[Choice]
    numels: dict[str, int]  # of all layers, in the model's order; empty if the report does not tell
    end: int  # steps that were run

    @property
    def names(self) -> list[str]:
        """Return the layers for which bits were chosen, in the model's order."""
        chosen = list(dict.fromkeys(name for choice in self.choices for name in choice.bits))
        order = {name: number for number, name in enumerate(self.numels)}
        return sorted(chosen, key=lambda name: order.get(name, len(order)))

    def average_text(self, choice: Choice) -> str:
        """Return the average bits per value, over the layers for which bits were chosen."""
        if set(choice.bits.values()) == {EXACT}:
            return "exact"
        numel = sum(self.numels.get(name, 0) for name in choice.bits)
        if not numel:
            return "unknown"
        return f"{sum(self.numels.get(name, 0) * bits for name, bits in choice.bits.items()) / numel:.2f}"


def read(path: Path) -> History:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandFailed(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CommandFailed(
            f"{path}: is not JSON, which json.dump(state.report().as_dict(), file) writes: {error}"
        ) from None
    if not isinstance(report, dict) or "choices" not in report:
        raise CommandFailed(f'{path}: has no "choices"; expected what json.dump(state.report().as_dict(), file) writes')
    try:
        choices = [_choice(each) for each in report["choices"]]
        numels = {name: int(layer["numel"]) for name, layer in report.get("layers", {}).items()}
        end = int(report.get("step", 0))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CommandFailed(
            f'{path}: expected choices with "step", "reason" and "layers": {{name: [bits, bucket size]}}; '
            f"{type(error).__name__}: {error}"
        ) from None
    if not any(choice.bits for choice in choices):
        raise CommandFailed(
            f"{path}: no bits have been chosen: make the state with adaptive, and the report after its warm-up"
        )
    return History(choices, numels, max(end, choices[-1].step + 1))


def _choice(given: dict[str, Any]) -> Choice:
    found = {str(name): int(bits) for name, (bits, _) in given["layers"].items()}
    wrong = next((bits for bits in found.values() if bits not in WIDTHS), None)
    if wrong is not None:
        raise ValueError(f"bits: expected 1 to 8 or 32, got {wrong}")
    return Choice(int(given["step"]), str(given["reason"]), found)


def draw(history: History, path: Path) -> None:
    """Draw layers from top to bottom, steps from left to right, colours for bits. A choice holds until the next."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure

    names, choices = history.names, history.choices
    edges = [*(choice.step for choice in choices), history.end]
    colours = ListedColormap(COLOURS)
    places = [[_place(choice.bits.get(name)) for choice in choices] for name in names]
    height = min(max(2.6, 1.5 + 0.24 * len(names)), 16.0)
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.add_subplot()
    mesh = axes.pcolormesh(
        edges,
        range(len(names) + 1),
        places,
        cmap=colours,
        norm=BoundaryNorm([each - 0.5 for each in range(len(WIDTHS) + 1)], len(WIDTHS)),
        edgecolors="white" if len(names) <= MOST_LABELS and len(choices) <= 40 else "none",
        linewidth=0.5,
    )
    axes.set_xlim(0, history.end)
    axes.set_ylim(len(names), 0)
    if edges[0] > 0:
        axes.axvspan(0, edges[0], facecolor="#fafafa", edgecolor="#e0e0e0", hatch="////", linewidth=0, zorder=0)
    every = -(-len(names) // MOST_LABELS)
    shown = range(0, len(names), every)
    axes.set_yticks([each + 0.5 for each in shown], [_short(names[each]) for each in shown], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("step" + (" (hatched: the reference, until the first choice)" if edges[0] > 0 else ""))
    _write_bits(axes, history, names, edges, height)
    bar = figure.colorbar(mesh, ax=axes, ticks=range(len(WIDTHS)), fraction=0.04, pad=0.015)
    bar.ax.set_yticklabels(["exact" if width == EXACT else str(width) for width in WIDTHS], fontsize=8)
    bar.ax.tick_params(length=0)
    bar.set_label("bits")
    last = choices[-1]
    average = history.average_text(last)
    title = f"from step {last.step} on: " + (average if average == "exact" else f"{average} bits a value on average")
    figure.suptitle(title, fontsize=11)
    axes.set_title("\n".join(textwrap.wrap(last.reason, 130)), fontsize=8, color="#404040")
    figure.savefig(path, dpi=130, format="png")


def _place(bits: int | None) -> float:
    """Return the index of a width in the list of colours, or NaN if none was chosen."""
    return float("nan") if bits is None else WIDTHS.index(bits)


def _write_bits(axes: Any, history: History, names: list[str], edges: list[int], height: float) -> None:
    """Write the bits into the cells that have room for them."""
    row_points = 72 * 0.8 * height / len(names)
    size = min(8.0, 0.75 * row_points)
    if size < 4.5:
        return
    for column, choice in enumerate(history.choices):
        width_points = 72 * 6.0 * (edges[column + 1] - edges[column]) / history.end
        for row, name in enumerate(names):
            bits = choice.bits.get(name)
            if bits is None:
                continue
            text = "exact" if bits == EXACT else str(bits)
            if width_points < 0.75 * size * len(text):
                continue
            dark = bits <= 5
            axes.text(
                (edges[column] + edges[column + 1]) / 2,
                row + 0.5,
                text,
                ha="center",
                va="center",
                fontsize=size,
                color="white" if dark else "black",
            )


def _short(name: str) -> str:
    return name if len(name) <= MOST_NAME else "..." + name[3 - MOST_NAME :]
