"""Several groups, several operations and several threads at once, and what a Work promises meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.harness import Rank, run_ranks

pytestmark = pytest.mark.ranks


def same(got: Tensor, expected: float) -> None:
    torch.testing.assert_close(got, torch.full_like(got, expected), rtol=0, atol=0)


def in_an_order_of_its_own(me: Rank) -> None:
    """Each rank issues the groups' operations in its own order and waits in another."""
    groups: list[tuple[Any, Sequence[int]]] = [(None, range(3)), (dist.new_group(), range(3))]
    groups += [(dist.new_group(list(members)), members) for members in [(0, 1), (1, 2), (0, 2), (0, 1, 2)]]
    mine = [(index, group, members) for index, (group, members) in enumerate(groups) if me.rank in members]
    order = random.Random(me.rank)
    for turn in range(15):
        order.shuffle(mine)
        pending = []
        for index, group, members in mine:
            numel = (16, 5000, 70_000)[(index + turn) % 3]
            x = torch.full((numel,), float(10 * index + me.rank + turn))
            work = dist.all_reduce(x, group=group, async_op=True)
            pending.append((work, x, float(sum(10 * index + r + turn for r in members))))
        order.shuffle(pending)
        for work, x, expected in pending:
            assert work is not None
            work.wait()
            same(x, expected)


def test_groups_in_flight_at_once_in_a_different_order_on_each_rank(backend: str) -> None:
    run_ranks(in_an_order_of_its_own, 3, backend)


def many_in_flight(me: Rank) -> None:
    sizes = [1, 16, 700, 40_000, 3, 200_000, 17]
    tensors = [torch.full((sizes[i % len(sizes)],), float(i + me.rank)) for i in range(60)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for i in random.Random(me.rank).sample(range(60), 60):
        work = works[i]
        assert work is not None
        work.wait()
        same(tensors[i], float(me.world * i + sum(range(me.world))))


def test_many_operations_of_one_group_may_be_waited_for_in_any_order(backend: str) -> None:
    run_ranks(many_in_flight, 3, backend)


def different_operations(me: Rank) -> None:
    for turn in range(10):
        summed = torch.full((3000,), float(me.rank + turn))
        sent = torch.full((100,), float(me.rank + turn))
        gathered = torch.zeros(me.world * 50)
        highest = torch.full((20,), me.rank + turn)
        works = [
            dist.all_reduce(summed, async_op=True),
            dist.broadcast(sent, turn % me.world, async_op=True),
            dist.all_gather_into_tensor(gathered, torch.full((50,), float(me.rank)), async_op=True),
            dist.all_reduce(highest, dist.ReduceOp.MAX, async_op=True),
            dist.barrier(async_op=True),
        ]
        for work in works:
            assert work is not None
            work.wait()
        same(summed, float(sum(range(me.world)) + me.world * turn))
        same(sent, float(turn % me.world + turn))
        same(highest, me.world - 1 + turn)
        torch.testing.assert_close(gathered, torch.arange(float(me.world)).repeat_interleave(50))


def test_different_operations_of_one_group_in_flight_together(backend: str) -> None:
    run_ranks(different_operations, 3, backend)


def about_a_poll_late(me: Rank) -> None:
    """Operations that end just as a waiting rank stops waiting to look around."""
    delays = random.Random(5)
    for turn in range(40):
        late, delay_s = turn % me.world, delays.uniform(0.017, 0.023)
        if me.rank == late:
            time.sleep(delay_s)
        if turn % 2:
            x = torch.full((50,), me.rank)
            dist.all_reduce(x, dist.ReduceOp.MAX)
            same(x, me.world - 1)
        else:
            scattered = torch.zeros(50)
            dist.reduce_scatter_tensor(scattered, torch.ones(50 * me.world))
            same(scattered, float(me.world))


def test_operations_may_end_at_any_moment_of_a_wait(backend: str) -> None:
    run_ranks(about_a_poll_late, 2, backend)


def functional_in_quick_succession(me: Rank) -> None:
    """The calls that DTensor makes, from C++, holding the GIL, while the engine's threads drop their tensors."""
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    assert group is not None
    for _ in range(150):
        gathered = [funcol.all_gather_tensor(torch.full((8,), float(me.rank)), 0, group) for _ in range(4)]
        scattered = funcol.reduce_scatter_tensor(torch.ones(8 * me.world), "sum", 0, group)
        same(scattered + 0, float(me.world))
        for x in gathered:
            assert (x + 0).sum().item() == 8 * sum(range(me.world))


def test_functional_collectives_in_quick_succession() -> None:
    # Not on gloo, where torch 2.13 itself has crashed here (a segmentation fault outside of Python).
    run_ranks(functional_in_quick_succession, 3, "cgx")


def callback_waits_for_a_queued_future(me: Rank) -> None:
    """The first future's callback waits for the second, which was asked for before the callback ran."""
    for _ in range(20):
        x, y = torch.ones(1000), torch.ones(1000)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (x, y)]
        first, second = (work.get_future() for work in works if work is not None)
        chained = first.then(lambda done, second=second: float(second.wait()[0].sum()) + float(done.value()[0].sum()))
        assert chained.wait() == 2 * 1000 * me.world


