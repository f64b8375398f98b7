"""Compressed all_reduces between real processes: the same bits on every rank, within the bound promised.

The kernels' numbers and the programs are tested without processes in tests/kernels and tests/plan; this needs several.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.error_bound import error_bound
from tests.support.families import only
from tests.support.gradients import BITS, DTYPES, digest, exact_sum, is_exact, noise, summed, within_bound
from tests.support.harness import Rank, run_ranks
from torch_cgx.config import QUANTIZER_VARIABLE

pytestmark = pytest.mark.ranks

SMALL_SIZES = (1, 15, 16, 17, 63, 511, 512, 513, 1000, 4097, 20_001)
LARGE_SIZES = (65_537, 1_000_003)


def all_reduces(me: Rank) -> list[str]:
    """Every width with every dtype and op on small tensors; on large ones each width with one of them."""
    cases: list[tuple[int, torch.dtype, bool, int]] = []
    for bits in range(1, 9):
        for index, (dtype, average) in enumerate((d, a) for d in DTYPES for a in (False, True)):
            # Each case takes every third size, shifted, so that over the widths all meet all.
            cases += [(bits, dtype, average, numel) for numel in SMALL_SIZES[(bits + index) % 3 :: 3]]
        cases.append((bits, DTYPES[bits % 3], bits % 2 == 0, LARGE_SIZES[0]))
    cases += [(bits, DTYPES[(bits + 1) % 3], bits % 2 == 1, LARGE_SIZES[1]) for bits in (1, 3, 4, 8)]
    digests: list[str] = []
    for bits, dtype, average, numel in cases:
        os.environ[BITS] = str(bits)
        x = noise(me.rank, numel, dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        # Where all ranks hold the same bits, one of them need check the values.
        if me.rank == len(digests) % me.world:
            if numel < 16:
                assert is_exact(x * me.world if average else x, me.world)
            else:
                within_bound(x, me.world, bits, average=average)
        digests.append(digest(x))
    return digests


@pytest.mark.parametrize("world", only([3], [2, 3, 4, 5]))
def test_all_ranks_hold_the_same_bits_within_the_bound(world: int) -> None:
    first, *others = run_ranks(
        all_reduces,
        world,
        "cgx",
        rank_env={1: {"CGX_SIMD": "scalar", "CGX_NUM_THREADS": "3"}},
        timeout_s=120.0,
        group_timeout_s=60.0,
    )
    assert len(first) > 100
    for other in others:
        assert other == first


def rotated_all_reduces(me: Rank) -> list[str]:
    """Check every width with every dtype and op against what one rotation loses of each contribution and of the sum."""
    os.environ[QUANTIZER_VARIABLE] = "rotated"
    digests: list[str] = []
    for bits, once in ((1, 0.571), (2, 0.1332), (3, 0.0358), (4, 0.0096)):
        os.environ[BITS] = str(bits)
        for index, (dtype, average) in enumerate((d, a) for d in DTYPES for a in (False, True)):
            for numel in (1025, 20_001, *([1_000_003] if index == bits else [])):
                x = noise(me.rank, numel, dtype)
                dist.all_reduce(x, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
                if me.rank == len(digests) % me.world:
                    exact = exact_sum(me.world, numel, dtype)
                    others = sum(noise(rank, numel, dtype).double().square().sum() for rank in range(me.world))
                    lost = (x.double() * (me.world if average else 1) - exact).square().sum()
                    assert lost < 1.3 * once * (others + (1 + once) * exact.square().sum()) + 1e-4 * others
                digests.append(digest(x))
    same = torch.full((5000,), 2.5)  # constant blocks are exact at every width
    dist.all_reduce(same)
    assert torch.equal(same, torch.full((5000,), 2.5 * me.world))
    return digests


@pytest.mark.parametrize("world", only([3], [2, 3, 4, 5]))
def test_all_ranks_hold_the_same_bits_of_rotated_sums(world: int) -> None:
    levels = {1: {"CGX_SIMD": "scalar", "CGX_NUM_THREADS": "3"}}
    first, *others = run_ranks(rotated_all_reduces, world, "cgx", rank_env=levels, timeout_s=120.0)
    assert len(set(first)) == len(first) > 50
    assert all(other == first for other in others)


def kinds_that_stay_exact(me: Rank) -> None:
    for numel in range(1, 16):
        x = noise(me.rank, numel)
        dist.all_reduce(x)
        assert is_exact(x, me.world), numel
    for dtype in (torch.int32, torch.int64, torch.uint8):
        y = torch.arange(5000).remainder(50).to(dtype) + me.rank
        dist.all_reduce(y)
        assert torch.equal(y, (torch.arange(5000).remainder(50) * 2 + 1).to(dtype))
    z = noise(me.rank, 5000, torch.float64)
    dist.all_reduce(z)
    assert is_exact(z, me.world)
    highest = noise(me.rank, 5000)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(highest, torch.maximum(noise(0, 5000), noise(1, 5000)))
    sent = noise(me.rank, 5000)
    dist.broadcast(sent, 1)
    assert torch.equal(sent, noise(1, 5000))
    gathered = torch.zeros(10_000)
    dist.all_gather_into_tensor(gathered, noise(me.rank, 5000))
    assert torch.equal(gathered, torch.cat([noise(0, 5000), noise(1, 5000)]))
    scattered = torch.zeros(2500)
    dist.reduce_scatter_tensor(scattered, noise(me.rank, 5000))
    expected = exact_sum(me.world, 5000)[me.rank * 2500 :][:2500]
    torch.testing.assert_close(scattered.double(), expected, rtol=0, atol=1e-5)


def test_what_is_not_a_large_sum_of_floats_stays_exact() -> None:
    run_ranks(kinds_that_stay_exact, 2, "cgx", env={BITS: "2"})


def not_finite(me: Rank) -> None:
    for dtype in DTYPES:
        for bad in (float("nan"), float("inf"), -float("inf")):
            x = noise(me.rank, 5000, dtype)
            if me.rank == 1:
                x[1030] = bad
            dist.all_reduce(x)
            assert x[1024:1536].isnan().all()
            assert x[:1024].isfinite().all() and x[1536:].isfinite().all()


def test_nan_and_infinity_spoil_their_block_on_all_ranks_and_nothing_else() -> None:
    run_ranks(not_finite, 3, "cgx", env={BITS: "4"})


def constant(me: Rank) -> None:
    x = torch.full((10_000,), 0.1) * (me.rank + 1)
    dist.all_reduce(x)
    both = torch.full((10_000,), 0.1) + torch.full((10_000,), 0.1) * 2
    assert torch.equal(x, both)


def test_constant_blocks_are_exact() -> None:
    run_ranks(constant, 2, "cgx", env={BITS: "1"})


def rounded_at_random(me: Rank) -> list[str]:
    mean = torch.zeros(2000, dtype=torch.float64)
    digests = []
    for _ in range(150):
        x = summed(me, 2000)
        within_bound(x, me.world, 4, rounding=1.0)
        mean += x / 150
        digests.append(digest(x))
    assert len(set(digests)) > 140  # each operation rolls its own dice
    expected, allowed = error_bound([noise(r, 2000) for r in range(me.world)], 4, 512, rounding=1.0)
    # One error has at most `allowed` as its standard deviation, the mean of 150 a twelfth of that.
    assert ((mean - expected).abs() / allowed).max().item() < 0.2
    assert ((mean - expected) / allowed).mean().abs().item() < 0.01
    return digests


def test_stochastic_rounding_is_unbiased_and_the_same_on_all_ranks() -> None:
    env = {BITS: "4", "CGX_COMPRESSION_STOCHASTIC": "1", "CGX_COMPRESSION_SEED": "11"}
    first, second = run_ranks(rounded_at_random, 2, "cgx", env=env)
    assert first == second


def all_at_once(me: Rank) -> list[str]:
    """Asynchronous, on several groups, coalesced and not contiguous."""
    groups = [None, dist.new_group()]
    pending = []
    for turn in range(20):
        x = noise(me.rank, (100, 3000, 50_000)[turn % 3])
        pending.append((dist.all_reduce(x, group=groups[turn % 2], async_op=True), x))
    for work, x in pending:
        assert work is not None
        work.wait()
        assert work.native_seconds() > 0
        within_bound(x, me.world, 4)
    tensors = [noise(me.rank, numel) for numel in (10, 100, 5000)]
    dist.all_reduce_coalesced(tensors)
    for x in tensors:
        torch.testing.assert_close(x.double(), exact_sum(me.world, x.numel()), rtol=0, atol=2.0)
    turned = noise(me.rank, 6000).reshape(60, 100).t()
    dist.all_reduce(turned)
    torch.testing.assert_close(turned.t().flatten().double(), exact_sum(me.world, 6000), rtol=0, atol=2.0)
    return [digest(x) for _, x in pending] + [digest(x) for x in (*tensors, turned)]


def test_asynchronous_and_coalesced_all_reduces_are_compressed_too() -> None:
    first, *others = run_ranks(all_at_once, 3, "cgx", env={BITS: "4"})
    assert all(other == first for other in others)


def trained(me: Rank) -> tuple[Tensor, float, float]:
    from torch.nn.parallel import DistributedDataParallel

    from tests.support.training import flat, loss_of, make_net, train

    net = DistributedDataParallel(make_net())
    before = sum(loss_of(net.module, step, me.rank).item() for step in range(30))
    train(net, me.rank, 30)
    after = sum(loss_of(net.module, step, me.rank).item() for step in range(30))
    return flat(net), before, after


def test_ddp_trains_on_compressed_gradients_and_ranks_stay_together() -> None:
    compressed = run_ranks(trained, 2, "cgx", env={BITS: "4"})
    exact = run_ranks(trained, 2, "cgx")
    assert torch.equal(compressed[0][0], compressed[1][0])
    assert not torch.equal(compressed[0][0], exact[0][0])
    gained, gained_exactly = (run[0][1] - run[0][2] for run in (compressed, exact))
    assert gained > 0.8 * gained_exactly > 0
