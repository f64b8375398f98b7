"""The rotated codec: a Hadamard rotation of each block, then the Lloyd-Max levels of the normal distribution.

A rotated block looks Gaussian whatever it was, so one scale per block and fixed levels lose little: at 2 bits about a
tenth of what evenly spaced levels lose on gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["BLOCKS", "Rotated"]

BLOCKS = tuple(2**k for k in range(6, 13))  # 64 to 4096 values
KEY_NBYTES = 8  # what a piece's signs are drawn from
SCALE_NBYTES = 4  # of a block, float32
_MAX_BITS = 4


@dataclass(frozen=True, slots=True)
class Rotated:
    """A key, the scales of all blocks, then their levels as one bit stream, then a raw tail, padded to 8 bytes."""

    bits: int  # 1 to 4
    block: int  # values, one of BLOCKS
    skip_incomplete: bool = False  # an incomplete last block is sent raw

    kind: ClassVar[int] = 2
    is_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= _MAX_BITS:
            raise ValueError(
                f"bits of the rotated quantizer: expected 1 to {_MAX_BITS} (or 32: exact; 5 to 8 bits are for the "
                f"quantizer 'maxmin'), got {self.bits}"
            )
        if self.block not in BLOCKS:
            allowed = ", ".join(map(str, BLOCKS))
            raise ValueError(f"bucket size of the rotated quantizer: expected one of {allowed}, got {self.block}")

    @property
    def cut_numel(self) -> int:
        return self.block

    def raw_tail(self, numel: int) -> int:
        return numel % self.block if self.skip_incomplete else 0

    def coded_numel(self, numel: int) -> int:
        """Return how many values of so many are coded, the zeros included that fill up an incomplete last block."""
        return numel // self.block * self.block + rotated_numel(numel % self.block)

    def payload_nbytes(self, numel: int, itemsize: int) -> int:
        raw = self.raw_tail(numel)
        quantized = numel - raw
        headers = (KEY_NBYTES if quantized else 0) + SCALE_NBYTES * -(-quantized // self.block)
        levels = self.coded_numel(quantized) * self.bits // 8
        return -(-(headers + levels + raw * itemsize) // 8) * 8


def rotated_numel(numel: int) -> int:
    """Return how many values an incomplete block of so many is rotated as: a power of two, at least 64; 0 for none."""
    return max(BLOCKS[0], 1 << (numel - 1).bit_length()) if numel else 0
