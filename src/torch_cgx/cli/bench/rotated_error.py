"""The error that rotated values may have. It is known in advance, because a rotated block looks Gaussian.

The Lloyd-Max levels of a normal distribution lose the share D of its variance; decoding without bias makes that
D / (1 - D). Errors of several encodings are independent of each other, so their squares add up.
"""

from __future__ import annotations

from math import sqrt

__all__ = ["LOST_AT_ONCE", "rotated_error_allowed"]

LOST_AT_ONCE = {1: 0.5708, 2: 0.1331, 3: 0.03578, 4: 0.009588}
"""The squared error of one encoding, as a share of the values' squared norm, by bits."""
_CHANCE = 32.0  # over the root of the number of values: what 4 bits, whose largest errors are rare, were seen to need


def rotated_error_allowed(bits: int, numel: int, encodings: int) -> float:
    """Return the largest |result - exact| / |exact| of a sum whose values are encoded at most `encodings` times."""
    square = (1 + LOST_AT_ONCE[bits]) ** encodings - 1
    return sqrt(square * (1 + _CHANCE / sqrt(numel)))
