"""Every collective of torch.distributed, on the world and on sub-groups, sync and async, on gloo and on cgx.

Expected results are worked out locally from all members' inputs, so that gloo passing this suite makes it the
standard that cgx is held to. What compression changes is in test_compressed, groups used at the same time in
test_concurrency.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.harness import Rank, run_ranks

pytestmark = pytest.mark.ranks

WORLD = 3
SUBGROUP = (0, 2)  # not contiguous, so that group ranks and global ranks differ

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
BITWISE_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@dataclass(frozen=True)
class Team:
    """The group that a check runs on, and this process's place in it."""

    group: Any  # None: the world
    members: tuple[int, ...]  # global ranks, by group rank
    rank: int  # in the group
    asynchronous: bool

    @property
    def size(self) -> int:
        return len(self.members)

    def finish(self, work: Any) -> None:
        """A collective was called with `async_op=asynchronous`: hold it to what it must then return."""
        if not self.asynchronous:
            assert work is None
            return
        assert work is not None
        work.wait()


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's input: small whole numbers, so that sums and products are exact in every dtype."""
    numel = int(torch.Size(shape).numel())
    return ((torch.arange(numel) * 3 + rank * 5) % 4 + 1).reshape(shape).to(dtype)


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def combined(team: Team, op: Callable[[Tensor, Tensor], Tensor], *shape: int, dtype: torch.dtype) -> Tensor:
    return reduce(op, [values(r, *shape, dtype=dtype) for r in range(team.size)])


def all_reduce_with_every_op_and_dtype(team: Team) -> None:
    for shape in [(3, 5), (1000,)]:
        cases = [(op, dtype) for op in OPS for dtype in FLOATS + INTEGERS]
        cases += [(op, dtype) for op in BITWISE_OPS for dtype in INTEGERS]
        for op, dtype in cases:
            x = values(team.rank, *shape, dtype=dtype)
            team.finish(dist.all_reduce(x, getattr(dist.ReduceOp, op), team.group, team.asynchronous))
            same(x, combined(team, {**OPS, **BITWISE_OPS}[op], *shape, dtype=dtype))


def all_reduce_averages(team: Team) -> None:
    for dtype in FLOATS:
        for numel in (1, 20, 5000):
            x = values(team.rank, numel, dtype=dtype) * team.size
            team.finish(dist.all_reduce(x, dist.ReduceOp.AVG, team.group, team.asynchronous))
            # Other ways to divide by 3 may differ in the last place.
            expected = combined(team, torch.add, numel, dtype=torch.float64)
            torch.testing.assert_close(x.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0.0)


def all_reduce_of_every_kind_of_tensor(team: Team) -> None:
    def check(x: Tensor, expected: Tensor) -> None:
        team.finish(dist.all_reduce(x, group=team.group, async_op=team.asynchronous))
        same(x, expected)

    total = sum(range(1, team.size + 1))
    mine = float(team.rank + 1)
    check(torch.tensor(mine), torch.tensor(float(total)))
    check(torch.full((0,), mine), torch.full((0,), float(total)))
    check(torch.full((1_000_003,), mine), torch.full((1_000_003,), float(total)))
    check(torch.full((7, 100), mine).t(), torch.full((100, 7), float(total)))
    check(torch.full((4,), complex(mine, -mine)), torch.full((4,), complex(total, -total)))
    whole = torch.full((5001,), mine)
    check(whole[1:], torch.full((5000,), float(total)))  # not aligned to anything
    assert whole[0] == mine


def all_reduce_of_a_sparse_tensor(team: Team) -> None:
    x = torch.sparse_coo_tensor(torch.tensor([[team.rank, 4]]), [1.0, 2.0], (5,))
    team.finish(dist.all_reduce(x, group=team.group, async_op=team.asynchronous))
    expected = torch.zeros(5)
    expected[: team.size] = 1.0
    expected[4] = 2.0 * team.size
    same(x.to_dense(), expected)


