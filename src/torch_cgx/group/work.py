"""Handles on operations in progress, as `all_reduce(..., async_op=True)` returns them.

Waits run in slices, natively and without the GIL. Between slices Python handles signals, so that Ctrl-C ends a wait.
Futures are completed by threads of their own (futures.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work

from torch_cgx.engines.recorder import Trail
from torch_cgx.errors import CGXError, CGXTimeoutError
from torch_cgx.group.futures import SLICE_MS, Completions
from torch_cgx.group.ledger import Entry
from torch_cgx.group.ledger.starter import SLICE_ENDED, Checked

if TYPE_CHECKING:
    from torch_cgx.engines.host.native import SharedGroup

__all__ = ["CompositeWork", "DoneWork", "EndOf", "PolledWork", "SharedWork", "TorchWork"]

_CARRIED_SLICE_MS = 20  # between two checks that peers live, for operations that Gloo carries


# Older torch lets the Python part of a Work die while C++ holds it, which then waits forever (seen with 2.6, in the
# first all_gather of DDP; not with 2.13). C++ waits at once, or asks for the future, so the last few are enough.
_kept: deque[PolledWork] = deque(maxlen=16 if torch.__version__ < "2.13" else 0)


class PolledWork(Work):
    """The base class of all handles. `_poll` waits for at most one slice, and raises the operation's error."""

    def __init__(self, result: list[torch.Tensor], completions: Completions) -> None:
        super().__init__()
        self._result = result
        self._completions = completions
        self._failure: BaseException | None = None
        self._done = False
        _kept.append(self)

    def _poll(self, slice_ms: int) -> bool:
        raise NotImplementedError

    def _abandoned(self) -> None:
        """React to an interrupt of the waiting caller."""

    @property
    def done(self) -> bool:
        """Return whether the operation is known to have ended, without checking again."""
        return self._done or self._failure is not None

    def poll(self, slice_ms: int) -> bool:
        """Wait for at most one slice. Return whether the operation is done."""
        if self._failure is not None:
            raise self._failure
        if not self._done:
            try:
                self._done = self._poll(slice_ms)
            except Exception as error:  # a call that Gloo refuses may be a TypeError
                self._failure = error
                self._failed(error)
                self._completions.failed(error)
                raise
        return self._done

    def _failed(self, failure: Exception) -> None:
        """React to the operation's failure."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            while not self.poll(SLICE_MS):
                if deadline is not None and time.monotonic() >= deadline:
                    raise CGXTimeoutError(f"wait(): Timed out after the {limit_s} s that it was given")
        except KeyboardInterrupt:
            self._abandoned()
            raise
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        try:
            return self.poll(0)
        except Exception:
            return True

    def is_success(self) -> bool:
        return self.is_completed() and self._failure is None

    def exception(self) -> BaseException | None:
        return self._failure if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._completions.future_of(self)

    def new_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future for the result."""
        return torch.futures.Future()

    def settle(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        """Complete the future with the result, which runs its callbacks. Called once the result is there."""
        future.set_result(self._result)


class SharedWork(PolledWork):
    """An operation of the native executor."""

    def __init__(
        self,
        group: SharedGroup,
        number: int,
        release: Callable[[int], None],
        result: list[torch.Tensor],
        completions: Completions,
    ) -> None:
        super().__init__(result, completions)
        self._group = group
        self._number = number
        self._release = release

    def _poll(self, slice_ms: int) -> bool:
        done = self._group.wait(self._number, slice_ms)
        if done:
            self._release(self._number)
        return done

    def _abandoned(self) -> None:
        self._group.kick()

    def native_seconds(self) -> float:
        """Return the seconds from submission to completion, by the native thread's clock."""
        return self._group.native_seconds(self._number)


class TorchWork(PolledWork):
    """An operation that a torch group carries. While it waits, it checks its ledger entry for trouble."""

    def __init__(
        self, inner: Any, entry: Entry, result: list[torch.Tensor], completions: Completions, trail: Trail
    ) -> None:
        super().__init__(result, completions)
        self._inner = inner
        self._entry = entry
        self._trail = trail

    def _poll(self, slice_ms: int) -> bool:
        try:
            if slice_ms == 0:
                if not self._inner.is_completed():
                    return False
                self._inner.wait()
            else:
                self._inner.wait(timedelta(milliseconds=min(slice_ms, _CARRIED_SLICE_MS)))
        except RuntimeError as error:
            if getattr(self._inner, "refusal", None) is error:
                raise
            if SLICE_ENDED in str(error):
                self._look_for_trouble()
                return False
            raise self._entry.explained(error) from None
        self._entry.has_ended()
        self._trail.finish()
        return True

    def _look_for_trouble(self) -> None:
        try:
            self._entry.still_waits()
        except CGXError:
            if isinstance(self._inner, Checked):
                self._inner.let_go()
            raise

    def _failed(self, failure: Exception) -> None:
        self._trail.finish(failure)

    def _abandoned(self) -> None:
        if isinstance(self._inner, Checked):
            self._inner.abandon()

    def source_rank(self) -> int:
        return int(self._inner.source_rank())


class CompositeWork(PolledWork):
    """Several operations handled as one. `finish` runs once, when all of them are done."""

    def __init__(
        self, parts: list[Any], finish: Callable[[], object], result: list[torch.Tensor], completions: Completions
    ) -> None:
        super().__init__(result, completions)
        self._parts = parts
        self._finish = finish
        self._lock = threading.Lock()  # the caller and the thread of futures may both get here

    def _poll(self, slice_ms: int) -> bool:
        if not all(part.poll(slice_ms) for part in self._parts):
            return False
        with self._lock:
            if not self._done:
                self._finish()
                self._done = True
        return True

    def _abandoned(self) -> None:
        for part in self._parts:
            part._abandoned()


class EndOf:
    """A part of a composite work that only has to end. Its error is raised by its own handle."""

    def __init__(self, work: PolledWork) -> None:
        self._work = work

    def poll(self, slice_ms: int) -> bool:
        try:
            return self._work.poll(slice_ms)
        except Exception:
            return True

    def _abandoned(self) -> None:
        self._work._abandoned()


class DoneWork(PolledWork):
    """An operation that had nothing to do."""

    def _poll(self, slice_ms: int) -> bool:
        return True
