"""Checks that a kernel's result is within its error bound, because timing a wrong result is pointless.

Up to a million values of a buffer are checked, in whole blocks spread evenly over it. The bound is computed from the
values alone, without any of the library's code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_cgx.cli.bench.rotated_error import rotated_error_allowed
from torch_cgx.cli.registry import CommandFailed

CHECKED_NUMEL = 1 << 20


@dataclass(frozen=True, slots=True)
class Check:
    relative_error: float  # |result - exact| / |exact|, Euclidean norms
    max_error_share: float  # the largest error of a value, as a share of its allowed error


@dataclass(frozen=True, slots=True)
class Loss:
    """The error that an operation of ours may have."""

    units: float  # max-min: steps between two levels, for each value
    encodings: float  # rotated: multiple of the squared error of one encoding, for all values together


ROUNDED = Loss(0.5, 1.0)
ROUNDED_AT_RANDOM = Loss(1.0, 1.0)
# Half of the payload's error, plus the error of encoding the sum, whose range the first error has widened.
REDUCED = Loss(1.0, 1.5)
KEPT = Loss(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Bound:
    """The allowed error of a value: a number of steps between two levels, and a rounding of its dtype."""

    bits: int
    block: int
    units: float  # 0.5: rounded to the nearest level
    whole: bool = False  # one range for the whole tensor, not one for each block
    coarseness: float = 0.0  # error of the range, for peers that store a block's range in float16


def check_result(what: str, values: Tensor, got: Tensor, bound: Bound, *, factor: float = 1.0) -> Check:
    """Compare a result with `factor` times the values. Raises `CommandFailed` if it is wrong."""
    blocks, results = (_some_blocks(x, bound.block) for x in (values, got))
    if bound.whole:
        lo, hi = (x.double() for x in values.aminmax())
    else:
        lo, hi = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    spread = hi - lo
    rounding = torch.finfo(values.dtype).eps + 2.0**-20
    allowed = (
        bound.units * spread / (2**bound.bits - 1) * (1 + 2.0**-20)
        + bound.coarseness * spread
        + rounding * factor * torch.maximum(lo.abs(), hi.abs())
        + 2.0**-24  # half the step of float16's subnormal numbers, twice
    )
    error = results - factor * blocks
    share = float((error.abs() / allowed).max())
    if not share <= 1.0:  # NaN is wrong too
        raise CommandFailed(f"{what} is wrong: off by up to {share:.3g} times what is allowed")
    return Check(float(error.norm() / (factor * blocks).norm()), share)


def check_rotated(what: str, values: Tensor, got: Tensor, bits: int, loss: Loss, *, factor: float = 1.0) -> Check:
    """Compare a result with `factor` times the values, by the squared error of all of them together."""
    exact = factor * values.double()
    norm, error = float(exact.norm()), float((got.double() - exact).norm())
    rounding = 2 * (torch.finfo(values.dtype).eps + 2.0**-20)
    once = rotated_error_allowed(bits, values.numel(), 1) / factor  # the values were encoded without the factor
    allowed = (loss.encodings**0.5 * once + rounding) * norm
    if not error <= allowed:  # NaN is wrong too
        raise CommandFailed(
            f"{what} is wrong: an error of {error / norm:.3g} of the norm, allowed is {allowed / norm:.3g}"
        )
    return Check(error / norm, error / allowed)


def check_same(what: str, got: Tensor, expected: Tensor) -> None:
    """Check that two tensors hold the same bits."""
    if not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        raise CommandFailed(f"{what} is wrong: the values written back are not what the payload decodes to")


def _some_blocks(x: Tensor, block: int) -> Tensor:
    """Return blocks in float64, one per row. The last block is padded with the last value."""
    missing = -x.numel() % block
    if missing:
        x = torch.cat((x, x[-1:].expand(missing)))
    rows = x.view(-1, block)
    count = max(1, min(len(rows), CHECKED_NUMEL // block))
    return rows[torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).round().long()].double()
