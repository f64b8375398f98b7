"""The random numbers of stochastic rounding: what they depend on, and that they are good enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_cgx.codecs import MaxMin
from torch_cgx.kernels import Piece, Rounding
from torch_cgx.kernels.random import random16
from torch_cgx.kernels.reference import ReferenceKernels

NUMEL = 1 << 18
BASE = Rounding(stochastic=True, seed=11, op=5, rank=2, stage=0)

words64 = st.integers(0, 2**64 - 1)
words32 = st.integers(0, 2**32 - 1)


def by_definition(seed: int, op: int, rank: int, stage: int, index: int) -> int:
    """docs/wire_format.md, one number at a time."""

    def mix64(z: int) -> int:
        z ^= z >> 30
        z = z * 0xBF58476D1CE4E5B9 % 2**64
        z ^= z >> 27
        z = z * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    g = 0x9E3779B97F4A7C15
    k = mix64((seed + g) % 2**64)
    k = mix64(((k ^ op) + g) % 2**64)
    k = mix64(((k ^ (rank << 32 | stage)) + g) % 2**64)
    k0, k1 = k % 2**32, k >> 32
    u = (index // 2 % 2**32 * 0x9E3779B1 + k0) % 2**32
    u ^= u >> 16
    u = u * 0x7FEB352D % 2**32
    u = (u + k1) % 2**32
    u ^= u >> 15
    u = u * 0x846CA68B % 2**32
    u ^= u >> 16
    return u >> 16 if index % 2 else u % 2**16


def uniform(rounding: Rounding, start: int, numel: int) -> Tensor:
    """The numbers, in [0, 1)."""
    return random16(rounding, start, numel).double() / 65536


@given(
    seed=words64,
    op=words64,
    rank=words32,
    stage=words32,
    start=st.integers(0, 2**40),
    numel=st.integers(0, 9),
)
def test_numbers_are_those_of_the_definition(seed: int, op: int, rank: int, stage: int, start: int, numel: int) -> None:
    drawn = random16(Rounding(True, seed, op, rank, stage), start, numel)
    assert drawn.tolist() == [by_definition(seed, op, rank, stage, start + i) for i in range(numel)]


@pytest.mark.parametrize("start", [0, 1, 2**31 - 500, 2**32 - 501, 2**33 - 500])
def test_a_number_depends_on_its_index_alone_not_on_where_drawing_starts(start: int) -> None:
    whole = random16(BASE, start, 1000)
    parts = [random16(BASE, start + at, 125) for at in range(0, 1000, 125)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("bins", [2, 16, 256, 4096, 65536])
@pytest.mark.parametrize("which", ["all", "even", "odd"])
def test_numbers_are_uniform(bins: int, which: str) -> None:
    """Chi-squared within five standard deviations: the high bits, the low ones, both halves of a hash."""
    drawn = random16(BASE, 0, 2 * NUMEL)
    drawn = {"all": drawn[:NUMEL], "even": drawn[::2], "odd": drawn[1::2]}[which]
    for part in (drawn * bins >> 16, drawn % bins):
        assert_uniform(part, bins)


@pytest.mark.parametrize("apart", [1, 2, 3, 8, 16, 32, 1024])
def test_pairs_of_numbers_fill_the_square_evenly(apart: int) -> None:
    """16 x 16 cells of the square of two numbers so far apart: neighbours share a hash, the others do not."""
    drawn = random16(BASE, 0, 2 * NUMEL + apart)
    high = drawn >> 12
    first = torch.arange(0, 2 * NUMEL, 2 if apart == 1 else 1)
    assert_uniform(high[first] * 16 + high[first + apart], 256)


def assert_uniform(numbers: Tensor, bins: int) -> None:
    expected = numbers.numel() / bins
    counts = torch.bincount(numbers, minlength=bins).double()
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_squared - (bins - 1)) < 5 * (2 * (bins - 1)) ** 0.5


def test_every_bit_is_as_often_one_as_zero_and_moves_alone() -> None:
    drawn = random16(BASE, 0, NUMEL)
    bits = torch.stack([(drawn >> i & 1).double() for i in range(16)])
    bound = 5 / NUMEL**0.5
    assert (bits.mean(dim=1) - 0.5).abs().max().item() < bound / 2
    off_diagonal = torch.corrcoef(bits) - torch.eye(16, dtype=torch.float64)
    assert off_diagonal.abs().max().item() < bound


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack((a.double(), b.double())))[0, 1].item()


OTHERS = [
    pytest.param(lambda n: uniform(replace(BASE, rank=3), 0, n), id="the next rank"),
    pytest.param(lambda n: uniform(replace(BASE, stage=1), 0, n), id="the sum's stage"),
    pytest.param(lambda n: uniform(replace(BASE, op=6), 0, n), id="the next operation"),
    pytest.param(lambda n: uniform(replace(BASE, seed=12), 0, n), id="the next seed"),
    pytest.param(lambda n: uniform(BASE, 1, n), id="the neighbour"),
    pytest.param(lambda n: uniform(BASE, 2, n), id="the next pair"),
    pytest.param(lambda n: uniform(BASE, 512, n), id="the next block"),
    pytest.param(lambda n: uniform(BASE, 2**32, n), id="the index 2^32 further"),
]


@pytest.mark.parametrize("draw", OTHERS)
def test_numbers_are_not_correlated_with_those_of(draw: Callable[[int], Tensor]) -> None:
    """Neither the numbers, nor which way they round a value in the middle, nor how far they are from it."""
    mine, other = uniform(BASE, 0, NUMEL), draw(NUMEL)
    bound = 5 / NUMEL**0.5
    assert abs(correlation(mine, other)) < bound
    assert abs(correlation((mine < 0.5).float(), (other < 0.5).float())) < bound
    assert abs(correlation((mine - 0.5).abs(), (other - 0.5).abs())) < bound


def test_the_first_numbers_of_consecutive_operations_are_uniform() -> None:
    """A single value that is rounded once an operation sees this sequence."""
    drawn = torch.tensor([int(random16(replace(BASE, op=op), 0, 1)) for op in range(4096)])
    assert_uniform(drawn >> 12, 16)


@pytest.mark.parametrize("averaged", ["operations", "ranks"])
def test_the_mean_of_many_roundings_converges_as_the_root_of_their_number(averaged: str) -> None:
    """n roundings of one tensor: the error of their mean has the variance f (1 - f) / n that independent ones have."""
    block = 512
    x = torch.linspace(0, 1, block)
    piece = Piece.of(MaxMin(2, block), 0, block)
    unit = 1 / 3
    spread = x / unit - torch.floor(x / unit)
    for count in (16, 64, 256, 1024):
        total = torch.zeros(block, dtype=torch.float64)
        for i in range(count):
            rounding = replace(BASE, op=i) if averaged == "operations" else replace(BASE, rank=i)
            payload, decoded = torch.empty(8 + block // 4, dtype=torch.uint8), torch.empty(block)
            ReferenceKernels().encode([piece], x, payload, rounding)
            ReferenceKernels().decode([piece], payload, decoded)
            total += decoded.double()
        squared = ((total / count - x) / unit).square().sum().item()
        expected = (spread * (1 - spread)).sum().item() / count
        assert 0.7 < squared / expected < 1.35, count


@pytest.mark.parametrize("fraction", [0.001, 0.25, 0.5, 0.9])
def test_roundings_have_no_bias_within_their_sixteen_bits(fraction: float) -> None:
    """A million values at this fraction of a step: the mean is off by no more than chance and 2^-17 of a step."""
    numel = 1 << 20
    x = torch.full((numel,), fraction)
    x[0], x[1] = 0.0, 3.0  # the block's range: three steps of 1
    piece = Piece(0, numel, 2, numel, 0, 0, MaxMin.kind)
    payload, decoded = torch.empty(8 + numel // 4, dtype=torch.uint8), torch.empty(numel)
    ReferenceKernels().encode([piece], x, payload, BASE)
    ReferenceKernels().decode([piece], payload, decoded)
    chance = (fraction * (1 - fraction) / numel) ** 0.5
    assert abs(decoded[2:].double().mean().item() - fraction) < 5 * chance + 2**-17 + 1e-7
