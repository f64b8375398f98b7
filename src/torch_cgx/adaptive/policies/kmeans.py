"""K-means: layers that are alike in size and norm get the same bits, those with the smallest norm the fewest.

As in CGX (arXiv 2111.08617):

1. A layer is the point (numel, norm), whitened: less the mean of all layers, over their standard deviation.
2. The points are clustered into as many groups as there are widths (k-means, Lloyd's algorithm).
3. Groups ordered by their mean norm take the widths in ascending order.

That knows no budget. So 3. is done for every range lo..hi of neighbouring widths:

    width number round(lo + (hi - lo) * g / (K - 1))          for group g = 0 .. K - 1

and the allocation is the one of them that the budget finds best; the reference, where that is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np

from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.layers import Candidate, LayerStats
from torch_cgx.adaptive.widths import Integers, Numbers, Widths

__all__ = ["allocate", "cluster"]

_SEED = 0
_RESTARTS = 5  # the best is taken
_ROUNDS = 50  # most of a restart; it ends where no point changes its group


def allocate(layers: Sequence[LayerStats], budget: Budget) -> list[Candidate]:
    """Within the limit where the reference is."""
    if not layers:
        return []
    widths = Widths.of(layers, budget)
    points = np.array([(layer.numel, layer.norm) for layer in layers], dtype=float)
    groups = cluster(_whitened(points), len(widths.bits))
    norms = np.bincount(groups, points[:, 1]) / np.bincount(groups)
    groups = np.argsort(np.argsort(norms, kind="stable"))[groups]
    count = len(norms)
    tries = [
        np.rint(np.linspace(low, high, count)).astype(np.int64)
        for low, high in combinations_with_replacement(range(len(widths.bits)), 2)
    ]
    costs, weights = widths.grouped(groups)
    each = np.arange(count)
    best = widths.first([costs[each, tried].sum() for tried in tries], [weights[each, tried].sum() for tried in tries])
    return widths.settle(tries[best][groups].tolist())


def cluster(points: Numbers, most: int) -> Integers:
    """The group of each point, from 0 on without a gap, at most so many: k-means, the best of several starts."""
    most = min(most, len(np.unique(points, axis=0)))
    random = np.random.default_rng(_SEED)
    least, best = np.inf, np.zeros(len(points), dtype=np.int64)
    for _ in range(_RESTARTS):
        groups, total = _lloyd(points, _spread(points, most, random))
        if total < least:
            least, best = total, groups
    found: Integers = np.unique(best, return_inverse=True)[1]
    return found


def _whitened(points: Numbers) -> Numbers:
    deviation = points.std(0)
    whitened: Numbers = (points - points.mean(0)) / np.where(deviation > 0, deviation, 1.0)
    return whitened


def _spread(points: Numbers, count: int, random: np.random.Generator) -> Numbers:
    """Centres to start from, each drawn by its squared distance from those before (k-means++)."""
    chosen = [int(random.random() * len(points))]
    nearest = np.full(len(points), np.inf)
    while len(chosen) < count:
        nearest = np.minimum(nearest, ((points - points[chosen[-1]]) ** 2).sum(1))
        summed = np.cumsum(nearest)
        chosen.append(int(np.searchsorted(summed, random.random() * summed[-1], side="right")))
    return points[chosen]


def _lloyd(points: Numbers, centres: Numbers) -> tuple[Integers, float]:
    """The group of each point, and the sum of squared distances to the centres."""
    groups = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        distances = ((points[:, None] - centres) ** 2).sum(2)
        nearest = distances.argmin(1)
        if np.array_equal(nearest, groups):
            break
        groups = nearest
        members = (groups == np.arange(len(centres))[:, None]).astype(float)
        counts = members.sum(1, keepdims=True)
        centres = np.where(counts > 0, members @ points / np.maximum(counts, 1), centres)
    return groups, float(distances.min(1).sum())
