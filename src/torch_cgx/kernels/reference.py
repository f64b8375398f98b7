"""The kernels in plain torch: the oracle that all others match to the byte, and the fallback without them.

This file cuts pieces into runs and carries raw values. The arithmetic of the codecs is in `plain`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_cgx.codecs.maxmin import HEADER_NBYTES
from torch_cgx.kernels import Piece, Rounding
from torch_cgx.kernels.plain import Run, plain_codec
from torch_cgx.kernels.plain.codec import keep_lost, scaled

__all__ = ["HEADER_NBYTES", "ReferenceKernels"]

# A long piece is worked through in runs of about this many values, so that temporaries stay in cache.
_RUN_NUMEL = 1 << 17

_QUANTIZABLE = (torch.float32, torch.float16, torch.bfloat16)
_RAW = (*_QUANTIZABLE, torch.float64)


class ReferenceKernels:
    """`torch_cgx.kernels.Kernels` on CPU tensors in plain torch."""

    name = "reference"

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise RuntimeError("torch_cgx payloads are little-endian, and so must be the host")

    def encode(
        self,
        pieces: Sequence[Piece],
        values: Tensor,
        payload: Tensor,
        rounding: Rounding,
        residual: Tensor | None = None,
    ) -> None:
        for piece in pieces:
            _check_dtype(piece, values)
            coded = _coded_bytes(piece)
            for run in _runs(piece):
                x, codec = _widen(run.of(values)), plain_codec(piece.kind)
                codec.encode(run, x, payload[coded], rounding)
                if residual is not None:
                    keep_lost(run.of(residual), x - codec.decode(run, payload[coded]))
            raw = _raw_span(piece, values)
            raw.write(payload, raw.of(values))
            if residual is not None:
                raw.of(residual).zero_()

    def decode(self, pieces: Sequence[Piece], payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        for piece in pieces:
            _check_dtype(piece, values)
            coded = _coded_bytes(piece)
            for run in _runs(piece):
                decoded = plain_codec(piece.kind).decode(run, payload[coded])
                target = run.of(values)
                target.copy_(_narrow(_widen(target) + decoded if add else decoded, values.dtype))
            raw = _raw_span(piece, values)
            arrived = raw.read(payload, values.dtype)
            target = raw.of(values)
            target.copy_(_narrow(_widen(target) + _widen(arrived), values.dtype) if add else arrived)

    def reduce(
        self,
        pieces: Sequence[Piece],
        values: Tensor,
        payloads: Sequence[Tensor],
        out: Tensor,
        scale: float,
        rounding: Rounding,
        residual: Tensor | None = None,
    ) -> None:
        for piece in pieces:
            _check_dtype(piece, values)
            coded = _coded_bytes(piece)
            arrived = [payload[coded] for payload in payloads]
            for run in _runs(piece):
                x, lost = _widen(run.of(values)), None if residual is None else run.of(residual)
                decoded = plain_codec(piece.kind).reduce(run, x, arrived, out[coded], scale, rounding, lost)
                run.of(values).copy_(_narrow(decoded, values.dtype))
            raw = _raw_span(piece, values)
            total = raw.sum(payloads, values, scale)
            raw.write(out, total)
            raw.of(values).copy_(total)
            if residual is not None:
                raw.of(residual).zero_()

    def sum(self, pieces: Sequence[Piece], values: Tensor, payloads: Sequence[Tensor], scale: float) -> None:
        for piece in pieces:
            _check_dtype(piece, values)
            coded = _coded_bytes(piece)
            arrived = [payload[coded] for payload in payloads]
            for run in _runs(piece):
                total = plain_codec(piece.kind).sum(run, _widen(run.of(values)), arrived, scale)
                run.of(values).copy_(_narrow(total, values.dtype))
            raw = _raw_span(piece, values)
            raw.of(values).copy_(raw.sum(payloads, values, scale))


def _runs(piece: Piece) -> Iterator[Run]:
    unit = math.lcm(piece.block, 8)  # whole blocks, and whole bytes of levels
    step = max(unit, _RUN_NUMEL // unit * unit)
    numel = piece.numel - piece.raw_tail
    for start in range(0, numel, step):
        yield Run(piece, start, min(step, numel - start))


def _coded_bytes(piece: Piece) -> slice:
    """Return where the piece's payload is in the slot, up to its raw tail."""
    nbytes = 0 if piece.is_raw else plain_codec(piece.kind).coded_nbytes(piece)
    return slice(piece.payload, piece.payload + nbytes)


class _RawSpan(NamedTuple):
    """The values of a piece that are sent raw, with their bytes and the padding in the slot."""

    offset: int
    numel: int
    start: int
    end: int
    padded_end: int

    def of(self, values: Tensor) -> Tensor:
        return values[self.offset : self.offset + self.numel]

    def read(self, payload: Tensor, dtype: torch.dtype) -> Tensor:
        return payload[self.start : self.end].clone().view(dtype)

    def write(self, payload: Tensor, raw: Tensor) -> None:
        payload[self.start : self.end] = raw.contiguous().view(torch.uint8)
        payload[self.end : self.padded_end] = 0

    def sum(self, payloads: Sequence[Tensor], values: Tensor, scale: float) -> Tensor:
        """Return the scaled sum of the values and the payloads, rounded to the dtype once."""
        total = _widen(self.of(values))
        for payload in payloads:
            total = total + _widen(self.read(payload, values.dtype))
        return _narrow(scaled(total, scale), values.dtype)


def _raw_span(piece: Piece, values: Tensor) -> _RawSpan:
    start = _coded_bytes(piece).stop
    end = start + piece.raw_tail * values.element_size()
    padded_end = piece.payload + -(-(end - piece.payload) // 8) * 8
    return _RawSpan(piece.offset + piece.numel - piece.raw_tail, piece.raw_tail, start, end, padded_end)


def _widen(x: Tensor) -> Tensor:
    """Convert to the type that sums are made in: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the dtype, nearest even. NaN becomes the quiet one: the bits that torch makes depend on the CPU."""
    return torch.where(torch.isnan(x), torch.tensor(math.nan, dtype=dtype, device="cpu"), x.to(dtype))


def _check_dtype(piece: Piece, values: Tensor) -> None:
    allowed = _RAW if piece.is_raw else _QUANTIZABLE
    if values.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"values at {piece.bits} bits: expected one of {names}, got {values.dtype}")
