"""The goal and the limit of an allocation, relative to one width for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch_cgx.adaptive.layers import Candidate, LayerStats

__all__ = ["Budget"]

_SLACK = 1e-9  # relative to a limit: reordering a sum changes it by less


@dataclass(frozen=True, slots=True)
class Budget:
    """A goal and a limit. `least` "bytes" asks for the fewest bytes at a limited error, "error" for the reverse.

    The reference gives all layers the same bits and block; `alpha` times its error (or bytes) is the limit.
    """

    least: Literal["bytes", "error"] = "bytes"
    bits: int = 4
    block: int = 1024
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.least not in ("bytes", "error"):
            raise ValueError(f'least: expected "bytes" or "error", got {self.least!r}')
        if not self.alpha > 0:
            raise ValueError(f"alpha: expected more than 0, got {self.alpha}")

    def reference(self, layers: Sequence[LayerStats]) -> list[Candidate]:
        return [layer.at(self.bits, self.block) for layer in layers]

    def cost(self, candidate: Candidate) -> float:
        """Return the quantity to minimize."""
        return candidate.nbytes if self.least == "bytes" else candidate.error

    def weight(self, candidate: Candidate) -> float:
        """Return the quantity that is limited."""
        return candidate.error if self.least == "bytes" else candidate.nbytes

    def limit(self, layers: Sequence[LayerStats]) -> float:
        return self.alpha * sum(map(self.weight, self.reference(layers)))

    def admits(self, allocation: Sequence[Candidate], layers: Sequence[LayerStats]) -> bool:
        return sum(map(self.weight, allocation)) <= self.limit(layers) * (1 + _SLACK)

    def better(self, first: Sequence[Candidate], second: Sequence[Candidate], layers: Sequence[LayerStats]) -> bool:
        """Return whether the first is better: within the limit, or nearer to it, and then cheaper."""

        def rank(allocation: Sequence[Candidate]) -> tuple[float, float]:
            weight = 0.0 if self.admits(allocation, layers) else sum(map(self.weight, allocation))
            return weight, sum(map(self.cost, allocation))

        return rank(first) < rank(second)
