"""The choice of bits for each layer. Nothing here quantizes or sends: the hook measures and applies the choice."""

from __future__ import annotations

from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.layers import Candidate, LayerStats
from torch_cgx.adaptive.options import AdaptiveBits
from torch_cgx.adaptive.policies import POLICIES

__all__ = ["POLICIES", "AdaptiveBits", "Budget", "Candidate", "LayerStats"]
