"""Run programs natively, over shared memory or over links: the Python side of csrc/engine.

A `Plan` is everything that one rank does in one operation, as the tables that csrc/engine runs on a thread of its own,
without the GIL. A `SharedGroup` is one rank's handle on the segment or the links, the board and that thread. Not here:
which tensors are compressed, and how ranks find each other (group/).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Mapping, Sequence

import torch

from torch_cgx import _native
from torch_cgx.errors import (
    CGXError,
    CGXTimeoutError,
    MismatchError,
    PeerLostError,
    PoisonedError,
    SharedMemoryError,
    TransportError,
)
from torch_cgx.kernels import Piece
from torch_cgx.kernels.native import DTYPES
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.layout import Chunk, Layer, Layout
from torch_cgx.plan.program import Add, Decode, Encode, Program, Receive, Reduce, Send, Sum
from torch_cgx.plan.programs import NodeSlot, NodeSlots, SharedSlot, layout_for, node_slots_for, programs_for
from torch_cgx.plan.schedule import levels_for

__all__ = ["Plan", "Prepared", "SharedGroup", "Tables", "make_plan"]

PENDING = 1
_ALIGNMENT = 64  # bytes: no two slots share a cache line
_MARK_NBYTES = 16  # by which a rank tells its node that a payload is there
_BYTES = 4  # a dtype of csrc/include/cgx.h: values that are only moved
_KINDS = {Encode: 0, Send: 1, Receive: 2, Reduce: 3, Decode: 4, Sum: 5, Add: 6}
_ERRORS: dict[int, type[CGXError]] = {
    -1: CGXTimeoutError,
    -2: PeerLostError,
    -3: MismatchError,
    -4: PoisonedError,
    -5: SharedMemoryError,
    -8: TransportError,
}

# The most of a slice, in bytes of values and of payloads. Small enough that what is encoded is still in the cache
# when its sum is decoded over it, and that payloads stay there too; large enough that two meetings of all ranks a
# slice cost little. The payload's bound: 25 MB exact on two ranks took 3.6 ms at 1 MB and 4.5 at 4 (one run each).
# The values' bound is a weak choice among about five that were tried, on a noisy machine: on two ranks 1 to 8 MB were
# alike; on four ranks and two cores 25 MB at 4 bits took 9.4 to 10.7 ms at 0.5 MB and 10.6 to 14.3 at 2 in one
# session, but 15 ms at 0.5 MB in another. Nothing shows that it matters to a busy main thread.
PIPELINE_PAYLOAD_NBYTES = 1 << 20


# Over links: values of a slice per rank, so that a message has 32 KB at 4 bits, and how many slices are under way.
# Between two hosts at 1 Gbit/s, 25 MB at 4 bits take longer while the main thread is busy in Python: 1.21 and 1.31x
# with a lag of 2 slices between the levels of SRA, 1.04 with 4, 1.20 with 8 (other work ran beside the last two).
# Payloads on their way must outlast the time that the scheduler takes to let this thread in. At 10 Gbit/s 2 and 4 are
# alike.
LINK_CHUNK_NBYTES = 256 << 10
LINK_SLICES = 8
MOVED_CHUNK_NBYTES = 128 << 10  # at least so much from a rank to another, of what is only moved through memory
MOST_LAG = 4


def link_lag(depth: int) -> int:
    """Return how many slices later the next level of a slice runs over links, for programs of this depth."""
    return max(1, min(MOST_LAG, LINK_SLICES // max(depth, 1)))


def pipeline_values_nbytes(world: int) -> int:
    """The most values of a slice: 4 MB on two ranks, 0.5 MB on four, never less than 0.25 MB."""
    return max((32 << 20) // world**3, 256 << 10)


class Plan:
    """One rank's tables; immutable, and used by any number of operations."""

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


