"""The order in which linked ranks run the steps of many slices never ends in a circle, even if sockets buffer nothing.

Simulated are the tables that csrc/engine gets, by the rules of csrc/engine/linked.cpp:

1. A rank makes its steps in order. A receive waits for its payload, a send only queues a frame.
2. A slice begins when the slice `ring` before it is finished: all its steps are made, and its frames have been taken.
3. A connection keeps its frames in order. The receiver takes the first one if its slice is less than `ring` ahead of
   what the receiver has finished. Until then the frame waits at its sender, as it would if no socket had a buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import pytest

from torch_cgx.engines.host.native import MOST_LAG, Tables, link_lag
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.layout import Chunk
from torch_cgx.plan.programs import programs_for
from torch_cgx.plan.schedule import levels_for

Pattern = tuple[bool, ...]  # by chunk of a slice: whether it has values

FLOAT32 = 0
SEND, RECEIVE = 1, 2  # kinds of steps, as csrc/include/cgx.h numbers them
ALGORITHMS = ("SRA", "RING", "REDUCE_SCATTER", "ALL_GATHER")
TOPOLOGIES = [Topology.flat(algorithm, world) for algorithm in ALGORITHMS for world in range(2, 13)]
FULL = Chunk((), nbytes=1, itemsize=4)
EMPTY = Chunk((), nbytes=0, itemsize=4)

each_topology = pytest.mark.parametrize(
    "topology", TOPOLOGIES, ids=lambda topology: f"{topology.algorithm} of {topology.world}"
)


class Step(NamedTuple):
    kind: int
    slice: int
    slot: int
    peer: int


class Tabled(NamedTuple):
    """One rank's plan, as native code gets it."""

    steps: list[Step]
    n_slices: int
    ring: int


class Recorder:
    """Stands in for the native library, and keeps the tables of a plan."""

    tabled: Tabled

    def cgx_plan_new(self, *arguments: Any) -> int:
        _, _, _, _, slots, _, _, _, steps, _, n_slices, ring, _ = arguments
        rows = [Step(step.kind, slots[step.slot].slice, step.slot, step.peer) for step in steps]
        self.tabled = Tabled(rows, n_slices, ring)
        return 1


def depth_of(topology: Topology, patterns: Sequence[Pattern]) -> int:
    return max(levels_for(topology, pattern).depth for pattern in patterns)


def tables_of(topology: Topology, patterns: Sequence[Pattern], lag: int = 0) -> list[Tabled]:
    """Return all ranks' plans for slices of these patterns. `lag` 0: as groups have it."""
    depth = depth_of(topology, patterns)
    plans = []
    for rank in range(topology.world):
        tables = Tables(topology.world, lag or link_lag(depth), depth)
        for pattern in patterns:
            programs, slots = programs_for(topology, pattern)
            chunks = [FULL if full else EMPTY for full in pattern]
            slot_nbytes = [chunks[slot.chunk].nbytes for slot in slots.values()]
            tables.add(programs[rank], slots, slot_nbytes, chunks, levels_for(topology, pattern).by_rank[rank])
        recorder: Any = Recorder()
        tables.build(recorder, FLOAT32)
        plans.append(recorder.tabled)
    return plans


class Rank:
    """What one rank has done."""

    def __init__(self, plan: Tabled, ring: int) -> None:
        self.plan = plan
        self.ring = ring
        self.position = 0
        self.begun = 0
        self.finished = 0  # slices, one after the other
        self.steps_left = [0] * plan.n_slices
        for step in plan.steps:
            self.steps_left[step.slice] += 1
        self.waiting_frames = [0] * plan.n_slices  # by slice: sent, and not taken yet
        self.arrived: set[int] = set()  # slots

    @property
    def is_done(self) -> bool:
        return self.finished == self.plan.n_slices

    def finish_slices(self) -> None:
        while (
            self.finished < self.begun and not self.steps_left[self.finished] and not self.waiting_frames[self.finished]
        ):
            self.finished += 1

    def begin_slices(self, end: int) -> bool:
        """Begin all slices before `end`; return whether there was room for them."""
        while self.begun < end:
            if self.begun - self.ring >= self.finished:
                return False
            self.begun += 1
            self.finish_slices()
        return True

    def has_room_for(self, number: int) -> bool:
        return number < self.finished + self.ring


