"""Operations on a thread of their own, one after the other. If one fails, all later ones fail with the same error."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from torch_cgx.engines.recorder import Trail
from torch_cgx.errors import CGXError

__all__ = ["Job", "JobThread"]

_CLOSE_S = 5.0


class Job:
    """One operation in the queue."""

    def __init__(self, run: Callable[[], None], trail: Trail | None = None) -> None:
        self._run = run
        self._trail = trail
        self._ended = threading.Event()
        self._error: CGXError | None = None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the job. Return whether it ended in that time; raise its error if it failed."""
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def run(self) -> None:
        if self._trail is not None:
            self._trail.start()
        try:
            self._run()
        except CGXError as error:
            self._error = error
        except Exception as error:
            self._error = CGXError(f"the operation failed: {error}")
            self._error.__cause__ = error

    def end(self, error: CGXError | None = None) -> None:
        self._error = self._error or error
        if self._trail is not None:
            self._trail.finish(self._error)
        self._ended.set()

    @property
    def error(self) -> CGXError | None:
        return self._error


class JobThread:
    """A thread with a queue of jobs. `hang_up` tells the peers that this rank is gone, on a failure or at the end."""

    def __init__(self, name: str, hang_up: Callable[[], None]) -> None:
        self._hang_up = hang_up
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._failure: CGXError | None = None
        self._lock = threading.Lock()  # keeps jobs from being queued after the end
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], None], trail: Trail | None = None) -> Job:
        job = Job(run, trail)
        with self._lock:
            if self._closed:
                job.end(CGXError("the group has been destroyed"))
            else:
                self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread after its queued jobs. A thread that outlives the interpreter would abort the process."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_CLOSE_S)
            self._hang_up()  # ends the wait of a job that still runs
            self._thread.join(timeout=_CLOSE_S)

    @property
    def is_busy(self) -> bool:
        """Return whether the thread has not ended yet."""
        return self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._failure is None:
                job.run()
                self._failure = job.error
                if self._failure is not None:
                    self._hang_up()
            job.end(self._failure)
            del job
