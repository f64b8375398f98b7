"""Groups whose ranks share no memory, or lack the native library: the same sums, over links and over Gloo.

Each rank gets a CGX_NODE_ID of its own here, which is all that a second host is to a group. The sums must be those of
shared memory to the bit, as long as a tensor fits into one slice there; larger ones are cut differently.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from tests.support.gradients import BITS, DTYPES, digest, is_exact, noise, within_bound
from tests.support.harness import Rank, apart, describe, needs_native, observe_ranks, run_ranks
from tests.support.training import flat, loss_of, make_net, train, train_alone

pytestmark = pytest.mark.ranks

SIZES = (16, 17, 513, 4097, 20_001)
LARGE = 100_003  # within one slice of shared memory on four ranks: beyond it, other ranks own the chunks
TRAINED_STEPS = 20


def uses_shared_memory() -> bool:
    group: Any = dist.group.WORLD
    return bool(group.carrier == "SHM")


def compressed_sums(me: Rank, shared: bool, check: bool = True) -> list[str]:
    assert uses_shared_memory() is shared
    cases = [
        (bits, dtype, average, numel)
        for bits in range(1, 9)
        for index, (dtype, average) in enumerate((d, a) for d in DTYPES for a in (False, True))
        for numel in SIZES[(bits + index) % 3 :: 3]
    ]
    cases += [(bits, DTYPES[bits % 3], bits % 2 == 0, LARGE) for bits in range(1, 9)]
    assert len(cases) > 80
    digests: list[str] = []
    for bits, dtype, average, numel in cases:
        os.environ[BITS] = str(bits)
        x = noise(me.rank, numel, dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        if check and me.rank == len(digests) % me.world:
            within_bound(x, me.world, bits, average=average)
        digests.append(f"{dtype} {digest(x)}")
    return digests


@needs_native
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gloo_gives_all_ranks_the_bits_of_shared_memory(world: int) -> None:
    first, *others = run_ranks(compressed_sums, world, "cgx", False, rank_env=apart(world))
    assert all(other == first for other in others)
    assert run_ranks(compressed_sums, world, "cgx", True, False)[0] == first


@needs_native
@pytest.mark.parametrize(
    ("world", "more"),
    [(2, {}), (3, {"CGX_STREAMS": "3"}), (4, {}), (4, {"CGX_CROSS_REDUCTION_TYPE": "RING"})],
    ids=["2 ranks", "3 ranks, 3 streams", "4 ranks", "a ring of 4"],
)
def test_links_give_all_ranks_the_bits_of_shared_memory(world: int, more: dict[str, str]) -> None:
    first, *others = run_ranks(compressed_sums, world, "cgx", False, env=more, rank_env=apart(world, "TCP"))
    assert all(other == first for other in others)
    is_ring = "CGX_CROSS_REDUCTION_TYPE" in more
    sharing = {"CGX_INNER_REDUCTION_TYPE": "RING" if is_ring else "SRA"}
    over_memory = run_ranks(compressed_sums, world, "cgx", True, False, env=sharing)[0]
    # A ring sums 16-bit values in float32 over links.
    compared = [each for each in zip(first, over_memory, strict=True) if not is_ring or "float32" in each[0]]
    assert len(compared) > 20 and all(ours == theirs for ours, theirs in compared)


def stochastic_sums(me: Rank, shared: bool) -> list[str]:
    assert uses_shared_memory() is shared
    digests = []
    for numel in (16, 513, 100_003, 100_003):
        x = noise(me.rank, numel)
        dist.all_reduce(x)
        within_bound(x, me.world, 4, rounding=1.0)
        digests.append(digest(x))
    return digests


@needs_native
def test_stochastic_rounding_rolls_the_same_dice_over_gloo() -> None:
    env = {BITS: "4", "CGX_COMPRESSION_STOCHASTIC": "1", "CGX_COMPRESSION_SEED": "11"}
    first, *others = run_ranks(stochastic_sums, 3, "cgx", False, env=env, rank_env=apart(3))
    assert first[2] != first[3]  # each operation rolls its own
    assert all(other == first for other in others)
    assert run_ranks(stochastic_sums, 3, "cgx", True, env=env)[0] == first


@needs_native
def test_stochastic_rounding_rolls_the_same_dice_over_links() -> None:
    env = {BITS: "4", "CGX_COMPRESSION_STOCHASTIC": "1", "CGX_COMPRESSION_SEED": "11"}
    digests = run_ranks(stochastic_sums, 3, "cgx", False, env=env, rank_env=apart(3, "TCP"))
    assert digests == run_ranks(stochastic_sums, 3, "cgx", True, env=env)


def in_slices(me: Rank) -> str:
    """A tensor that is larger than the fusion buffer, with a raw tail, beside one that is registered in layers."""
    torch_cgx.register_layer(0, 0, 1000, 2, 64)
    torch_cgx.register_layer(0, 1, 3001, 8, 512)
    layered = noise(me.rank, 4001)
    dist.all_reduce(layered)
    expected = sum(noise(r, 4001) for r in range(me.world))
    assert isinstance(expected, Tensor)
    error = (layered - expected).abs()
    assert error[:1000].max() > 0.05 and error[1000:].max() < 0.1
    x = noise(me.rank, 700_001)
    dist.all_reduce(x)
    within_bound(x, me.world, 8)
    return digest(torch.cat((layered, x)))


@pytest.mark.parametrize("cross", [None, "TCP"])
def test_large_tensors_go_in_slices_and_layers_by_themselves(cross: str | None) -> None:
    env = {BITS: "8", "CGX_FUSION_BUFFER_SIZE_MB": "1"}
    digests = run_ranks(in_slices, 3, "cgx", env=env, rank_env=apart(3, cross))
    assert len(set(digests)) == 1


def exact_sums(me: Rank) -> list[str]:
    assert not uses_shared_memory()
    digests = []
    for dtype in (*DTYPES, torch.float64):
        for numel in (1, 15, 1000, LARGE):
            for average in (False, True):
                x = noise(me.rank, numel, dtype)
                dist.all_reduce(x, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
                assert is_exact(x * me.world if average else x, me.world), (dtype, numel, average)
                digests.append(digest(x))
    for op, expected in ((dist.ReduceOp.MAX, me.world - 1), (dist.ReduceOp.SUM, sum(range(me.world)))):
        y = torch.full((100,), me.rank)
        dist.all_reduce(y, op)
        assert (y == expected).all()
    with torch_cgx.uncompressed():
        torch_cgx.set_default(bits=1)
        x = noise(me.rank, 5000)
        dist.all_reduce(x)
        assert is_exact(x, me.world)
    scattered = torch.zeros(100)
    dist.reduce_scatter_tensor(scattered, torch.full((100 * me.world,), 0.1))
    torch.testing.assert_close(scattered, torch.full((100,), 0.1 * me.world))
    dist.barrier()
    return digests


@pytest.mark.parametrize("world", [2, 3])
def test_exact_sums_and_averages_are_right(world: int) -> None:
    first, *others = run_ranks(exact_sums, world, "cgx", rank_env=apart(world))
    assert all(other == first for other in others)


def everything_in_flight(me: Rank) -> list[str]:
    """Asynchronous, on two groups, coalesced, transposed, as inference, by futures."""
    groups = [None, dist.new_group()]
    pending = []
    for turn in range(12):
        x = noise(me.rank, (100, 3000, 50_000)[turn % 3])
        pending.append((dist.all_reduce(x, group=groups[turn % 2], async_op=True), x))
    for work, x in reversed(pending):
        assert work is not None
        work.wait()
        assert work.is_completed() and work.is_success()
        within_bound(x, me.world, 4)
    results = [x for _, x in pending]
    tensors = [noise(me.rank, numel) for numel in (10, 100, 5000)]
    dist.all_reduce_coalesced(tensors)
    turned = noise(me.rank, 6000).view(60, 100).t()
    dist.all_reduce(turned)
    within_bound(turned.t().flatten(), me.world, 4)
    chained = noise(me.rank, 3000)
    work = dist.all_reduce(chained, async_op=True)
    assert work is not None
    assert torch.equal(work.get_future().then(lambda future: future.value()[0] * 2).wait(), chained * 2)
    return [digest(x) for x in (*results, *tensors, turned, chained)]


def test_asynchronous_and_coalesced_all_reduces_over_gloo() -> None:
    first, *others = run_ranks(everything_in_flight, 3, "cgx", env={BITS: "4"}, rank_env=apart(3))
    assert all(other == first for other in others)


def in_inference_mode(me: Rank) -> None:
    with torch.inference_mode():
        x = noise(me.rank, 5000)
        dist.all_reduce(x)
        within_bound(x, me.world, 4)
        y = noise(me.rank, 5000)
        with torch_cgx.uncompressed():
            dist.all_reduce(y, dist.ReduceOp.AVG)
        assert is_exact(y * me.world, me.world)


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=needs_native), 2])
def test_tensors_of_inference_mode_are_reduced(nodes: int) -> None:
    run_ranks(in_inference_mode, 2, "cgx", env={BITS: "4"}, rank_env=apart(2) if nodes == 2 else {})


def trained(me: Rank) -> tuple[Tensor, float, float]:
    assert not uses_shared_memory()
    net = DistributedDataParallel(make_net(), bucket_cap_mb=0.005)
    before = sum(loss_of(net.module, step, me.rank).item() for step in range(TRAINED_STEPS))
    train(net, me.rank, TRAINED_STEPS)
    after = sum(loss_of(net.module, step, me.rank).item() for step in range(TRAINED_STEPS))
    return flat(net), before, after


def test_ddp_trains_over_gloo_and_ranks_stay_together() -> None:
    (first, before, after), (second, _, _) = run_ranks(trained, 2, "cgx", env={BITS: "4"}, rank_env=apart(2))
    assert torch.equal(first, second)
    alone = train_alone(2, TRAINED_STEPS)
    exactly = sum(loss_of(alone, step, 0).item() for step in range(TRAINED_STEPS))
    assert not torch.equal(first, flat(alone))
    assert before - after > 0.8 * (before - exactly) > 0


def counted(me: Rank) -> dict[str, float]:
    x = noise(me.rank, LARGE)
    dist.all_reduce(x)
    dist.all_reduce(x)
    found = torch_cgx.stats()
    torch_cgx.reset_stats()
    assert torch_cgx.stats()["bytes_sent"] == 0 and torch_cgx.stats()["operations"] == 0
    dist.all_reduce(x)
    assert torch_cgx.stats()["operations"] == 1
    return found


def test_stats_count_what_gloo_carried() -> None:
    world = 3
    found = run_ranks(counted, world, "cgx", env={BITS: "4"}, rank_env=apart(world))
    for figures in found:
        assert figures["operations"] == figures["compressed_operations"] == 2
        assert figures["bytes_before"] == 2 * 4 * LARGE
        payload = torch_cgx.payload_nbytes(LARGE, torch.float32, 4, 512)
        assert figures["bytes_after"] == pytest.approx(2 * payload, rel=0.001)
        assert all(figures[f"{phase}_s"] > 0 for phase in ("encode", "wait", "reduce", "decode"))
    # Every rank's part of every foreign chunk, and every sum to every other rank.
    sent = sum(figures["bytes_sent"] for figures in found)
    assert sent == pytest.approx(2 * (world - 1) * found[0]["bytes_after"], rel=0.001)


def one_without_the_library(me: Rank, without: int) -> list[str]:
    from torch_cgx import _native

    if me.rank == without:
        load, _native._loaded = _native._load, []
        _native._load = lambda path: load(path.with_name("absent.so"))  # type: ignore[assignment]
        assert _native.library() is None
    me.start_group("cgx")
    return compressed_sums(me, shared=False, check=False)


@needs_native
def test_one_rank_without_the_native_library_has_the_same_bits_and_warns_once() -> None:
    outcomes = observe_ranks(one_without_the_library, 3, None, 1)
    assert all(outcome.ok for outcome in outcomes), describe(outcomes)
    first, *others = (outcome.value for outcome in outcomes)
    assert all(other == first for other in others)
    assert run_ranks(compressed_sums, 3, "cgx", True, False)[0] == first
    logs = [outcome.log for outcome in outcomes]
    assert [log.count("torch_cgx has no native library") for log in logs] == [0, 1, 0], logs
    assert [log.count("torch_cgx has no native engine on rank 1, so") for log in logs] == [1, 0, 0], logs
    assert logs[0].count("\n") <= 1 and logs[2].strip() == ""


def averages_of_large_halves(me: Rank) -> None:
    """Each contribution is near the end of float16, so that any sum on the way would be beyond it."""
    for numel in (1000, 200_003):
        x = torch.linspace(30_000, 50_000, numel).half()
        expected = x.float()
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert ((x.float() - expected).abs() <= 200).all()
        with torch_cgx.uncompressed():
            y = torch.full((numel,), 40_000.0, dtype=torch.float16)
            dist.all_reduce(y, dist.ReduceOp.AVG)
            assert (y == 40_000.0).all()


@pytest.mark.parametrize("algorithm", ["SRA", "RING"])
@pytest.mark.parametrize("nodes", ["abcd", "aabb"])
def test_averages_of_float16_do_not_overflow_on_the_way(nodes: str, algorithm: str) -> None:
    env = {BITS: "8", "CGX_CROSS_REDUCTION_TYPE": algorithm}
    rank_env = {rank: {"CGX_NODE_ID": node} for rank, node in enumerate(nodes)}
    run_ranks(averages_of_large_halves, len(nodes), "cgx", env=env, rank_env=rank_env)
