"""Layers by width, for policies that choose bits: the best block for each width, and the best of many tries.

Of a layer's candidates with b bits, the one with the least

    error * 4^(8 * nbytes / numel)

stands for b. One more bit per value divides the error by about four, so a smaller block is taken if it lowers the error
by more than its bytes would as bits, whether bytes or error are limited. A layer without a candidate with b bits uses
the nearest that it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.layers import Candidate, LayerStats

__all__ = ["Integers", "Numbers", "Widths"]

Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Widths:
    """Candidates by layer and width; the widths ascend.

    `candidates[i][k]`, and its cost and weight, is layer i with `bits[k]` bits.
    """

    bits: Integers
    candidates: list[list[Candidate]]
    costs: Numbers
    weights: Numbers
    layers: Sequence[LayerStats]
    budget: Budget

    @classmethod
    def of(cls, layers: Sequence[LayerStats], budget: Budget) -> Widths:
        blocks = [_best_blocks(layer) for layer in layers]
        bits = sorted({width for have in blocks for width in have})
        candidates = [[have.get(width) or _nearest(have, width) for width in bits] for have in blocks]
        costs = np.array([[budget.cost(each) for each in row] for row in candidates], dtype=float)
        weights = np.array([[budget.weight(each) for each in row] for row in candidates], dtype=float)
        return cls(np.array(bits), candidates, costs, weights, layers, budget)

    def grouped(self, groups: Integers) -> tuple[Numbers, Numbers]:
        """Return cost and weight of whole groups of layers, by width; `groups` holds each layer's group."""
        members = (groups == np.arange(groups.max() + 1)[:, None]).astype(float)
        return members @ self.costs, members @ self.weights

    def first(self, costs: npt.ArrayLike, weights: npt.ArrayLike) -> int:
        """Return the index of the best of several allocations with these sums: `Budget.better` for numbers."""
        outside = np.asarray(weights) * (np.asarray(weights) > self.budget.limit(self.layers))
        return int(np.lexsort((np.asarray(costs), outside))[0])

    def settle(self, choice: Iterable[int]) -> list[Candidate]:
        """Return the allocation with width number `choice[i]` for layer i, or the reference if that is better."""
        found = [row[number] for row, number in zip(self.candidates, choice, strict=True)]
        uniform = self.budget.reference(self.layers)
        return found if self.budget.better(found, uniform, self.layers) else uniform


def _nearest(have: dict[int, Candidate], width: int) -> Candidate:
    """Return the candidate with the nearest width, and on a tie the wider one."""
    return have[min(have, key=lambda bits: (abs(bits - width), -bits))]


def _best_blocks(layer: LayerStats) -> dict[int, Candidate]:
    def loss(candidate: Candidate) -> tuple[float, int]:
        if candidate.error <= 0:
            return -math.inf, candidate.nbytes
        return math.log2(candidate.error) / 2 + 8 * candidate.nbytes / layer.numel, candidate.nbytes

    best: dict[int, Candidate] = {}
    for candidate in layer.candidates:
        if candidate.bits not in best or loss(candidate) < loss(best[candidate.bits]):
            best[candidate.bits] = candidate
    return best