def test_a_callback_may_wait_for_a_future_that_is_queued_behind_its_own() -> None:
    run_ranks(callback_waits_for_a_queued_future, 2, "cgx")


def from_threads(me: Rank) -> None:
    groups = [dist.new_group() for _ in range(3)]
    wrong: list[int] = []

    def work_on(index: int) -> None:
        for turn in range(30):
            x = torch.full((2000,), float(index + turn))
            dist.all_reduce(x, group=groups[index])
            if not bool((x == me.world * (index + turn)).all()):
                wrong.append(index)

    threads = [threading.Thread(target=work_on, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_may_each_use_a_group(backend: str) -> None:
    run_ranks(from_threads, 2, backend)


def work_keeps_its_promises(me: Rank) -> None:
    x = torch.ones(1000)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    work.wait()
    assert work.is_completed()
    same(x, float(me.world))

    x = torch.ones(1000)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=10))
    same(x, float(me.world))

    x = torch.ones(1000)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    same(doubled.wait(), 2.0 * me.world)
    same(work.get_future().wait()[0], float(me.world))

    if me.rank == 1:
        me.meet("rank 0 has looked")
    x = torch.ones(1000)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    if me.rank == 0:
        assert not work.is_completed()
        me.meet("rank 0 has looked")
    work.wait()
    same(x, float(me.world))


def test_a_work_can_be_waited_for_asked_and_chained(backend: str) -> None:
    run_ranks(work_keeps_its_promises, 2, backend)


def collective_in_a_callback(me: Rank) -> None:
    """What PowerSGD's hook does: a collective, waited for, in the callback of another one's future."""
    x, y = torch.ones(1000), torch.ones(50)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None

    def second(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        future.value()
        inner = dist.all_reduce(y, async_op=True)
        assert inner is not None
        summed: list[Tensor] = inner.get_future().wait()
        return summed[0]

    same(work.get_future().then(second).wait(), float(me.world))
    same(x, float(me.world))


def test_a_callback_may_wait_for_another_collective(backend: str) -> None:
    run_ranks(collective_in_a_callback, 2, backend)


def dropped_work(me: Rank) -> None:
    for _ in range(20):
        dist.all_reduce(torch.ones(5000), async_op=True)
    x = torch.ones(20)
    dist.all_reduce(x)
    same(x, float(me.world))


def test_work_and_tensor_may_be_dropped_while_in_flight(backend: str) -> None:
    run_ranks(dropped_work, 2, backend)


def groups_come_and_go(me: Rank) -> None:
    for turn in range(6):
        group = dist.new_group([0, 1])
        if me.rank < 2:
            x = torch.full((1000,), float(turn))
            dist.all_reduce(x, group=group)
            same(x, 2.0 * turn)
            dist.destroy_process_group(group)
    x = torch.ones(1000)
    dist.all_reduce(x)
    same(x, float(me.world))


def test_subgroups_may_be_made_and_destroyed_again_and_again(backend: str) -> None:
    run_ranks(groups_come_and_go, 3, backend)
