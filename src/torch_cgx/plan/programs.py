"""Programs cached by pattern of nonempty chunks, and the slots and layouts that they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch_cgx.plan.algorithms import IN_SHARES, Topology
from torch_cgx.plan.layout import Layer, Layout, make_layout, make_shares_layout
from torch_cgx.plan.program import Add, Decode, Encode, Join, Program, Receive, Reduce, Slot

__all__ = [
    "COMPRESSED",
    "EXACT",
    "JOINED",
    "NodeSlot",
    "NodeSlots",
    "SharedSlot",
    "layout_for",
    "node_slots_for",
    "program_for",
    "programs_for",
]


def layout_for(topology: Topology, layers: Sequence[Layer], itemsize: int, slice_nbytes: int) -> Layout:
    """Return the layout of a tensor for the programs of a topology. If ranks have shares, `layers` are those of one."""
    make = make_shares_layout if topology.algorithm in (*IN_SHARES, "EXCHANGE") else make_layout
    return make(layers, topology.n_chunks, itemsize, slice_nbytes)


@dataclass(frozen=True, slots=True)
class SharedSlot:
    """A slot as all ranks see it."""

    writer: int
    chunks: tuple[int, ...]
    exact: bool


@lru_cache(maxsize=1024)
def program_for(topology: Topology, nonempty: tuple[bool, ...], rank: int) -> Program:
    """Return the program of one rank."""
    return topology.program(nonempty, rank)


@lru_cache(maxsize=256)
def programs_for(topology: Topology, nonempty: tuple[bool, ...]) -> tuple[tuple[Program, ...], dict[Slot, SharedSlot]]:
    """Return the programs by rank, and the slots that any of them writes, by name."""
    programs = tuple(program_for(topology, nonempty, rank) for rank in range(topology.world))
    slots: dict[Slot, SharedSlot] = {}
    for rank, program in enumerate(programs):
        for step in program:
            if isinstance(step, Encode | Reduce | Join):
                assert step.slot not in slots, f"{step.slot} has two writers"
                slots[step.slot] = SharedSlot(rank, step.chunks, not isinstance(step, Join) and step.exact)
    return programs, slots


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """The location of a slot in the memory that a node shares, as one of its ranks uses it."""

    kind: int  # of place: COMPRESSED, EXACT or JOINED
    place: int  # index among the places of its kind, in memory order
    writer: int  # the rank of the node that puts the payload there: by encoding it, or by receiving it from elsewhere
    flag: int  # its number: on several nodes among this node's slots, on one node among its writer's
    behind: tuple[int, ...] = ()  # the chunks whose payloads lie in the same place before it


# Kinds of places: for the payload of one chunk, compressed or exact, or for the payloads of several, concatenated.
COMPRESSED, EXACT, JOINED = range(3)


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """The slots that one rank of a node finds in its memory."""

    found: dict[Slot, NodeSlot]
    n_places: tuple[int, int, int]  # of the node, by kind
    n_flags: int  # one more than the node's greatest flag


@lru_cache(maxsize=1024)
def node_slots_for(topology: Topology, nonempty: tuple[bool, ...], home: tuple[int, ...], rank: int) -> NodeSlots:
    """Return where a rank of the node `home` finds the slots that it touches.

    If several ranks of a node receive the same payload from elsewhere, each has a place of its own for it, and none
    forwards it within the node. A flat ring would, so it is only for ranks that share no memory, or all of it. The
    inputs of a `Join` are placed next to each other, so that joining copies nothing.
    """
    elsewhere = frozenset(range(topology.world)) - frozenset(home)
    writers: dict[Slot, list[tuple[int, bool]]] = {}
    several: set[str] = set()  # slots of more than one chunk
    within: dict[Slot, Join] = {}  # by the slot that the join reads
    for member in home:
        for step in program_for(topology, nonempty, member):
            if isinstance(step, (Encode, Reduce)) or (isinstance(step, Receive) and step.peer in elsewhere):
                writers.setdefault(step.slot, []).append((member, step.exact))
            elif isinstance(step, Join):
                writers.setdefault(step.slot, []).append((member, False))
                several.add(step.slot)
                within |= dict.fromkeys(step.inputs, step)
            if isinstance(step, (Encode, Add, Decode)) and step.more:
                several.add(step.slot)
    found: dict[Slot, NodeSlot] = {}
    n_places = [0, 0, 0]
    n_flags: Counter[int] = Counter()
    alone = len(home) == topology.world
    for name in sorted(writers, key=within.__contains__):  # joined slots come before their parts
        written = writers[name]
        flags_of = written[0][0] if alone else -1
        flag = n_flags[flags_of]
        n_flags[flags_of] += 1
        if name in within:
            ((writer, _),) = written
            join = within[name]
            behind = join.chunks[: join.inputs.index(name)]
            found[name] = NodeSlot(JOINED, found[join.slot].place, writer, flag, behind)
            continue
        for writer, exact in written:
            kind = JOINED if name in several else EXACT if exact else COMPRESSED
            if len(written) == 1 or writer == rank:
                found[name] = NodeSlot(kind, n_places[kind], writer, flag)
            n_places[kind] += 1
    return NodeSlots(found, (n_places[0], n_places[1], n_places[2]), max(n_flags.values(), default=0))
