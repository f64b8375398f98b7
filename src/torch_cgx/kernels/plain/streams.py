"""Levels as one little-endian bit stream."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]


def pack(levels: Tensor, bits: int) -> Tensor:
    """Return the bytes of int64 levels; unused high bits are 0.

    Eight levels of b bits are b bytes, and fit one 64-bit word.
    """
    numel = levels.numel()
    groups = torch.zeros(-(-numel // 8) * 8, dtype=torch.int64, device="cpu")
    groups[:numel] = levels
    words = (groups.view(-1, 8) << _shifts(bits)).sum(dim=1)
    return words.view(torch.uint8).view(-1, 8)[:, :bits].flatten()[: -(-numel * bits // 8)]


def unpack(stream: Tensor, bits: int, numel: int) -> Tensor:
    """Return the first levels of a stream, as int64."""
    groups = torch.zeros(-(-stream.numel() // bits) * bits, dtype=torch.uint8, device="cpu")
    groups[: stream.numel()] = stream
    words = torch.zeros(groups.numel() // bits, 8, dtype=torch.uint8, device="cpu")
    words[:, :bits] = groups.view(-1, bits)
    levels: Tensor = words.view(torch.int64) >> _shifts(bits) & (2**bits - 1)
    return levels.flatten()[:numel]


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, 8 * bits, bits, dtype=torch.int64, device="cpu")
