"""The ring over shared memory: every hop quantizes the sum so far, and all ranks still end with the same bits."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_cgx
from tests.support.dying import reduce_until_one_dies
from tests.support.gradients import BITS, DTYPES, digest, is_exact, noise, within_bound
from tests.support.harness import Rank, describe, needs_native, observe_ranks, run_ranks

pytestmark = [pytest.mark.ranks, needs_native]

RING = {"CGX_INNER_REDUCTION_TYPE": "RING", "CGX_CROSS_REDUCTION_TYPE": "RING"}
LARGE = 1_000_003  # many slices
SOON_S = 30.0


def ring_sums(me: Rank, shared: bool, large: bool) -> list[str]:
    """All widths on one size; so few values that most chunks are empty; and slice after slice."""
    group: Any = dist.group.WORLD
    assert (group.carrier == "SHM") is shared
    cases = [(bits, DTYPES[bits % 3], bits % 2 == 0, 60_001) for bits in range(1, 9)]
    cases += [(bits, dtype, bits == 2, 17) for bits in (2, 4) for dtype in DTYPES]
    cases += [(bits, DTYPES[bits % 3], bits == 4, LARGE) for bits in (1, 4, 8) if large]
    digests: list[str] = []
    for bits, dtype, average, numel in cases:
        os.environ[BITS] = str(bits)
        x = noise(me.rank, numel, dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        if me.rank == len(digests) % me.world:
            within_bound(x, me.world, bits, average=average, quantizations=me.world)
        digests.append(digest(x))
    return digests


@pytest.mark.parametrize("world", [3, 4])
def test_all_ranks_hold_the_same_bits_within_the_bound_of_so_many_quantizations(world: int) -> None:
    first, *others = run_ranks(
        ring_sums, world, "cgx", True, True, env=RING, rank_env={1: {"CGX_SIMD": "scalar"}}, timeout_s=60.0
    )
    assert len(set(first)) == len(first) == 17
    assert all(other == first for other in others)


def test_a_ring_makes_other_bits_than_sra() -> None:
    by_ring, by_sra = (run_ranks(ring_sums, 3, "cgx", True, False, env=env)[0] for env in (RING, {}))
    assert all(ring != sra for ring, sra in zip(by_ring[:8], by_sra[:8], strict=True))


def exact_and_mixed(me: Rank) -> list[str]:
    results = []
    for dtype in (torch.float32, torch.float64):
        for numel in (1, 17, LARGE):
            x = noise(me.rank, numel, dtype)
            dist.all_reduce(x, dist.ReduceOp.AVG)
            assert is_exact(x * me.world, me.world), (dtype, numel)
            results.append(x)
    os.environ[BITS] = "4"
    dist.barrier()
    torch_cgx.register_layer(0, 0, 1000, 2, 64)
    torch_cgx.register_layer(0, 1, 3001, 8, 512)
    layered = noise(me.rank, 4001)
    pending = [dist.all_reduce(x, async_op=True) for x in (layered, noise(me.rank, 50_000))]
    for work in pending:
        assert work is not None
        work.wait()
    exact = torch.stack([noise(r, 4001).double() for r in range(me.world)]).sum(0)
    error = (layered - exact).abs()
    assert error[:1000].max() > 0.05 and error[1000:].max() < 0.15
    return [digest(x) for x in (*results, layered)]


def test_exact_sums_layers_and_barriers_go_round_too() -> None:
    first, *others = run_ranks(exact_and_mixed, 4, "cgx", env=RING)
    assert all(other == first for other in others)


def call_differently(me: Rank) -> None:
    dist.all_reduce(noise(me.rank, 100_000))
    me.mark()
    dist.all_reduce(noise(me.rank, 5000 if me.rank == 1 else 5001))


@pytest.mark.parametrize(
    ("function", "kind"), [(call_differently, "MismatchError"), (reduce_until_one_dies, "PeerLostError")]
)
def test_a_ring_that_breaks_raises_soon_on_all_ranks(function: Any, kind: str) -> None:
    outcomes = observe_ranks(function, 4, "cgx", env={**RING, BITS: "4"})
    for outcome in outcomes:
        if outcome.exit_code == -signal.SIGKILL and outcome.rank == 2:
            continue
        assert kind in outcome.error_kinds and not outcome.timed_out, describe(outcomes)
        assert outcome.after_mark_s is not None and outcome.after_mark_s < SOON_S
