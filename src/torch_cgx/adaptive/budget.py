"""What an allocation may cost, against the same width for every layer, and what it shall be good at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch_cgx.adaptive.layers import Candidate, LayerStats

__all__ = ["Budget"]

_SLACK = 1e-9  # of a limit: sums in another order differ by less


@dataclass(frozen=True, slots=True)
class Budget:
    """`least` "bytes": the fewest of them, with no more error than the reference has. "error": the other way round.

    The reference is every layer with the same bits and block; `alpha` times what it costs is the limit.
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
        """What is to be small."""
        return candidate.nbytes if self.least == "bytes" else candidate.error

    def weight(self, candidate: Candidate) -> float:
        """What is limited."""
        return candidate.error if self.least == "bytes" else candidate.nbytes

    def limit(self, layers: Sequence[LayerStats]) -> float:
        return self.alpha * sum(map(self.weight, self.reference(layers)))

    def admits(self, allocation: Sequence[Candidate], layers: Sequence[LayerStats]) -> bool:
        return sum(map(self.weight, allocation)) <= self.limit(layers) * (1 + _SLACK)

    def better(self, first: Sequence[Candidate], second: Sequence[Candidate], layers: Sequence[LayerStats]) -> bool:
        """Whether the first is: within the limit, or nearer to it, and then the cheaper of the two."""

        def rank(allocation: Sequence[Candidate]) -> tuple[float, float]:
            weight = 0.0 if self.admits(allocation, layers) else sum(map(self.weight, allocation))
            return weight, sum(map(self.cost, allocation))

        return rank(first) < rank(second)
