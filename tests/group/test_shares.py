"""Compressed reduce-scatters and all-gathers between real processes: the bits of the in-memory executor, on every way.

Kernels and programs are tested without processes in tests/kernels/test_sums.py, forms of calls in test_share_calls.py,
MPI in test_transports.py; here is what is left that needs several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_cgx
from tests.support.families import only
from tests.support.gradients import BITS, digest, exact_sum, noise, within_bound
from tests.support.harness import OVER_GLOO, Rank, describe, observe_ranks, run_ranks
from tests.support.in_shares import (
    LAYERS,
    NUMEL,
    OPS,
    expected_gather,
    expected_scatter,
    gathered_shares,
    one_layer,
    quarter,
    same,
    sum_of_shares,
    sweep,
)
from torch_cgx.cli.hosts import Hosts
from torch_cgx.codecs import RAW, MaxMin
from torch_cgx.config import Compression
from torch_cgx.engines.recorder import process_recorder
from torch_cgx.group.compression import Override
from torch_cgx.kernels import Rounding
from torch_cgx.plan.layout import Layer, make_shares_layout

pytestmark = pytest.mark.ranks

INNER = "CGX_INNER_COMMUNICATOR_TYPE"
WAYS = {"shared memory": {INNER: "SHM"}, "Gloo": OVER_GLOO, "TCP": {INNER: "TCP"}}
EXACT = 32
ODD_MEANS = {1: {"CGX_SIMD": "scalar", "CGX_NUM_THREADS": "2"}}  # of one rank, which must not matter

each_way = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.matrix if way == "Gloo" else ()) for way in WAYS]
)


def sweep_of(me: Rank) -> list[str]:
    return sweep(me.rank, me.world)


@each_way
@pytest.mark.parametrize("world", only([3], [2, 3, 4]))
def test_the_bits_are_those_of_the_in_memory_executor(world: int, way: str) -> None:
    first, *others = run_ranks(sweep_of, world, "cgx", env=WAYS[way], rank_env=ODD_MEANS)
    assert len(set(first)) == len(first) == 24
    assert all(other == first for other in others)


def test_on_two_nodes_of_two_ranks_the_bits_are_the_same(make_hosts: Callable[..., Hosts]) -> None:
    """Shares go from rank to rank, whatever nodes these are on."""
    hosts = make_hosts(2)
    first, *others = run_ranks(sweep_of, 4, "cgx", nodes=[hosts.nodes[node] for node in (0, 0, 1, 1)])
    assert all(other == first for other in others)


# ---- what is compressed, and what not ----


def exact_ones(me: Rank) -> None:
    """Within a block that compresses, what cannot be; and outside of it, everything."""
    group: Any = dist.group.WORLD

    def check(x: Tensor, numel: int) -> None:
        share = torch.zeros(numel, dtype=x.dtype)
        dist.reduce_scatter_tensor(share, x)
        total = torch.stack([each.double() for each in gathered_objects(x)]).sum(0)
        torch.testing.assert_close(share.double(), total.view(me.world, -1)[me.rank], rtol=0, atol=1e-5)
        whole = torch.zeros(me.world * x.numel(), dtype=x.dtype)
        dist.all_gather_into_tensor(whole, x)
        same(whole, torch.cat(gathered_objects(x)))
        lists = [torch.zeros_like(x) for _ in range(me.world)]
        dist.all_gather(lists, x)
        same(torch.cat(lists), whole)
        dist.reduce_scatter(share, list(x.view(me.world, -1).unbind()))
        torch.testing.assert_close(share.double(), total.view(me.world, -1)[me.rank], rtol=0, atol=1e-5)

    def gathered_objects(x: Tensor) -> list[Tensor]:
        found: list[Any] = [None] * me.world
        dist.all_gather_object(found, x)
        return found

    with torch_cgx.compressed(1):
        check(noise(me.rank, me.world * 100, torch.float64), 100)
        check((noise(me.rank, me.world * 100) * 100).to(torch.int32), 100)
        check(torch.empty(0), 0)
        share, whole = torch.zeros(15), torch.zeros(15 * me.world)
        x = noise(me.rank, 15 * me.world)
        dist.reduce_scatter_tensor(share, x)
        expected = exact_sum(me.world, 15 * me.world).view(me.world, -1)[me.rank]
        torch.testing.assert_close(share.double(), expected, rtol=0, atol=1e-5)
        dist.all_gather_into_tensor(whole, x[:15])
        same(whole, torch.cat([noise(rank, 15 * me.world)[:15] for rank in range(me.world)]))
        highest = torch.zeros(100)
        dist.reduce_scatter_tensor(highest, noise(me.rank, me.world * 100), op=dist.ReduceOp.MAX)
        best = torch.stack([noise(rank, me.world * 100) for rank in range(me.world)]).amax(0)
        same(highest, best.view(me.world, -1)[me.rank])
        with torch_cgx.uncompressed():
            check(noise(me.rank, me.world * 100), 100)
        assert torch_cgx.stats()["compressed_operations"] == 0
    torch_cgx.set_default(bits=1)
    check(noise(me.rank, me.world * 100), 100)
    torch_cgx.set_default()
    assert torch_cgx.stats()["compressed_operations"] == 0
    with torch_cgx.uncompressed(), torch_cgx.compressed(4):
        share = torch.zeros(100)
        dist.reduce_scatter_tensor(share, noise(me.rank, me.world * 100))
        same(share, expected_scatter(me, 100, 4))
        reduced = noise(me.rank, 100)
        dist.all_reduce(reduced)
    assert torch_cgx.stats()["compressed_operations"] == 2
    assert not torch.equal(reduced.double(), exact_sum(me.world, 100))
    assert group is not None


@each_way
def test_what_is_small_or_no_float_or_not_asked_for_is_exact(way: str) -> None:
    run_ranks(exact_ones, 2, "cgx", env={**WAYS[way], BITS: "1"})


def counted(me: Rank) -> tuple[dict[str, float], list[tuple[Any, ...]]]:
    """The figures, and what the flight recorder has of each."""
    torch_cgx.reset_stats()
    with torch_cgx.compressed(4):
        dist.reduce_scatter_tensor(torch.zeros(1000), noise(me.rank, me.world * 1000))
        dist.all_gather_into_tensor(torch.zeros(me.world * 700), noise(me.rank, 700))
    told = ("operation", "reduction", "bits", "state", "nbytes", "payload_nbytes", "sent_nbytes")
    recorded = process_recorder().as_dict("for a test")["operations"]
    return torch_cgx.stats(), [tuple(each[name] for name in told) for each in recorded[-2:]]


@each_way
def test_stats_and_the_flight_recorder_say_what_was_sent(way: str) -> None:
    world = 3
    scattered, gathered = (MaxMin(4, 512).payload_nbytes(numel, 4) for numel in (1000, 700))
    for counts, recorded in run_ranks(counted, world, "cgx", env=WAYS[way]):
        assert counts["operations"] == counts["compressed_operations"] == 2
        assert counts["bytes_before"] == world * (1000 + 700) * 4
        assert counts["bytes_after"] == world * (scattered + gathered)
        assert counts["bytes_sent"] == (world - 1) * (scattered + gathered)
        assert recorded == [
            ("reduce_scatter_tensor", "SUM", 4, "done", world * 4000, world * scattered, (world - 1) * scattered),
            ("all_gather_into_tensor", None, 4, "done", world * 2800, world * gathered, (world - 1) * gathered),
        ]


def alone(me: Rank) -> None:
    x = noise(0, 100)
    with torch_cgx.compressed(1):
        for name, (op, scale) in OPS.items():
            share = torch.zeros(10, 10).t()
            dist.reduce_scatter_tensor(share, x, op=op())
            assert torch.equal(share.reshape(-1), x * scale(1)), name
        whole = torch.zeros(200)[::2]
        dist.all_gather_into_tensor(whole, x)
        assert torch.equal(whole, x)
        kept = x.clone()
        dist.reduce_scatter_tensor(kept, kept, op=quarter())
        assert torch.equal(kept, x / 4)
        outputs = [torch.zeros(100)]
        dist.all_gather(outputs, x)
        assert torch.equal(outputs[0], x)
    assert torch_cgx.stats()["operations"] == torch_cgx.stats()["bytes_sent"] == 0


def test_alone_a_rank_has_its_own_values_times_the_factor() -> None:
    run_ranks(alone, 1, "cgx")


def incomplete_raw(me: Rank) -> None:
    layers = (Layer(600, MaxMin(2, 512, skip_incomplete=True)),)
    parts = [noise(rank, 600) for rank in range(me.world)]
    whole, share = torch.zeros(me.world, 600), torch.zeros(600)
    with torch_cgx.compressed(2):
        dist.all_gather_into_tensor(whole, parts[me.rank])
        dist.reduce_scatter_tensor(share, noise(me.rank, me.world * 600))
    same(whole, gathered_shares(parts, layers))
    same(whole[:, 512:], torch.stack(parts)[:, 512:])
    same(share, sum_of_shares([noise(rank, me.world * 600) for rank in range(me.world)], me.rank, layers, 1.0))


def test_an_incomplete_last_block_of_a_share_travels_raw_where_that_is_asked_for() -> None:
    run_ranks(incomplete_raw, 2, "cgx", env={"CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS": "1"})


def a_group_s_own(me: Rank) -> None:
    """What one group was told to do holds for its all_reduces alone, and within a block that says otherwise not."""
    told: Any = dist.new_group()
    told.override_compression(Override(Compression(2, 64)))

    def compressed_operations(group: Any, bits: int | None = None) -> float:
        x = noise(me.rank, 1000)
        torch_cgx.reset_stats(group)
        dist.all_reduce(x, group=group)
        if bits is not None:
            within_bound(x, me.world, bits, 64)
        return torch_cgx.stats(group)["compressed_operations"]

    assert compressed_operations(told, 2) == 1 and compressed_operations(None) == 0
    with torch_cgx.compressed(8):
        assert compressed_operations(told, 2) == 1 and compressed_operations(None) == 1
    with torch_cgx.uncompressed():
        assert compressed_operations(told) == 0
    dist.reduce_scatter_tensor(torch.zeros(500), noise(me.rank, me.world * 500), group=told)
    dist.all_gather_into_tensor(torch.zeros(me.world * 500), noise(me.rank, 500), group=told)
    assert torch_cgx.stats(told)["compressed_operations"] == 0
    told.override_compression(None)
    assert compressed_operations(told) == 0


def test_a_group_may_be_told_to_compress_its_all_reduces_and_nothing_else() -> None:
    run_ranks(a_group_s_own, 2, "cgx")


# ---- random rounding, slices, groups ----


def rounded_at_random(me: Rank) -> list[str]:
    layers, found = one_layer(500, 3), []
    with torch_cgx.compressed(3):
        for _ in range(4):
            whole = torch.zeros(me.world * 500)
            dist.all_gather_into_tensor(whole, noise(me.rank, 500))
            found.append(digest(whole))
    scattered = set()
    with torch_cgx.compressed(3):
        for _ in range(4):
            share = torch.zeros(500)
            dist.reduce_scatter_tensor(share, noise(me.rank, me.world * 500))
            scattered.add(digest(share))
    assert len(scattered) == 4 and len(set(found)) == 4
    possible = {
        digest(gathered_shares([noise(rank, 500) for rank in range(me.world)], layers, Rounding(True, 11, op)))
        for op in range(12)
    }
    assert possible.issuperset(found)
    return found


@each_way
def test_stochastic_rounding_draws_anew_at_each_call_and_all_ranks_gather_the_same(way: str) -> None:
    env = {**WAYS[way], "CGX_COMPRESSION_STOCHASTIC": "1", "CGX_COMPRESSION_SEED": "11"}
    first, *others = run_ranks(rounded_at_random, 3, "cgx", env=env)
    assert all(other == first for other in others)


def in_several_slices(me: Rank) -> None:
    numel = 400_003  # 1.6 MB a share
    assert len(make_shares_layout(one_layer(numel, 4), me.world, 4, 1 << 20).slices) >= 4
    share, whole = torch.zeros(numel), torch.zeros(me.world * numel)
    with torch_cgx.compressed(4):
        dist.reduce_scatter_tensor(share, noise(me.rank, me.world * numel), op=dist.ReduceOp.AVG)
        dist.all_gather_into_tensor(whole, noise(me.rank, numel))
    same(share, expected_scatter(me, numel, 4, scale=1 / me.world))
    same(whole, expected_gather(me, numel, 4))


@each_way
def test_several_slices_have_the_bits_of_the_in_memory_executor(way: str) -> None:
    run_ranks(in_several_slices, 2, "cgx", env={**WAYS[way], "CGX_FUSION_BUFFER_SIZE_MB": "1"})


def two_groups(me: Rank) -> None:
    """At once, one of them without rank 1: in each the ranks are counted anew."""
    members = [0, 2]
    pair: Any = dist.new_group(members)
    pending: list[tuple[Any, Tensor, Tensor]] = []
    with torch_cgx.compressed(4):
        for _ in range(3):
            share = torch.zeros(100)
            work = dist.reduce_scatter_tensor(share, noise(me.rank, me.world * 100), async_op=True)
            pending.append((work, share, expected_scatter(me, 100, 4)))
            if me.rank in members:
                place, share = members.index(me.rank), torch.zeros(80)
                work = dist.reduce_scatter_tensor(share, noise(me.rank, 160), group=pair, async_op=True)
                inputs = [noise(rank, 160) for rank in members]
                pending.append((work, share, sum_of_shares(inputs, place, one_layer(80, 4), 1.0)))
                whole = torch.zeros(160)
                work = dist.all_gather_into_tensor(whole, noise(me.rank, 80), group=pair, async_op=True)
                expected = gathered_shares([noise(rank, 80) for rank in members], one_layer(80, 4))
                pending.append((work, whole, expected))
    for work, got, expected in pending:
        work.wait()
        same(got, expected)


@each_way
def test_two_groups_at_once_do_not_mix_their_shares(way: str) -> None:
    run_ranks(two_groups, 3, "cgx", env=WAYS[way])


# ---- layers of one's own ----


def own_layers(me: Rank) -> list[str]:
    group: Any = dist.group.WORLD
    inputs = [noise(rank, me.world * NUMEL, torch.bfloat16) for rank in range(me.world)]
    parts = [noise(rank, NUMEL, torch.bfloat16) for rank in range(me.world)]
    found = []
    for name, (op, scale) in OPS.items():
        share = torch.zeros(NUMEL, dtype=torch.bfloat16)
        asynchronous = name != "AVG"
        group.reduce_scatter_layers(share, inputs[me.rank], LAYERS, op=op(), asynchronous=asynchronous).wait()
        same(share, sum_of_shares(inputs, me.rank, LAYERS, scale(me.world)))
        whole = torch.zeros(me.world * NUMEL, dtype=torch.bfloat16)
        group.all_gather_layers(whole, parts[me.rank], LAYERS, asynchronous=asynchronous).wait()
        same(whole, gathered_shares(parts, LAYERS))
        same(whole.view(me.world, -1)[:, 300:340], torch.stack(parts)[:, 300:340])  # what travels raw
    for _ in range(2):
        group.all_gather_layers(whole, parts[me.rank], LAYERS, stochastic=True).wait()
        found.append(digest(whole))
        assert found.count(found[-1]) == 1 and digest(gathered_shares(parts, LAYERS)) != found[-1]
    # Exact layers are exact, with any factor, and what cannot be compressed is, too.
    exact = (Layer(NUMEL, RAW),)
    for dtype in (torch.float32, torch.float64):
        share = torch.zeros(NUMEL, dtype=dtype)
        x = noise(me.rank, me.world * NUMEL, dtype)
        group.reduce_scatter_layers(share, x, exact if dtype == torch.float32 else LAYERS).wait()
        expected = exact_sum(me.world, me.world * NUMEL, dtype).view(me.world, -1)[me.rank]
        torch.testing.assert_close(share.double(), expected, rtol=0, atol=1e-5)
        whole = torch.zeros(me.world * NUMEL, dtype=dtype)
        group.all_gather_layers(whole, x[:NUMEL], exact if dtype == torch.float32 else LAYERS).wait()
        same(whole, torch.cat([noise(rank, me.world * NUMEL, dtype)[:NUMEL] for rank in range(me.world)]))
    share = torch.zeros(NUMEL)
    group.reduce_scatter_layers(share, noise(me.rank, me.world * NUMEL), exact, op=quarter()).wait()
    expected = exact_sum(me.world, me.world * NUMEL).view(me.world, -1)[me.rank] / 4
    torch.testing.assert_close(share.double(), expected, rtol=0, atol=1e-5)
    return found


@each_way
def test_layers_of_one_s_own_are_compressed_each_its_way(way: str) -> None:
    first, *others = run_ranks(own_layers, 3, "cgx", env=WAYS[way])
    assert all(other == first for other in others)


def refused(me: Rank) -> None:
    group: Any = dist.group.WORLD
    few = LAYERS[:2]
    with pytest.raises(ValueError, match=f"expected layers of {NUMEL} values, as many as a share has, got 340"):
        group.reduce_scatter_layers(torch.zeros(NUMEL), torch.zeros(me.world * NUMEL), few)
    with pytest.raises(ValueError, match="all_gather_into_tensor: expected layers of 463 values"):
        group.all_gather_layers(torch.zeros(me.world * NUMEL), torch.zeros(NUMEL), few)
    with torch_cgx.compressed(4):
        for share, whole in (
            (torch.zeros(100), torch.zeros(me.world * 100 + 1)),
            (torch.zeros(100), torch.zeros(me.world * 100, dtype=torch.float16)),
            (torch.zeros(100, dtype=torch.bfloat16), torch.zeros(me.world * 100)),
        ):
            with pytest.raises((ValueError, RuntimeError), match=r"expected|invalid"):
                group._reduce_scatter_base(share, whole)
            with pytest.raises((ValueError, RuntimeError), match=r"expected|invalid"):
                group._allgather_base(whole, share)
        lapping = torch.zeros(me.world).expand(100, me.world).t()
        with pytest.raises(ValueError, match="whose values do not overlap"):
            group._reduce_scatter_base(torch.zeros(1).expand(100), torch.zeros(me.world * 100))
        with pytest.raises(ValueError, match="whose values do not overlap"):
            group._allgather_base(lapping, torch.zeros(100))
    share = torch.zeros(100)
    with torch_cgx.compressed(4):  # and the group is as good as before
        dist.reduce_scatter_tensor(share, noise(me.rank, me.world * 100))
    same(share, expected_scatter(me, 100, 4))


def test_shares_and_layers_that_do_not_fit_are_refused_before_anybody_waits() -> None:
    run_ranks(refused, 2, "cgx")


# ---- ranks that do not agree ----


def ask_for_other(me: Rank, what: str) -> None:
    other = me.rank == 1
    share, whole = torch.zeros(100), torch.zeros(me.world * 100)
    if what == "nothing":
        with torch_cgx.compressed(EXACT if other else 4):
            dist.all_gather_into_tensor(whole, share)
    elif what == "all-gathered bits":
        with torch_cgx.compressed(8 if other else 4):
            dist.all_gather_into_tensor(whole, share)
    elif what == "a factor":
        with torch_cgx.compressed(4):
            dist.reduce_scatter_tensor(share, whole, op=dist._make_nccl_premul_sum(0.5) if other else quarter())  # type: ignore[attr-defined]
    else:
        block = 64 if other and what == "bucket size" else 512
        with torch_cgx.compressed(8 if other and what == "bits" else 4, block):
            dist.reduce_scatter_tensor(share, whole)


@pytest.mark.parametrize(
    ("what", "way"),
    [
        *((what, way) for what in ("nothing", "bits", "a factor") for way in WAYS),
        ("bucket size", "shared memory"),
        ("all-gathered bits", "Gloo"),
    ],
)
def test_ranks_that_ask_for_different_compression_are_told_so(what: str, way: str) -> None:
    outcomes = observe_ranks(ask_for_other, 2, "cgx", what, env=WAYS[way], group_timeout_s=30.0, destroy=False)
    for outcome_of_rank in outcomes:
        assert "MismatchError" in outcome_of_rank.error_kinds, describe(outcomes)


def profiled(me: Rank) -> list[str]:
    with torch.profiler.profile() as profile, torch_cgx.compressed(4):
        dist.reduce_scatter_tensor(torch.zeros(100), noise(me.rank, me.world * 100))
        dist.all_gather_into_tensor(torch.zeros(me.world * 100), noise(me.rank, 100))
    return [event.key for event in profile.key_averages()]


def test_a_profile_names_them_and_their_bits() -> None:
    for names in run_ranks(profiled, 2, "cgx"):
        assert {"cgx::reduce_scatter_tensor 4 bits", "cgx::all_gather_into_tensor 4 bits"} <= set(names)
