"""Runs programs over transports, from a Python thread: between nodes, and where there is no native library.

Operations run in the order of submission on one thread a group, their slices overlapping as `schedule` tells. A
rank that fails closes its transports, so that its peers fail at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch

from torch_cgx.errors import CGXError
from torch_cgx.executors.pipeline import Pipeline, Reduction
from torch_cgx.kernels import Kernels
from torch_cgx.transports import Transport

__all__ = ["Job", "MessageExecutor"]

_CLOSE_S = 5.0


class Job:
    """One operation in the queue."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._ended = threading.Event()
        self._error: CGXError | None = None

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time; raises what it failed with."""
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def run(self) -> None:
        try:
            self._run()
        except CGXError as error:
            self._error = error
        except Exception as error:
            self._error = CGXError(f"the operation failed: {error}")
            self._error.__cause__ = error

    def end(self, error: CGXError | None = None) -> None:
        self._error = self._error or error
        self._ended.set()

    @property
    def error(self) -> CGXError | None:
        return self._error


class MessageExecutor:
    """Runs jobs in order; most of them are programs.

    `transports` has one for each peer, by rank; a rank's own place holds None.
    """

    def __init__(
        self,
        transports: Sequence[Transport | None],
        kernels: Kernels,
        rank: int,
        global_ranks: Sequence[int],
        staging_nbytes: int,
    ) -> None:
        self._transports = tuple(transports)
        self._pipeline = Pipeline(transports, kernels, rank, global_ranks, staging_nbytes)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._failure: CGXError | None = None
        self._lock = threading.Lock()  # nothing is queued behind the end
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="cgx-messages", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], None]) -> Job:
        job = Job(run)
        with self._lock:
            if self._closed:
                job.end(CGXError("the group has been destroyed"))
            else:
                self._jobs.put(job)
        return job

    def allreduce(self, operation: Reduction) -> Job:
        return self.submit(lambda: self._pipeline.run(operation))

    def allreduce_widened(self, operation: Reduction) -> Job:
        """The same in a float32 copy, which the layout is made for; the values get what it ends with."""

        def run() -> None:
            wide = operation.values.to(torch.float32)
            self._pipeline.run(replace(operation, values=wide))
            with torch.inference_mode():  # they may be a tensor of that mode
                operation.values.copy_(wide)

        return self.submit(run)

    def stats(self) -> dict[str, float]:
        """Bytes sent, and seconds by phase."""
        return dict(self._pipeline.figures)

    def reset_stats(self) -> None:
        self._pipeline.reset_figures()

    def set_timeout(self, timeout: timedelta) -> None:
        """For waits that begin from now on."""
        for transport in self._transports:
            if transport is not None:
                transport.timeout = timeout

    def close(self) -> None:
        """End the thread, once what is queued is done. One that outlives the interpreter would abort the process."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_CLOSE_S)
            self._hang_up()  # what it still waits for, it need not wait for any longer
            self._thread.join(timeout=_CLOSE_S)

    def _hang_up(self) -> None:
        for transport in set(self._transports):
            if transport is not None:
                with suppress(Exception):  # it is in ruins already, and whoever waits must still be told
                    transport.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._failure is None:
                job.run()
                self._failure = job.error
                if self._failure is not None:
                    self._hang_up()
            job.end(self._failure)
            del job
