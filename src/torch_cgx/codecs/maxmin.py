"""The max-min codec: evenly spaced levels from a block's minimum to its maximum, `bits` bits each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["MAX_BLOCK", "MaxMin"]

MAX_BLOCK = 65536  # values: beyond it a block leaves the fastest cache, and saves nothing that matters
HEADER_NBYTES = 8  # a block's unit and minimum, float32 each


@dataclass(frozen=True, slots=True)
class MaxMin:
    """Headers of all blocks, then their levels as one bit stream, then a raw tail, padded to 8 bytes."""

    bits: int  # 1 to 8
    block: int  # values, 1 to 65536
    skip_incomplete: bool = False  # an incomplete last block is sent raw

    kind: ClassVar[int] = 1
    is_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits: expected 1 to 8 or 32, got {self.bits}")
        if not 1 <= self.block <= MAX_BLOCK:
            raise ValueError(f"bucket size: expected 1 to {MAX_BLOCK} values, got {self.block}")

    @property
    def cut_numel(self) -> int:
        return math.lcm(self.block, 8)

    def raw_tail(self, numel: int) -> int:
        return numel % self.block if self.skip_incomplete else 0

    def payload_nbytes(self, numel: int, itemsize: int) -> int:
        raw = self.raw_tail(numel)
        quantized = numel - raw
        headers = HEADER_NBYTES * -(-quantized // self.block)
        levels = -(-quantized * self.bits // 8)
        return -(-(headers + levels + raw * itemsize) // 8) * 8