def all_reduce_coalesced_of_mixed_shapes(team: Team) -> None:
    shapes = [(1,), (3, 5), (2000,), (16,)]
    tensors = [values(team.rank, *shape) for shape in shapes]
    team.finish(dist.all_reduce_coalesced(tensors, group=team.group, async_op=team.asynchronous))
    same(tensors, [combined(team, torch.add, *shape, dtype=torch.float32) for shape in shapes])


def broadcast_from_every_root(team: Team) -> None:
    for root, global_root in enumerate(team.members):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            x = values(team.rank, 3, 50, dtype=dtype)
            team.finish(dist.broadcast(x, global_root, team.group, team.asynchronous))
            same(x, values(root, 3, 50, dtype=dtype))


def reduce_to_every_root(team: Team) -> None:
    for root, global_root in enumerate(team.members):
        for op, dtype in [("SUM", torch.float32), ("MAX", torch.int64), ("SUM", torch.float16)]:
            x = values(team.rank, 1000, dtype=dtype)
            work = dist.reduce(x, global_root, getattr(dist.ReduceOp, op), team.group, team.asynchronous)
            team.finish(work)
            if team.rank == root:
                same(x, combined(team, OPS[op], 1000, dtype=dtype))


def all_gather_into_a_list(team: Team) -> None:
    for dtype in (torch.float32, torch.int32, torch.bfloat16):
        got = [torch.zeros(3, 5, dtype=dtype) for _ in team.members]
        mine = values(team.rank, 3, 5, dtype=dtype)
        team.finish(dist.all_gather(got, mine, team.group, team.asynchronous))
        same(got, [values(r, 3, 5, dtype=dtype) for r in range(team.size)])


def all_gather_into_one_tensor(team: Team) -> None:
    for name in ("all_gather_into_tensor", "all_gather_single"):
        gather = getattr(dist, name, None)
        if gather is None:  # all_gather_single came with torch 2.13
            continue
        for shape in [(7,), (3, 5), (40_000,)]:
            got = torch.zeros(team.size * shape[0], *shape[1:])
            work = gather(got, values(team.rank, *shape), group=team.group, async_op=team.asynchronous)
            team.finish(work)
            same(got, torch.cat([values(r, *shape) for r in range(team.size)]))


def all_gather_coalesced_of_mixed_shapes(team: Team) -> None:
    shapes = [(4,), (2, 3), (100,)]
    got = [[torch.zeros(shape) for shape in shapes] for _ in team.members]
    mine = [values(team.rank, *shape) for shape in shapes]
    team.finish(dist.all_gather_coalesced(got, mine, team.group, team.asynchronous))
    same(got, [[values(r, *shape) for shape in shapes] for r in range(team.size)])


def gather_to_every_root(team: Team) -> None:
    for root, global_root in enumerate(team.members):
        got = [torch.zeros(50) for _ in team.members] if team.rank == root else None
        work = dist.gather(values(team.rank, 50), got, global_root, team.group, team.asynchronous)
        team.finish(work)
        if team.rank == root:
            same(got, [values(r, 50) for r in range(team.size)])


def scatter_from_every_root(team: Team) -> None:
    for root, global_root in enumerate(team.members):
        x = torch.zeros(50)
        parts = [values(10 * root + r, 50) for r in range(team.size)] if team.rank == root else None
        team.finish(dist.scatter(x, parts, global_root, team.group, team.asynchronous))
        same(x, values(10 * root + team.rank, 50))


def reduce_scatter_from_a_list(team: Team) -> None:
    for op in ("SUM", "MAX"):
        x = torch.zeros(50)
        parts = [values(team.rank + 10 * r, 50) for r in range(team.size)]
        work = dist.reduce_scatter(x, parts, getattr(dist.ReduceOp, op), team.group, team.asynchronous)
        team.finish(work)
        same(x, reduce(OPS[op], [values(r + 10 * team.rank, 50) for r in range(team.size)]))


