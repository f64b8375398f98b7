"""The flight recorder: the last 1,000 operations of this process, over all its groups, and their JSON file.

It is always on, so it does little per operation. One tuple goes into a ring for an operation of the native executor,
whose times and phases the native library keeps, and one `Trail` for any other. Everything else happens when a file is
written: when a group fails, when it ends, and on a signal. Files are written only if CGX_TRACE_DIR names a folder. Not
here: the analysis of the files (cli/trace.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import platform
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch_cgx.errors import CGXError
from torch_cgx.version import __version__

if TYPE_CHECKING:
    import torch

__all__ = ["FORMAT", "GroupRecorder", "NativeEntry", "OpInfo", "Recorder", "Trail", "process_recorder"]

FORMAT = "cgx-trace 1"
LENGTH = 1000  # operations
PHASES = ("encode", "wait", "reduce", "decode")

_STATES = ("submitted", "running", "done", "failed")
_LIVES = ("absent", "present", "left", "gone")
_log = logging.getLogger("torch_cgx")


class OpInfo(NamedTuple):
    """The description of one operation. None: not known, or different on each rank."""

    operation: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    reduction: str | None = None
    bits: int = 0  # 0: none were chosen
    root: int = -1  # -1: it has none
    nbytes: int | None = None  # of values
    payload_nbytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        nbytes = self.nbytes
        if nbytes is None and self.dtype is not None and self.shape is not None:
            nbytes = math.prod(self.shape) * self.dtype.itemsize
        return {
            "operation": self.operation,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "shape": None if self.shape is None else list(self.shape),
            "reduction": self.reduction,
            "bits": self.bits or None,
            "root": None if self.root < 0 else self.root,
            "nbytes": nbytes,
            "payload_nbytes": self.payload_nbytes,
        }


class Native(Protocol):
    """The interface to a native group's knowledge of its operations and peers."""

    def record(self, number: int) -> Any: ...

    def peer(self, rank: int) -> tuple[Any, str]: ...


class _Waiting:
    """The context of one wait. A class costs a third of a generator, and an operation has dozens of waits."""

    __slots__ = ("_begin_ns", "_peer", "_trail")

    def __init__(self, trail: Trail, peer: int) -> None:
        self._trail, self._peer = trail, peer

    def __enter__(self) -> None:
        self._begin_ns = time.monotonic_ns()
        self._trail.waiting = (self._peer, self._begin_ns)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            return
        trail = self._trail
        trail.waiting = None
        if trail.waits_ns is None:
            trail.waits_ns = {}
        trail.waits_ns[self._peer] = trail.waits_ns.get(self._peer, 0) + time.monotonic_ns() - self._begin_ns


class Trail:
    """One operation that Python runs or delegates. Times are nanoseconds of the monotonic clock."""

    # Defaults are class attributes: setting each costs a little, and most operations need none.
    started_ns = 0
    finished_ns = 0
    enqueued = False  # True: only its enqueueing is finished, because the host does not see a device's work
    error = ""
    phases_ns: dict[str, int] | None = None
    waits_ns: dict[int, int] | None = None  # by peer
    waiting: tuple[int, int] | None = None  # the peer, and the start of the wait
    sent_nbytes = 0

    def __init__(self, group: GroupRecorder, number: int, info: OpInfo, carrier: str) -> None:
        self.group = group
        self.number = number
        self.info = info
        self.carrier = carrier
        self.submitted_ns = time.monotonic_ns()

    def start(self) -> None:
        self.started_ns = time.monotonic_ns()

    def finish(self, error: BaseException | None = None) -> None:
        if not self.finished_ns:
            self.finished_ns = time.monotonic_ns()
            if error is not None:
                self.error = f"{type(error).__name__}: {error}"

    def waiting_for(self, peer: int) -> _Waiting:
        """Return a context that records a wait for a peer. If the wait fails, the peer stays recorded."""
        return _Waiting(self, peer)

    def add(self, phase: str, seconds: float) -> None:
        if self.phases_ns is None:
            self.phases_ns = dict.fromkeys(PHASES, 0)
        self.phases_ns[phase] += int(seconds * 1e9)

    @property
    def state(self) -> str:
        if self.error:
            return "failed"
        if self.finished_ns:
            return "enqueued" if self.enqueued else "done"
        return "running" if self.started_ns else "submitted"

    def as_dict(self) -> dict[str, Any]:
        names = self.group.global_ranks
        longest = max(self.waits_ns.items(), key=lambda item: item[1]) if self.waits_ns else None
        return {
            **self.info.as_dict(),
            "number": self.number,
            "carrier": self.carrier,
            "state": self.state,
            "submitted_ns": self.submitted_ns,
            "started_ns": self.started_ns or None,
            "finished_ns": (self.finished_ns or None) if self.state != "failed" else None,
            "phases_ns": self.phases_ns,
            "sent_nbytes": self.sent_nbytes,
            "waited_for": longest and {"rank": names[longest[0]], "ns": longest[1]},
            "waiting_for": self.waiting and {"rank": names[self.waiting[0]], "since_ns": self.waiting[1]},
            "error": self.error or None,
        }


