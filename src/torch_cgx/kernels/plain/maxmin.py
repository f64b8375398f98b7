"""The max-min quantizer, as docs/wire_format.md numbers its steps. Each line is one IEEE binary32 operation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_cgx.codecs.maxmin import HEADER_NBYTES
from torch_cgx.kernels import Piece, Rounding
from torch_cgx.kernels.plain.codec import PlainCodec, Run
from torch_cgx.kernels.plain.streams import pack, unpack
from torch_cgx.kernels.random import random16

__all__ = ["PlainMaxMin"]

_SMALLEST_UNIT = 2.0**-126  # the smallest normal float32: its inverse is finite


class PlainMaxMin(PlainCodec):
    """All blocks of a run at once."""

    def coded_nbytes(self, piece: Piece) -> int:
        coded = piece.numel - piece.raw_tail
        return HEADER_NBYTES * -(-coded // piece.block) + -(-coded * piece.bits // 8)

    def encode(self, run: Run, x: Tensor, payload: Tensor, rounding: Rounding) -> None:
        top = float(2**run.piece.bits - 1)
        rows = _rows(x, run)
        finite = torch.isfinite(rows).all(dim=1)
        lo = rows.amin(dim=1) + 0.0
        hi = rows.amax(dim=1) + 0.0
        spread = hi - lo
        good = finite & torch.isfinite(spread)
        constant = lo == hi

        unit = torch.maximum(spread / top, torch.tensor(_SMALLEST_UNIT, device="cpu"))
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
        payload[_headers(run)] = header.flatten().view(torch.uint8)
        payload[_levels(run)] = pack(levels, run.piece.bits)

    def decode(self, run: Run, payload: Tensor) -> Tensor:
        """Lo + unit * level, with a rounding after each of the two operations."""
        unit, lo = payload[_headers(run)].clone().view(torch.float32).view(-1, 2).unbind(dim=1)
        levels = unpack(payload[_levels(run)], run.piece.bits, run.numel)
        step = unit[:, None] * _rows(levels.to(torch.float32), run)
        return (lo[:, None] + step).flatten()[: run.numel]


def _headers(run: Run) -> slice:
    start = HEADER_NBYTES * (run.start // run.piece.block)
    return slice(start, start + HEADER_NBYTES * run.blocks)


def _levels(run: Run) -> slice:
    start = HEADER_NBYTES * -(-run.coded // run.piece.block) + run.start * run.piece.bits // 8
    return slice(start, start + -(-run.numel * run.piece.bits // 8))


def _rows(x: Tensor, run: Run) -> Tensor:
    """One row per block. An incomplete one is filled up with its last value: min and max stay."""
    missing = run.blocks * run.piece.block - run.numel
    if missing:
        x = torch.cat((x, x[-1:].expand(missing)))
    return x.view(run.blocks, run.piece.block)
