"""Broadcasts, all-gathers and exchanges of all types: the engine's own, right to the bit, never of the wrong root."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import Rank, apart, needs_native, observe_ranks, run_ranks
from torch_cgx.engines.recorder import process_recorder

pytestmark = pytest.mark.ranks

TYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64),
)
SIZES = (1, 3, 1001, 70_003)  # bytes of odd numbers among them
PLACES: dict[str, dict[int, dict[str, str]]] = {
    "shared memory": {},
    "links": apart(3, "TCP"),
    "nodes of two": {rank: {"CGX_NODE_ID": f"host-{rank // 2}"} for rank in range(3)},
}


def values_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return any bits that the type has: NaNs with a payload, say, which a copy must not change."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype is torch.bool:
        return torch.rand(numel, generator=generator) < 0.5
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def moves_everything(me: Rank) -> None:
    group: Any = dist.group.WORLD
    for dtype in TYPES:
        for numel in SIZES:
            all_values = [values_of(rank, numel, dtype) for rank in range(me.world)]
            before = group.stats()
            for root in range(me.world):
                tensor = all_values[me.rank].clone()
                dist.broadcast(tensor, root)
                assert same_bits(tensor, all_values[root]), (dtype, numel, root)
            gathered = torch.empty(me.world * numel, dtype=dtype)
            dist.all_gather_into_tensor(gathered, all_values[me.rank])
            assert same_bits(gathered, torch.cat(all_values)), (dtype, numel)
            gathered_apart = [torch.empty(numel, dtype=dtype) for _ in range(me.world)]
            dist.all_gather(gathered_apart, all_values[me.rank])
            assert all(map(same_bits, gathered_apart, all_values)), (dtype, numel)
            whole = [values_of(rank, me.world * numel, dtype).view(me.world, numel) for rank in range(me.world)]
            exchanged = torch.empty(me.world, numel, dtype=dtype)
            dist.all_to_all_single(exchanged, whole[me.rank])
            assert same_bits(exchanged, torch.stack([each[me.rank] for each in whole])), (dtype, numel)
            recorded = process_recorder().as_dict("a test")["operations"][-(me.world + 3) :]
            assert {entry["carrier"] for entry in recorded} == {group.carrier}  # not Gloo
            counts = ("operations", "bytes_before", "bytes_after", "bytes_sent")
            assert all(group.stats()[name] == before[name] for name in counts)  # these are of compression


@needs_native
@pytest.mark.parametrize("rank_env", PLACES.values(), ids=PLACES)
def test_values_of_all_types_are_moved_by_the_engine_right_to_the_bit(rank_env: dict[int, dict[str, str]]) -> None:
    run_ranks(moves_everything, 3, "cgx", rank_env=rank_env)


def odd_tensors(me: Rank) -> None:
    transposed = torch.full((3, 5), float(me.rank)).t()
    dist.broadcast(transposed, 1)
    assert torch.equal(transposed, torch.ones(5, 3))
    empty = torch.empty(0)
    dist.broadcast(empty, 0)
    dist.all_to_all_single(empty, torch.empty(0))
    # Parts of different sizes, of which one rank's are equal: Gloo's.
    sizes = [[2, 2], [2, 5]][me.rank]
    output = torch.empty(sum(sizes))
    dist.all_to_all_single(output, torch.full((sum(sizes),), float(me.rank)), sizes, sizes)
    assert output.tolist() == [0.0] * 2 + [1.0] * sizes[1]
    works = [dist.broadcast(torch.ones(7), root % 2, async_op=True) for root in range(20)]
    assert all(work is not None and work.wait() for work in works)


def test_odd_tensors_are_moved_right_or_refused(backend: str) -> None:
    run_ranks(odd_tensors, 2, backend)


def overlapping_tensors(me: Rank) -> None:
    """Exchange in place, and into an output that begins within the input: Gloo is no standard here."""
    start = torch.arange(12.0)
    expected = torch.cat([start[4 * me.rank : 4 * me.rank + 4] + 100 * rank for rank in range(2)])
    memory = start + 100 * me.rank
    dist.all_to_all_single(memory[:8], memory[:8])
    assert torch.equal(memory[:8], expected)
    memory = start + 100 * me.rank
    dist.all_to_all_single(memory[2:10], memory[:8])
    assert torch.equal(memory[2:10], expected)
    # A negative view on one rank alone: all ranks must still go the same way.
    values = torch._neg_view(start[:8].clone()) if me.rank else -start[:8]
    into = torch._neg_view(torch.empty(8)) if me.rank else torch.empty(8)
    assert values.is_neg() == into.is_neg() == bool(me.rank)
    dist.all_to_all_single(into, values)
    assert torch.equal(into, -torch.cat([start[4 * me.rank : 4 * me.rank + 4]] * 2))
    with pytest.raises(ValueError, match="without gaps"):
        dist.broadcast(torch.ones(4, 4)[:, ::2], 0)


@needs_native
def test_outputs_may_share_memory_with_inputs_and_gaps_are_refused() -> None:
    run_ranks(overlapping_tensors, 2, "cgx")


def changes_what_autograd_saved(me: Rank) -> bool:
    weight = torch.ones(20, requires_grad=True)
    loss = (weight * weight).sum()
    dist.broadcast(weight.detach(), 0)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return True
    return False


@needs_native
def test_autograd_notices_the_change_where_there_is_one() -> None:
    assert run_ranks(changes_what_autograd_saved, 2, "cgx") == [False, True]


def differs(me: Rank, roots: tuple[int, ...]) -> None:
    dist.all_reduce(torch.ones(20))  # memory is there now, and nobody meets to make it
    dist.broadcast(torch.ones(20), roots[me.rank])
    dist.barrier()  # whoever needed nothing of the others finds out here at the latest


@needs_native
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("roots", [(1, 0, 0), (0, 1, 2), (0, 1, 0), (2, 2, 0)], ids=str)
def test_different_roots_are_named(roots: tuple[int, ...], places: str) -> None:
    outcomes = observe_ranks(differs, 3, "cgx", roots, rank_env=PLACES[places], group_timeout_s=20.0)
    for outcome in outcomes:
        assert not outcome.ok
        assert {"MismatchError", "PoisonedError"} & set(outcome.error_kinds), outcome.message
        named = {root for root in roots if f"broadcast(float32[20], root {root})" in outcome.message}
        assert len(named) > 1, outcome.message


def leaves_early(me: Rank) -> None:
    large = torch.full((1 << 20,), float(me.rank))
    if me.rank:
        time.sleep(1.0)
    for _ in range(3):
        small = torch.full((2,), float(me.rank))
        dist.broadcast(small, 0)
        assert small.tolist() == [0.0, 0.0]
    dist.broadcast(large, 0)
    assert not large.any()
    dist.destroy_process_group()


@needs_native
@pytest.mark.parametrize("places", PLACES)
def test_a_root_may_leave_as_soon_as_it_is_done(places: str) -> None:
    run_ranks(leaves_early, 3, "cgx", rank_env=PLACES[places])


def records(me: Rank) -> list[tuple[Any, ...]]:
    dist.broadcast(torch.ones(2, 3), 1)
    dist.all_gather_into_tensor(torch.empty(2 * me.world, 3), torch.ones(2, 3))
    dist.all_gather([torch.empty(5) for _ in range(me.world)], torch.ones(5))
    dist.reduce_scatter(torch.empty(4), [torch.ones(4) for _ in range(me.world)])
    entries = process_recorder().as_dict("a test")["operations"][-4:]
    return [(entry["operation"], list(entry["shape"]), entry["root"]) for entry in entries]


@needs_native
def test_the_flight_recorder_has_calls_as_they_were_made() -> None:
    expected = [
        ("broadcast", [2, 3], 1),
        ("all_gather_into_tensor", [2, 3], None),
        ("all_gather", [5], None),
        ("reduce_scatter", [8], None),
    ]
    assert run_ranks(records, 2, "cgx") == [expected, expected]
