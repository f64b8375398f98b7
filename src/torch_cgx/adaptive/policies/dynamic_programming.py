"""Dynamic programming: the least cost within the limit, exact up to the steps in which weight is counted.

With c the cost that is to be small and w the weight that is limited to W (for the fewest bytes: error; the problem and
its solution by dynamic programming are L-GreCo's, arXiv 2210.17357):

    best(i, d) = min over candidates of layer i of  c + best(i - 1, d - ceil(w / step))      d = 0 .. D, step = W / D

1. One price for all layers (greedy.py) gives a good allocation, and a bound that no allocation can undercut.
2. A candidate that alone raises the bound above that allocation's cost cannot be in a better one, and is dropped.
   Of hundreds of layers this leaves a few with more than one candidate, so that D steps are fine ones.
3. Dynamic programming runs over those few, counting weight above each layer's least.

Rounding up never breaks the limit. The result costs at most as much as the best allocation within W - n * step, with n
the number of layers left in 3. An allocation of step 1 within 1e-5 of its cost of the bound is not improved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.layers import Candidate, LayerStats
from torch_cgx.adaptive.policies.greedy import Choice, Problem, relax, spend

__all__ = ["STEPS", "allocate"]

STEPS = 8192
_MOST_STATES = 1 << 25  # bytes of memory: layers times steps
_GOOD_ENOUGH = 1e-5  # of the cost: an allocation so near to the bound is not improved


def allocate(layers: Sequence[LayerStats], budget: Budget) -> list[Candidate]:
    """Return an allocation within the limit if there is one, else the nearest to it."""
    if not layers:
        return []
    problem = Problem.of(layers, budget)
    relaxed = relax(problem)
    uniform = budget.reference(layers)
    choice = spend(problem, relaxed.choice)
    if budget.better(uniform, _candidates(layers, choice), layers):
        choice = np.array([layer.candidates.index(each) for layer, each in zip(layers, uniform, strict=True)])
    cost = problem.cost(choice)
    if np.isfinite(relaxed.price) and cost - relaxed.bound > _GOOD_ENOUGH * cost:
        improved = _improve(problem, choice, relaxed.price, relaxed.bound)
        if budget.better(_candidates(layers, improved), _candidates(layers, choice), layers):
            choice = improved
    return _candidates(layers, choice)


def _candidates(layers: Sequence[LayerStats], choice: Choice) -> list[Candidate]:
    return [layer.candidates[number] for layer, number in zip(layers, choice.tolist(), strict=True)]


def _improve(problem: Problem, choice: Choice, price: float, bound: float) -> Choice:
    """Improve the choice by steps 2 and 3."""
    cost = problem.cost(choice)
    with np.errstate(invalid="ignore"):
        total = problem.costs + price * problem.weights
    total[~np.isfinite(problem.costs)] = np.inf
    possible = bound + (total - total.min(1, keepdims=True)) <= cost * (1 + 1e-9)
    choice = np.where(possible.sum(1) == 1, possible.argmax(1), choice)
    free = np.flatnonzero(possible.sum(1) > 1)
    if not len(free):
        return choice
    settled = np.setdiff1d(np.arange(len(choice)), free)
    limit = problem.limit - float(problem.weights[settled, choice[settled]].sum())
    weights = np.where(possible[free], problem.weights[free], np.inf)
    least = weights.min(1)
    room = limit - float(least.sum())
    if room < 0:
        return choice
    steps = min(STEPS, _MOST_STATES // len(free))
    found = _fill(np.where(possible[free], problem.costs[free], np.inf), weights - least[:, None], room, steps)
    choice = choice.copy()
    choice[free] = found
    return choice


def _fill(costs: np.ndarray, weights: np.ndarray, room: float, steps: int) -> Choice:
    """Choose each layer's candidate by step 3."""
    with np.errstate(divide="ignore", invalid="ignore"):
        units = np.where(weights > 0, np.ceil(weights / (room / steps) if room > 0 else np.inf), 0.0)
    worth = _worth_trying(costs, units, steps)
    most = [int(units[layer, numbers[-1]]) for layer, numbers in enumerate(worth)]
    order = np.argsort(most, kind="stable").tolist()  # layers that need a long table come last
    reach = np.minimum(np.cumsum(np.array(most)[order]), steps).tolist()
    best = np.zeros(1)  # the least cost of the layers so far, with at most so many steps; more make no difference
    taken = []
    for layer, last in zip(order, reach, strict=True):
        best = np.append(best, np.full(last + 1 - len(best), best[-1]))
        least = np.full(last + 1, np.inf)
        numbers = np.zeros(last + 1, dtype=np.uint8)
        for number in worth[layer]:
            start = int(units[layer, number])
            tried = best[: last + 1 - start] + costs[layer, number]
            np.copyto(numbers[start:], number, where=tried < least[start:])
            np.minimum(least[start:], tried, out=least[start:])
        best = least
        taken.append(numbers)
    choice = np.zeros(len(costs), dtype=np.int64)
    left = steps
    for layer, last, numbers in zip(reversed(order), reversed(reach), reversed(taken), strict=True):
        left = min(left, last)
        choice[layer] = numbers[left]
        left -= int(units[layer, choice[layer]])
    return choice


def _worth_trying(costs: np.ndarray, units: np.ndarray, steps: int) -> list[list[int]]:
    """Return each layer's candidates that cost less than all with no more steps, in the order of steps."""
    order = np.lexsort((costs, units))
    ordered = np.where(np.take_along_axis(units, order, 1) <= steps, np.take_along_axis(costs, order, 1), np.inf)
    before = np.minimum.accumulate(ordered, 1)[:, :-1]
    worth = ordered < np.concatenate([np.full((len(costs), 1), np.inf), before], 1)
    return [numbers[those].tolist() for numbers, those in zip(order, worth, strict=True)]