class Tables:
    """Collects the rows of a plan, slice by slice.

    With `lag` 0 the steps of a slice come after all steps of the slice before it, and two slices share the memory.
    Otherwise level l of slice t runs in tick t + l * lag, so that payloads travel while other slices are computed.
    """

    def __init__(self, world: int, lag: int = 0, depth: int = 0) -> None:
        self._world = world
        self._lag = lag
        self.ring = lag * depth + 2  # one more than are under way: their payloads may still wait to be sent
        self._pieces: list[Piece] = []
        self._slots: list[tuple[int, ...]] = []
        self._inputs: list[int] = []
        self._steps: list[tuple[tuple[int, int], tuple[int, ...]]] = []  # with the tick and level of each
        self._slices = 0
        self.part_nbytes = 0

    def add(
        self,
        program: Program,
        slots: Mapping[str, SharedSlot],
        chunks: Sequence[Chunk],
        levels: Sequence[int] | None = None,
        node: NodeSlots | None = None,
        room_nbytes: int | None = None,
    ) -> None:
        """Add one rank's steps, of which `levels` has the level of each.

        `slots` are all ranks', in the order of their index. `node` says where this rank finds those that it touches, as
        `node_slots_for` does; None: all ranks share all memory. `room_nbytes`: of every slot; None: what it holds.
        """
        first_slot = len(self._slots)
        nbytes = {
            name: chunks[slot.chunk].coded(slot.exact).nbytes if room_nbytes is None else room_nbytes
            for name, slot in slots.items()
        }
        offsets = [0]
        for name in tuple(slots) if node is None else node.places:
            offsets.append(offsets[-1] + _aligned(nbytes[name]))
        for name, slot in slots.items():
            where = NodeSlot(slot.index, slot.writer) if node is None else node.found.get(name)
            flag = slot.flag if node is None else node.flags.get(name, 0)
            # A slot that this rank does not touch has no room: its row only keeps the others' numbers.
            offset, writer = (0, slot.writer) if where is None else (offsets[where.place], where.writer)
            self._slots.append((offset, nbytes[name], writer, flag, self._slices))
        self.part_nbytes = max(self.part_nbytes, offsets[-1], *nbytes.values(), 0)
        first_piece: dict[tuple[int, bool], int] = {}
        for step, level in zip(program, levels or [0] * len(program), strict=True):
            name = step.inputs[0] if isinstance(step, Sum) else step.slot
            assert node is None or name in node.found, f"no place for {name} on this node"
            row = [_KINDS[type(step)], first_slot + slots[name].index, 0, 0, 0, 0, 0, 0]
            if isinstance(step, Send | Receive):
                row[2] = step.peer
            else:
                chunk = chunks[step.chunk].coded(slots[name].exact)
                key = (step.chunk, slots[name].exact)
                if isinstance(step, Sum):
                    row[3] = self._add_pieces(chunk.in_share)
                else:
                    if key not in first_piece:
                        first_piece[key] = self._add_pieces(chunk.pieces)
                    row[3] = first_piece[key]
                row[4] = len(chunk.pieces)
            if isinstance(step, Reduce | Sum):
                row[5:8] = len(self._inputs), len(step.inputs), int(isinstance(step, Reduce) and not step.final)
                self._inputs.extend(first_slot + slots[each].index for each in step.inputs)
            self._steps.append(((self._slices + self._lag * level, level), tuple(row)))
        self._slices += 1

    @property
    def memory_nbytes(self) -> int:
        return self.ring * self.part_nbytes

    def _add_pieces(self, pieces: Sequence[Piece]) -> int:
        """The first one's row."""
        self._pieces.extend(pieces)
        return len(self._pieces) - len(pieces)

    def build(self, lib: ctypes.CDLL, dtype: int) -> int:
        pieces = _array(
            _native.Piece, ((p.offset, p.numel, p.payload, p.raw_tail, p.block, p.bits) for p in self._pieces)
        )
        slots = _array(_native.Slot, self._slots)
        in_order = sorted(self._steps, key=lambda each: each[0])  # steps of one level stay in the program's order
        steps = _array(_native.Step, (row for _, row in in_order))
        inputs = (ctypes.c_int64 * len(self._inputs))(*self._inputs)
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
        )
        assert handle, "the native library found an inconsistent plan"
        return int(handle)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _array(kind: type[ctypes.Structure], rows: Iterable[tuple[int, ...]]) -> ctypes.Array[ctypes.Structure]:
    filled = [kind(*row) for row in rows]
    return (kind * len(filled))(*filled)


