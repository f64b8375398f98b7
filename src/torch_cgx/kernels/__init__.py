"""The kernel interface: the four operations that touch values, and the tables that describe their work.

Every kernel set (plain torch, native, Triton) has the same four operations and produces identical bytes, which
docs/wire_format.md defines. `reference.py` is the oracle for all others. Kernels know pieces of one flat tensor and
payloads, but not ranks, slots or transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch_cgx.codecs import RAW, Codec, family_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NEAREST", "Kernels", "Piece", "Rounding"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive values of one layer, encoded together: one row of the table that a kernel works through."""

    offset: int  # its first value, counted from the start of the whole tensor
    numel: int
    bits: int
    block: int  # values that share a header
    raw_tail: int  # number of last values that are sent raw, in the tensor's dtype
    payload: int  # where its bytes start inside the slot, a multiple of 8
    kind: int  # of its codec

    @classmethod
    def of(cls, codec: Codec, offset: int, numel: int, payload: int = 0) -> Piece:
        """Return a piece of `numel` values that this codec encodes."""
        return cls(offset, numel, codec.bits, codec.block, codec.raw_tail(numel), payload, codec.kind)

    @property
    def is_raw(self) -> bool:
        """Return whether all its values are sent raw."""
        return self.kind == RAW.kind

    @property
    def codec(self) -> Codec:
        """Return the codec, for its lengths; an incomplete last block is sent raw if this piece says so."""
        if self.is_raw:
            return RAW
        return family_of(self.kind).make(self.bits, self.block, self.raw_tail > 0)


@dataclass(frozen=True, slots=True)
class Rounding:
    """An encoder's rounding to levels. All fields but the first matter only to stochastic rounding."""

    stochastic: bool = False
    seed: int = 0
    op: int = 0  # the operation's number in its group, so that each step draws anew
    rank: int = 0  # without it, errors would be correlated across ranks and not average out
    stage: int = 0  # 0: a rank's contribution, 1: the sum

    def at_stage(self, stage: int) -> Rounding:
        return replace(self, stage=stage) if self.stochastic else self


NEAREST = Rounding()


class Kernels(Protocol):
    """One implementation of the operations on values.

    `values` is the whole flat tensor (1-D, contiguous), which pieces index by their offset; `payload` and
    `out` are one slot each (uint8, 1-D, contiguous), which pieces index by theirs. Every byte of a piece's
    payload is written, the padding too. All work in place.

    `residual`, if given, is a float32 tensor as long as `values`. What encoding loses of each value is written
    there (0 for raw values), but nothing for blocks that hold a NaN or an infinity.
    """

    @property
    def name(self) -> str: ...

    def encode(
        self,
        pieces: Sequence[Piece],
        values: Tensor,
        payload: Tensor,
        rounding: Rounding,
        residual: Tensor | None = None,
    ) -> None:
        """Write the pieces' values into the payload."""

    def decode(self, pieces: Sequence[Piece], payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        """Write the payload's values over the pieces' values, or add them to those."""

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
        """Add the decoded payloads to the values, in order; scale; encode into `out`; decode that back.

        So the values end bit-identical to what any rank gets from decoding `out`. The residual is divided by the
        scale: it is what the sum, not the mean, has lost.
        """

    def sum(self, pieces: Sequence[Piece], values: Tensor, payloads: Sequence[Tensor], scale: float) -> None:
        """Add the decoded payloads (at least one) to the values, in order; scale; round once."""
