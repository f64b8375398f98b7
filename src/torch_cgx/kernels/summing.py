"""Sums of payloads by decoding them, for kernel sets without one call that does it.

Sums are made in float32, or in float64 for float64 tensors. Nothing here makes the host wait for the tensors' device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from torch_cgx.kernels import Piece

__all__ = ["Total", "add_payloads"]


class _Decodes(Protocol):
    def decode(self, pieces: Sequence[Piece], payload: Tensor, values: Tensor, *, add: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class Total:
    """A tensor in which pieces of another one are summed up; it begins with the first of them."""

    values: Tensor
    start: int
    pieces: tuple[Piece, ...]  # with offsets in `values`
    quantized: tuple[Piece, ...]  # but for their raw tails
    _with_raw: tuple[Piece, ...]

    @classmethod
    def of(cls, pieces: Sequence[Piece], dtype: torch.dtype, device: torch.device) -> Total:
        parts = _parts_of(tuple(pieces))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = torch.empty(parts.numel, dtype=wide, device=device)
        return cls(values, parts.start, parts.pieces, parts.quantized, parts.with_raw)

    def take(self, values: Tensor) -> None:
        """Begin the sum with the pieces' own values."""
        for piece in self.pieces:
            span = slice(piece.offset, piece.offset + piece.numel)
            self.values[span] = values[self.start + piece.offset : self.start + piece.offset + piece.numel]

    def hand_out(self, values: Tensor, scale: float) -> None:
        """Write the sum, scaled and rounded to the dtype once, over the pieces' values.

        A NaN becomes the quiet one, so that the same payloads give identical bits on every host.
        """
        self.values.mul_(scale)
        for piece in self.pieces:
            target = values[self.start + piece.offset : self.start + piece.offset + piece.numel]
            target.copy_(self.values[piece.offset : piece.offset + piece.numel])
            target.masked_fill_(torch.isnan(target), torch.nan)


def add_payloads(kernels: _Decodes, total: Total, payloads: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Add the decoded payloads of a tensor of this dtype, in order."""
    if total.values.dtype == dtype:
        for payload in payloads:
            kernels.decode(total.pieces, payload, total.values, add=True)
    else:
        _add_narrow(kernels, total, payloads, dtype)


def _add_narrow(kernels: _Decodes, total: Total, payloads: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Add payloads of a narrower dtype: levels decode to float32 directly, but raw values are in the dtype itself."""
    values = total.values
    arrived = torch.empty(values.numel() if total._with_raw else 0, dtype=dtype, device=values.device)
    for payload in payloads:
        kernels.decode(total.quantized, payload, values, add=True)
        kernels.decode(total._with_raw, payload, arrived)
        for piece in total._with_raw:
            end = piece.offset + piece.numel
            raw = slice(end - piece.raw_tail, end)
            values[raw] += arrived[raw].float()


@dataclass(frozen=True, slots=True)
class _Parts:
    """Pieces with offsets in their sum, which begins with the first."""

    start: int
    numel: int
    pieces: tuple[Piece, ...]
    quantized: tuple[Piece, ...]  # but for their raw tails
    with_raw: tuple[Piece, ...]


@lru_cache(maxsize=256)
def _parts_of(pieces: tuple[Piece, ...]) -> _Parts:
    """Return the same objects for equal pieces, because kernels cache tables by the identity of the tuple."""
    start = min(piece.offset for piece in pieces)
    numel = max(piece.offset + piece.numel for piece in pieces) - start
    moved = tuple(replace(piece, offset=piece.offset - start) for piece in pieces) if start else pieces
    quantized = tuple(
        replace(piece, numel=piece.numel - piece.raw_tail, raw_tail=0)
        for piece in moved
        if not piece.is_raw and piece.numel > piece.raw_tail
    )
    return _Parts(start, numel, moved, quantized, tuple(piece for piece in moved if piece.raw_tail))
