"""Scatter-reduce-allgather: right for every world, at the promised cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_cgx.plan.algorithms import ALGORITHMS
from torch_cgx.plan.checker import check
from torch_cgx.plan.program import Encode, Program, Receive, Reduce

program = ALGORITHMS["SRA"].program


def programs(nonempty: list[bool]) -> list[Program]:
    return [program(nonempty, rank, len(nonempty)) for rank in range(len(nonempty))]


@pytest.mark.parametrize("world", range(1, 13))
def test_every_world_is_right_and_quantizes_a_contribution_twice(world: int) -> None:
    report = check(programs([True] * world), [1000] * world)
    assert report.quantizations == (dict.fromkeys(range(world), 2) if world > 1 else {})
    assert report.messages == (2 * (world - 1),) * world
    assert report.sent_nbytes == (2 * (world - 1) * 1000,) * world


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_empty_chunks_cost_nothing_and_leave_the_rest_right(nonempty: list[bool]) -> None:
    world = len(nonempty)
    made = programs(nonempty)
    report = check(made)
    full = [chunk for chunk in range(world) if nonempty[chunk]]
    assert list(report.quantizations) == (full if world > 1 else [])
    assert sum(report.messages) == 2 * (world - 1) * len(full)


@pytest.mark.parametrize("world", range(2, 13))
def test_peers_are_summed_in_ascending_order(world: int) -> None:
    for rank, steps in enumerate(programs([True] * world)):
        (reduce,) = [step for step in steps if isinstance(step, Reduce)]
        assert reduce == Reduce(
            tuple(f"part:{peer}>{rank}" for peer in range(world) if peer != rank), rank, f"sum:{rank}"
        )


@pytest.mark.parametrize("world", range(2, 13))
def test_no_two_ranks_encode_for_the_same_owner_at_the_same_time(world: int) -> None:
    orders = [[step.chunk for step in steps if isinstance(step, Encode)] for steps in programs([True] * world)]
    for owners in zip(*orders, strict=True):
        assert sorted(owners) == list(range(world))


@pytest.mark.parametrize("world", range(2, 13))
def test_parts_are_received_in_the_order_in_which_they_are_encoded(world: int) -> None:
    made = programs([True] * world)
    when = {
        step.slot: position
        for steps in made
        for position, step in enumerate(step for step in steps if isinstance(step, Encode))
    }
    for steps in made:
        received = [when[step.slot] for step in steps if isinstance(step, Receive) and step.slot in when]
        assert received == sorted(received)


@pytest.mark.parametrize(("chunks", "rank", "world"), [(2, 2, 2), (2, -1, 2), (1, 0, 2), (3, 0, 2)])
def test_ranks_and_chunks_that_do_not_fit_the_world_are_refused(chunks: int, rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got"):
        program([True] * chunks, rank, world)
