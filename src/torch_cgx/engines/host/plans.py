"""Plans: everything that one rank does in one operation, as the tables that csrc/engine runs.

A rank makes its plan from its own program and those of its node, not from those of all ranks: on 256 hosts that is one
program instead of 256. Each rank numbers its own slots. Slots that are sent between two ranks have the same order in
the tables of both.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import torch

from torch_cgx import _native
from torch_cgx.errors import SharedMemoryError
from torch_cgx.kernels import Piece
from torch_cgx.kernels.native import DTYPES
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.algorithms.hierarchical import members_of
from torch_cgx.plan.layout import Layer, Layout, Slice
from torch_cgx.plan.program import Add, Decode, Encode, Join, Program, Receive, Reduce, Send, Slot, Sum
from torch_cgx.plan.programs import EXACT, NodeSlots, layout_for, node_slots_for, program_for
from torch_cgx.plan.schedule import levels_of
from torch_cgx.plan.slicing import largest_slice_nbytes, link_lag

__all__ = ["Plan", "Tables", "Template", "aligned", "homes_in_tensor", "make_plan", "rooms_for"]

_ALIGNMENT = 64  # bytes: no two slots share a cache line
_MARK_NBYTES = 16  # of a mark that tells a node that a payload is there
_BYTES = 4  # a dtype of csrc/include/cgx.h: values that are only moved
Rooms = tuple[int, int, int]
_NO_MEMORY = -5  # a status of csrc/include/cgx.h
# The home of a payload, numbered as in csrc/include/cgx.h: in memory, in the values, or at the decoded values.
_MEMORY, _VALUES, _RESULT = range(3)
_KINDS = {Encode: 0, Send: 1, Receive: 2, Reduce: 3, Decode: 4, Sum: 5, Add: 6}


class Plan:
    """One rank's tables. They are immutable, and any number of operations can use them."""

    def __init__(self, tables: Tables, payload_nbytes: int, dtype: torch.dtype) -> None:
        self.memory_nbytes = tables.memory_nbytes
        self.payload_nbytes = payload_nbytes
        lib = _native.library()
        assert lib is not None
        self._free = lib.cgx_plan_free
        self.handle = tables.build(lib, _BYTES if dtype is torch.uint8 else DTYPES[dtype])

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._free(self.handle)


class Template:
    """The rows that all slices with the same empty chunks have in common, for one rank."""

    def __init__(self, program: Program, node: NodeSlots, *, in_place: bool = False) -> None:
        """Make the rows of a program. `in_place`: leave exact payloads in the tensor if the program allows it."""
        chunks_of: dict[Slot, tuple[int, ...]] = {}
        for step in program:
            if isinstance(step, (Reduce, Sum)):
                chunks_of |= dict.fromkeys(step.inputs, step.chunks)
            if not isinstance(step, (Send, Receive, Sum)):
                chunks_of[step.slot] = step.chunks
        # Sorted, because a message is identified by its number and needs the same order on both sides.
        names = sorted(chunks_of)
        index = {name: number for number, name in enumerate(names)}
        self.n_places, self.n_flags = node.n_places, node.n_flags
        homes = homes_in_tensor(program) if in_place else {}
        self.in_place = in_place
        self.slots = [(chunks_of[name], node.found[name], homes.get(name, _MEMORY)) for name in names]
        self.inputs: list[int] = []
        # Per step: kind, slot, peer, chunks, whether it is exact, first input, inputs, partial, level.
        self.steps: list[tuple[int, int, int, tuple[int, ...], bool, int, int, int, int]] = []
        for step, level in zip(program, levels_of(program), strict=True):
            if isinstance(step, Join):  # its inputs are adjacent in memory already
                continue
            name = step.inputs[0] if isinstance(step, Sum) else step.slot
            peer, chunks = (step.peer, ()) if isinstance(step, (Send, Receive)) else (0, step.chunks)
            inputs = step.inputs if isinstance(step, (Reduce, Sum)) else ()
            partial = isinstance(step, Reduce) and not step.final
            exact = node.found[name].kind == EXACT
            row = (index[name], peer, chunks, exact, len(self.inputs), len(inputs), int(partial), level)
            self.steps.append((_KINDS[type(step)], *row))
            self.inputs.extend(index[each] for each in inputs)


