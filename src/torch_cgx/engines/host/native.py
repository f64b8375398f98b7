"""Native execution of plans, over shared memory or over links: the Python side of csrc/engine.

csrc/engine runs plans on a thread of its own, without the GIL. A `SharedGroup` is one rank's handle on the segment or
the links, the board and that thread. Not here: which tensors are compressed, and how ranks find each other (group/).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence

from torch_cgx import _native
from torch_cgx.engines.host.plans import Plan
from torch_cgx.errors import (
    CGXError,
    CGXTimeoutError,
    MismatchError,
    PeerLostError,
    PoisonedError,
    SharedMemoryError,
    TransportError,
)

__all__ = ["Prepared", "SharedGroup"]

PENDING = 1
_ERRORS: dict[int, type[CGXError]] = {
    -1: CGXTimeoutError,
    -2: PeerLostError,
    -3: MismatchError,
    -4: PoisonedError,
    -5: SharedMemoryError,
    -8: TransportError,
}


class Prepared:
    """An operation without its tensor's address. The backend caches one per shape."""

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
    """One rank's handle on the native group. `close` may be called at any time. The last reference frees the memory.

    `nodes` has a number per rank, equal for ranks that share memory. Before the group is used, `link` joins this rank
    to each peer on another node. If there are such peers, `hang_bells` joins it to the ranks of its own node. Without a
    control segment (None) no other rank may be on this rank's node.
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
        self._getpid = os.getpid  # for __del__ at exit, when modules have been emptied
        self._pid = os.getpid()
        self.limit_nbytes = limit_nbytes
        self._lock = threading.Lock()
        error = ctypes.create_string_buffer(512)
        operations, dtypes, reductions = ("\n".join(words).encode() for words in names)
        world = len(nodes)
        self.nodes = tuple(nodes)
        self.linked = len(set(nodes)) > 1
        self.by_sockets = True  # False, on all ranks: MPI carries data between some ranks
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
        # In a forked child the group's thread does not exist. Freeing would wait for it, so the child does not free.
        if self._handle and self._getpid() == self._pid:
            self._lib.cgx_group_free(self._handle)

    def link_by_mpi(self, peer: int, library: _native.Mpi, tags: Sequence[int]) -> None:
        """Send data to a peer by MPI, in streams with these tags. `link` sets the control connection."""
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
        """Take over the descriptors that wake the ranks of this node, by rank. This rank sleeps on its own."""
        for peer, file in bells.items():
            status = self._lib.cgx_group_bell(self._handle, peer, file)
            assert status == 0, f"the native library refused the bell of rank {peer}"

    def agree(self, call: _native.Call, timeout_ms: int, *, wake: bool) -> tuple[int, int]:
        """Queue an operation that is done when all linked ranks have made this call. Return its number and sequence."""
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
        """Write a call on the board, and return its number."""
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
        """Note and queue an operation. Return its number, and the number of the last one that is done.

        The tensors must live until this operation is done. `wake` False: the caller waits at once, and runs the
        operation on its own thread.
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
        """Wait natively for at most one slice. Return whether the operation is done; raise its error if it failed."""
        self._check_process()
        status = self._lib.cgx_group_wait(self._handle, number, slice_ms)
        if status < 0:
            raise self.error(status)
        return bool(status != PENDING)

    def kick(self) -> None:
        """Let the group's thread continue the operations that this thread will not run."""
        self._lib.cgx_group_kick(self._handle)

    def check(self, sequence: int) -> None:
        """Raise if ranks are out of step at this call, or if a rank has failed."""
        self._check(sequence, 0)

    def check_missing(self, sequence: int) -> None:
        """Raise like `check`, and if a peer has died before it made this call."""
        self._check(sequence, 1)

    def check_alive(self, sequence: int) -> None:
        """Raise like `check`, and if any peer has died."""
        self._check(sequence, 2)

    def _check(self, sequence: int, look_at_peers: int) -> None:
        status = self._lib.cgx_group_check(self._handle, sequence, look_at_peers)
        if status < 0:
            raise self.error(status)

    def laggards(self, sequence: int) -> str:
        """Describe the peers that have not made this call yet, with their latest calls; "" if all have made it."""
        text = ctypes.create_string_buffer(2048)
        self._lib.cgx_group_laggards(self._handle, sequence, text, len(text))
        return text.value.decode(errors="replace")

    def fail(self, error: CGXError) -> None:
        """Tell all peers that this rank cannot continue."""
        status = next((status for status, kind in _ERRORS.items() if type(error) is kind), -4)
        self._lib.cgx_group_fail(self._handle, status, str(error).encode())

    @property
    def has_failed(self) -> bool:
        """Return whether this rank or a peer has failed."""
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
        """Return the flight recorder's record of an operation; None unless it is queued or one of the last 1,024."""
        record = _native.Record()
        return record if self._lib.cgx_group_record(self._handle, number, record) else None

    def peer(self, rank: int) -> tuple[_native.Peer, str]:
        """Return a rank's state on the board, and its latest call in words."""
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
        """Leave the group. Pending operations fail, and peers that wait for this rank are notified."""
        if os.getpid() == self._pid:
            self._lib.cgx_group_close(self._handle)