Connections = dict[tuple[int, int, int], deque[tuple[int, int]]]  # sender, receiver, stream: slices and slots


def advance(rank: int, ranks: Sequence[Rank], connections: Connections, streams: int, most: int) -> bool:
    """Make up to so many steps of a rank; return whether it made or began anything."""
    own = ranks[rank]
    before = (own.position, own.begun)
    steps = own.plan.steps
    while own.position < min(len(steps), before[0] + most):
        step = steps[own.position]
        if not own.begin_slices(step.slice + 1) or (step.kind == RECEIVE and step.slot not in own.arrived):
            break
        if step.kind == SEND:
            frames = connections.setdefault((rank, step.peer, step.slice % streams), deque())
            frames.append((step.slice, step.slot))
            own.waiting_frames[step.slice] += 1
        own.position += 1
        own.steps_left[step.slice] -= 1
        own.finish_slices()
    if own.position == len(steps):
        own.begin_slices(own.plan.n_slices)  # those in which this rank has nothing to do
    return (own.position, own.begun) != before


def take_frames(rank: int, ranks: Sequence[Rank], connections: Connections, random: Random | None = None) -> bool:
    """Let a rank take what its connections, or some of them, bring; return whether it took anything."""
    taken = False
    for (sender, receiver, _), frames in connections.items():
        if receiver != rank or (random is not None and random.random() < 0.3):
            continue
        while frames and ranks[rank].has_room_for(frames[0][0]):
            number, slot = frames.popleft()
            assert slot not in ranks[rank].arrived
            ranks[rank].arrived.add(slot)
            ranks[sender].waiting_frames[number] -= 1
            ranks[sender].finish_slices()
            taken = True
    return taken


def stuck_ranks(plans: Sequence[Tabled], ring: int, random: Random, streams: int = 1) -> list[int]:
    """Run all ranks, in a random order, until none can go on. Return those that are not done then."""
    ranks = [Rank(plan, ring) for plan in plans]
    connections: Connections = {}
    order = list(range(len(ranks)))
    moved = True
    while moved:
        random.shuffle(order)
        moved = False
        for rank in order:
            moved |= take_frames(rank, ranks, connections, random)
            moved |= advance(rank, ranks, connections, streams, random.choice((1, 5, 1000)))
        if not moved:  # perhaps only because some connections were left out
            for rank in order:
                moved |= take_frames(rank, ranks, connections)
    return [number for number, rank in enumerate(ranks) if not rank.is_done]


def full_slices(topology: Topology, n_slices: int) -> list[Pattern]:
    return [(True,) * topology.n_chunks] * n_slices


def ticks_under_way(topology: Topology) -> int:
    """Return how many ticks after its first level the last level of a slice runs."""
    depth = depth_of(topology, full_slices(topology, 1))
    return link_lag(depth) * depth


@each_topology
def test_slices_wait_in_a_circle_only_if_the_ring_is_too_small(topology: Topology) -> None:
    under_way = ticks_under_way(topology)
    ring = under_way + 2
    plans = tables_of(topology, full_slices(topology, 3 * ring // 2 + 2))  # half of the ring is used twice
    assert {plan.ring for plan in plans} == {ring}
    for seed, streams in enumerate((1, 2)):
        assert not stuck_ranks(plans, ring, Random(seed), streams)
    # Slice t would have to begin before slice t - under_way is finished. So this test can fail.
    assert stuck_ranks(plans, under_way, Random(0))


@each_topology
def test_nor_do_they_where_other_chunks_are_empty_in_each_slice(topology: Topology) -> None:
    for seed, fullness in enumerate((0.2, 0.7)):
        random = Random(seed)
        n_slices = random.randint(4, ticks_under_way(topology) + 8)
        patterns = [tuple(random.random() < fullness for _ in range(topology.n_chunks)) for _ in range(n_slices)]
        plans = tables_of(topology, patterns)
        assert not stuck_ranks(plans, plans[0].ring, random)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("lag", range(1, MOST_LAG + 1))
def test_nor_do_they_with_another_lag(algorithm: str, lag: int) -> None:
    topology = Topology.flat(algorithm, 4)
    plans = tables_of(topology, full_slices(topology, 40), lag)
    assert plans[0].ring == lag * depth_of(topology, full_slices(topology, 1)) + 2
    assert not stuck_ranks(plans, plans[0].ring, Random(lag))
