"""Completion of the futures of a group's operations, on Python threads of its own.

They need their own threads because callbacks of futures may themselves wait for collectives. The threads start only
when a caller asks for a future.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

if TYPE_CHECKING:
    from torch_cgx.group.work import PolledWork

__all__ = ["SLICE_MS", "Completions"]

SLICE_MS = 100  # between two checks for signals

# A work, and either the future that receives its result, or None and a name for the profiler.
_Item = tuple["PolledWork", Any, str]


class Completions:
    """The threads that complete a group's futures. The first one starts with the first future.

    One thread is enough, in order, except for callbacks that themselves wait for futures (PowerSGD's do). If all
    threads are inside callbacks, another one starts for the queued futures.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], object] = lambda error: None) -> None:
        """Keep the name of the threads. `failed` is called with an operation's error before its caller sees it."""
        self._name = name
        self.failed = failed
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._in_callbacks = 0

    def future_of(self, work: PolledWork) -> torch.futures.Future[list[torch.Tensor]]:
        future = work.new_future()
        self._enqueue((work, future, ""))
        # A future that failed by set_exception crashes DDP's C++, which does not expect a Python exception there. The
        # future that .then returns carries a plain C++ error with the same text.
        return future.then(lambda done: done.value())

    def watch(self, work: PolledWork, name: str) -> None:
        """Wait for the work on a thread, under this name, for a profiler that shows all threads."""
        self._enqueue((work, None, name))

    def close(self) -> None:
        """Finish the queued futures, whose operations are done or have failed, and end the threads."""
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._waiting.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    def _enqueue(self, item: _Item) -> None:
        self._waiting.put(item)
        with self._lock:
            self._ensure_thread()

    def _ensure_thread(self) -> None:
        """Start a thread if none is free for the queued futures. The caller holds the lock."""
        if len(self._threads) == self._in_callbacks:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def _run(self) -> None:
        try:
            while (item := self._waiting.get()) is not None:
                work, future, name = item
                if future is None:
                    with record_function(name), contextlib.suppress(Exception):
                        work.wait()
                else:
                    self._complete(work, future)
                del item, work, future  # keeps no tensor alive while the queue is empty
                with self._lock:
                    if len(self._threads) - self._in_callbacks > 1:
                        # While the lock is still held: a second thread whose count still included this one would also
                        # end, and none would be left.
                        self._threads.discard(threading.current_thread())
                        return
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _complete(self, work: PolledWork, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        failure: Exception | None = None
        try:
            while not work.poll(SLICE_MS):
                pass
        except Exception as error:
            failure = error
        with self._lock:
            self._in_callbacks += 1
            if not self._waiting.empty():
                self._ensure_thread()
        try:
            if failure is None:
                work.settle(future)
            else:
                future.set_exception(failure)  # type: ignore[arg-type]
        finally:
            with self._lock:
                self._in_callbacks -= 1