class NativeEntry(NamedTuple):
    """An operation of the native executor, which keeps the rest."""

    group: GroupRecorder
    number: int
    info: OpInfo


class GroupRecorder:
    """One group's part of the flight recorder."""

    def __init__(
        self, recorder: Recorder, rank: int, global_ranks: Sequence[int], carrier: str = "", folder: str | None = None
    ) -> None:
        self.recorder = recorder
        self.rank = rank
        self.global_ranks = tuple(global_ranks)
        self.carrier = carrier  # of its own allreduces
        self.reduction = ""  # their algorithm between nodes, or how it is chosen
        self.append: Callable[[NativeEntry | Trail], None] = recorder.entries.append
        self.failure: str | None = None
        self.failed_ns = 0
        self.name = ""
        self.closed = False
        self._native: Native | None = None
        self._named: Callable[[], Any] = lambda: None
        self._count = itertools.count(1)
        self._kept: dict[int, dict[str, Any]] = {}  # the native group's records when it ended
        self._peers: list[dict[str, Any]] = []
        recorder.add(self, folder)

    @classmethod
    def detached(cls) -> GroupRecorder:
        """Return a recorder for parts of a group that have none."""
        return cls(Recorder(), 0, range(1024))

    def attach(self, group: Any, carrier: str, native: Native | None) -> None:
        """Connect the recorder to its group. torch names the group later, so its name is looked up when needed."""
        self._named = weakref.ref(group)
        self.carrier = carrier
        self._native = native

    def begin(self, info: OpInfo, carrier: str, number: int = 0) -> Trail:
        """Record an operation. `number` 0: count it here, identically on all ranks that make the same calls."""
        trail = Trail(self, number or next(self._count), info, carrier)
        self.append(trail)
        return trail

    def fail(self, error: BaseException) -> None:
        """Note an error that the group has raised. Its first failure is written to the file."""
        if isinstance(error, CGXError) and self.failure is None and not self.closed:
            self.failure = f"{type(error).__name__}: {error}"
            self.failed_ns = time.monotonic_ns()
            self._peers = self.peers()  # later they will have left, or will have been killed because of it
            self.recorder.write("failure")

    @contextlib.contextmanager
    def noting_failures(self) -> Iterator[None]:
        """Record errors that the body raises."""
        try:
            yield
        except CGXError as error:
            self.fail(error)
            raise

    def close(self) -> None:
        """Keep the native group's records and write the file, before the group ends."""
        if self.closed:
            return
        self._kept = {
            entry.number: self._of_native(entry.number)
            for entry in self.recorder.snapshot()
            if isinstance(entry, NativeEntry) and entry.group is self
        }
        self._peers = self.peers()
        self._name()
        self.closed = True
        self._native = None
        self.recorder.write("end")
        self.recorder.forget_closed()

    def _name(self) -> str:
        group = self._named()
        if not self.name and group is not None:
            with contextlib.suppress(Exception):  # torch has none for a group that it did not make
                self.name = str(group.group_name)
        return self.name

    def peers(self) -> list[dict[str, Any]]:
        """Return the state of all ranks on the board."""
        native = self._native  # which another thread may close meanwhile
        if native is None or self._peers:
            return self._peers
        found = []
        for rank, name in enumerate(self.global_ranks):
            peer, call = native.peer(rank)
            found.append(
                {
                    "rank": name,
                    "pid": peer.pid,
                    "life": _LIVES[peer.life],
                    "number": peer.noted,
                    "call": call,
                    "called_ns": peer.noted_at_ns,
                    "waits_for": None if peer.waits_on < 0 else self.global_ranks[peer.waits_on],
                }
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self._name(),
            "rank": self.rank,
            "ranks": list(self.global_ranks),
            "carrier": self.carrier,
            "reduction": self.reduction,
            "closed": self.closed,
            "failure": self.failure,
            "failed_ns": self.failed_ns or None,
            "peers": self.peers(),
        }

    def native_dict(self, entry: NativeEntry) -> dict[str, Any]:
        found = self._kept.get(entry.number) or self._of_native(entry.number)
        described = {**entry.info.as_dict(), "carrier": self.carrier, **found}
        if found["state"] == "failed":
            described["error"] = self.failure
        return described

    def _of_native(self, number: int) -> dict[str, Any]:
        native = self._native
        record = None if native is None else native.record(number)
        if record is None:
            return {"number": None, "state": "unknown", "submitted_ns": None, "started_ns": None, "finished_ns": None}
        names = self.global_ranks
        waited, waiting = record.waited_for, record.waiting_for
        return {
            "number": record.sequence,
            "state": _STATES[record.state],
            "submitted_ns": record.submitted_ns,
            "started_ns": record.started_ns or None,
            "finished_ns": record.finished_ns or None,
            "phases_ns": {phase: getattr(record, f"{phase}_ns") for phase in PHASES},
            "nbytes": record.bytes_before,
            "payload_nbytes": record.bytes_after,
            "sent_nbytes": record.bytes_sent,
            "waited_for": None if waited < 0 else {"rank": names[waited], "ns": record.waited_for_ns},
            "waiting_for": None if waiting < 0 else {"rank": names[waiting], "since_ns": record.waiting_since_ns},
        }


