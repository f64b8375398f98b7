"""The statistics that policies have of a layer, and the candidates that they choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Candidate", "LayerStats", "total_error", "total_nbytes"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to send a layer."""

    bits: int  # 1 to 8
    block: int  # values that share a unit and a minimum
    nbytes: int  # of the layer's payload
    error: float  # squared, summed over the layer's values


@dataclass(frozen=True, slots=True)
class LayerStats:
    """One layer: how large it is, and what each candidate would cost."""

    name: str
    numel: int
    norm: float  # of its gradient
    candidates: tuple[Candidate, ...]

    def at(self, bits: int, block: int) -> Candidate:
        """Return the candidate with these bits and this block."""
        for candidate in self.candidates:
            if (candidate.bits, candidate.block) == (bits, block):
                return candidate
        have = ", ".join(f"{each.bits} bits in blocks of {each.block}" for each in self.candidates)
        raise ValueError(f"{self.name}: expected one of {have}; got {bits} bits in blocks of {block}")


def total_nbytes(allocation: Sequence[Candidate]) -> int:
    return sum(candidate.nbytes for candidate in allocation)


def total_error(allocation: Sequence[Candidate]) -> float:
    return sum(candidate.error for candidate in allocation)
