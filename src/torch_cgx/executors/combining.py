"""Combines payloads: what no kernel does in one call, made of those that there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from torch_cgx.kernels import Kernels, Piece

__all__ = ["combine"]


def combine(
    kernels: Kernels, pieces: Sequence[Piece], values: Tensor, payloads: Sequence[Tensor], scale: float
) -> None:
    """Write the sum of the decoded payloads, in this order, times the scale over the pieces' values.

    Summed in float32 (float64 tensors: in float64) and rounded to the dtype once. The same payloads make the same bits
    on every host: a NaN becomes the quiet one. Nothing here makes the host wait for the tensors' device.
    """
    if not payloads:
        raise ValueError("payloads: expected at least one, got none")
    if not pieces:
        return
    parts = _parts_of(tuple(pieces))
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    total = torch.empty(parts.numel, dtype=wide, device=values.device)
    if total.dtype == values.dtype:
        _sum(kernels, parts.pieces, payloads, total)
    else:
        _sum_narrow(kernels, parts, payloads, total, values.dtype)
    total.mul_(scale)
    for piece in parts.pieces:
        target = values[parts.start + piece.offset : parts.start + piece.offset + piece.numel]
        target.copy_(total[piece.offset : piece.offset + piece.numel])
        target.masked_fill_(torch.isnan(target), math.nan)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Pieces as the sum has them, which begins with the first."""

    start: int
    numel: int
    pieces: tuple[Piece, ...]
    quantized: tuple[Piece, ...]  # but for their raw tails
    with_raw: tuple[Piece, ...]


@lru_cache(maxsize=256)
def _parts_of(pieces: tuple[Piece, ...]) -> _Parts:
    """The same objects for the same pieces: kernels keep tables by the tuple that they were made of."""
    start = min(piece.offset for piece in pieces)
    numel = max(piece.offset + piece.numel for piece in pieces) - start
    moved = tuple(replace(piece, offset=piece.offset - start) for piece in pieces) if start else pieces
    quantized = tuple(
        replace(piece, numel=piece.numel - piece.raw_tail, raw_tail=0)
        for piece in moved
        if piece.bits != 32 and piece.numel > piece.raw_tail
    )
    return _Parts(start, numel, moved, quantized, tuple(piece for piece in moved if piece.raw_tail))


def _sum(kernels: Kernels, pieces: Sequence[Piece], payloads: Sequence[Tensor], total: Tensor) -> None:
    for number, payload in enumerate(payloads):
        kernels.decode(pieces, payload, total, add=number > 0)


def _sum_narrow(kernels: Kernels, parts: _Parts, payloads: Sequence[Tensor], total: Tensor, dtype: torch.dtype) -> None:
    """Levels decode to float32 whatever the dtype is, but raw values lie in the payload in the dtype itself."""
    arrived = torch.empty(total.numel() if parts.with_raw else 0, dtype=dtype, device=total.device)
    _sum(kernels, parts.quantized, payloads, total)
    for number, payload in enumerate(payloads):
        kernels.decode(parts.with_raw, payload, arrived)
        for piece in parts.with_raw:
            end = piece.offset + piece.numel
            raw = slice(end - piece.raw_tail, end)
            total[raw] = total[raw] + arrived[raw].float() if number > 0 else arrived[raw].float()
