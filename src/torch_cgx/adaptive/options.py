"""`AdaptiveBits`: how a state chooses bits automatically."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal

from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.policies import POLICIES
from torch_cgx.config import Compression, shortened, whole_number

__all__ = ["AUTO", "AdaptiveBits"]

AUTO: Final = "auto"
# Smaller blocks cost more bytes for their headers and have less error, so a search over both finds what suits a layer.
# Widths get smaller blocks as long as another bit is not the better use of the same bytes.
_SMALLER_BLOCKS = (256, 128)
_WIDEST_IN_SMALLER = 6
_BLOCK_OF_ONE_BIT = 32


@dataclass(frozen=True, slots=True)
class AdaptiveBits:
    """Options for automatic bits: every `period` steps, new ones for each layer that is compressed by default.

    Layers with an override keep theirs.

    Args:
        policy: a name from `torch_cgx.adaptive.policies`.
        bits_range: the fewest and the most bits per layer.
        period: steps between choices.
        warmup: steps until the first choice. Until then all layers have the reference, which is the state's
            `compression_params` (4 bits, bucket size 1024 by default).
        alpha: the limit on what `least` does not minimize, as a multiple of the reference's.
        least: "bytes": the fewest bytes with no more error than the reference; "error": the least error in no more
            bytes.
        layer_alpha: the most squared error of a single layer, as a multiple of its own at the reference (2.25: 1.5
            times the distance). None: no limit. Without a limit, error goes to layers with small gradients, which Adam
            and similar optimizers enlarge again.
        target_step_time: in seconds: as many bits as let a step take no longer. "auto": no longer than the fastest of
            exact, the most bits and the reference, so that bits that cost no time are not saved, and layers are exact
            if compression does not pay. None: time does not matter. Step times are measured once, during the first
            steps.
    """

    policy: str = "dynamic_programming"
    bits_range: tuple[int, int] = (2, 8)
    period: int = 256
    warmup: int = 64
    alpha: float = 1.0
    least: Literal["bytes", "error"] = "bytes"
    layer_alpha: float | None = 2.25
    target_step_time: float | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or self.policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}; got {shortened(self.policy)}")
        if not _is_range(self.bits_range):
            raise ValueError(
                f"bits_range: expected two widths from 1 to 8, the lower first, got {shortened(self.bits_range)}"
            )
        for name in ("period", "warmup"):
            steps = whole_number(name, getattr(self, name), "1 step or more")
            if steps < 1:
                raise ValueError(f"{name}: expected 1 step or more, got {steps}")
            object.__setattr__(self, name, steps)
        if self.layer_alpha is not None and not (_is_number(self.layer_alpha) and self.layer_alpha >= 1):
            raise ValueError(f"layer_alpha: expected 1 or more, or None, got {shortened(self.layer_alpha)}")
        if not _is_number(self.alpha):
            raise ValueError(f"alpha: expected more than 0, got {shortened(self.alpha)}")
        if not isinstance(self.least, str):
            raise ValueError(f'least: expected "bytes" or "error", got {shortened(self.least)}')
        target = self.target_step_time
        timed = target is not None and not (isinstance(target, str) and target == AUTO)
        if timed and not (_is_number(target) and target > 0):  # type: ignore[operator]
            raise ValueError(f'target_step_time: expected seconds, "auto" or None, got {shortened(target)}')
        POLICIES[self.policy]((), self.budget(Compression(4, 1024)))  # checks the rest, and what the policy needs

    @classmethod
    def of(cls, given: AdaptiveBits | str | Mapping[str, Any] | None) -> AdaptiveBits | None:
        """Return the options that a user's argument, or a checkpoint, stands for."""
        if given is None or isinstance(given, AdaptiveBits):
            return given
        if isinstance(given, str) and given == AUTO:
            return cls(target_step_time=AUTO)
        if isinstance(given, Mapping):
            names = [field.name for field in fields(cls)]
            if set(given) != set(names):
                raise ValueError(f"adaptive: expected the keys {', '.join(names)}, got {shortened(list(given))}")
            widths = given["bits_range"]
            return cls(**{**given, "bits_range": tuple(widths) if isinstance(widths, list) else widths})
        raise ValueError(f'adaptive: expected "auto", an AdaptiveBits or None, got {shortened(given)}')

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def budget(self, reference: Compression) -> Budget:
        return Budget(self.least, reference.bits, reference.block, self.alpha)

    def candidates(self, reference: Compression) -> tuple[Compression, ...]:
        """Return the compressions that a layer may have, the reference first."""
        low, high = self.bits_range
        found = {reference: None}
        for bits in range(low, high + 1):
            blocks = [reference.block]
            if bits <= _WIDEST_IN_SMALLER:
                blocks += [block for block in _SMALLER_BLOCKS if block < reference.block]
            if bits == 1 and reference.block > _BLOCK_OF_ONE_BIT:
                blocks.append(_BLOCK_OF_ONE_BIT)
            found |= {Compression(bits, block): None for block in blocks}
        return tuple(found)


def _is_range(given: object) -> bool:
    return (
        isinstance(given, (tuple, list))
        and len(given) == 2
        and all(isinstance(each, int) and not isinstance(each, bool) for each in given)
        and 1 <= given[0] <= given[1] <= 8
    )


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and math.isfinite(given)
