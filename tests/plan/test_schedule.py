"""The order of steps over many slices: messages lead to later ticks, and so nobody waits in a circle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.algorithms.hierarchical import most_shares
from torch_cgx.plan.program import Program, Receive, Send, Step
from torch_cgx.plan.programs import programs_for
from torch_cgx.plan.schedule import levels_of, schedule_for
from torch_cgx.plan.simulate import ordered

TOPOLOGIES = [
    *(Topology.flat(algorithm, world) for algorithm in ("SRA", "RING") for world in (2, 3, 4, 7)),
    Topology.flat("GRID", 6),
    Topology("GRID", (0, 0, 1, 2, 3)),
    Topology("SRA", (0, 0, 1, 1)),
    Topology("SRA", (0, 0, 1, 1), 2, False),
    Topology("RING", (0, 0, 0, 1, 2, 2)),
    Topology("SRA", (0, 1, 1, 0, 0), 2),
    Topology("RING", (0, 1, 2, 0, 1, 2, 2), 2, False),
    Topology("RING", (0, 0, 1, 1, 2, 2, 3, 3), 2),
    Topology("SRA", (3, 3, 3), 1, False),
    Topology("RING", (3, 3, 3), 3),
]
N_LEVELS = [
    *((Topology.flat("SRA", world), 3) for world in (2, 5)),  # a part, a sum, and its decoding
    *((Topology.flat("RING", world), 2 * world - 1) for world in (2, 3, 6)),
    *((Topology.flat("REDUCE_SCATTER", world), 2) for world in (2, 5)),
    (Topology.flat("GRID", 6), 5),  # along a row, a part, a sum, and along a row
    (Topology("SRA", (0, 0, 1, 1)), 5),  # inside, across, across, and handed on
    (Topology("SRA", (0, 0, 0)), 3),
    (Topology("SRA", (0, 1, 1, 2, 2, 2), 1), 5),
    (Topology("RING", (0, 1, 1, 2, 2, 2), 1), 7),
    (Topology("GRID", (0, 1, 2, 3, 3)), 7),
    *((Topology.flat(algorithm, 4), 2) for algorithm in ("ALL_GATHER", "EXCHANGE")),
    (Topology.broadcast((0, 0, 0), 0), 2),
    *((Topology.broadcast(nodes, root), 2) for nodes, root in (((0, 1), 1), ((0, 0, 1), 0))),
    *((Topology.broadcast(nodes, root), 3) for nodes, root in (((0, 0, 1), 2), ((0, 1, 2), 1), ((0, 1, 1, 0), 0))),
    *((Topology.broadcast((0, 1, 2, 1, 0), root), 4) for root in range(5)),
]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    nodes = tuple(draw(st.lists(st.integers(0, 3), min_size=2, max_size=8)))
    algorithm = draw(st.sampled_from(["SRA", "RING"]))
    if draw(st.booleans()):
        return Topology.flat(algorithm, len(nodes))
    return Topology(algorithm, nodes, draw(st.integers(1, most_shares(nodes))), draw(st.booleans()))


def all_full(topology: Topology) -> tuple[bool, ...]:
    return (True,) * topology.n_chunks


def patterns(topology: Topology, count: int, random: Random) -> list[tuple[bool, ...]]:
    """Which chunks of so many slices are empty; the first and the last slice may be empty altogether."""
    return [tuple(random.random() < 0.6 for _ in range(topology.n_chunks)) for _ in range(count)]


def check_levels(programs: tuple[Program, ...]) -> None:
    levels = [levels_of(program) for program in programs]
    assert [len(mine) for mine in levels] == [len(program) for program in programs]
    sent: dict[tuple[int, int, str], int] = {}
    for rank, program in enumerate(programs):
        assert levels[rank] == sorted(levels[rank])  # a level is a part of the program, in its order
        for step, level in zip(program, levels[rank], strict=True):
            if isinstance(step, Send):
                sent[rank, step.peer, step.slot] = level
    for rank, program in enumerate(programs):
        for step, level in zip(program, levels[rank], strict=True):
            if isinstance(step, Receive):
                assert sent[step.peer, rank, step.slot] < level


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_message_leads_from_a_lower_to_a_higher_level(topology: Topology) -> None:
    check_levels(programs_for(topology, all_full(topology))[0])


@given(topology=topologies(), data=st.data())
def test_so_it_does_where_chunks_are_empty(topology: Topology, data: st.DataObject) -> None:
    nonempty = data.draw(st.tuples(*[st.booleans()] * topology.n_chunks))
    check_levels(programs_for(topology, nonempty)[0])


@given(topology=topologies(), data=st.data())
def test_a_schedule_is_the_program_and_has_as_many_levels_on_every_rank(
    topology: Topology, data: st.DataObject
) -> None:
    nonempty = data.draw(st.tuples(*[st.booleans()] * topology.n_chunks))
    programs, slots = programs_for(topology, nonempty)
    schedules = [schedule_for(topology, nonempty, rank) for rank in range(topology.world)]
    assert len({len(schedule.levels) for schedule in schedules}) == 1
    for program, schedule in zip(programs, schedules, strict=True):
        assert tuple(step for level in schedule.levels for step in level) == program
        assert schedule.slots == slots


@pytest.mark.parametrize(("topology", "n_levels"), N_LEVELS, ids=str)
def test_an_algorithm_has_a_level_more_than_messages_one_after_the_other(topology: Topology, n_levels: int) -> None:
    assert len(schedule_for(topology, all_full(topology), 0).levels) == n_levels == topology.depth + 1
    programs, _ = programs_for(topology, all_full(topology))
    assert max(level for program in programs for level in levels_of(program)) == topology.depth


def orders(
    topology: Topology, nonempty: Sequence[tuple[bool, ...]], rounds: bool = False
) -> list[list[tuple[int, Step]]]:
    """By rank: its steps of these slices by ticks, each with the number of its slice."""
    return [list(ordered(topology, nonempty, rank, rounds)) for rank in range(topology.world)]


def simulate(ranks: Iterable[list[tuple[int, Step]]], random: Random) -> int:
    """Count the messages of all ranks, whose steps are made in any order that messages allow. A send never waits."""
    left = [(rank, steps[::-1]) for rank, steps in enumerate(ranks)]
    sent: set[tuple[int, int, int, str]] = set()
    received = 0
    while unfinished := [each for each in left if each[1]]:
        random.shuffle(unfinished)
        moved = False
        for rank, steps in unfinished:
            while steps:
                number, step = steps[-1]
                if isinstance(step, Send):
                    sent.add((rank, step.peer, number, step.slot))
                elif isinstance(step, Receive):
                    if (step.peer, rank, number, step.slot) not in sent:
                        break
                    received += 1
                steps.pop()
                moved = True
                if random.random() < 0.2:
                    break
        assert moved, f"stuck: {[(rank, steps[-1]) for rank, steps in unfinished]}"
    assert received == len(sent)
    return received


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("n_slices", [1, 2, 5])
@pytest.mark.parametrize("rounds", [False, True])
def test_slices_that_overlap_never_wait_in_a_circle(topology: Topology, n_slices: int, rounds: bool) -> None:
    assert simulate(orders(topology, [all_full(topology)] * n_slices, rounds), Random(n_slices)) > n_slices


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_nor_where_other_chunks_are_empty_in_each_slice(topology: Topology) -> None:
    for seed in range(8):
        random = Random(seed)
        simulate(orders(topology, patterns(topology, random.randint(1, 6), random)), random)


@pytest.mark.parametrize("topology", [Topology.flat("SRA", 3), Topology("SRA", (0, 0, 1, 1))], ids=str)
def test_the_simulation_notices_a_circle(topology: Topology) -> None:
    """Were the sends of the first slice made last, two ranks would each wait for the other's."""
    late = [
        sorted(steps, key=lambda each: isinstance(each[1], Send) and each[0] == 0)
        for steps in orders(topology, [all_full(topology)] * 2)
    ]
    with pytest.raises(AssertionError, match="stuck"):
        simulate(late, Random(0))
