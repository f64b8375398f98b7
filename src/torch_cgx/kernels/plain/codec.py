"""What a codec's arithmetic is: float32 values of a run to bytes and back. Sums are made of these two by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torch_cgx.kernels import Piece, Rounding

__all__ = ["PlainCodec", "Run", "keep_lost", "scaled"]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive coded values of a piece: whole blocks, but that the piece's last block may be incomplete.

    A long piece is worked through in runs. Each starts at a multiple of the block and of 8 values, so at a whole byte of
    levels.
    """

    piece: Piece
    start: int  # its first value, counted from the piece's first
    numel: int

    @property
    def coded(self) -> int:
        """How many values of the piece are coded, in all of its runs."""
        return self.piece.numel - self.piece.raw_tail

    @property
    def offset(self) -> int:
        """Its first value, counted from the start of the tensor."""
        return self.piece.offset + self.start

    @property
    def blocks(self) -> int:
        return -(-self.numel // self.piece.block)

    def of(self, values: Tensor) -> Tensor:
        return values[self.offset : self.offset + self.numel]


class PlainCodec(Protocol):
    """One codec in plain torch, on CPU tensors. A subclass needs the first three methods only.

    `x` is always a run's values, widened to float32, and is not written to. A `payload` is the bytes of the run's whole
    piece up to the raw tail, of which a run reads or writes its own part.
    """

    def coded_nbytes(self, piece: Piece) -> int:
        """Return how many bytes of the piece's payload come before its raw tail."""

    def encode(self, run: Run, x: Tensor, payload: Tensor, rounding: Rounding) -> None:
        """Write the bytes that stand for these values."""

    def decode(self, run: Run, payload: Tensor) -> Tensor:
        """Return the values that the bytes stand for, in float32."""

    def reduce(
        self,
        run: Run,
        x: Tensor,
        payloads: Sequence[Tensor],
        out: Tensor,
        scale: float,
        rounding: Rounding,
        residual: Tensor | None,
    ) -> Tensor:
        """Encode the scaled sum of the values and the payloads into `out`. Return what that decodes to.

        The run's residual, if given, gets what the sum has lost.
        """
        total = self.sum(run, x, payloads, scale)
        self.encode(run, total, out, rounding)
        decoded = self.decode(run, out)
        if residual is not None:
            keep_lost(residual, scaled(total - decoded, 1.0 / scale))
        return decoded

    def sum(self, run: Run, x: Tensor, payloads: Sequence[Tensor], scale: float) -> Tensor:
        """Return the scaled sum of the values and the payloads, added in order."""
        for payload in payloads:
            x = x + self.decode(run, payload)
        return scaled(x, scale)


def scaled(x: Tensor, scale: float) -> Tensor:
    """Return x times the number of its dtype that is nearest to the scale."""
    return x * torch.tensor(scale, dtype=x.dtype, device="cpu")


def keep_lost(residual: Tensor, lost: Tensor) -> None:
    """Write what is lost over the residual, but where it is NaN, as it is in blocks with a NaN or an infinity."""
    residual.copy_(torch.where(torch.isnan(lost), residual, lost))
