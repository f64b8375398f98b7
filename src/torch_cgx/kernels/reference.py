"""The kernels in plain torch: the oracle that all others match to the byte, and the fallback without them.

Each line of arithmetic is one IEEE binary32 operation, as docs/wire_format.md numbers them. Vectorised over
blocks, but written to be read, not to be fast.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_cgx.kernels import Piece, Rounding
from torch_cgx.kernels.random import random16

HEADER_NBYTES = 8  # unit and lo, float32 each
SMALLEST_UNIT = 2.0**-126  # the smallest normal float32: its inverse is finite

# A long piece is worked through in runs of about this many values, so that temporaries stay in cache.
_RUN_NUMEL = 1 << 17

_QUANTIZABLE = (torch.float32, torch.float16, torch.bfloat16)
_RAW = (*_QUANTIZABLE, torch.float64)


class ReferenceKernels:
    """`torch_cgx.kernels.Kernels` on CPU tensors, with nothing but torch."""

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
            for run in _runs(piece):
                x = _widen(run.of(values))
                _encode_run(run, x, payload, rounding)
                if residual is not None:
                    _write_residual(run.of(residual), x - _decode_run(run, payload))
            raw = _raw_span(piece, values)
            raw.write(payload, raw.of(values))
            if residual is not None:
                raw.of(residual).zero_()

    def decode(self, pieces: Sequence[Piece], payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        for piece in pieces:
            _check_dtype(piece, values)
            for run in _runs(piece):
                decoded = _decode_run(run, payload)
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
            for run in _runs(piece):
                total = _widen(run.of(values))
                for payload in payloads:
                    total = total + _decode_run(run, payload)
                total = _scaled(total, scale)
                _encode_run(run, total, out, rounding)
                decoded = _decode_run(run, out)
                run.of(values).copy_(_narrow(decoded, values.dtype))
                if residual is not None:
                    _write_residual(run.of(residual), _scaled(total - decoded, 1.0 / scale))
            raw = _raw_span(piece, values)
            total = _widen(raw.of(values))
            for payload in payloads:
                total = total + _widen(raw.read(payload, values.dtype))
            rounded = _narrow(_scaled(total, scale), values.dtype)
            raw.write(out, rounded)
            raw.of(values).copy_(rounded)
            if residual is not None:
                raw.of(residual).zero_()

    def sum(self, pieces: Sequence[Piece], values: Tensor, payloads: Sequence[Tensor], scale: float) -> None:
        for piece in pieces:
            _check_dtype(piece, values)
            for run in _runs(piece):
                total = _widen(run.of(values))
                for payload in payloads:
                    total = total + _decode_run(run, payload)
                run.of(values).copy_(_narrow(_scaled(total, scale), values.dtype))
            raw = _raw_span(piece, values)
            total = _widen(raw.of(values))
            for payload in payloads:
                total = total + _widen(raw.read(payload, values.dtype))
            raw.of(values).copy_(_narrow(_scaled(total, scale), values.dtype))


class _Run(NamedTuple):
    """Consecutive blocks of a piece (its last may be incomplete) that start at a whole byte of levels."""

    offset: int
    numel: int
    bits: int
    block: int
    headers: int  # where its headers and its levels start in the slot, in bytes
    levels: int

    @property
    def blocks(self) -> int:
        return -(-self.numel // self.block)

    @property
    def levels_nbytes(self) -> int:
        return -(-self.numel * self.bits // 8)

    def of(self, values: Tensor) -> Tensor:
        return values[self.offset : self.offset + self.numel]


def _runs(piece: Piece) -> Iterator[_Run]:
    quantized = piece.numel - _raw_numel(piece)
    unit = math.lcm(piece.block, 8)
    step = max(unit, _RUN_NUMEL // unit * unit)
    levels = piece.payload + HEADER_NBYTES * -(-quantized // piece.block)
    for start in range(0, quantized, step):
        yield _Run(
            offset=piece.offset + start,
            numel=min(step, quantized - start),
            bits=piece.bits,
            block=piece.block,
            headers=piece.payload + HEADER_NBYTES * (start // piece.block),
            levels=levels + start * piece.bits // 8,
        )


class _RawSpan(NamedTuple):
    """The values of a piece that travel raw, with their bytes and the padding in the slot."""

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


def _raw_numel(piece: Piece) -> int:
    return piece.numel if piece.is_raw else piece.raw_tail


def _raw_span(piece: Piece, values: Tensor) -> _RawSpan:
    raw = _raw_numel(piece)
    quantized = piece.numel - raw
    coded_nbytes = HEADER_NBYTES * -(-quantized // piece.block) + -(-quantized * piece.bits // 8)
    start = piece.payload + coded_nbytes
    end = start + raw * values.element_size()
    padded_end = piece.payload + -(-(end - piece.payload) // 8) * 8
    return _RawSpan(piece.offset + quantized, raw, start, end, padded_end)


def _encode_run(run: _Run, x: Tensor, payload: Tensor, rounding: Rounding) -> None:
    """Steps 1 to 4 of the encoder, for all blocks of a run at once."""
    top = float(2**run.bits - 1)
    rows = _rows(x, run)
    finite = torch.isfinite(rows).all(dim=1)
    lo = rows.amin(dim=1) + 0.0
    hi = rows.amax(dim=1) + 0.0
    spread = hi - lo
    good = finite & torch.isfinite(spread)
    constant = lo == hi

    unit = torch.maximum(spread / top, torch.tensor(SMALLEST_UNIT, device="cpu"))
    inv = torch.div(torch.ones_like(unit), unit)
    position = (rows - lo[:, None]) * inv[:, None]
    # Levels of bad and constant blocks are 0; a NaN must not reach the conversion to integers.
    levelled = (good & ~constant)[:, None].expand_as(rows).flatten()[: run.numel]
    position = torch.where(levelled, position.flatten()[: run.numel], 0.0)
    if rounding.stochastic:
        random = random16(rounding, run.offset, run.numel)
        levels = (torch.round(position * 65536.0).to(torch.int64) + random) >> 16
    else:
        levels = (position + 0.5).to(torch.int64)
    levels = torch.where(levelled, levels, 0).clamp_(max=int(top))

    nan = torch.tensor(math.nan, device="cpu")  # 0x7FC00000
    header = torch.stack((torch.where(constant, 0.0, unit), lo), dim=1)
    header = torch.where(good[:, None], header, nan)
    payload[run.headers : run.headers + HEADER_NBYTES * run.blocks] = header.flatten().view(torch.uint8)
    payload[run.levels : run.levels + run.levels_nbytes] = _pack(levels, run.bits)[: run.levels_nbytes]


def _decode_run(run: _Run, payload: Tensor) -> Tensor:
    """Lo + unit * level in float32, with a rounding after each of the two operations."""
    header = payload[run.headers : run.headers + HEADER_NBYTES * run.blocks].clone().view(torch.float32)
    unit, lo = header.view(-1, 2).unbind(dim=1)
    levels = _unpack(payload[run.levels : run.levels + run.levels_nbytes], run.bits)[: run.numel]
    step = unit[:, None] * _rows(levels.to(torch.float32), run)
    return (lo[:, None] + step).flatten()[: run.numel]


def _write_residual(residual: Tensor, lost: Tensor) -> None:
    """Bad blocks decode to NaN, and so does what they lost: theirs stays."""
    residual.copy_(torch.where(torch.isnan(lost), residual, lost))


def _rows(x: Tensor, run: _Run) -> Tensor:
    """One row a block. An incomplete one is filled up with its last value: min and max stay."""
    missing = run.blocks * run.block - run.numel
    if missing:
        x = torch.cat((x, x[-1:].expand(missing)))
    return x.view(run.blocks, run.block)


def _pack(levels: Tensor, bits: int) -> Tensor:
    """Levels to one little-endian bit stream: eight levels of b bits are b bytes, and fit one 64-bit word."""
    groups = torch.zeros(-(-levels.numel() // 8) * 8, dtype=torch.int64, device="cpu")
    groups[: levels.numel()] = levels
    words = (groups.view(-1, 8) << _shifts(bits)).sum(dim=1)
    return words.view(torch.uint8).view(-1, 8)[:, :bits].flatten()


def _unpack(stream: Tensor, bits: int) -> Tensor:
    """The inverse of `_pack`, with up to seven levels too many at the end."""
    groups = torch.zeros(-(-stream.numel() // bits) * bits, dtype=torch.uint8, device="cpu")
    groups[: stream.numel()] = stream
    words = torch.zeros(groups.numel() // bits, 8, dtype=torch.uint8, device="cpu")
    words[:, :bits] = groups.view(-1, bits)
    levels: Tensor = words.view(torch.int64) >> _shifts(bits) & (2**bits - 1)
    return levels.flatten()


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, 8 * bits, bits, dtype=torch.int64, device="cpu")


def _widen(x: Tensor) -> Tensor:
    """To the type that sums are made in: float32, for float64 itself."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x * torch.tensor(scale, dtype=x.dtype, device="cpu")


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the dtype, nearest even. NaN becomes the quiet one: the bits that torch makes depend on the CPU."""
    return torch.where(torch.isnan(x), torch.tensor(math.nan, dtype=dtype, device="cpu"), x.to(dtype))


def _check_dtype(piece: Piece, values: Tensor) -> None:
    allowed = _RAW if piece.is_raw else _QUANTIZABLE
    if values.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"values at {piece.bits} bits: expected one of {names}, got {values.dtype}")
