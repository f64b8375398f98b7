"""Fusion of a call's small tensors into one tensor. They share messages; each is a layer with its own quantizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Fused", "fusable"]

_MOST_NBYTES = 1 << 20  # of a tensor; larger ones gain less from fusion than two copies cost


def fusable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that can be fused: at least two small ones of the same type, or none."""
    small = [t for t in tensors if 0 < t.numel() * t.element_size() <= _MOST_NBYTES]
    alike = [t for t in small if t.dtype == small[0].dtype]
    return alike if len(alike) > 1 else []


class Fused:
    """One flat tensor with copies of several tensors' values."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self.flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def hand_out(self) -> None:
        """Copy the flat tensor's current values back into the tensors."""
        numels = [tensor.numel() for tensor in self._tensors]
        for tensor, values in zip(self._tensors, torch.split(self.flat, numels), strict=True):
            tensor.detach().copy_(values.view(tensor.shape))
