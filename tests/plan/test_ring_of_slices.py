"""The order in which linked ranks run the steps of many slices never ends in a circle, even if sockets buffer nothing.

Simulated are the tables that csrc/engine gets, by the rules of csrc/engine/linked.cpp:

1. A rank makes its steps in order. A receive waits for its payload, a send only queues a frame.
2. A slice begins when the slice `ring` before it is finished on all ranks of the node: all its steps are made, and its
   frames have been taken.
3. A connection keeps its frames in order. The receiver takes the first one if its slice is less than `ring` ahead of
   what its node has finished. Until then the frame waits at its sender, as it would if no socket had a buffer.
4. Ranks of one node share memory. A payload is there for all of them once the rank that put it there has sent it to
   one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest

from torch_cgx.engines.host.plans import Tables, Template, rooms_for
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.layout import Chunk, Slice
from torch_cgx.plan.programs import node_slots_for, program_for
from torch_cgx.plan.slicing import MOST_LAG, link_lag

Pattern = tuple[bool, ...]  # by chunk of a slice: whether it has values

FLOAT32 = 0
SEND, RECEIVE = 1, 2  # kinds of steps, as csrc/include/cgx.h numbers them
ALGORITHMS = ("SRA", "RING", "GRID", "REDUCE_SCATTER", "ALL_GATHER")
MOST_RANKS, MOST_NODES = 12, 4
FULL = Chunk((), nbytes=1, itemsize=4)
EMPTY = Chunk((), nbytes=0, itemsize=4)


class Case(NamedTuple):
    """A topology, and by rank a number of what shares memory with it."""

    topology: Topology
    nodes: tuple[int, ...]

    def __str__(self) -> str:
        topology = self.topology
        how = topology.algorithm if topology.is_flat else f"{topology.algorithm} with {topology.shares} speakers"
        return f"{how} on nodes {''.join(map(str, self.nodes))}"


def node_sizes(world: int, most: int) -> Iterator[list[int]]:
    """Divide a world into nodes, the largest first."""
    if world == 0:
        yield []
    for first in range(min(world, most), 0, -1):
        yield from ([first, *rest] for rest in node_sizes(world - first, first))


def nodes_of(sizes: Sequence[int], turns: bool) -> tuple[int, ...]:
    """Number the nodes of ranks: one node after the other, or in turns as long as they have ranks."""
    numbered = [(place if turns else 0, node) for node, size in enumerate(sizes) for place in range(size)]
    return tuple(node for _, node in sorted(numbered))


def cases() -> Iterator[Any]:
    """Every division of the checker: alone on its node, flat, and with one or all ranks of a node as its speakers."""
    for world in range(2, MOST_RANKS + 1):
        for algorithm in ALGORITHMS:
            yield Case(Topology.flat(algorithm, world), tuple(range(world)))
    for world in range(3, MOST_RANKS + 1):
        for sizes in node_sizes(world, world - 1):
            if len(sizes) > MOST_NODES or len(sizes) in (1, world):
                continue
            nodes = nodes_of(sizes, turns=world % 2 == 0)
            flat = [algorithm for algorithm in ALGORITHMS if algorithm not in ("RING", "GRID")]
            found = [Case(Topology.flat(algorithm, world), nodes) for algorithm in flat]
            found += [
                Case(Topology(algorithm, nodes, shares), nodes)
                for algorithm in ("SRA", "RING", *(("GRID",) if len(sizes) == 4 else ()))
                for shares in {1, sizes[-1]}
            ]
            chosen = sizes in ([2, 2], [3, 2, 1], [4, 4, 4], [2, 2, 2, 1])
            yield from (pytest.param(case, marks=() if chosen else pytest.mark.matrix) for case in found)


each_case = pytest.mark.parametrize("case", list(cases()), ids=str)


class Step(NamedTuple):
    kind: int
    slice: int
    slot: int  # a number of this rank's own
    peer: int
    writer: int  # the rank of this node that puts the payload there
    mark: tuple[int, int]  # its slice and number, alike for all ranks of a node


class Tabled(NamedTuple):
    """One rank's plan, as native code gets it."""

    steps: list[Step]
    n_slices: int
    ring: int

    def slots(self, kind: int, peer: int) -> list[int]:
        """Return what passes to a peer, or from it, by the numbers of messages."""
        return sorted(step.slot for step in self.steps if step.kind == kind and step.peer == peer)


class Recorder:
    """Stands in for the native library, and keeps the tables of a plan."""

    tabled: Tabled

    def cgx_plan_new(self, *arguments: Any) -> int:
        _, _, _, _, slots, _, _, _, steps, _, n_slices, ring, *_ = arguments
        rows = []
        for step in steps:
            slot = slots[step.slot]
            rows.append(Step(step.kind, slot.slice, step.slot, step.peer, slot.writer, (slot.slice, slot.flag)))
        self.tabled = Tabled(rows, n_slices, ring)
        return 1


def tables_of(case: Case, patterns: Sequence[Pattern], lag: int = 0) -> list[Tabled]:
    """Return all ranks' plans for slices of these patterns. `lag` 0: as groups have it."""
    topology, nodes = case
    plans = []
    for rank in range(topology.world):
        home = tuple(other for other, node in enumerate(nodes) if node == nodes[rank])
        tables = Tables(topology.world, lag or link_lag(topology.depth), topology.depth)
        for pattern in patterns:
            part = Slice(tuple(FULL if full else EMPTY for full in pattern))
            template = Template(program_for(topology, pattern, rank), node_slots_for(topology, pattern, home, rank))
            tables.add(template, part, rooms_for(template, part, topology.most_chunks))
        recorder: Any = Recorder()
        tables.build(recorder, FLOAT32)
        plans.append(recorder.tabled)
    return plans