def reduce_scatter_from_one_tensor(team: Team) -> None:
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        scatter = getattr(dist, name, None)
        if scatter is None:  # reduce_scatter_single came with torch 2.13
            continue
        for numel in (1, 5, 10_000):
            x = torch.zeros(numel)
            whole = torch.cat([values(team.rank + 10 * r, numel) for r in range(team.size)])
            team.finish(scatter(x, whole, group=team.group, async_op=team.asynchronous))
            same(x, reduce(torch.add, [values(r + 10 * team.rank, numel) for r in range(team.size)]))


def all_to_all_of_lists(team: Team) -> None:
    got = [torch.zeros(2, 3) for _ in team.members]
    parts = [values(team.rank + 10 * d, 2, 3) for d in range(team.size)]
    team.finish(dist.all_to_all(got, parts, team.group, team.asynchronous))
    same(got, [values(s + 10 * team.rank, 2, 3) for s in range(team.size)])


def all_to_all_of_one_tensor(team: Team) -> None:
    got = torch.zeros(4 * team.size)
    whole = torch.cat([values(team.rank + 10 * d, 4) for d in range(team.size)])
    team.finish(dist.all_to_all_single(got, whole, group=team.group, async_op=team.asynchronous))
    same(got, torch.cat([values(s + 10 * team.rank, 4) for s in range(team.size)]))

    sizes = [team.rank + d for d in range(team.size)]  # one of them is 0
    got = torch.zeros(sum(sizes))
    whole = torch.cat([values(team.rank + 10 * d, sizes[d]) for d in range(team.size)])
    team.finish(dist.all_to_all_single(got, whole, sizes, sizes, team.group, team.asynchronous))
    same(got, torch.cat([values(s + 10 * team.rank, sizes[s]) for s in range(team.size)]))


def send_and_receive(team: Team) -> None:
    following = team.members[(team.rank + 1) % team.size]
    before = (team.rank - 1) % team.size
    x = torch.zeros(100)
    if team.asynchronous:
        works = [
            dist.isend(values(team.rank, 100), following, team.group, tag=3),
            dist.irecv(x, team.members[before], team.group, tag=3),
        ]
        for work in works:
            assert work is not None
            work.wait()
    elif team.rank == 0:
        dist.send(values(team.rank, 100), following, team.group)
        assert dist.recv(x, team.members[before], team.group) == team.members[before]
    else:
        assert dist.recv(x, team.members[before], team.group) == team.members[before]
        dist.send(values(team.rank, 100), following, team.group)
    same(x, values(before, 100))


def tags_keep_messages_apart(team: Team) -> None:
    if team.rank == 0:
        works = [dist.isend(values(tag, 10), team.members[1], team.group, tag=tag) for tag in (1, 2)]
    elif team.rank == 1:
        got = {tag: torch.zeros(10) for tag in (2, 1)}
        works = [dist.irecv(x, team.members[0], team.group, tag=tag) for tag, x in got.items()]
    else:
        return
    for work in works:
        assert work is not None
        work.wait()
    if team.rank == 1:
        same(got, {tag: values(tag, 10) for tag in (2, 1)})


def batched_sends_and_receives(team: Team) -> None:
    others = [r for r in range(team.size) if r != team.rank]
    got = {r: torch.zeros(100) for r in others}
    messages = []
    for r in others:
        to = team.members[r]
        messages.append(dist.P2POp(dist.isend, values(team.rank + 10 * r, 100), to, team.group))
        messages.append(dist.P2POp(dist.irecv, got[r], to, team.group))
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    same(got, {r: values(r + 10 * team.rank, 100) for r in others})


def receive_from_any_source(team: Team) -> None:
    if team.rank > 0:
        dist.send(values(team.rank, 20), team.members[0], team.group)
    else:
        seen = set()
        for _ in range(team.size - 1):
            x = torch.zeros(20)
            source = dist.recv(x, group=team.group)
            same(x, values(team.members.index(source), 20))
            seen.add(source)
        assert seen == set(team.members[1:])
    dist.barrier(team.group)  # or a fast rank's next message would be taken for a slow one's first


