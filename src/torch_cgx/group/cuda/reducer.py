"""Compressed allreduces of CUDA tensors: from requests to what is enqueued, noted on the board, counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch

from torch_cgx import _native
from torch_cgx.engines.computing import Reduction
from torch_cgx.engines.cuda.exchange import Exchange
from torch_cgx.engines.cuda.executor import CudaExecutor, Enqueued
from torch_cgx.engines.host.native import SharedGroup
from torch_cgx.engines.jobs import JobThread
from torch_cgx.errors import CGXError
from torch_cgx.group.cuda.engine import Engine
from torch_cgx.group.requests import (
    Counts,
    Meaning,
    Meanings,
    Place,
    Request,
    begin_trail,
    make_reduction,
    share_meanings,
)
from torch_cgx.group.stream_work import StagedWork, StreamWork
from torch_cgx.plan.algorithms import Topology

__all__ = ["CudaReducer"]

# An operation is cut into about so many slices, which overlap: while one is exchanged, the next is encoded. Guesses, as
# nothing has been measured on a GPU: a slice must be large beside what launching its kernels and exchanges costs.
_SLICES = 4
_LEAST_SLICE_NBYTES = 16 << 20


class CudaReducer:
    """Implements `torch_cgx.group.reducers.Reducer`.

    Enqueues from the calling thread, or, where the exchange makes the host wait, from a thread of its own. `lock` is
    the group's: calls are enqueued in the order in which the board has them.
    """

    def __init__(
        self,
        engine: Engine,
        exchange: Exchange,
        topology: Topology,
        place: Place,
        board: SharedGroup | None,
        lock: threading.Lock,
        timeout: timedelta,
        number: Callable[[_native.Call], int] | None = None,
    ) -> None:
        self._device = engine.device
        self._executor = CudaExecutor(engine.device, engine.make_kernels, exchange, place.rank)
        self._exchange = exchange
        self._topology = topology
        self._meanings = Meanings(place, topology)
        self._share_meanings = share_meanings(place)
        self._place = place
        self._board = board
        self._lock = lock
        self._timeout = timeout
        self._thread = JobThread("cgx-staging", self._hang_up) if exchange.waits else None
        self._next_number = number
        self._failure: CGXError | None = None
        self._exiting = False
        self.reset_stats()

    def submit(self, request: Request) -> StreamWork:
        place, where = self._place, request.tensor.device
        meanings = self._meanings if request.algorithm is None else self._share_meanings[request.algorithm]
        meaning = meanings.of(request, self._slice_nbytes(request))
        reduction = make_reduction(request, meaning, place, meanings.topology)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            enqueued = self._executor.take(reduction)
            number = self._number(request, meaning)
            trail = begin_trail(request, place, reduction, number if self._board is not None else 0)
            trail.enqueued = True
            reduction = reduction.numbered(number)
            self._counts.add(request, meaning)
            timeout = timedelta(milliseconds=request.timeout_ms)
            enqueue = partial(self._enqueue, reduction, enqueued, meaning.widened, timeout)
            if self._thread is not None:
                job = self._thread.submit(partial(self._stage, where, enqueue), trail)
                return StagedWork(job, self._device, where, enqueued, request.result, place.completions)
            trail.start()
            try:
                enqueue()
            except CGXError as failure:
                trail.finish(failure)
                place.recorder.fail(failure)
                raise
            trail.finish()
        return StreamWork(self._device, where, enqueued, request.result, place.completions)

    def _stage(self, where: torch.device, enqueue: Callable[[], None]) -> None:
        """On the thread, whose device would be the first one, whichever this rank's is."""
        self._device.adopt(where)
        enqueue()

    def _enqueue(self, reduction: Reduction, enqueued: Enqueued, widened: bool, timeout: timedelta) -> None:
        own_timeout = timeout != self._timeout
        try:
            if own_timeout:
                self._exchange.set_timeout(timeout)
            self._executor.enqueue(reduction, enqueued, widened=widened)
        except Exception as error:
            raise self._failed(error) from error
        finally:
            if own_timeout:
                self._exchange.set_timeout(self._timeout)

    def _slice_nbytes(self, request: Request) -> int:
        nbytes = request.tensor.numel() * request.tensor.element_size()
        fusion_nbytes = self._place.settings.fusion_nbytes
        most = min(fusion_nbytes, self._exchange.most_nbytes or fusion_nbytes)
        return max(1, min(most, max(_LEAST_SLICE_NBYTES, -(-nbytes // _SLICES))))

    def _number(self, request: Request, meaning: Meaning) -> int:
        """The operation's number in its group: the board's, which is the CPU path's too."""
        call = self._meanings.call(request, meaning)
        if self._board is None:
            assert self._next_number is not None
            return self._next_number(call)
        number = self._board.note(call)
        self._board.check(number)
        return number

    def _failed(self, error: Exception) -> CGXError:
        """The stream holds half an operation, and peers wait for the rest: nothing can follow on this group."""
        failure = error
        if not isinstance(failure, CGXError):
            failure = CGXError(f"a compressed operation failed while it was enqueued, and so has its group: {error}")
        self._failure = failure
        if self._board is not None:
            self._board.fail(failure)
        return failure

    def stats(self) -> dict[str, float]:
        """Time is not known: the host does not see when the device does what."""
        times = dict.fromkeys(("encode_s", "wait_s", "reduce_s", "decode_s"), 0.0)
        return {**self._counts.figures, "bytes_sent": self._executor.bytes_sent, **times}

    def reset_stats(self) -> None:
        self._counts = Counts()
        self._executor.reset_stats()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._exchange.set_timeout(timeout)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def close(self, *, at_exit: bool = False) -> None:
        """`at_exit`: without waiting for peers once what is queued has had its time."""
        self._exiting = at_exit
        if self._thread is not None:
            self._thread.close()
        (self._exchange.abort if at_exit else self._exchange.close)()

    def abort(self) -> None:
        """Leave without waiting for anybody."""
        self._exchange.abort()
        self.close()

    def _hang_up(self) -> None:
        """The thread has failed, still waits, or is about to end."""
        is_busy = self._thread is not None and self._thread.is_busy
        at_once = self._exiting or self._failure is not None or is_busy
        (self._exchange.abort if at_once else self._exchange.close)()
