"""Sums of payloads, made of decoding: for kernel sets without one call that does it.

Summed in float32 (float64 tensors: in float64). Nothing here makes the host wait for the tensors' device.
For raw and max-min pieces only: a sum of rotated payloads is not the sum of what they decode to.
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
    """What pieces of a tensor are summed up in: a tensor of its own, which begins with the first of them."""

    values: Tensor
    start: int
    pieces: tuple[Piece, ...]  # as `values` has them
    quantized: tuple[Piece, ...]  # but for their raw tails
    _with_raw: tuple[Piece, ...]

    @classmethod
    def of(cls, pieces: Sequence[Piece], dtype: torch.dtype, device: torch.device) -> Total:
        parts = _parts_of(tuple(pieces))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = torch.empty(parts.numel, dtype=wide, device=device)
        return cls(values, parts.start, parts.pieces, parts.quantized, parts.with_raw)

    def take(self, values: Tensor) -> None:
        """Begin with the pieces' own values."""
        for piece in self.pieces:
            span = slice(piece.offset, piece.offset + piece.numel)
            self.values[span] = values[self.start + piece.offset : self.start + piece.offset + piece.numel]

    def hand_out(self, values: Tensor, scale: float) -> None:
        """Write it, scaled and rounded to the dtype once, over the pieces' values.

        A NaN becomes the quiet one, so that the same payloads make the same bits on every host.
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
    """Levels decode to float32 whatever the dtype is, but raw values lie in the payload in the dtype itself."""
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
        if not piece.is_raw and piece.numel > piece.raw_tail
    )
    return _Parts(start, numel, moved, quantized, tuple(piece for piece in moved if piece.raw_tail))
