"""Start operations that Gloo carries between hosts, once all ranks are known to have made the same call.

Gloo aborts the process if the lengths of two ranks differ. If only their types differ, it adds up whatever arrives. So
all ranks compare their calls before each operation. Linked ranks compare natively. Others reduce two numbers with a
hash of their call on the same Gloo group, which cannot go wrong in this way and costs a tiny all_reduce. Synchronous
calls compare while they wait, others on a thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from torch_cgx.errors import CGXError, MismatchError

if TYPE_CHECKING:
    from torch_cgx.engines.host.native import SharedGroup

__all__ = [
    "SLICE_ENDED",
    "Checked",
    "GlooComparison",
    "GroupFailedError",
    "NativeComparison",
    "Nothing",
    "Starter",
    "hang_up",
]

SLICE_ENDED = "Operation timed out!"  # torch's words for a wait that ended before its operation did
_CLOSE_S = 1.0
_JOIN_S = 5.0  # for a kernel to end, after connections are closed
_CLOSING_TAG = (1 << 31) - 1
_POLL_S = 0.002
_SLICE = timedelta(milliseconds=20)  # between two checks whether the group has been closed


class GroupFailedError(Exception):
    """An error of a `Checked`'s operation after which the whole group has failed. `error` is the cause."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class GlooComparison:
    """An all_reduce of two numbers that tells ranks whether they made the same call."""

    def __init__(self, gloo: Any, facts: int, timeout: timedelta) -> None:
        self._values = torch.tensor([facts, -facts], device="cpu")
        options = c10d.AllreduceOptions()
        options.timeout = timeout
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._work = gloo.allreduce([self._values], options)

    def wait(self, timeout: timedelta | None = None) -> None:
        self._work.wait() if timeout is None else self._work.wait(timeout)
        highest, lowest = self._values.tolist()
        if highest != -lowest:
            raise MismatchError("ranks have lost step: they called different operations")

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class NativeComparison:
    """An operation of a linked group that is done when all ranks have made the same call."""

    def __init__(self, group: SharedGroup, number: int) -> None:
        self._group = group
        self._number = number

    def wait(self, timeout: timedelta | None = None) -> None:
        slice_ms = int((_SLICE if timeout is None else timeout) / timedelta(milliseconds=1))
        while not self._group.wait(self._number, slice_ms):
            if timeout is not None:
                raise RuntimeError(SLICE_ENDED)

    def is_completed(self) -> bool:
        try:
            return self._group.wait(self._number, 0)
        except CGXError:
            return True


