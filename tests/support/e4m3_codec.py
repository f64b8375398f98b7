"""A codec that torch_cgx does not have, as somebody outside would add it: one file, and nothing else is touched.

Each block has one float32 scale; each value is an 8-bit float, torch.float8_e4m3fn. Importing this file registers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torch_cgx import codecs
from torch_cgx.kernels import Piece, Rounding, plain

LARGEST = 448.0  # that an e4m3 number can be
SCALE_NBYTES = 4


@dataclass(frozen=True, slots=True)
class E4M3:
    """The scales of all blocks, then a byte per value, then a raw tail, padded to 8 bytes."""

    bits: int
    block: int
    skip_incomplete: bool = False

    kind: ClassVar[int] = 100
    is_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bits != 8:
            raise ValueError(f"bits of the quantizer 'e4m3': expected 8, got {self.bits}")
        if self.block % 8:
            raise ValueError(f"bucket size of the quantizer 'e4m3': expected a multiple of 8, got {self.block}")

    @property
    def cut_numel(self) -> int:
        return self.block

    def raw_tail(self, numel: int) -> int:
        return numel % self.block if self.skip_incomplete else 0

    def payload_nbytes(self, numel: int, itemsize: int) -> int:
        raw = self.raw_tail(numel)
        coded = numel - raw
        return -(-(SCALE_NBYTES * -(-coded // self.block) + coded + raw * itemsize) // 8) * 8


class PlainE4M3(plain.PlainCodec):
    """What is not defined here, sums and residuals, is made of these by `PlainCodec`."""

    def coded_nbytes(self, piece: Piece) -> int:
        coded = piece.numel - piece.raw_tail
        return SCALE_NBYTES * -(-coded // piece.block) + coded

    def encode(self, run: plain.Run, x: Tensor, payload: Tensor, rounding: Rounding) -> None:
        blocks = x.split(run.piece.block)
        scales = torch.stack([block.abs().max() for block in blocks]) / LARGEST
        # Blocks of zeros, or of values so small that their scale is 0, become zeros.
        scaled = [block / scale if scale > 0 else block * scale for block, scale in zip(blocks, scales, strict=True)]
        payload[_scales(run)] = scales.view(torch.uint8)
        payload[_values(run)] = torch.cat(scaled).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, run: plain.Run, payload: Tensor) -> Tensor:
        scales = payload[_scales(run)].clone().view(torch.float32)
        scaled = payload[_values(run)].view(torch.float8_e4m3fn).float().split(run.piece.block)
        return torch.cat([block * scale for block, scale in zip(scaled, scales, strict=True)])


def _scales(run: plain.Run) -> slice:
    start = SCALE_NBYTES * (run.start // run.piece.block)
    return slice(start, start + SCALE_NBYTES * run.blocks)


def _values(run: plain.Run) -> slice:
    start = SCALE_NBYTES * -(-run.coded // run.piece.block) + run.start
    return slice(start, start + run.numel)


codecs.register(codecs.Family("e4m3", E4M3.kind, E4M3, default_block=256))
plain.register(E4M3.kind, PlainE4M3())
