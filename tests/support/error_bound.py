"""How far a compressed sum may be from the exact one: the design's bound for one block, carried through an algorithm.

Worked out from the inputs alone, in float64, and not from any of the library's code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def error_bound(
    inputs: Sequence[Tensor], bits: int, block: int, scale: float = 1.0, rounding: float = 0.5
) -> tuple[Tensor, Tensor]:
    """The exact sum of `inputs`, times `scale`, and for each of its values the largest error allowed.

    1. Each contribution is quantized, except the owner's: at most `rounding` units of its block off (1 in
       stochastic mode), and a little for the arithmetic of encode and decode.
    2. Adding N of them in float32 rounds N - 1 times.
    3. The sum, whose range can have grown by the errors so far, is quantized once more.
    4. What is decoded is rounded to the tensor's dtype.
    """
    dtype = inputs[0].dtype
    wide = [x.double() for x in inputs]
    error = torch.zeros_like(wide[0])
    magnitude = torch.zeros_like(wide[0])
    for x in wide:
        lo, hi = _extremes(x, block)
        largest = torch.maximum(lo.abs(), hi.abs())
        error += _off(lo, hi, bits, rounding)
        magnitude += largest
    error += len(inputs) * 2.0**-23 * magnitude
    total = torch.stack(wide).sum(0)
    error, total = error * scale, total * scale
    lo, hi = _extremes(total, block)
    worst = _highest(error, block)
    error = error + _off(lo - worst, hi + worst, bits, rounding)
    largest = torch.maximum(lo.abs(), hi.abs()) + worst + error
    smallest = {torch.float16: 2.0**-25}.get(dtype, 2.0**-140)  # half the step of subnormal numbers
    error = error + largest * torch.finfo(dtype).eps / 2 + smallest
    return total, error


_LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}  # of a normal distribution's variance is lost


def rotated_bound(inputs: Sequence[Tensor], bits: int, scale: float = 1.0) -> tuple[Tensor, float]:
    """The exact sum of `inputs`, times `scale`, and the largest norm of all its errors allowed with rotated values.

    Decoding without bias makes D / (1 - D) of the share D that the levels lose. With few values it may be more by
    chance. Errors of contributions that are alike may be alike too, so norms add up here, not squares.
    """
    wide = [x.double() * scale for x in inputs]
    total = torch.stack(wide).sum(0)
    lost = _LLOYD_MAX[bits] / (1 - _LLOYD_MAX[bits])
    once = (lost * (1 + 32 / total.numel() ** 0.5)) ** 0.5
    contributed = once * sum(float(x.norm()) for x in wide)
    rounding = len(inputs) * torch.finfo(inputs[0].dtype).eps * sum(float(x.norm()) for x in wide)
    return total, contributed + once * (float(total.norm()) + contributed) + rounding


def bound_by_quantizations(
    inputs: Sequence[Tensor], bits: int, block: int, quantizations: int, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same for any algorithm that quantizes a contribution at most so many times, and a little wider.

    A payload of a sum of some contributions is off by half a unit, and its unit is at most the spreads of those
    contributions together over the number of levels, for what is decoded is never outside of what was encoded. A
    contribution is in as many payloads as it is quantized. Beside it, each payload costs a few roundings in float32,
    and each sum so far may be rounded to the dtype.
    """
    wide = [x.double() for x in inputs]
    spread, magnitude = torch.zeros_like(wide[0]), torch.zeros_like(wide[0])
    for x in wide:
        lo, hi = _extremes(x, block)
        spread += hi - lo
        magnitude += torch.maximum(lo.abs(), hi.abs())
    error = quantizations * (0.5 * spread / (2**bits - 1) + 2.0**-20 * magnitude)
    error += (len(inputs) + 1) * torch.finfo(inputs[0].dtype).eps * magnitude
    return torch.stack(wide).sum(0) * scale, error * scale


def _off(lo: Tensor, hi: Tensor, bits: int, rounding: float) -> Tensor:
    unit: Tensor = ((hi - lo) / (2**bits - 1)).clamp_min(2.0**-126)
    off: Tensor = rounding * unit * (1 + 2.0**-20) + 2.0**-22 * torch.maximum(lo.abs(), hi.abs())
    return off


def _extremes(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """For each value the least and the greatest value of its block."""
    return -_highest(-x, block), _highest(x, block)


def _highest(x: Tensor, block: int) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.numel() % block), value=-torch.inf).reshape(-1, block)
    highest: Tensor = padded.amax(1).repeat_interleave(block)
    return highest[: x.numel()]