class Checked:
    """A handle like Gloo's, on an operation that `run` starts once all ranks are known to have made the same call.

    An error that `run` raises concerns this operation alone: Gloo refuses a call on all ranks, and later operations can
    still run. An earlier error, or a `GroupFailedError`, concerns the group. Later operations fail with it too.
    """

    def __init__(
        self,
        compare: Callable[[], Any],
        run: Callable[[], Any],
        before: Checked | None,
        enqueue: Callable[[Checked], None],
    ) -> None:
        self._compare = compare
        self._run: Callable[[], Any] | None = run  # holds the caller's tensors
        self._before = before  # must start first, because Gloo counts operations
        self._enqueue = enqueue
        self._begun = False
        self._check: Any = None
        self._inner: Any = None
        self._error: Exception | None = None
        self.refusal: Exception | None = None  # what `run` raised
        self._lock = threading.Lock()
        self._ready = threading.Event()  # started, or failed
        self.on_thread = False

    @property
    def started(self) -> bool:
        return self._ready.is_set()

    @property
    def error(self) -> Exception | None:
        """Return the error from before the operation was started. The operations behind it fail with the same error."""
        return self._error

    def begin(self) -> None:
        if self._begun:  # interrupted during the comparison: the peers may or may not have received it
            raise CGXError("the comparison of this call with other ranks' calls was interrupted. Restart all ranks.")
        self._begun = True
        self._check = self._compare()

    def start(self, timeout: timedelta | None = None) -> None:
        """Wait for the comparison, then start. Raises like Gloo on a timeout, and another call continues the wait.

        Ctrl-C ends only the wait. Other errors are kept for `wait`.
        """
        with self._lock:
            if self._ready.is_set():
                return
            try:
                if self._check is None:
                    self.begin()
                self._check.wait() if timeout is None else self._check.wait(timeout)
            except Exception as error:
                if SLICE_ENDED in str(error):
                    raise
                self._settle(error)
                return
            assert self._run is not None
            try:
                self._inner = self._run()
            except GroupFailedError as failed:
                self._settle(failed.error)
                return
            except Exception as error:
                self.refusal = error
            except BaseException as error:
                self._settle(CGXError(f"the operation was interrupted while it was started: {error!r}"))
                raise
            self._settle(None)

    def start_on_thread(self, closing: threading.Event) -> None:
        """Start the operation after the one before it, which an interrupted caller may have left half-started."""
        before = self._before
        if before is not None:
            before._start_in_slices(closing)
            if before._error is not None:
                self.fail(before._error)
        self._start_in_slices(closing)

    def _start_in_slices(self, closing: threading.Event) -> None:
        """Start the operation, checking between slices whether the group is closing.

        Gloo's own time limit ends the comparison.
        """
        while not self._ready.is_set():
            if closing.is_set():
                self.fail(CGXError("this process group has been shut down"))
                return
            try:
                self.start(_SLICE)
            except RuntimeError as error:
                if SLICE_ENDED not in str(error):
                    raise

    def fail(self, error: Exception) -> None:
        with self._lock:
            if not self._ready.is_set():
                self._settle(error)

    def _settle(self, error: Exception | None) -> None:
        self._error = error
        self._before = None
        self._run = None
        self._ready.set()

    def abandon(self) -> None:
        """Hand the operation to the thread. Its waiting caller was interrupted, and peers still need it."""
        if not self._ready.is_set() and not self.on_thread:
            self.on_thread = True
            self._enqueue(self)

    def let_go(self) -> None:
        """Wait until the thread has released the operation's tensors. Called after the group has failed."""
        if self.on_thread:
            self._ready.wait(_JOIN_S)

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._ready.is_set():
            if not self.on_thread:
                self.start(timeout)
            elif not self._ready.wait(None if timeout is None else timeout.total_seconds()):
                raise RuntimeError(SLICE_ENDED)
        failure = self._error or self.refusal
        if failure is not None:
            raise failure
        self._inner.wait() if timeout is None else self._inner.wait(timeout)
        self._inner = Nothing()  # the starter keeps its last handle, which must not keep the caller's tensors alive

    def is_completed(self) -> bool:
        if not self._ready.is_set() and not self.on_thread and self._check is not None and self._check.is_completed():
            self.start()
        return self._ready.is_set() and (self._inner is None or self._inner.is_completed())


class Nothing:
    """A handle on an operation that does nothing except that all ranks call it."""

    def wait(self, timeout: timedelta | None = None) -> None: ...

    def is_completed(self) -> bool:
        return True


class Starter:
    """The starter of one Gloo group's operations, in the order of their calls."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._last: Checked | None = None
        self._waiting: queue.SimpleQueue[Checked | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def carry(self, compare: Callable[[], Any], run: Callable[[], Any], asynchronous: bool) -> Checked:
        """Begin the comparison, and call `run` once it succeeds. The caller holds the group's lock."""
        before = self._last if self._last is not None and not self._last.started else None
        checked = self._last = Checked(compare, run, before, self._enqueue)
        if asynchronous or before is not None:
            checked.on_thread = True
            self._enqueue(checked)
        else:
            checked.begin()
        return checked

    def _drained(self) -> bool:
        """Wait up to a second for all operations. Return whether they have ended."""
        deadline = time.monotonic() + _CLOSE_S
        while self._last is not None and not self._last.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        """Wait a second for running operations, then close Gloo's connections. Queued operations fail."""
        if not self._drained():
            hang_up(self._gloo)
        self._closing.set()
        if self._thread is not None:
            self._waiting.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=_JOIN_S)

    def _enqueue(self, checked: Checked) -> None:
        self._waiting.put(checked)
        if self._closing.is_set():  # the queue has ended already
            checked.fail(CGXError("this process group has been shut down"))
        elif self._thread is None:
            self._thread = threading.Thread(target=self._work, name="cgx-carried", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (checked := self._waiting.get()) is not None:
            try:
                checked.start_on_thread(self._closing)
            except Exception as error:
                checked.fail(CGXError(f"the operation could not be started: {error}"))
            del checked


def hang_up(group: Any) -> None:
    """Close all connections of a Gloo group at once, so that all waits raise, here and on peers.

    The first wait that times out closes them all. A wait for a peer that is gone already raises, and closes nothing.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([nothing], peer, _CLOSING_TAG).wait(timedelta(milliseconds=1))