def make_plan(
    layers: Sequence[Layer],
    rank: int,
    topology: Topology,
    dtype: torch.dtype,
    *,
    nodes: Sequence[int],
    slice_nbytes: int,
    limit_nbytes: int,
) -> Plan:
    """Return the plan with the largest slices, up to `slice_nbytes`, whose payloads fit into `limit_nbytes`.

    `nodes`: by rank, a number of what shares memory with it. All ranks find the same slices.
    """
    world, linked = topology.world, len(set(nodes)) > 1
    values_nbytes = sum(layer.numel for layer in layers) * dtype.itemsize
    payload_nbytes = sum(layer.quantizer.payload_nbytes(layer.numel, dtype.itemsize) for layer in layers)
    within_payload = PIPELINE_PAYLOAD_NBYTES * values_nbytes // max(payload_nbytes, 1)
    largest = LINK_CHUNK_NBYTES * topology.n_chunks if linked else min(pipeline_values_nbytes(world), within_payload)
    if (
        dtype is torch.uint8
    ):  # an exchange has slots for all pairs of ranks: to make the tables of many slices takes long
        largest = max(largest, world * MOVED_CHUNK_NBYTES)
    slice_nbytes = max(1, min(slice_nbytes, largest))
    while True:
        layout = layout_for(topology, layers, dtype.itemsize, slice_nbytes)
        tables, memory_nbytes = _tables_of(layout, rank, topology, tuple(nodes))
        if memory_nbytes <= limit_nbytes:
            return Plan(tables, sum(part.nbytes for part in layout.slices), dtype)
        if slice_nbytes <= 1024:
            raise SharedMemoryError(
                f"a block of {max(layer.quantizer.block for layer in layers)} values needs "
                f"{memory_nbytes} bytes of memory, and the group may take {limit_nbytes}: "
                "make /dev/shm larger or blocks smaller"
            )
        slice_nbytes //= 2


def _tables_of(layout: Layout, rank: int, topology: Topology, nodes: tuple[int, ...]) -> tuple[Tables, int]:
    """Return a rank's tables, and the most memory that any node needs for its own."""
    patterns = [tuple(chunk.nbytes > 0 for chunk in part.chunks) for part in layout.slices]
    if len(set(nodes)) == 1:
        tables = Tables(topology.world)
        for part, nonempty in zip(layout.slices, patterns, strict=True):
            programs, slots = programs_for(topology, nonempty)
            tables.add(programs[rank], slots, part.chunks)
        return tables, tables.memory_nbytes
    depth = max((levels_for(topology, pattern).depth for pattern in set(patterns)), default=0)
    tables = Tables(topology.world, link_lag(depth), depth)
    homes = {node: tuple(other for other, at in enumerate(nodes) if at == node) for node in dict.fromkeys(nodes)}
    largest = 0
    for part, nonempty in zip(layout.slices, patterns, strict=True):
        programs, slots = programs_for(topology, nonempty)
        found = node_slots_for(topology, nonempty, homes[nodes[rank]], rank)
        tables.add(programs[rank], slots, part.chunks, levels_for(topology, nonempty).by_rank[rank], found)
        nbytes = {name: part.chunks[slot.chunk].coded(slot.exact).nbytes for name, slot in slots.items()}
        for home in homes.values():
            places = node_slots_for(topology, nonempty, home).places
            room = sum(_MARK_NBYTES + _aligned(nbytes[name]) for name in places)
            largest = max(largest, room + _ALIGNMENT)
    return tables, tables.ring * max(largest, tables.part_nbytes)


class Prepared:
    """An operation but for its tensor's address: what the backend keeps for each shape that it has seen."""

    def __init__(
        self,
        plan: Plan,
        call: _native.Call,
        *,
        scale: float,
        nbytes: int,
        compressed: bool,
        stochastic: bool,
        seed: int,
    ) -> None:
        self.plan = plan
        self.call = call
        self.submission = _native.Submission()
        self.submission.plan = plan.handle
        self.submission.scale = scale
        self.submission.rounding.seed = seed
        self.submission.rounding.stochastic = stochastic
        self.submission.bytes_before = nbytes
        self.submission.bytes_after = plan.payload_nbytes
        self.submission.compressed = compressed


