"""The order of steps over many slices: messages lead to later ticks, and so nobody waits in a circle."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.algorithms.hierarchical import most_shares
from torch_cgx.plan.program import Program, Receive, Send
from torch_cgx.plan.programs import programs_for
from torch_cgx.plan.schedule import AHEAD, Schedule, levels_of, schedule_for

TOPOLOGIES = [
    *(Topology.flat(algorithm, world) for algorithm in ("SRA", "RING", "ALL_TO_ALL") for world in (2, 3, 4, 7)),
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
    *((Topology.flat("ALL_TO_ALL", world), 2) for world in (2, 5)),
    (Topology("SRA", (0, 0, 1, 1)), 5),  # inside, across, across, and handed on
    (Topology("SRA", (0, 0, 0)), 3),
]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    nodes = tuple(draw(st.lists(st.integers(0, 3), min_size=2, max_size=8)))
    if draw(st.booleans()):
        return Topology.flat(draw(st.sampled_from(["SRA", "RING", "ALL_TO_ALL"])), len(nodes))
    algorithm = draw(st.sampled_from(["SRA", "RING"]))
    return Topology(algorithm, nodes, draw(st.integers(1, most_shares(nodes))), draw(st.booleans()))


def all_full(topology: Topology) -> tuple[bool, ...]:
    return (True,) * topology.n_chunks


def patterns(topology: Topology, count: int, random: Random) -> list[tuple[bool, ...]]:
    """Which chunks of so many slices are empty; the first and the last slice may be empty altogether."""
    return [tuple(random.random() < 0.6 for _ in range(topology.n_chunks)) for _ in range(count)]


def check_levels(programs: tuple[Program, ...]) -> None:
    levels = levels_of(programs)
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
    for rank, (program, schedule) in enumerate(zip(programs, schedules, strict=True)):
        assert tuple(step for level in schedule.levels for step in level) == program
        sent = {step.slot for step in program if isinstance(step, Send)}
        spent = [slot for slots in schedule.spent for slot in slots]
        assert len(spent) == len(set(spent)) and not sent & set(spent)
        for level, slots_of_level in enumerate(schedule.spent):
            later = repr(schedule.levels[level + 1 :])
            assert not any(repr(slot) in later for slot in slots_of_level)
        assert schedule.slots == slots
        for peer in schedule.peers:  # so that both tell each other what they are about to do
            assert rank in schedules[peer].peers
        assert all(step.peer in schedule.peers for step in program if isinstance(step, Send | Receive))


@pytest.mark.parametrize(("topology", "n_levels"), N_LEVELS, ids=str)
def test_an_algorithm_has_a_level_more_than_messages_one_after_the_other(topology: Topology, n_levels: int) -> None:
    assert len(schedule_for(topology, all_full(topology), 0).levels) == n_levels


class Rank:
    """One rank in `Pipeline.run`'s order of events: what it does next, and whether it can."""

    def __init__(self, rank: int, schedules: list[Schedule]) -> None:
        self.rank = rank
        self.events: list[tuple[str, int, str, int]] = []  # what, slice, slot, peer
        depth = max(len(schedule.levels) for schedule in schedules)
        n_slices = len(schedules)
        peers = sorted(frozenset[int]().union(*(schedule.peers for schedule in schedules)))
        self.events += [("post", -1, "agreed", peer) for peer in peers]
        self.events += [("send", -1, "agreed", peer) for peer in peers]
        for tick in range(AHEAD):
            self.post(schedules, tick)
        for tick in range(n_slices + depth):
            self.post(schedules, tick + AHEAD)
            for level in range(depth):
                number = tick - level
                if not 0 <= number < n_slices:
                    continue
                if level == 1 and number == 0:
                    self.events += [("receive", -1, "agreed", peer) for peer in peers]
                    self.events += [("left", -1, "agreed", peer) for peer in peers]
                for step in schedules[number].level(level):
                    if isinstance(step, Send | Receive):
                        kind = "send" if isinstance(step, Send) else "receive"
                        self.events.append((kind, number, step.slot, step.peer))
            if tick >= depth:
                each = schedules[tick - depth]
                self.events += [
                    ("left", tick - depth, step.slot, step.peer)
                    for steps in each.levels
                    for step in steps
                    if isinstance(step, Send)
                ]
        self.events.reverse()

    def post(self, schedules: list[Schedule], tick: int) -> None:
        for number, schedule in enumerate(schedules):
            if number <= tick:
                for step in schedule.level(tick - number):
                    if isinstance(step, Receive):
                        self.events.append(("post", number, step.slot, step.peer))


def simulate(topology: Topology, nonempty: list[tuple[bool, ...]], random: Random) -> Counter[str]:
    """All ranks' events in any order that messages allow. A receive waits for its send; whoever waits for a message
    to have left waits for its receiver to have posted the receive: no transport keeps it."""
    ranks = [
        Rank(rank, [schedule_for(topology, pattern, rank) for pattern in nonempty]) for rank in range(topology.world)
    ]
    sent: set[tuple[int, int, int, str]] = set()
    posted: set[tuple[int, int, int, str]] = set()
    counted: Counter[str] = Counter()
    while unfinished := [rank for rank in ranks if rank.events]:
        random.shuffle(unfinished)
        moved = False
        for rank in unfinished:
            while rank.events:
                kind, number, slot, peer = rank.events[-1]
                incoming, outgoing = (peer, rank.rank, number, slot), (rank.rank, peer, number, slot)
                if kind == "send":
                    sent.add(outgoing)
                elif kind == "post":
                    posted.add(incoming)
                elif (kind == "receive" and incoming not in sent) or (kind == "left" and outgoing not in posted):
                    break
                elif kind == "receive":
                    assert incoming in posted, f"rank {rank.rank} waits for {slot} of slice {number} before it posts it"
                rank.events.pop()
                counted[kind] += 1
                moved = True
                if random.random() < 0.2:
                    break
        assert moved, f"stuck: {[(rank.rank, rank.events[-1]) for rank in unfinished]}"
    return counted


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("n_slices", [1, 2, 5])
def test_slices_that_overlap_never_wait_in_a_circle(topology: Topology, n_slices: int) -> None:
    counted = simulate(topology, [all_full(topology)] * n_slices, Random(n_slices))
    assert counted["send"] == counted["receive"] == counted["post"] == counted["left"] > n_slices


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_nor_where_other_chunks_are_empty_in_each_slice(topology: Topology) -> None:
    for seed in range(8):
        random = Random(seed)
        counted = simulate(topology, patterns(topology, random.randint(1, 6), random), random)
        assert counted["send"] == counted["receive"] == counted["left"]


@pytest.mark.parametrize("topology", [Topology.flat("SRA", 3), Topology("SRA", (0, 0, 1, 1))], ids=str)
def test_the_simulation_notices_a_circle(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were receives posted a slice too late, two ranks would each wait for the other's messages to leave."""
    events = Rank.__init__

    def late(self: Rank, rank: int, schedules: list[Schedule]) -> None:
        events(self, rank, schedules)
        last = [event for event in self.events if event[0] == "post" and event[1] == 0]
        self.events = last + [event for event in self.events if event not in last]

    monkeypatch.setattr(Rank, "__init__", late)
    with pytest.raises(AssertionError, match=r"before it posts it|stuck"):
        simulate(topology, [all_full(topology)] * 2, Random(0))
