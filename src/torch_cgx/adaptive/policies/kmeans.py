"""K-means: layers of similar size and norm get the same bits, and the smallest norms get the fewest.

The algorithm of CGX (arXiv 2111.08617):

1. A layer is the point (numel, norm), whitened: less the mean of all layers, over their standard deviation.
2. The points are clustered into as many groups as there are widths (k-means, Lloyd's algorithm).
3. Groups ordered by their mean norm take the widths in ascending order.

That ignores the budget, so step 3 is repeated for every range lo..hi of neighbouring widths:

    width number round(lo + (hi - lo) * g / (K - 1))          for group g = 0 .. K - 1

The result is the allocation that the budget ranks best, or the reference if that is better.
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
_ROUNDS = 50  # at most, per restart, which ends when no point changes its group


def allocate(layers: Sequence[LayerStats], budget: Budget) -> list[Candidate]:
    """Return an allocation that is within the limit if the reference is."""
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
    """Return each point's group, from 0 without gaps, of at most `most`: k-means, the best of several starts."""
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
    """Return initial centres, each drawn by its squared distance from the previous ones (k-means++)."""
    chosen = [int(random.random() * len(points))]
    nearest = np.full(len(points), np.inf)
    while len(chosen) < count:
        nearest = np.minimum(nearest, ((points - points[chosen[-1]]) ** 2).sum(1))
        summed = np.cumsum(nearest)
        chosen.append(int(np.searchsorted(summed, random.random() * summed[-1], side="right")))
    return points[chosen]


def _lloyd(points: Numbers, centres: Numbers) -> tuple[Integers, float]:
    """Return each point's group, and the sum of squared distances to the centres."""
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
