"""Scaling curves of `cgx plan` on CPU nodes, beside those that it drew before it simulated the native engine.

    python benchmarks/plan_curves.py [--plot docs/plan-curves.png]

The earlier curves are stored (plan-curves-before.json): what the same commands predicted at commit 2f8f097, whose model
was of messages that Python drove, 520 us each, and without GRID.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from results import newest
from torch_cgx.cli.plan.command import fastest
from torch_cgx.cli.plan.inputs import workload_of_numbers
from torch_cgx.cli.plan.model import CONTESTANTS, Plan
from torch_cgx.cli.plan.sites import make_site

PARAMETERS, STEP_S = 110_000_000, 0.3
RATES = {"1gbit": 1e9, "10gbit": 10e9}
NODES = [2**power for power in range(11)]
DRAWN = {"exact": "#222222", "fp16": "#30638e", "8 bits": "#b2182b", "4 bits": "#e28743"}


def curves() -> dict[str, dict[str, list[float]]]:
    """Return shares of ideal scaling, by rate and contestant."""
    workload = workload_of_numbers(PARAMETERS, STEP_S).workload
    found: dict[str, dict[str, list[float]]] = {}
    for rate, bit_per_s in RATES.items():
        plan = Plan(make_site("cpu", 1, 32e9, bit_per_s), workload)
        predictions = {nodes: [plan.predict(name, nodes) for name in CONTESTANTS] for nodes in NODES}
        found[rate] = {name: [] for name in DRAWN}
        for nodes, cells in predictions.items():
            by_name = {cell.contestant: cell for cell in cells}
            for name in DRAWN:
                found[rate][name].append(by_name[name].share)
            ways = ", ".join(f"{name} {by_name[name].share:.0%}" for name in DRAWN)
            way = by_name["4 bits"].way
            assert way is not None
            print(f"{rate:>7} {nodes:5} nodes: {ways} by {way.algorithm}; fastest: {fastest(cells).contestant}")
    return found


def draw(before: dict[str, Any], after: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter, ScalarFormatter

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    for axes, rate in zip(figure.subplots(1, 2, sharey=True), RATES, strict=True):
        for name, color in DRAWN.items():
            axes.plot(NODES, after[rate][name], color=color, marker="o", markersize=4, label=name)
            if name.endswith("bits"):
                axes.plot(NODES, before[rate][name], color=color, linestyle=":", linewidth=1.5, label=f"{name}, before")
        axes.set_title(f"{RATES[rate] / 1e9:g} Gbit/s")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xticks(NODES)
        axes.tick_params(axis="x", labelrotation=45)
        axes.set_xlabel("nodes of one rank")
        axes.grid(True, alpha=0.3)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.axes[0].set_ylim(0, 1.05)
    figure.axes[0].set_ylabel("share of ideal scaling")
    figure.axes[0].legend(ncols=1, fontsize=9)
    figure.suptitle(
        f"predicted by cgx plan: {PARAMETERS / 1e6:.0f} M parameters, step {STEP_S * 1e3:.0f} ms, CPU nodes"
    )
    figure.savefig(path, dpi=130, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path(__file__).parents[1] / "docs" / "plan-curves.png")
    options = parser.parse_args()
    before = json.loads(newest("plan-curves-before.json").read_text())
    draw(before["shares"], curves(), options.plot)


if __name__ == "__main__":
    main()