class Rank:
    """What one rank has done."""

    def __init__(self, plan: Tabled, ring: int) -> None:
        self.plan = plan
        self.ring = ring
        self.home: list[Rank] = []  # the ranks of its node
        self.marks: set[tuple[int, int]] = set()  # of slots that are there for all of them
        self.position = 0
        self.begun = 0
        self.finished = 0  # slices, one after the other
        self.steps_left = [0] * plan.n_slices
        for step in plan.steps:
            self.steps_left[step.slice] += 1
        self.waiting_frames = [0] * plan.n_slices  # by slice: sent, and not taken yet
        self.arrived: set[int] = set()  # slots
        ranks = {step.peer for step in plan.steps}
        self.numbers = {peer: {slot: n for n, slot in enumerate(plan.slots(SEND, peer))} for peer in ranks}
        self.incoming = {peer: plan.slots(RECEIVE, peer) for peer in ranks}

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
            if not self.has_room_for(self.begun):
                return False
            self.begun += 1
            self.finish_slices()
        return True

    def has_room_for(self, number: int) -> bool:
        return all(number < member.finished + self.ring for member in self.home)


Connections = dict[tuple[int, int, int], deque[tuple[int, int]]]  # sender, receiver, stream: slices and messages


def advance(rank: int, ranks: Sequence[Rank], connections: Connections, streams: int, most: int) -> bool:
    """Make up to so many steps of a rank; return whether it made or began anything."""
    own = ranks[rank]
    before = (own.position, own.begun)
    steps = own.plan.steps
    while own.position < min(len(steps), before[0] + most):
        step = steps[own.position]
        is_near = step.kind in (SEND, RECEIVE) and ranks[step.peer] in own.home
        is_there = step.mark in own.marks if is_near else step.slot in own.arrived
        if not own.begin_slices(step.slice + 1) or (step.kind == RECEIVE and not is_there):
            break
        if step.kind == SEND and is_near:
            if step.writer == rank:
                own.marks.add(step.mark)
        elif step.kind == SEND:
            frames = connections.setdefault((rank, step.peer, step.slice % streams), deque())
            frames.append((step.slice, own.numbers[step.peer][step.slot]))
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
            number, message = frames.popleft()
            slot = ranks[rank].incoming[sender][message]
            assert slot not in ranks[rank].arrived
            ranks[rank].arrived.add(slot)
            ranks[sender].waiting_frames[number] -= 1
            ranks[sender].finish_slices()
            taken = True
    return taken


def stuck_ranks(
    plans: Sequence[Tabled], nodes: Sequence[int], ring: int, random: Random, streams: int = 1
) -> list[int]:
    """Run all ranks, in a random order, until none can go on. Return those that are not done then."""
    ranks = [Rank(plan, ring) for plan in plans]
    marks: dict[int, set[tuple[int, int]]] = {}
    for rank, node in zip(ranks, nodes, strict=True):
        rank.home = [other for other, at in zip(ranks, nodes, strict=True) if at == node]
        rank.marks = marks.setdefault(node, set())
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
    return link_lag(topology.depth) * topology.depth


@each_case
def test_slices_wait_in_a_circle_only_if_the_ring_is_too_small(case: Case) -> None:
    under_way = ticks_under_way(case.topology)
    ring = under_way + 2
    plans = tables_of(case, full_slices(case.topology, 3 * ring // 2 + 2))  # half of the ring is used twice
    assert {plan.ring for plan in plans} == {ring}
    for seed, streams in enumerate((1, 2)):
        assert not stuck_ranks(plans, case.nodes, ring, Random(seed), streams)
    # Slice t would have to begin before slice t - under_way is finished. So this test can fail.
    assert stuck_ranks(plans, case.nodes, under_way, Random(0))


@each_case
def test_nor_do_they_where_other_chunks_are_empty_in_each_slice(case: Case) -> None:
    for seed, fullness in enumerate((0.2, 0.7)):
        random = Random(seed)
        n_slices = random.randint(4, ticks_under_way(case.topology) + 8)
        patterns = [tuple(random.random() < fullness for _ in range(case.topology.n_chunks)) for _ in range(n_slices)]
        plans = tables_of(case, patterns)
        assert not stuck_ranks(plans, case.nodes, plans[0].ring, random)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("lag", range(1, MOST_LAG + 1))
def test_nor_do_they_with_another_lag(algorithm: str, lag: int) -> None:
    topology = Topology.flat(algorithm, 4)
    case = Case(topology, tuple(range(4)))
    plans = tables_of(case, full_slices(topology, 40), lag)
    assert plans[0].ring == lag * topology.depth + 2
    assert not stuck_ranks(plans, case.nodes, plans[0].ring, Random(lag))


@pytest.mark.parametrize("nodes", [(0, 1), (0, 1, 2, 3, 4), (0, 0, 1, 1), (0, 1, 0, 2, 1, 1), (3, 1, 1, 1)], ids=str)
def test_nor_do_they_where_values_are_only_moved(nodes: tuple[int, ...]) -> None:
    roots = range(len(nodes))
    for topology in (Topology.flat("EXCHANGE", len(nodes)), *(Topology.broadcast(nodes, root) for root in roots)):
        case = Case(topology, nodes)
        plans = tables_of(case, full_slices(topology, 30))
        for seed, streams in enumerate((1, 2)):
            assert not stuck_ranks(plans, nodes, plans[0].ring, Random(seed), streams), case
