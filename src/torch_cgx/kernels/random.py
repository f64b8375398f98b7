"""The counter-based random numbers of stochastic rounding, in plain torch.

A number depends only on (seed, operation, rank, stage, the value's index in its tensor), so that every kernel
draws the same ones in any order and on any number of threads. It is no generator for anything else: it has 16 bits
per value and is not secret. docs/wire_format.md defines it; every other kernel set repeats it to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_cgx.kernels import Rounding

__all__ = ["key", "mix64", "random16", "random_pairs"]

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(z: int) -> int:
    """Apply SplitMix64's finalizer: each bit of the input flips about half of the output's bits."""
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & _MASK64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & _MASK64
    return z ^ z >> 31


def key(rounding: Rounding) -> tuple[int, int]:
    """Return the two 32-bit keys of one rank's roundings in one stage of an operation."""
    k = mix64((rounding.seed + _GOLDEN) & _MASK64)
    for word in (rounding.op, rounding.rank << 32 | rounding.stage):
        k = mix64(((k ^ word & _MASK64) + _GOLDEN) & _MASK64)
    return k & _MASK32, k >> 32


def random16(rounding: Rounding, start: int, numel: int) -> Tensor:
    """Return whole numbers below 65536, as int64, for the values start to start + numel of a tensor."""
    index = torch.arange(start, start + numel, dtype=torch.int64, device="cpu")
    return (random_pairs(key(rounding), (index >> 1) & _MASK32) >> ((index & 1) << 4)) & 0xFFFF


def random_pairs(keys: tuple[int, int], pairs: Tensor) -> Tensor:
    """Return the 32-bit hashes of these pairs of neighbours, as int64: torch has no uint32 arithmetic.

    Products may wrap around: their low 32 bits are right.
    """
    k0, k1 = keys
    u = (pairs * 0x9E3779B1 + k0) & _MASK32
    u ^= u >> 16
    u = (u * 0x7FEB352D + k1) & _MASK32
    u ^= u >> 15
    u = (u * 0x846CA68B) & _MASK32
    u ^= u >> 16
    return u
