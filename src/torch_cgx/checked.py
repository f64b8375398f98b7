"""Operations that Gloo carries between ranks that share no board: compared first, then let loose.

Gloo aborts the process where the lengths of two ranks differ, and adds up whatever comes where only their types do. So
before each operation all ranks reduce a hash of their call on the same Gloo group, two numbers, which cannot go wrong
in this way. It costs as much as a tiny all_reduce. Synchronous calls do it while they wait, others on a thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from torch_cgx import _native
from torch_cgx.calls import digest
from torch_cgx.errors import CGXError, CGXTimeoutError, MismatchError
from torch_cgx.inquiry import Inquiry

__all__ = ["SLICE_ENDED", "Checked", "Starter"]

SLICE_ENDED = "Operation timed out!"  # torch's words for a wait that ended before its operation did
_CLOSE_S = 1.0
_POLL_S = 0.002
_ODD = 0x9E3779B97F4A7C15 >> 8


class Checked:
    """A handle like Gloo's own, on an operation that `run` starts once all ranks are known to have called alike."""

    def __init__(self, compare: Callable[[], Any], run: Callable[[], Any], before: Checked | None) -> None:
        self._compare = compare
        self._run = run
        self._before = before  # it has to be started first: Gloo counts operations
        self._check: Any = None
        self._values: torch.Tensor | None = None
        self._inner: Any = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._ready = threading.Event()  # started, or failed
        self.on_thread = False

    @property
    def started(self) -> bool:
        return self._ready.is_set()

    @property
    def error(self) -> Exception | None:
        return self._error

    def begin(self) -> None:
        self._values, self._check = self._compare()

    def start(self, timeout: timedelta | None = None) -> None:
        """Wait for the comparison, and start; raises what goes wrong, and like Gloo where the time is over."""
        with self._lock:
            if self._ready.is_set():
                return
            try:
                if self._check is None:
                    self.begin()
                self._check.wait() if timeout is None else self._check.wait(timeout)
                assert self._values is not None
                highest, lowest = self._values.tolist()
                if highest != -lowest:
                    raise MismatchError("ranks have lost step: they called different operations")
                self._inner = self._run()
            except RuntimeError as error:
                if SLICE_ENDED in str(error):
                    raise
                self._error = error
            self._before = None
            self._ready.set()

    def start_on_thread(self) -> None:
        before = self._before
        if before is not None:
            before._ready.wait()
            if before._error is not None:
                self.fail(before._error)
        self.start()

    def fail(self, error: Exception) -> None:
        with self._lock:
            if not self._ready.is_set():
                self._error = error
                self._ready.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._ready.is_set():
            if not self.on_thread:
                self.start(timeout)
            elif not self._ready.wait(None if timeout is None else timeout.total_seconds()):
                raise RuntimeError(SLICE_ENDED)
        if self._error is not None:
            raise self._error
        self._inner.wait() if timeout is None else self._inner.wait(timeout)

    def is_completed(self) -> bool:
        if not self._ready.is_set() and not self.on_thread and self._check is not None and self._check.is_completed():
            self.start()
        return self._ready.is_set() and (self._error is not None or self._inner.is_completed())


class _Nothing:
    """An operation that needs nothing done."""

    def wait(self, timeout: timedelta | None = None) -> None: ...

    def is_completed(self) -> bool:
        return True


class Starter:
    """Starts the operations of one group in the order of their calls."""

    def __init__(self, gloo: Any, inquiry: Inquiry) -> None:
        self._gloo = gloo
        self._inquiry = inquiry
        self._in_detail = c10d.get_debug_level() == c10d.DebugLevel.DETAIL
        self._last: Checked | None = None
        self._waiting: queue.SimpleQueue[Checked | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def carry(self, call: _native.Call, number: int, run: Callable[[], Any], asynchronous: bool) -> Checked:
        """With the group's lock held."""
        facts = (digest(call) + number * _ODD) & ((1 << 62) - 1)
        before = self._last if self._last is not None and not self._last.started else None
        checked = self._last = Checked(lambda: self._compare(facts), run, before)
        if asynchronous or before is not None:
            checked.on_thread = True
            self._waiting.put(checked)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="cgx-carried", daemon=True)
                self._thread.start()
        else:
            checked.begin()
        return checked

    def number(self, call: _native.Call) -> int:
        """The number of a call that NCCL carries, with the group's lock held.

        With TORCH_DISTRIBUTED_DEBUG=DETAIL the host first waits until all ranks have made it, and raises where they
        differ; else nobody compares it.
        """
        number = self._inquiry.note(call)
        if self._in_detail:
            checked = self.carry(call, number, _Nothing, asynchronous=False)
            checked.start()
            if checked.error is not None:
                kind = type(checked.error) if isinstance(checked.error, CGXError) else CGXTimeoutError
                raise self._inquiry.explain(kind(str(checked.error)), number)
        return number

    def drained(self) -> bool:
        """Whether all that was begun has ended, or does so within a second."""
        deadline = time.monotonic() + _CLOSE_S
        while self._last is not None and not self._last.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        """After the group's connections are closed, or when nothing is under way. What is queued fails."""
        if self._thread is not None:
            self._waiting.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=_CLOSE_S)

    def _compare(self, facts: int) -> tuple[torch.Tensor, Any]:
        values = torch.tensor([facts, -facts])
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return values, self._gloo.allreduce([values], options)

    def _work(self) -> None:
        while (checked := self._waiting.get()) is not None:
            try:
                checked.start_on_thread()
            except Exception as error:
                checked.fail(CGXError(f"the operation could not be started: {error}"))
            del checked
