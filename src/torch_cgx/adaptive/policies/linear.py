"""Linear: bits from the logarithm of a layer's error relative to the largest.

With e the squared error per value of a layer at the reference,

    bits = b0 + 1/2 * log2(e / largest e)          rounded to the nearest of the widths

One more bit divides the error by about four. If that were exact and bits were not rounded, then with slope 1/2 every
layer would gain equally from another byte, and no allocation could be better. That leaves the choice of b0, the bits of
the layer with the largest error. The allocation changes at each b0 that puts a layer half-way between two widths. All
of these are tried, and the one that the budget ranks best is taken, or the reference if that is better.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.layers import Candidate, LayerStats
from torch_cgx.adaptive.widths import Integers, Numbers, Widths

__all__ = ["allocate"]

_SLOPE = 0.5
_LEAST = 2.0**-64  # relative to the largest e: smaller values, such as 0, count as this


def allocate(layers: Sequence[LayerStats], budget: Budget) -> list[Candidate]:
    """Return an allocation that is within the limit if the reference is."""
    if not layers:
        return []
    widths = Widths.of(layers, budget)
    errors = np.array([each.error / layer.numel for each, layer in zip(budget.reference(layers), layers, strict=True)])
    offsets = _SLOPE * np.log2(np.maximum(errors / (errors.max() or 1.0), _LEAST))
    turns = (widths.bits[1:] + widths.bits[:-1]) / 2 - offsets[
        :, None
    ]  # the b0 from which a layer takes the next width
    b0 = _best(turns, widths)
    choice: Integers = (turns <= b0).sum(1)
    return widths.settle(choice.tolist())


def _best(turns: Numbers, widths: Widths) -> float:
    """Return the best b0. In its order, costs and weights are running sums of the changes at each turn."""
    order = np.argsort(turns, axis=None, kind="stable")
    b0 = np.append(-np.inf, turns.ravel()[order])
    costs, weights = (
        np.append(0.0, np.diff(table, axis=1).ravel()[order]).cumsum() + table[:, 0].sum()
        for table in (widths.costs, widths.weights)
    )
    whole = np.append(b0[1:] > b0[:-1], True)  # several layers may turn at one b0
    return float(b0[whole][widths.first(costs[whole], weights[whole])])
