"""Completes the futures of a group's operations, on Python threads of its own.

Started only where somebody asks for a future, because callbacks of futures may themselves wait for collectives.
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

SLICE_MS = 100  # between two looks at signals

# A work, and either the future that shall get its result, or None and a name for the profiler.
_Item = tuple["PolledWork", Any, str]


class Completions:
    """Completes the futures of a group on Python threads, the first of which is started with the first future.

    One thread is enough, in order, but for callbacks that themselves wait for futures (PowerSGD's do): while all
    threads are inside callbacks, what is queued gets another one.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], object] = lambda error: None) -> None:
        """`failed` gets to know what the group's operations failed with, before their callers do."""
        self._name = name
        self.failed = failed
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._in_callbacks = 0

    def future_of(self, work: PolledWork) -> torch.futures.Future[list[torch.Tensor]]:
        future = work.new_future()
        self._enqueue((work, future, ""))
        # A future that failed by set_exception crashes DDP's C++, which does not expect a Python exception there; what
        # .then makes of it carries a plain C++ error with the same text.
        return future.then(lambda done: done.value())

    def watch(self, work: PolledWork, name: str) -> None:
        """Let a thread wait for the work under this name, for a profiler that shows all threads."""
        self._enqueue((work, None, name))

    def close(self) -> None:
        """Finish what is queued (the group has failed it, or it is done) and end the threads."""
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
        """Start a thread if there is none that could take what is queued. With the lock held."""
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
                        # Before the lock is free again: a second thread that came to the same conclusion from a count
                        # with this one still in it would leave nobody.
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
