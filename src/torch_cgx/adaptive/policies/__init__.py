"""The policies: pure functions from layers and a budget to one candidate per layer.

They neither quantize nor send, and the same layers and budget always give the same allocation. A new policy is one file
beside these and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.layers import Candidate, LayerStats
from torch_cgx.adaptive.policies import bayes, dynamic_programming, greedy, kmeans, linear

__all__ = ["POLICIES", "Policy"]

Policy = Callable[[Sequence[LayerStats], Budget], list[Candidate]]

POLICIES: dict[str, Policy] = {
    "dynamic_programming": dynamic_programming.allocate,
    "greedy": greedy.allocate,
    "kmeans": kmeans.allocate,
    "linear": linear.allocate,
    "bayes": bayes.allocate,  # needs optuna
}
