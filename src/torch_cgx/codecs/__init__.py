"""What a quantizer is: its bits and block, where a layer may be cut, and how long a payload is.

Pure arithmetic about lengths. What is done to values stands in `kernels`; which layer gets which quantizer is
decided above. A new quantizer is one file beside these.
"""

from __future__ import annotations

from typing import Protocol

from torch_cgx.codecs.maxmin import MaxMin
from torch_cgx.codecs.raw import Identity
from torch_cgx.config import Compression

__all__ = ["Identity", "MaxMin", "Quantizer", "quantizer_for"]


class Quantizer(Protocol):
    """Immutable and hashable, because layouts are cached by it."""

    @property
    def bits(self) -> int:
        """Bits a value, as the kernels' table names them."""

    @property
    def is_exact(self) -> bool:
        """Whether values are sent as they are."""

    @property
    def block(self) -> int:
        """Values a block."""

    @property
    def cut_numel(self) -> int:
        """A layer may be cut at multiples of this many values: whole blocks, and whole bytes of levels."""

    def raw_tail(self, numel: int) -> int:
        """How many of the last values of a piece travel raw."""

    def payload_nbytes(self, numel: int, itemsize: int) -> int:
        """Bytes of a piece's payload, a multiple of 8; for multiples of 8 * cut_numel linear in numel."""


def quantizer_for(compression: Compression, *, skip_incomplete: bool = False) -> Quantizer:
    """Return the quantizer that a compression asks for. `skip_incomplete`: an incomplete last block is sent raw."""
    return Identity() if compression.is_exact else MaxMin(compression.bits, compression.block, skip_incomplete)