class Recorder:
    """The ring of a process, and the file that it is written to."""

    def __init__(self) -> None:
        self.entries: deque[NativeEntry | Trail] = deque(maxlen=LENGTH)
        self.pid = os.getpid()
        # Read together once. They make monotonic times of several hosts comparable, as far as their clocks agree.
        self.wall_ns, self.monotonic_ns = time.time_ns(), time.monotonic_ns()
        self._groups: list[GroupRecorder] = []
        self._folder: str | None = None
        self._rank = 0
        self._writing = threading.Lock()
        self._warned = False

    def add(self, group: GroupRecorder, folder: str | None) -> None:
        self._groups.append(group)
        if folder is not None:
            self._folder = folder
            self._rank = group.global_ranks[group.rank]

    def snapshot(self) -> list[NativeEntry | Trail]:
        while True:
            with contextlib.suppress(RuntimeError):  # another thread has appended meanwhile
                return list(self.entries)

    def calls(self) -> list[OpInfo]:
        """Return every operation in the ring."""
        return [entry.info for entry in self.snapshot()]

    def forget_closed(self) -> None:
        """Forget groups that have ended and have no operation left in the ring."""
        if len(self._groups) > 64:
            seen = {id(entry.group) for entry in self.snapshot()}
            self._groups = [group for group in self._groups if not group.closed or id(group) in seen]

    def write(self, why: str) -> Path | None:
        """Write the file, if a folder is set. Never raises, because the caller must see the error that it reports."""
        if self._folder is None or os.getpid() != self.pid:
            return None
        with self._writing:
            path = Path(self._folder) / f"cgx-trace-rank{self._rank}-{self.pid}.json"
            partial = path.with_suffix(".partial")
            try:
                text = json.dumps(self.as_dict(why))
                path.parent.mkdir(parents=True, exist_ok=True)
                partial.write_text(text, encoding="utf-8")
                partial.replace(path)
            except Exception as error:
                with contextlib.suppress(OSError):
                    partial.unlink()
                if not self._warned:
                    self._warned = True
                    _log.warning("torch_cgx: no trace was written to CGX_TRACE_DIR=%s: %s", self._folder, error)
                return None
        return path

    def as_dict(self, why: str) -> dict[str, Any]:
        groups = list(self._groups)
        places = {id(group): place for place, group in enumerate(groups)}
        operations = []
        for entry in self.snapshot():
            described = entry.as_dict() if isinstance(entry, Trail) else entry.group.native_dict(entry)
            if id(entry.group) in places:
                operations.append({"group": places[id(entry.group)], **described})
        return {
            "format": FORMAT,
            "torch_cgx": __version__,
            "why": why,
            "rank": self._rank,
            "pid": self.pid,
            "host": platform.node(),
            "clock": {"name": _clock_name(), "wall_ns": self.wall_ns, "monotonic_ns": self.monotonic_ns},
            "written_ns": time.monotonic_ns(),
            "groups": [group.as_dict() for group in groups],
            "operations": operations,
        }


def _clock_name() -> str:
    """Return a name for the processes that share a monotonic clock, which is the running kernel's."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"{platform.node()}:{os.getpid()}"


_of_process: list[Recorder] = []


def process_recorder() -> Recorder:
    """Return the recorder that all groups of this process share. A forked child begins its own."""
    if not _of_process or _of_process[0].pid != os.getpid():
        _of_process[:] = [Recorder()]
    return _of_process[0]