class SharedGroup:
    """One rank's handle on the native group. `close` may be called at any time; memory goes with the last reference.

    `nodes` has, by rank, a number of what shares memory with it. Before the group is used, `link` joins this rank to
    each peer elsewhere, and where there are some, `hang_bells` to those of its own node. Without a control segment
    (None) no other rank may be on this rank's node.
    """

    def __init__(
        self,
        control_name: str | None,
        rank: int,
        nodes: Sequence[int],
        global_ranks: Sequence[int],
        names: tuple[Sequence[str], Sequence[str], Sequence[str]],
        means: _native.Means,
        limit_nbytes: int,
    ) -> None:
        lib = _native.library()
        assert lib is not None
        self._lib = lib
        self._handle = 0
        self._getpid = os.getpid  # for __del__ at exit, when modules are empty already
        self._pid = os.getpid()
        self.limit_nbytes = limit_nbytes
        self._lock = threading.Lock()
        error = ctypes.create_string_buffer(512)
        operations, dtypes, reductions = ("\n".join(words).encode() for words in names)
        world = len(nodes)
        self.nodes = tuple(nodes)
        self.linked = len(set(nodes)) > 1
        assert control_name is not None or self.nodes.count(nodes[rank]) == 1
        self._handle = lib.cgx_group_open(
            None if control_name is None else control_name.encode(),
            rank,
            world,
            (ctypes.c_int32 * world)(*nodes),
            (ctypes.c_int32 * world)(*global_ranks),
            operations,
            dtypes,
            reductions,
            means,
            limit_nbytes,
            error,
            len(error),
        )
        if not self._handle:
            raise SharedMemoryError(error.value.decode())

    def __del__(self) -> None:
        # In a forked child the group's thread does not exist, and freeing would wait for it: the child lets it be.
        if self._handle and self._getpid() == self._pid:
            self._lib.cgx_group_free(self._handle)

    def link_by_mpi(self, peer: int, library: _native.Mpi, tags: Sequence[int]) -> None:
        """Send data to a peer by MPI, in streams of these tags. The control connection comes by `link`."""
        for tag in tags:
            status = self._lib.cgx_group_link_mpi(self._handle, peer, library, tag)
            if status != 0:
                raise TransportError(f"MPI cannot be used: it refused a receive from rank {peer} of the group")

    def link(self, peer: int, control: int, streams: Sequence[int]) -> None:
        """Take over the descriptors of connected sockets to a peer."""
        for stream, file in (*enumerate(streams), (-1, control)):
            status = self._lib.cgx_group_link(self._handle, peer, stream, file)
            assert status == 0, f"the native library refused a link to rank {peer}"

    def hang_bells(self, bells: Mapping[int, int]) -> None:
        """Take over the descriptors by which ranks of this node wake each other; of this rank: what it sleeps on."""
        for peer, file in bells.items():
            status = self._lib.cgx_group_bell(self._handle, peer, file)
            assert status == 0, f"the native library refused the bell of rank {peer}"

    def agree(self, call: _native.Call, timeout_ms: int, *, wake: bool) -> tuple[int, int]:
        """Queue an operation that is done when all linked ranks have made this call: its number and sequence."""
        self._check_process()
        row = _native.Submission()
        row.timeout_ms = timeout_ms
        row.wake = wake
        number = self._lib.cgx_group_submit(self._handle, call, row)
        if number < 0:
            raise self.error(number)
        return int(number), int(row.sequence)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise CGXError("a process group does not survive fork: call init_process_group in the child")

    def note(self, call: _native.Call) -> int:
        """Write a call on the board; its number."""
        return int(self._lib.cgx_group_note(self._handle, call))

    def submit(
        self,
        prepared: Prepared,
        data_ptr: int,
        residual_ptr: int | None,
        timeout_ms: int,
        *,
        wake: bool,
        share_ptr: int | None = None,
    ) -> tuple[int, int]:
        """Note and queue an operation: its number, and the number of the last one that is done.

        The tensors must live until this one is done. `wake` False: the caller waits at once, and runs it on its own
        thread.
        """
        self._check_process()
        with self._lock:
            row = prepared.submission
            row.values = data_ptr
            row.residual = residual_ptr
            row.share = share_ptr
            row.timeout_ms = timeout_ms
            row.wake = wake
            number = self._lib.cgx_group_submit(self._handle, prepared.call, row)
            completed = row.completed
        if number < 0:
            raise self.error(number)
        return number, completed

    def wait(self, number: int, slice_ms: int) -> bool:
        """Wait natively for at most a slice; whether the operation is done. Raises what it failed with."""
        self._check_process()
        status = self._lib.cgx_group_wait(self._handle, number, slice_ms)
        if status < 0:
            raise self.error(status)
        return bool(status != PENDING)

    def kick(self) -> None:
        """Let the group's thread go on with what this thread will not."""
        self._lib.cgx_group_kick(self._handle)

    def check(self, sequence: int) -> None:
        """Raise if ranks have lost step at this call, or a rank has failed."""
        self._check(sequence, 0)

    def check_missing(self, sequence: int) -> None:
        """And if a peer has died before it made this call."""
        self._check(sequence, 1)

    def check_alive(self, sequence: int) -> None:
        """And if any peer has died."""
        self._check(sequence, 2)

    def _check(self, sequence: int, look_at_peers: int) -> None:
        status = self._lib.cgx_group_check(self._handle, sequence, look_at_peers)
        if status < 0:
            raise self.error(status)

    def laggards(self, sequence: int) -> str:
        """Which peers have not made this call yet, and where they stand; empty if all have."""
        text = ctypes.create_string_buffer(2048)
        self._lib.cgx_group_laggards(self._handle, sequence, text, len(text))
        return text.value.decode(errors="replace")

    def fail(self, error: CGXError) -> None:
        """Tell all peers that this rank cannot go on."""
        status = next((status for status, kind in _ERRORS.items() if type(error) is kind), -4)
        self._lib.cgx_group_fail(self._handle, status, str(error).encode())

    @property
    def has_failed(self) -> bool:
        """Whether this rank or a peer has."""
        return bool(self._lib.cgx_group_check(self._handle, 0, 0) < 0)

    def error(self, status: int) -> CGXError:
        text = ctypes.create_string_buffer(2048)
        kept = self._lib.cgx_group_error(self._handle, text, len(text))
        if kept == 0:
            return CGXError("this process group has been shut down")
        return _ERRORS.get(status, CGXError)(text.value.decode(errors="replace"))

    def native_seconds(self, number: int) -> float:
        """Return the seconds from submission to completion; NaN if the operation is not done or too old to be known."""
        record = self.record(number)
        if record is None or not record.finished_ns:
            return float("nan")
        return float(record.finished_ns - record.submitted_ns) * 1e-9

    def record(self, number: int) -> _native.Record | None:
        """What the flight recorder tells of an operation: of the last 1,024, and of what is queued."""
        record = _native.Record()
        return record if self._lib.cgx_group_record(self._handle, number, record) else None

    def peer(self, rank: int) -> tuple[_native.Peer, str]:
        """Where a rank stands, and its latest call in words."""
        peer, text = _native.Peer(), ctypes.create_string_buffer(1024)
        self._lib.cgx_group_peer(self._handle, rank, peer, text, len(text))
        return peer, text.value.decode(errors="replace")

    def stats(self) -> _native.Stats:
        stats = _native.Stats()
        self._lib.cgx_group_stats(self._handle, stats)
        return stats

    def reset_stats(self) -> None:
        self._lib.cgx_group_reset_stats(self._handle)

    def close(self) -> None:
        """Leave the group: pending operations fail, peers that wait for this rank are told."""
        if os.getpid() == self._pid:
            self._lib.cgx_group_close(self._handle)
