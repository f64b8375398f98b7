"""Compressed allreduces of CUDA tensors: requests are entered in the ledger, enqueued and counted."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch

from torch_cgx.engines.computing import Reduction
from torch_cgx.engines.cuda.exchange import Exchange
from torch_cgx.engines.cuda.executor import CudaExecutor, Enqueued
from torch_cgx.engines.jobs import JobThread
from torch_cgx.errors import CGXError
from torch_cgx.group.bootstrap.topology import Chooser
from torch_cgx.group.context import GroupContext
from torch_cgx.group.cuda.engine import Engine
from torch_cgx.group.ledger import Ledger
from torch_cgx.group.requests import (
    Counts,
    Meaning,
    Meanings,
    Request,
    begin_trail,
    make_reduction,
    share_meanings,
)
from torch_cgx.group.stream_work import StagedWork, StreamWork
from torch_cgx.plan.slicing import cuda_slice_nbytes

__all__ = ["CudaReducer"]


class CudaReducer:
    """The reducer for CUDA tensors. Implements `torch_cgx.group.reducers.Reducer`.

    It enqueues from the calling thread or, if the exchange blocks the host, from a thread of its own. Calls are
    enqueued in the ledger's order.
    """

    def __init__(
        self,
        engine: Engine,
        exchange: Exchange,
        chooser: Chooser,
        context: GroupContext,
        ledger: Ledger,
    ) -> None:
        self._device = engine.device
        self._executor = CudaExecutor(engine.device, engine.make_kernels, exchange, context.rank)
        self._exchange = exchange
        self._meanings = Meanings(context, chooser)
        self._share_meanings = share_meanings(context)
        self._context = context
        self._ledger = ledger
        self._timeout = context.timeout
        self._thread = JobThread("cgx-staging", self._hang_up) if exchange.waits else None
        self._failure: CGXError | None = None
        self._exiting = False
        self.reset_stats()

    def submit(self, request: Request) -> StreamWork:
        context, where = self._context, request.tensor.device
        meanings = self._meanings if request.algorithm is None else self._share_meanings[request.algorithm]
        meaning = meanings.of(request, self._slice_nbytes(request))
        reduction = make_reduction(request, meaning, context)
        with context.lock:
            if self._failure is not None:
                raise self._failure
            enqueued = self._executor.take(reduction)
            number = self._number(request, meaning)
            trail = begin_trail(request, context, reduction, number)
            trail.enqueued = True
            reduction = reduction.numbered(number)
            self._counts.add(request, meaning)
            timeout = timedelta(milliseconds=request.timeout_ms)
            enqueue = partial(self._enqueue, reduction, enqueued, meaning.widened, timeout)
            if self._thread is not None:
                job = self._thread.submit(partial(self._stage, where, enqueue), trail)
                return StagedWork(job, self._device, where, enqueued, request.result, context.completions)
            trail.start()
            try:
                enqueue()
            except CGXError as failure:
                trail.finish(failure)
                context.recorder.fail(failure)
                raise
            trail.finish()
        return StreamWork(self._device, where, enqueued, request.result, context.completions)

    def _stage(self, where: torch.device, enqueue: Callable[[], None]) -> None:
        """Enqueue on the reducer's thread, whose device by default would be the first one, not this rank's."""
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
        fusion_nbytes = self._context.settings.fusion_nbytes
        most = min(fusion_nbytes, self._exchange.most_nbytes or fusion_nbytes)
        return cuda_slice_nbytes(nbytes, most)

    def _number(self, request: Request, meaning: Meaning) -> int:
        """Enter the call in the ledger, which numbers it among all calls of the group."""
        number = self._ledger.note(self._meanings.call(request, meaning))
        self._ledger.check(number)
        return number

    def _failed(self, error: Exception) -> CGXError:
        """Make the group fail, and return the error.

        The stream holds half an operation and peers wait for the rest, so nothing can follow on this group.
        """
        failure = error
        if not isinstance(failure, CGXError):
            failure = CGXError(f"a compressed operation failed while it was enqueued, and so has its group: {error}")
        self._failure = failure
        self._ledger.abort(failure)
        return failure

    def stats(self) -> dict[str, float]:
        """Return the statistics. Times are 0, because the host does not see when the device works."""
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
        """Leave the group. `at_exit`: do not wait for peers after queued operations have had their time."""
        self._exiting = at_exit
        if self._thread is not None:
            self._thread.close()
        (self._exchange.abort if at_exit else self._exchange.close)()

    def abort(self) -> None:
        """Leave without waiting for peers."""
        self._exchange.abort()
        self.close()

    def _hang_up(self) -> None:
        """Leave the exchange. Called when the thread has failed, still waits, or is about to end."""
        is_busy = self._thread is not None and self._thread.is_busy
        at_once = self._exiting or self._failure is not None or is_busy
        (self._exchange.abort if at_once else self._exchange.close)()