class Tables:
    """The rows of a plan, collected slice by slice.

    With `lag` 0 the steps of a slice come after all steps of the slice before it, and two slices share the memory.
    Otherwise level l of slice t runs in tick t + l * lag, so that payloads are sent while other slices are computed.
    """

    def __init__(self, world: int, lag: int = 0, depth: int = 0) -> None:
        self._world = world
        self._lag = lag
        self._depth = depth
        self.ring = lag * depth + 2  # one more than are in progress, because a payload may still wait to be sent
        self._pieces: list[tuple[int, ...]] = []
        self._slots: list[tuple[int, ...]] = []
        self._inputs: list[int] = []
        self._steps: list[tuple[int, ...]] = []
        self._turns: list[int] = []  # per step; grows with its tick, and within a tick with its level
        self._slices = 0
        self._n_flags = 0
        self.part_nbytes = 0

    def add(self, template: Template, part: Slice, rooms: Rooms) -> None:
        """Add one slice. `rooms` has the bytes per place, by kind of place."""
        first_slot, first_input, number = len(self._slots), len(self._inputs), self._slices
        ends = list(accumulate(count * room for count, room in zip(template.n_places, rooms, strict=True)))
        starts = (0, *ends)
        for chunks, slot, home in template.slots:
            offset = starts[slot.kind] + slot.place * rooms[slot.kind]
            offset += sum(part.chunks[chunk].nbytes for chunk in slot.behind)
            coded = part.joined(chunks).coded(slot.kind == EXACT)
            nbytes = coded.nbytes
            assert offset + nbytes <= starts[slot.kind] + (slot.place + 1) * rooms[slot.kind], "no room for a payload"
            if template.in_place and coded.is_as_it_lies:
                # Both sides of a message omit the padding.
                (piece,) = coded.pieces
                nbytes = piece.numel * coded.itemsize
                offset = piece.offset * coded.itemsize if home else offset
            else:
                home = _MEMORY
            self._slots.append((offset, nbytes, slot.writer, slot.flag, number, home))
        self.part_nbytes = max(self.part_nbytes, ends[-1])
        self._n_flags = max(self._n_flags, template.n_flags)
        self._inputs.extend(first_slot + slot for slot in template.inputs)
        first_pieces: dict[tuple[tuple[int, ...], bool], tuple[int, int]] = {}
        for kind, slot_number, peer, chunks, exact, inputs_at, n_inputs, partial, level in template.steps:
            pieces = (0, 0)
            if chunks:
                coded = part.joined(chunks).coded(exact)
                if kind == _KINDS[Sum]:
                    pieces = self._add_pieces(coded.in_share)
                elif (chunks, exact) in first_pieces:
                    pieces = first_pieces[chunks, exact]
                else:
                    pieces = first_pieces[chunks, exact] = self._add_pieces(coded.pieces)
            row = (kind, first_slot + slot_number, peer, *pieces, first_input + inputs_at, n_inputs, partial)
            self._steps.append(row)
            self._turns.append((number + self._lag * level) * (self._depth + 1) + level if self._lag else number)
        self._slices += 1

    @property
    def memory_nbytes(self) -> int:
        return self.ring * self.part_nbytes

    def _add_pieces(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        """Append rows. Return the number of the first row and the number of rows."""
        first = len(self._pieces)
        self._pieces.extend((p.offset, p.numel, p.payload, p.raw_tail, p.block, p.bits, p.kind) for p in pieces)
        return first, len(pieces)

    def build(self, lib: ctypes.CDLL, dtype: int) -> int:
        # Steps of one level stay in the program's order.
        order = sorted(range(len(self._steps)), key=self._turns.__getitem__)
        pieces, slots = _array(_native.Piece, self._pieces), _array(_native.Slot, self._slots)
        steps = _array(_native.Step, (self._steps[number] for number in order))
        inputs = (ctypes.c_int64 * len(self._inputs))(*self._inputs)
        status = ctypes.c_int()
        handle = lib.cgx_plan_new(
            self._world,
            dtype,
            pieces,
            len(pieces),
            slots,
            len(slots),
            inputs,
            len(inputs),
            steps,
            len(steps),
            self._slices,
            self.ring,
            self.part_nbytes,
            self._n_flags,
            status,
        )
        if status.value == _NO_MEMORY:
            raise MemoryError("out of memory while planning an operation: free some, then restart all ranks")
        assert handle, "the native library found an inconsistent plan"
        return int(handle)


def homes_in_tensor(program: Program) -> dict[Slot, int]:
    """Return the slots whose payload, if it is exact, can stay in a tensor, and which tensor that is.

    A rank sends from the values that it would encode, and receives into those that it would decode into. That is safe
    if no payload overwrites values that are still to be read or sent: tests/plan/test_in_place.py proves it. Summands
    must be elsewhere, and parts of a joined payload must be adjacent.
    """
    elsewhere: set[str] = set()
    homes: dict[Slot, int] = {}
    for step in program:
        if isinstance(step, (Reduce, Sum, Join)):
            elsewhere.update(step.inputs)
        if isinstance(step, (Encode, Reduce)):
            homes[step.slot] = _VALUES
        elif isinstance(step, Decode):  # of a peer's payload, or of this rank's own
            homes.setdefault(step.slot, _RESULT)
        elif isinstance(step, (Add, Join)):
            elsewhere.add(step.slot)
    return {slot: home for slot, home in homes.items() if slot not in elsewhere}


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def rooms_for(node: NodeSlots | Template, part: Slice, most_chunks: int) -> Rooms:
    """Return the bytes per place that fit any payload of a slice, by kind of place. A joined one has `most_chunks`."""
    compressed = max(chunk.nbytes for chunk in part.chunks)
    exact = max(chunk.exact.nbytes for chunk in part.chunks) if node.n_places[EXACT] else 0
    return aligned(compressed), aligned(exact), aligned(most_chunks * compressed)


def _array(kind: type[ctypes.Structure], rows: Iterable[tuple[int, ...]]) -> ctypes.Array[ctypes.Structure]:
    """Pack rows into an array of a structure whose fields all have 64 bits."""
    words = array("q", chain.from_iterable(rows))
    return (kind * (len(words) * words.itemsize // ctypes.sizeof(kind))).from_buffer(words)


def make_plan(
    layers: Sequence[Layer],
    rank: int,
    topology: Topology,
    dtype: torch.dtype,
    *,
    nodes: Sequence[int],
    slice_nbytes: int,
    limit_nbytes: int,
    by_sockets: bool = True,
) -> Plan:
    """Return the plan with the largest slices, up to `slice_nbytes`, whose payloads fit into `limit_nbytes`.

    `nodes`: a number per rank, equal for ranks that share memory. `by_sockets`: sockets carry the payloads between
    nodes, and release a tensor when an operation has failed. All ranks find the same slices.
    """
    homes = members_of(tuple(nodes))
    linked = len(homes) > 1
    in_place = by_sockets and linked and len(homes) == topology.world and topology.is_flat and topology.most_chunks == 1
    values_nbytes = sum(layer.numel for layer in layers) * dtype.itemsize
    payload_nbytes = sum(layer.codec.payload_nbytes(layer.numel, dtype.itemsize) for layer in layers)
    largest = largest_slice_nbytes(
        topology.n_chunks,
        topology.world,
        linked=linked,
        values_nbytes=values_nbytes,
        payload_nbytes=payload_nbytes,
        moved=dtype is torch.uint8,
    )
    slice_nbytes = max(1, min(slice_nbytes, largest))
    tables = Tables(topology.world, link_lag(topology.depth) if linked else 0, topology.depth)
    # If ranks of a node share memory, the largest node with no chunk empty is an upper bound for all nodes.
    by_node = topology.is_flat or homes == members_of(topology.nodes)
    neediest = [max(homes, key=len)] if by_node else homes
    while True:
        layout = layout_for(topology, layers, dtype.itemsize, slice_nbytes)
        memory_nbytes = tables.ring * _most_nbytes(layout, topology, neediest, full=True)
        has_empty = any(not chunk.nbytes for part in layout.slices for chunk in part.chunks)
        if memory_nbytes > limit_nbytes and has_empty:
            memory_nbytes = tables.ring * _most_nbytes(layout, topology, homes, full=False)
        if memory_nbytes <= limit_nbytes:
            break
        if slice_nbytes <= 1024:
            raise SharedMemoryError(
                f"a block of {max(layer.codec.block for layer in layers)} values needs "
                f"{memory_nbytes} bytes of memory, and the group may take {limit_nbytes}: "
                "make /dev/shm larger or blocks smaller"
            )
        slice_nbytes //= 2
    home = next(ranks for ranks in homes if rank in ranks)
    templates: dict[tuple[bool, ...], Template] = {}
    for part in layout.slices:
        nonempty = tuple(chunk.nbytes > 0 for chunk in part.chunks)
        if nonempty not in templates:
            node = node_slots_for(topology, nonempty, home, rank)
            templates[nonempty] = Template(program_for(topology, nonempty, rank), node, in_place=in_place)
        template = templates[nonempty]
        tables.add(template, part, rooms_for(template, part, topology.most_chunks))
    return Plan(tables, sum(part.nbytes for part in layout.slices), dtype)


def _most_nbytes(layout: Layout, topology: Topology, homes: Sequence[tuple[int, ...]], *, full: bool) -> int:
    """Return the most bytes of memory that a slice needs on any of these nodes. `full`: assume no chunk is empty."""
    most_payload = most_flags = 0
    for part in layout.slices:
        nonempty = tuple(full or chunk.nbytes > 0 for chunk in part.chunks)
        for home in homes:
            node = node_slots_for(topology, nonempty, home, home[0])
            rooms = rooms_for(node, part, topology.most_chunks)
            needed = sum(count * room for count, room in zip(node.n_places, rooms, strict=True))
            most_payload, most_flags = max(most_payload, needed), max(most_flags, node.n_flags)
    # Groups of several nodes also keep marks.
    return most_payload + (most_flags * _MARK_NBYTES + _ALIGNMENT if len(homes[0]) < topology.world else 0)
