"""Combines payloads: what no kernel does in one call, made of those that there are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_cgx.kernels import Kernels, Piece
from torch_cgx.kernels.summing import Total, add_payloads

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
    total = Total.of(pieces, values.dtype, values.device)
    add_payloads(kernels, total, payloads, values.dtype, begun=False)
    total.hand_out(values, scale)
