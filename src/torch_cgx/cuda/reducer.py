"""Compressed allreduces of CUDA tensors: from requests to what is enqueued, noted on the board, counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch_cgx import _native
from torch_cgx.algorithms import Topology
from torch_cgx.cuda.engine import Engine
from torch_cgx.errors import CGXError
from torch_cgx.executors.cuda import CudaExecutor
from torch_cgx.executors.jobs import JobThread
from torch_cgx.executors.shm import SharedGroup
from torch_cgx.reducers import Counts, Place, Request, call_of, make_reduction
from torch_cgx.stream_work import StagedWork, StreamWork
from torch_cgx.transports import Exchange

__all__ = ["CudaReducer"]

# An operation is cut into about so many slices, which overlap: while one is exchanged, the next is encoded. Guesses, as
# nothing has been measured on a GPU: a slice must be large beside what launching its kernels and exchanges costs.
_SLICES = 4
_LEAST_SLICE_NBYTES = 16 << 20


class CudaReducer:
    """Implements `torch_cgx.reducers.Reducer`.

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
        number: Callable[[_native.Call], int] | None = None,
    ) -> None:
        self._device = engine.device
        self._executor = CudaExecutor(engine.device, engine.make_kernels, exchange, place.rank)
        self._exchange = exchange
        self._topology = topology
        self._place = place
        self._board = board
        self._lock = lock
        self._thread = JobThread("cgx-staging", exchange.close) if exchange.waits else None
        self._next_number = number
        self._failure: CGXError | None = None
        self.reset_stats()

    def submit(self, request: Request) -> StreamWork:
        place, where = self._place, request.tensor.device
        reduction, widened = make_reduction(request, place, self._topology, self._slice_nbytes(request))
        with self._lock:
            if self._failure is not None:
                raise self._failure
            enqueued = self._executor.take(reduction)
            reduction = reduction.numbered(self._number(request))
            self._counts.add(reduction)
            enqueue = partial(self._executor.enqueue, reduction, enqueued, widened=widened)
            if self._thread is not None:
                job = self._thread.submit(enqueue)
                return StagedWork(job, self._device, where, enqueued, request.result, place.completions)
            try:
                enqueue()
            except Exception as error:
                raise self._failed(error) from error
        return StreamWork(self._device, where, enqueued, request.result, place.completions)

    def _slice_nbytes(self, request: Request) -> int:
        nbytes = request.tensor.numel() * request.tensor.element_size()
        fusion_nbytes = self._place.settings.fusion_nbytes
        most = min(fusion_nbytes, self._exchange.most_nbytes or fusion_nbytes)
        return max(1, min(most, max(_LEAST_SLICE_NBYTES, -(-nbytes // _SLICES))))

    def _number(self, request: Request) -> int:
        """The operation's number in its group: the board's, which is the CPU path's too."""
        call = call_of(request, self._place)
        if self._board is None:
            assert self._next_number is not None
            return self._next_number(call)
        number = self._board.note(call)
        self._board.check(number)
        return number

    def _failed(self, error: Exception) -> CGXError:
        """The stream holds half an operation, and peers wait for the rest: nothing can follow on this group."""
        self._failure = CGXError(f"a compressed all_reduce failed while it was enqueued, and so has its group: {error}")
        if self._board is not None:
            self._board.fail(self._failure)
        return self._failure

    def stats(self) -> dict[str, float]:
        """Time is not known: the host does not see when the device does what."""
        times = dict.fromkeys(("encode_s", "wait_s", "reduce_s", "decode_s"), 0.0)
        return {**self._counts.figures, "bytes_sent": self._executor.bytes_sent, **times}

    def reset_stats(self) -> None:
        self._counts = Counts()
        self._executor.reset_stats()

    def set_timeout(self, timeout: timedelta) -> None:
        self._exchange.set_timeout(timeout)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        self._exchange.close()