def barrier_waits_for_all(team: Team) -> None:
    for _ in range(3):
        team.finish(dist.barrier(team.group, team.asynchronous))


def objects_travel(team: Team) -> None:
    everyone: list[Any] = [None] * team.size
    dist.all_gather_object(everyone, {"rank": team.rank, "text": "x" * team.rank}, team.group)
    assert everyone == [{"rank": r, "text": "x" * r} for r in range(team.size)]

    root = team.members[-1]
    gathered: list[Any] | None = [None] * team.size if team.rank == team.size - 1 else None
    dist.gather_object((team.rank, "g"), gathered, root, team.group)
    if gathered is not None:
        assert gathered == [(r, "g") for r in range(team.size)]

    several: list[Any] = ["a", {"b": 2}, team.members] if team.rank == 0 else [None] * 3
    dist.broadcast_object_list(several, team.members[0], team.group)
    assert several == ["a", {"b": 2}, team.members]

    mine: list[Any] = [None]
    parts = [("s", r) for r in range(team.size)] if team.rank == 0 else None
    dist.scatter_object_list(mine, parts, team.members[0], team.group)
    assert mine == [("s", team.rank)]

    if team.rank == 0:
        dist.send_object_list([{"to": 1}], team.members[1], team.group)
    elif team.rank == 1:
        got: list[Any] = [None]
        assert dist.recv_object_list(got, team.members[0], team.group) == team.members[0]
        assert got == [{"to": 1}]


CHECKS = (
    all_reduce_with_every_op_and_dtype,
    all_reduce_of_every_kind_of_tensor,
    all_reduce_of_a_sparse_tensor,
    all_reduce_coalesced_of_mixed_shapes,
    broadcast_from_every_root,
    reduce_to_every_root,
    all_gather_into_a_list,
    all_gather_into_one_tensor,
    all_gather_coalesced_of_mixed_shapes,
    gather_to_every_root,
    scatter_from_every_root,
    reduce_scatter_from_a_list,
    reduce_scatter_from_one_tensor,
    all_to_all_of_lists,
    all_to_all_of_one_tensor,
    send_and_receive,
    tags_keep_messages_apart,
    batched_sends_and_receives,
    receive_from_any_source,
    barrier_waits_for_all,
    objects_travel,
)


def on_world_and_subgroup(me: Rank, check_name: str) -> None:
    check: Callable[[Team], None] = globals()[check_name]
    subgroup = dist.new_group(list(SUBGROUP))
    for asynchronous, late in ((False, 2), (True, 0)):
        if me.rank == late:
            time.sleep(0.15)  # the others wait for longer than any poll of theirs lasts
        check(Team(None, tuple(range(me.world)), me.rank, asynchronous))
        if me.rank in SUBGROUP:
            check(Team(subgroup, SUBGROUP, SUBGROUP.index(me.rank), asynchronous))
    dist.barrier()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_the_world_and_on_a_subgroup(backend: str, check: Callable[[Team], None]) -> None:
    run_ranks(on_world_and_subgroup, WORLD, backend, check.__name__)


def test_all_reduce_averages() -> None:
    run_ranks(on_world_and_subgroup, WORLD, "cgx", all_reduce_averages.__name__)


def works_alone(me: Rank) -> None:
    team = Team(None, (0,), 0, False)
    for check in (all_reduce_with_every_op_and_dtype, all_gather_into_one_tensor, objects_alone, has_a_default_backend):
        check(team)


def objects_alone(team: Team) -> None:
    everyone: list[Any] = [None]
    dist.all_gather_object(everyone, "alone")
    assert everyone == ["alone"]


def has_a_default_backend(team: Team) -> None:
    """Ask what torch answers from a group's default backend: 2.15 looks for it as soon as a group is made."""
    assert dist.distributed_c10d._get_default_group()._get_sequence_number_for_group() >= 0


def test_a_world_of_one_works(backend: str) -> None:
    run_ranks(works_alone, 1, backend)
