"""Exact operations where gloo is no standard: refusals, tensors with gaps, the same bits on all ranks, who carries."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.support.harness import Rank, apart, needs_native, run_ranks

pytestmark = pytest.mark.ranks

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ON_NODES = {rank: {"CGX_NODE_ID": f"host-{rank // 2}"} for rank in range(3)}


def refuses_and_goes_on(me: Rank) -> None:
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(20), dist.ReduceOp.BAND)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(20), dist._make_nccl_premul_sum(2.0))
    with pytest.raises((ValueError, RuntimeError)):
        dist.broadcast(torch.ones(20), src=me.world + 3)
    x = torch.ones(20)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((20,), float(me.world)))


def wrong_outputs(me: Rank) -> None:
    shares = [torch.ones(4) for _ in range(me.world)]
    with pytest.raises(ValueError, match=r"expected an output of 4 values of torch\.float32 on cpu, got 8"):
        dist.reduce_scatter(torch.zeros(8), shares)
    with pytest.raises(ValueError, match="float64"):
        dist.reduce_scatter(torch.zeros(4, dtype=torch.float64), shares)
    with pytest.raises(ValueError, match="2 times the output's 3 values, got 8"):
        dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(8))
    dist.all_reduce(torch.ones(4))


def test_a_reduce_scatter_into_the_wrong_output_is_refused_and_the_group_goes_on() -> None:
    run_ranks(wrong_outputs, 2, "cgx")


def test_what_gloo_refuses_raises_and_the_group_goes_on(backend: str) -> None:
    run_ranks(refuses_and_goes_on, 2, backend)


def reduces_a_tensor_with_gaps(me: Rank) -> None:
    whole = torch.full((10, 40), 1.0 + me.rank)
    try:
        dist.all_reduce(whole[:, ::2])
    except (ValueError, RuntimeError):
        return
    assert torch.equal(whole[:, ::2], torch.full((10, 20), 3.0))
    assert torch.equal(whole[:, 1::2], torch.full((10, 20), 1.0 + me.rank))


def test_a_tensor_with_gaps_is_reduced_right_or_refused() -> None:
    # Gloo is no standard here: it reduces the first 200 values in memory, gaps or not.
    run_ranks(reduces_a_tensor_with_gaps, 2, "cgx")


def agrees_with_gloo(me: Rank) -> list[bytes]:
    gloo = dist.new_group(backend="gloo")
    generator = torch.Generator().manual_seed(me.rank)
    bits: list[bytes] = []
    for dtype in FLOATS:
        for numel in (1, 15, 16, 1000, 65_537, 300_000):
            ours = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
            theirs = ours.clone()
            dist.all_reduce(ours)
            dist.all_reduce(theirs, group=gloo)
            # Both round, in an order of their own: by at most half an ulp of a partial sum at each addition.
            atol = 8.0 * me.world * torch.finfo(dtype).eps
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=0.0, atol=atol)
            bits.append(ours.view(torch.uint8).numpy().tobytes())
    return bits


@pytest.mark.parametrize("world", [2, 4])
def test_exact_sums_agree_with_gloo_and_are_the_same_bits_on_all_ranks(world: int) -> None:
    first, *others = run_ranks(agrees_with_gloo, world, "cgx")
    assert all(other == first for other in others)


def odd_values(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Return values that a careless copy would change: NaNs with a payload, infinities, subnormals, minus zero."""
    generator = torch.Generator().manual_seed(rank)
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    bits = torch.randint(-(2**15), 2**15, (numel,), generator=generator) * (2 ** (8 * dtype.itemsize - 16) - 1)
    return bits.to(integers).view(dtype)


def exact_shares(me: Rank) -> None:
    gloo = dist.new_group(backend="gloo")
    group: Any = dist.group.WORLD
    for dtype in FLOATS:
        for numel in (1, 7, 16, 1001, 120_000):
            before = group.stats()["operations"]
            gathered = torch.empty(me.world * numel, dtype=dtype)
            dist.all_gather_into_tensor(gathered, odd_values(numel, dtype, me.rank))
            expected = torch.cat([odd_values(numel, dtype, rank) for rank in range(me.world)])
            assert torch.equal(gathered.view(torch.uint8), expected.view(torch.uint8)), (dtype, numel)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                parts = torch.randn(me.world * numel, generator=torch.Generator().manual_seed(me.rank)).to(dtype)
                kept = parts.clone()
                ours, theirs = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
                dist.reduce_scatter_tensor(ours, parts, op)
                dist.reduce_scatter_tensor(theirs, parts, group=gloo)
                share = 1 / me.world if op == dist.ReduceOp.AVG else 1.0
                atol = 8.0 * me.world * torch.finfo(dtype).eps
                torch.testing.assert_close(ours.double(), theirs.double() * share, rtol=0.0, atol=atol)
                assert torch.equal(parts, kept)  # an input is only read
            assert group.stats()["operations"] == before + 2  # the engine's own, not Gloo's; a gather is not counted


@needs_native
@pytest.mark.parametrize("rank_env", [{}, apart(3, "TCP"), ON_NODES], ids=["shared memory", "links", "nodes of two"])
def test_exact_shares_are_the_engines_and_right_to_the_bit(rank_env: dict[int, dict[str, str]]) -> None:
    run_ranks(exact_shares, 3, "cgx", rank_env=rank_env)


def odd_tensors(me: Rank) -> None:
    """Reduce what a functional collective returned, and scatter into memory that the input has, too."""
    gathered = funcol.all_gather_tensor(torch.full((10,), 1.0 + me.rank), 0, dist.group.WORLD)
    assert type(gathered) is not torch.Tensor  # it is still to be waited for
    share = torch.empty(10)
    dist.reduce_scatter_tensor(share, gathered)
    assert torch.equal(share, torch.full((10,), me.world * (1.0 + me.rank)))
    gathered = funcol.all_gather_tensor(torch.full((10,), 1.0 + me.rank), 0, dist.group.WORLD)
    dist.all_reduce(gathered)
    assert torch.equal(gathered[:10] + 0, torch.full((10,), float(me.world)))
    memory = numpy.arange(float(10 * me.world), dtype=numpy.float32)
    whole, overlapping = torch.from_numpy(memory), torch.from_numpy(memory[5:15])
    expected = me.world * whole.view(me.world, -1)[me.rank]
    dist.reduce_scatter_tensor(overlapping, whole)
    assert torch.equal(overlapping, expected)


def test_results_of_functional_collectives_and_views_of_numpy_are_taken() -> None:
    run_ranks(odd_tensors, 2, "cgx")


def gathers_into_a_stack(me: Rank) -> None:
    for dtype in (torch.float32, torch.int64):
        with pytest.raises(RuntimeError, match="invalid tensor size"):
            dist.all_gather_into_tensor(torch.empty(me.world, 4, dtype=dtype), torch.ones(4, dtype=dtype))
    gathered = torch.empty(4 * me.world)
    dist.all_gather_into_tensor(gathered, torch.full((4,), float(me.rank)))
    assert gathered.view(me.world, 4)[:, 0].tolist() == list(map(float, range(me.world)))


def test_a_gather_into_a_stack_is_refused_as_by_gloo_and_the_group_stays_usable(backend: str) -> None:
    run_ranks(gathers_into_a_stack, 2, backend)
