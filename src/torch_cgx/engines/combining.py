"""Combines payloads: what no kernel does in one call, made of those that there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_cgx.kernels import Kernels, Piece
from torch_cgx.kernels.summing import Total, add_payloads

__all__ = ["combine"]


def combine(
    kernels: Kernels, pieces: Sequence[Piece], values: Tensor, payloads: Sequence[Tensor], scale: float
) -> None:
    """Write the sum of the decoded payloads, in this order, times the scale over the pieces' values.

    Summed in float32 (float64 tensors: in float64) and rounded to the dtype once. The same payloads make the same bits
    on every host: a NaN becomes the quiet one. Where a sum overflows, its whole block becomes NaN, as if the sum were
    encoded again. Nothing here makes the host wait for the tensors' device.
    """
    if not payloads:
        raise ValueError("payloads: expected at least one, got none")
    if not pieces:
        return
    total = Total.of(pieces, values.dtype, values.device)
    add_payloads(kernels, total, payloads, values.dtype, begun=False)
    total.values.mul_(scale)
    for piece in total.quantized:
        whole = piece.numel - piece.numel % piece.block
        span = total.values[piece.offset : piece.offset + piece.numel]
        for blocks in (span[:whole].view(-1, piece.block), span[whole:].view(1, -1)):
            if blocks.numel():
                spread = blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)
                blocks.masked_fill_(~spread.isfinite(), torch.nan)
    total.hand_out(values, 1.0)
