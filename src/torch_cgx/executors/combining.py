"""Combines payloads: what no kernel does in one call, made of those that there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_cgx.kernels import Kernels, Piece

__all__ = ["combine"]


def combine(
    kernels: Kernels, pieces: Sequence[Piece], values: Tensor, payloads: Sequence[Tensor], scale: float
) -> None:
    """Write the sum of the decoded payloads, in this order, times the scale over the pieces' values.

    Summed in float32 (float64 tensors: in float64) and rounded to the dtype once. The same payloads make the same bits
    on every host: a NaN becomes the quiet one.
    """
    if not payloads:
        raise ValueError("payloads: expected at least one, got none")
    if not pieces:
        return
    start = min(piece.offset for piece in pieces)
    numel = max(piece.offset + piece.numel for piece in pieces) - start
    if start:
        pieces = [replace(piece, offset=piece.offset - start) for piece in pieces]
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    total = torch.empty(numel, dtype=wide, device=values.device)
    if total.dtype == values.dtype:
        _sum(kernels, pieces, payloads, total)
    else:
        _sum_narrow(kernels, pieces, payloads, total, values.dtype)
    total *= torch.tensor(scale, dtype=total.dtype)
    nan = torch.tensor(math.nan, dtype=values.dtype)  # on no device in particular, being one number
    for piece in pieces:
        piece_total = total[piece.offset : piece.offset + piece.numel]
        target = values[start + piece.offset : start + piece.offset + piece.numel]
        torch.where(torch.isnan(piece_total), nan, piece_total.to(values.dtype), out=target)


def _sum(kernels: Kernels, pieces: Sequence[Piece], payloads: Sequence[Tensor], total: Tensor) -> None:
    for number, payload in enumerate(payloads):
        kernels.decode(pieces, payload, total, add=number > 0)


def _sum_narrow(
    kernels: Kernels, pieces: Sequence[Piece], payloads: Sequence[Tensor], total: Tensor, dtype: torch.dtype
) -> None:
    """Levels decode to float32 whatever the dtype is, but raw values lie in the payload in the dtype itself."""
    # Lists: tables are kept by the tuple that they were made of, and these are new at each call.
    quantized = [
        replace(piece, numel=piece.numel - piece.raw_tail, raw_tail=0)
        for piece in pieces
        if piece.bits != 32 and piece.numel > piece.raw_tail
    ]
    with_raw = [piece for piece in pieces if piece.raw_tail]
    arrived = torch.empty(total.numel() if with_raw else 0, dtype=dtype, device=total.device)
    _sum(kernels, quantized, payloads, total)
    for number, payload in enumerate(payloads):
        kernels.decode(with_raw, payload, arrived)
        for piece in with_raw:
            end = piece.offset + piece.numel
            raw = slice(end - piece.raw_tail, end)
            total[raw] = total[raw] + arrived[raw].float() if number > 0 else arrived[raw].float()
