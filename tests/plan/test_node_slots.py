"""Ranks of one node find the same slots at the same places of the memory that they share."""

from __future__ import annotations

from random import Random

import pytest

from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.algorithms.hierarchical import most_shares
from torch_cgx.plan.program import Encode, Join, Receive, Reduce, Send, Step, Sum
from torch_cgx.plan.programs import EXACT, JOINED, node_slots_for, programs_for

NODES = [(0, 0, 1, 1), (0, 1, 0, 0, 2), (0, 0, 0, 0, 1), (0, 1, 2, 3, 3, 1), (0, 1, 2, 3, 0, 1, 2, 3)]
TOPOLOGIES = [
    (topology, nodes)
    for nodes in NODES
    for topology in (
        *(Topology.flat(name, len(nodes)) for name in ("SRA", "REDUCE_SCATTER", "ALL_GATHER", "EXCHANGE")),
        *(Topology.broadcast(nodes, root) for root in (0, len(nodes) - 1)),
        *(Topology("GRID", nodes, shares) for shares in range(2, most_shares(nodes) + 1)),
        *(
            Topology(name, nodes, compress_inside=inside)
            for name in ("SRA", "RING", "GRID")
            for inside in (True, False)
        ),
    )
]


def slots_of(step: Step) -> tuple[str, ...]:
    """Return the slots that a step reads, writes or moves."""
    if isinstance(step, Sum):
        return step.inputs
    if isinstance(step, Join):
        return (*step.inputs, step.slot)
    return (*step.inputs, step.slot) if isinstance(step, Reduce) else (step.slot,)


@pytest.mark.parametrize(("topology", "nodes"), TOPOLOGIES, ids=str)
def test_all_ranks_of_a_node_agree_on_places_marks_and_writers(topology: Topology, nodes: tuple[int, ...]) -> None:
    random = Random(topology.world)
    full = (True,) * topology.n_chunks
    some = [full if topology.algorithm == "EXCHANGE" else tuple(random.random() < 0.6 for _ in full) for _ in range(4)]
    for nonempty in (full, *some):
        check_views(topology, nodes, nonempty)


def check_views(topology: Topology, nodes: tuple[int, ...], nonempty: tuple[bool, ...]) -> None:
    programs, slots = programs_for(topology, nonempty)
    for node in set(nodes):
        home = tuple(rank for rank, at in enumerate(nodes) if at == node)
        views = {rank: node_slots_for(topology, nonempty, home, rank) for rank in home}
        first = views[home[0]]
        for rank, view in views.items():
            assert (view.n_places, view.n_flags) == (first.n_places, first.n_flags)
            assert all(slot.flag < view.n_flags for slot in view.found.values())
            assert all(slot.place < view.n_places[slot.kind] for slot in view.found.values())
            for name, slot in view.found.items():
                assert slots[name].exact == (slot.kind == EXACT)
            for step in programs[rank]:
                # A rank finds all that it touches, and what it writes or receives from elsewhere is its own to write.
                assert all(name in view.found for name in slots_of(step))
                puts = isinstance(step, Encode | Reduce | Join) or (isinstance(step, Receive) and step.peer not in home)
                assert not puts or view.found[step.slot].writer == rank
                if isinstance(step, Send | Receive) and step.peer in home:  # then both look at one place
                    assert views[step.peer].found[step.slot] == view.found[step.slot]
        # No two payloads have one place or one mark. A payload that several ranks receive has one mark, many places.
        places: dict[object, object] = {}
        marks: dict[object, str] = {}
        for rank, view in views.items():
            for step in programs[rank]:
                if isinstance(step, Join):  # its parts lie in its place, in their order
                    parts = [view.found[name] for name in step.inputs]
                    assert {part.place for part in parts} == {view.found[step.slot].place}
                    assert [part.behind for part in parts] == [step.chunks[:n] for n in range(len(parts))]
            for name, slot in view.found.items():
                is_part = name.startswith("sum:") and slot.kind == JOINED
                place = (slot.kind, slot.place, slot.behind if is_part else None)
                assert places.setdefault(place, (name, slot.writer)) == (name, slot.writer)
                mark = slot.flag if len(home) < topology.world else (slot.writer, slot.flag)
                assert marks.setdefault(mark, name) == name
