"""All ranks' programs for one pattern of chunks, the slots in them, numbered alike on every rank, and their layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch_cgx.plan.algorithms import IN_SHARES, Topology
from torch_cgx.plan.layout import Layer, Layout, make_layout, make_shares_layout
from torch_cgx.plan.program import Encode, Program, Receive, Reduce

__all__ = ["NodeSlot", "NodeSlots", "SharedSlot", "layout_for", "node_slots_for", "programs_for"]


def layout_for(topology: Topology, layers: Sequence[Layer], itemsize: int, slice_nbytes: int) -> Layout:
    """How a tensor is cut for the programs of a topology. Where ranks have shares, the layers are those of one."""
    make = make_shares_layout if topology.algorithm in (*IN_SHARES, "EXCHANGE") else make_layout
    return make(layers, topology.n_chunks, itemsize, slice_nbytes)


@dataclass(frozen=True, slots=True)
class SharedSlot:
    """A slot as all ranks see it."""

    index: int  # among all slots of the programs
    writer: int
    flag: int  # among the slots of its writer
    chunk: int
    exact: bool


@lru_cache(maxsize=256)
def programs_for(topology: Topology, nonempty: tuple[bool, ...]) -> tuple[tuple[Program, ...], dict[str, SharedSlot]]:
    """The programs by rank, and the slots that any of them writes, by name."""
    programs = tuple(topology.program(nonempty, rank) for rank in range(topology.world))
    slots: dict[str, SharedSlot] = {}
    for rank, program in enumerate(programs):
        written = [step for step in program if isinstance(step, Encode | Reduce)]
        for flag, step in enumerate(written):
            assert step.slot not in slots, f"{step.slot} has two writers"
            slots[step.slot] = SharedSlot(len(slots), rank, flag, step.chunk, step.exact)
    return programs, slots


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """The location of a slot in the memory that a node shares, as one of its ranks uses it."""

    place: int  # among the places of its slice, in the order in which they lie in memory
    writer: int  # the rank of the node that puts the payload there: by encoding it, or by receiving it from elsewhere


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """The slots that the ranks of one node use, with their locations in its memory."""

    found: dict[str, NodeSlot]
    places: tuple[str, ...]  # whose payload each place is for; the same on all ranks of the node
    flags: dict[str, int]  # numbers of the slots that any of them touches; the same on all of them


@lru_cache(maxsize=1024)
def node_slots_for(
    topology: Topology, nonempty: tuple[bool, ...], home: tuple[int, ...], rank: int | None = None
) -> NodeSlots:
    """Return where a rank of the node `home` finds the slots that it touches.

    Where several ranks of a node receive the same payload from elsewhere, each has a place of its own for it, and none
    hands it on within the node: a flat ring would, so it is for ranks that share no memory, or all of it.
    """
    programs, slots = programs_for(topology, nonempty)
    writers: dict[str, list[int]] = {}
    for member in home:
        for step in programs[member]:
            if isinstance(step, Encode | Reduce) or (isinstance(step, Receive) and step.peer not in home):
                writers.setdefault(step.slot, []).append(member)
    found: dict[str, NodeSlot] = {}
    places: list[str] = []
    touched = [name for name in slots if name in writers]
    for name in touched:
        for writer in writers[name]:
            if len(writers[name]) == 1 or writer == rank:
                found[name] = NodeSlot(len(places), writer)
            places.append(name)
    return NodeSlots(found, tuple(places), {name: number for number, name in enumerate(touched)})
