"""How long the policies take to allocate bits, and how good they are, on layers made up at random.

    python benchmarks/policies.py --json FILE

Every layer has 17 candidates: 2 to 8 bits in blocks of 1024, and 2 to 6 bits in blocks of 256 and 128 as well. Prints
the median time of an allocation (of the processor: other programs do not count), and what the allocation has of the
uniform reference's bytes (for the fewest bytes) or error (for the least error). Policies whose library is missing are
left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from results import write_json
from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.layers import Candidate, LayerStats, total_error, total_nbytes
from torch_cgx.adaptive.policies import POLICIES

SIZES = [50, 500, 5000]
WIDTHS = [(bits, 1024) for bits in range(2, 9)] + [(bits, block) for bits in range(2, 7) for block in (256, 128)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=SIZES)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the report to this file too")
    arguments = parser.parse_args()
    if min(arguments.layers) < 1 or arguments.repeats < 1:
        parser.error("expected at least 1 layer and 1 repeat")
    rows = []
    for count in arguments.layers:
        layers = random_layers(count)
        for name in arguments.policies:
            for least in ("bytes", "error"):
                try:
                    rows.append(measure(name, layers, Budget(least), arguments.repeats))
                except ImportError as error:
                    print(f"{name}: {error}", file=sys.stderr)
    print(table(rows))
    if arguments.json:
        report = {"candidates": len(WIDTHS), "repeats": arguments.repeats, "policies": rows}
        write_json(arguments.json, report)
    return 0


def random_layers(count: int, seed: int = 0) -> list[LayerStats]:
    """Sizes and errors over several powers of ten; heavy tails, for which smaller blocks pay, in some layers."""
    random = np.random.default_rng(seed)
    layers = []
    for number in range(count):
        numel = int(10 ** random.uniform(2.0, 6.5))
        deviation = 10 ** random.uniform(-4, -1)
        tail = random.uniform(0.05, 0.4)  # how the range of a block grows with its length
        candidates = []
        for bits, block in WIDTHS:
            unit = 2 * deviation * min(block, numel) ** tail / (2**bits - 1)
            error = numel * unit**2 / 12 * random.uniform(0.9, 1.1)
            nbytes = -(-(8 * -(-numel // block) + -(-numel * bits // 8)) // 8) * 8
            candidates.append(Candidate(bits, block, nbytes, error))
        layers.append(LayerStats(f"layer{number}", numel, deviation * numel**0.5, tuple(candidates)))
    return layers


def measure(name: str, layers: list[LayerStats], budget: Budget, repeats: int) -> dict[str, Any]:
    allocate = POLICIES[name]
    allocation = allocate(layers, budget)  # and warms up
    assert budget.admits(allocation, layers)
    times = []
    for _ in range(repeats):
        start = time.process_time()
        allocate(layers, budget)
        times.append(time.process_time() - start)
    uniform = budget.reference(layers)
    return {
        "policy": name,
        "layers": len(layers),
        "least": budget.least,
        "time_ms": round(1e3 * median(times), 2),
        "least_time_ms": round(1e3 * min(times), 2),
        "nbytes_of_uniform": round(total_nbytes(allocation) / total_nbytes(uniform), 5),
        "error_of_uniform": round(total_error(allocation) / total_error(uniform), 5),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """One row for each policy and kind of budget: time, and what is left of the uniform reference's cost."""
    counts = sorted({row["layers"] for row in rows})
    lines = [
        "| policy | least | " + " | ".join(f"{count} layers" for count in counts) + " |",
        "|---|---|" + "---:|" * len(counts),
    ]
    for policy, least in dict.fromkeys((row["policy"], row["least"]) for row in rows):
        cells = {
            row[
                "layers"
            ]: f"{row['time_ms']:.1f} ms, {row['nbytes_of_uniform' if least == 'bytes' else 'error_of_uniform']:.4f}"
            for row in rows
            if (row["policy"], row["least"]) == (policy, least)
        }
        lines.append(f"| {policy} | {least} | " + " | ".join(cells.get(count, "") for count in counts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
