"""The random numbers of stochastic rounding: what they depend on, and that they are good enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_cgx.kernels import Rounding
from torch_cgx.kernels.random import uniform

NUMEL = 1 << 18
BASE = Rounding(stochastic=True, seed=11, op=5, rank=2, stage=0)

words64 = st.integers(0, 2**64 - 1)
words32 = st.integers(0, 2**32 - 1)


def by_definition(seed: int, op: int, rank: int, stage: int, index: int) -> float:
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
    k = mix64(((k ^ (index >> 32)) + g) % 2**64)
    k0, k1 = k % 2**32, k >> 32
    u = (index % 2**32 * 0x9E3779B1 + k0) % 2**32
    u ^= u >> 16
    u = u * 0x7FEB352D % 2**32
    u = (u + k1) % 2**32
    u ^= u >> 15
    u = u * 0x846CA68B % 2**32
    u ^= u >> 16
    return (u >> 8) * 2.0**-24


@given(
    seed=words64,
    op=words64,
    rank=words32,
    stage=words32,
    start=st.integers(0, 2**40),
    numel=st.integers(0, 9),
)
def test_numbers_are_those_of_the_definition(seed: int, op: int, rank: int, stage: int, start: int, numel: int) -> None:
    drawn = uniform(Rounding(True, seed, op, rank, stage), start, numel)
    assert drawn.dtype == torch.float32
    expected = [by_definition(seed, op, rank, stage, start + i) for i in range(numel)]
    assert drawn.tolist() == expected


@pytest.mark.parametrize("start", [0, 2**31 - 500, 2**32 - 500, 2**33 - 500])
def test_a_number_depends_on_its_index_alone_not_on_where_drawing_starts(start: int) -> None:
    whole = uniform(BASE, start, 1000)
    parts = [uniform(BASE, start + at, 125) for at in range(0, 1000, 125)]
    assert torch.equal(whole, torch.cat(parts))


def test_numbers_lie_in_the_half_open_unit_interval() -> None:
    drawn = uniform(BASE, 0, NUMEL)
    assert drawn.min().item() >= 0.0 and drawn.max().item() < 1.0


@pytest.mark.parametrize("bins", [2, 16, 256, 4096])
def test_numbers_are_uniform(bins: int) -> None:
    """Chi-squared within five standard deviations, for the high bits and for the low ones."""
    drawn = (uniform(BASE, 0, NUMEL).double() * 2**24).to(torch.int64)
    expected = NUMEL / bins
    for part in (drawn * bins >> 24, drawn % bins):
        counts = torch.bincount(part, minlength=bins).double()
        chi_squared = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi_squared - (bins - 1)) < 5 * (2 * (bins - 1)) ** 0.5


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack((a.double(), b.double())))[0, 1].item()


OTHERS = [
    pytest.param(lambda n: uniform(replace(BASE, rank=3), 0, n), id="the next rank"),
    pytest.param(lambda n: uniform(replace(BASE, stage=1), 0, n), id="the sum's stage"),
    pytest.param(lambda n: uniform(replace(BASE, op=6), 0, n), id="the next operation"),
    pytest.param(lambda n: uniform(replace(BASE, seed=12), 0, n), id="the next seed"),
    pytest.param(lambda n: uniform(BASE, 1, n), id="the neighbour"),
    pytest.param(lambda n: uniform(BASE, 512, n), id="the next block"),
    pytest.param(lambda n: uniform(BASE, 2**32, n), id="the index 2^32 further"),
]


@pytest.mark.parametrize("draw", OTHERS)
def test_numbers_are_not_correlated_with_those_of(draw: object) -> None:
    """Neither the numbers, nor which way they round a value in the middle, nor how far they are from it."""
    assert callable(draw)
    mine, other = uniform(BASE, 0, NUMEL), draw(NUMEL)
    bound = 5 / NUMEL**0.5
    assert abs(correlation(mine, other)) < bound
    assert abs(correlation((mine < 0.5).float(), (other < 0.5).float())) < bound
    assert abs(correlation((mine - 0.5).abs(), (other - 0.5).abs())) < bound


def test_the_first_numbers_of_consecutive_operations_are_uniform() -> None:
    """A single value that is rounded once an operation sees this sequence."""
    drawn = torch.tensor([uniform(replace(BASE, op=op), 0, 1).item() for op in range(4096)])
    counts = torch.bincount((drawn * 16).to(torch.int64), minlength=16).double()
    chi_squared = ((counts - 256) ** 2 / 256).sum().item()
    assert chi_squared < 15 + 5 * 30**0.5
