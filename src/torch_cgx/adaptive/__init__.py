"""Chooses bits: which layer can bear how many. Neither quantizes nor sends; the hook measures for it and obeys it."""

from __future__ import annotations

from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.layers import Candidate, LayerStats
from torch_cgx.adaptive.options import AdaptiveBits
from torch_cgx.adaptive.policies import POLICIES

__all__ = ["POLICIES", "AdaptiveBits", "Budget", "Candidate", "LayerStats"]
