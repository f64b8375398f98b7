"""Greedy: one price for all layers, and then what still fits.

With c the cost that is to be small and w the weight that is limited to W, each layer takes

    argmin over its candidates of  c + p * w

and p, the price of weight, is the lowest for which the sum of all w is at most W. No allocation within W costs less
than

    bound(p) = sum over layers of min(c + p * w) - p * W          (Lagrange)

What is left of W is then spent on single layers, first on those that save the most cost per weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.layers import Candidate, LayerStats

__all__ = ["Problem", "Relaxed", "allocate", "relax"]

_HALVINGS = 100  # of the range in which the logarithm of the price lies

Numbers = npt.NDArray[np.float64]
Choice = npt.NDArray[np.int64]  # the number of a candidate for each layer


@dataclass(frozen=True)
class Problem:
    """Cost and weight of candidate j of layer i (infinity if a layer has fewer), and the limit on weight."""

    costs: Numbers
    weights: Numbers
    limit: float

    @classmethod
    def of(cls, layers: Sequence[LayerStats], budget: Budget) -> Problem:
        shape = len(layers), max((len(layer.candidates) for layer in layers), default=0)
        costs, weights = np.full(shape, np.inf), np.full(shape, np.inf)
        for row, layer in enumerate(layers):
            costs[row, : len(layer.candidates)] = [budget.cost(each) for each in layer.candidates]
            weights[row, : len(layer.candidates)] = [budget.weight(each) for each in layer.candidates]
        return cls(costs, weights, budget.limit(layers))

    def cost(self, choice: Choice) -> float:
        return float(np.take_along_axis(self.costs, choice[:, None], 1).sum())

    def weight(self, choice: Choice) -> float:
        return float(np.take_along_axis(self.weights, choice[:, None], 1).sum())


@dataclass(frozen=True)
class Relaxed:
    """The choice that one price leads to. No choice within the limit costs less than `bound`."""

    choice: Choice
    price: float
    bound: float


def allocate(layers: Sequence[LayerStats], budget: Budget) -> list[Candidate]:
    """Return an allocation within the limit if there is one, else the nearest to it."""
    if not layers:
        return []
    problem = Problem.of(layers, budget)
    choice = spend(problem, relax(problem).choice)
    found = [layer.candidates[number] for layer, number in zip(layers, choice.tolist(), strict=True)]
    uniform = budget.reference(layers)
    return found if budget.better(found, uniform, layers) else uniform


def relax(problem: Problem) -> Relaxed:
    """Return the lowest price that keeps the limit, and the choice that it leads to."""
    costs, weights = problem.costs, problem.weights
    lightest = _lightest(problem)
    if problem.weight(lightest) >= problem.limit:
        return Relaxed(lightest, np.inf, problem.cost(lightest))
    cheapest = np.argmin(costs, 1)
    if problem.weight(cheapest) <= problem.limit:
        return Relaxed(cheapest, 0.0, problem.cost(cheapest))
    finite = np.isfinite(costs)
    # Prices at which every layer is as cheap, or as light, as it can be.
    steps = costs[finite].max() / max(np.diff(np.unique(weights[finite])).min(initial=np.inf), np.finfo(float).tiny)
    low, high = np.log(np.finfo(float).tiny), np.log(max(steps, np.finfo(float).tiny)) + 1
    choice = lightest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        tried = _at_price(problem, np.exp(middle))
        if problem.weight(tried) <= problem.limit:
            choice, high = tried, middle
        else:
            low = middle
    price = float(np.exp(high))
    bound = float(np.where(finite, costs + price * weights, np.inf).min(1).sum() - price * problem.limit)
    bound -= len(costs) * np.finfo(float).eps * price * problem.limit  # rounding, at high prices more than all costs
    return Relaxed(choice, price, bound)


def _lightest(problem: Problem) -> Choice:
    """Return each layer's lightest candidate, the cheapest if several weigh the same."""
    lightest = problem.weights.min(1, keepdims=True)
    choice: Choice = np.where(problem.weights == lightest, problem.costs, np.inf).argmin(1)
    return choice


def _at_price(problem: Problem, price: float) -> Choice:
    with np.errstate(invalid="ignore"):  # infinity times a price of 0
        total = problem.costs + price * problem.weights
    choice: Choice = np.where(np.isfinite(total), total, np.inf).argmin(1)
    return choice


def spend(problem: Problem, choice: Choice) -> Choice:
    """Return the choice with better candidates for single layers, as long as the limit admits them."""
    choice = choice.copy()
    rows = np.arange(len(choice))
    cost, weight = problem.costs[rows, choice], problem.weights[rows, choice]
    left = problem.limit - float(weight.sum())
    saved, more = cost[:, None] - problem.costs, problem.weights - weight[:, None]
    layer, candidate = np.nonzero((saved > 0) & (more <= left))
    with np.errstate(over="ignore"):  # what weighs no more comes first
        gain = saved[layer, candidate] / np.maximum(more[layer, candidate], np.finfo(float).tiny)
    order = np.argsort(-gain, kind="stable")
    for i, j in zip(layer[order].tolist(), candidate[order].tolist(), strict=True):
        extra = problem.weights[i, j] - problem.weights[i, choice[i]]
        if problem.costs[i, j] < problem.costs[i, choice[i]] and extra <= left:
            choice[i] = j
            left -= extra
    return choice
