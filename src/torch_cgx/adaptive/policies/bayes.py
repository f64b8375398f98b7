"""Bayes: a search for the allocation that minimizes size^a * error, guided by the tries so far.

Size is the sum of bytes and error the sum of squared errors, both relative to the reference. If each bit divides the
error by four, size^a * error grows with the bits below a / (2 ln 2) bits, and falls above. So

    a = 16 ln 2     for the fewest bytes: a bit less pays at every width up to 8, and the limit of error holds it back
    a = 1           for the least error: a bit more pays at every width, and the limit of bytes holds it back

(With 1 for both, 8 bits would win even for the fewest bytes.) Tries outside the limit rank after all tries inside it.

1. Layers with similar curves (the logarithm of the error for each value, by width) form at most 8 groups (k-means):
   the search, by tree-structured Parzen estimators (optuna), is good at few dimensions only.
2. It tries the reference's bits for all, then other widths by group, `_TRIALS` tries in total.
3. The try that the budget ranks best is taken, or the reference if that is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.layers import Candidate, LayerStats
from torch_cgx.adaptive.policies.kmeans import cluster
from torch_cgx.adaptive.widths import Integers, Widths

__all__ = ["allocate"]

_SEED = 0
_GROUPS = 8
_TRIALS = 128  # about a second
_EXPONENTS = {"bytes": 16 * math.log(2), "error": 1.0}
_LEAST = 2.0**-64  # relative to the reference, or the largest: smaller values, such as 0, count as this
_OUTSIDE = 1e6  # more than any logarithm of size^a * error


def allocate(layers: Sequence[LayerStats], budget: Budget) -> list[Candidate]:
    """Return an allocation that is within the limit if the reference is."""
    optuna = _optuna()
    if not layers:
        return []
    widths = Widths.of(layers, budget)
    groups = cluster(_curves(widths), _GROUPS)
    costs, weights = widths.grouped(groups)
    each = np.arange(len(costs))
    uniform = budget.reference(layers)
    cost_unit, limit = sum(map(budget.cost, uniform)), budget.limit(layers)
    exponent = _EXPONENTS[budget.least]

    def score(cost: float, weight: float) -> float:
        """Return the logarithm of size^a * error, with the limit as the unit of weight, which moves no minimum."""
        log_cost, log_weight = _log(cost, cost_unit), _log(weight, limit)
        if weight > limit:
            return _OUTSIDE + log_weight
        return exponent * log_cost + log_weight if budget.least == "bytes" else log_cost + exponent * log_weight

    study = _study(optuna)
    start = int(np.abs(widths.bits - budget.bits).argmin())
    study.enqueue_trial({str(group): start for group in each})
    space = {str(group): optuna.distributions.IntDistribution(0, len(widths.bits) - 1) for group in each}
    tries: list[Integers] = []
    sums: list[tuple[float, float]] = []
    for _ in range(_TRIALS):
        trial = study.ask(space)
        tries.append(np.array([trial.params[str(group)] for group in each]))
        sums.append((float(costs[each, tries[-1]].sum()), float(weights[each, tries[-1]].sum())))
        study.tell(trial, score(*sums[-1]))
    best = widths.first([cost for cost, _ in sums], [weight for _, weight in sums])
    return widths.settle(tries[best][groups].tolist())


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ImportError("the policy \"bayes\" needs optuna: pip install 'optuna>=5'") from error
    return optuna


def _study(optuna: Any) -> Any:
    """Return a new study, without the line that optuna logs about it."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=_SEED, multivariate=True))
    finally:
        optuna.logging.set_verbosity(verbosity)


def _curves(widths: Widths) -> np.ndarray:
    errors = np.array([[each.error for each in row] for row in widths.candidates])
    errors /= np.array([[layer.numel] for layer in widths.layers])
    return np.log2(np.maximum(errors / (errors.max() or 1.0), _LEAST))


def _log(value: float, unit: float) -> float:
    return math.log(max(value / unit if unit > 0 else value, _LEAST))
