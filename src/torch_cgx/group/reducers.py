"""Reducers run the collectives that cgx carries out itself: natively, or over Gloo if a rank has no native engine.

Both take the same `Request` and return a handle. The backend makes all decisions. Reducers only cache what operations
of the same shape have in common.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch

from torch_cgx.engines.computing import Reduction
from torch_cgx.engines.host.native import Prepared, SharedGroup
from torch_cgx.engines.host.plans import make_plan
from torch_cgx.engines.plain import PlainEngine
from torch_cgx.engines.recorder import NativeEntry, OpInfo, Trail
from torch_cgx.errors import CGXError
from torch_cgx.group.bootstrap.topology import Chooser
from torch_cgx.group.context import GroupContext
from torch_cgx.group.ledger import Entry, Ledger, trouble_of
from torch_cgx.group.ledger.starter import GroupFailedError, Nothing
from torch_cgx.group.requests import (
    PREPARED,
    Counts,
    Meanings,
    Request,
    begin_trail,
    call_of,
    cut,
    info_of,
    is_compressed,
    is_stochastic,
    make_reduction,
    note_change,
    scale_of,
    share_meanings,
)
from torch_cgx.group.work import CompositeWork, DoneWork, PolledWork, SharedWork, TorchWork
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.layout import Layer
from torch_cgx.plan.slicing import LINK_CHUNK_NBYTES
from torch_cgx.tensors import copy_values

__all__ = ["LoneReducer", "PlainReducer", "Reducer", "SharedReducer", "no_figures"]

_FIGURES = (
    *("operations", "compressed_operations", "bytes_before", "bytes_after", "bytes_sent"),
    *("encode_s", "wait_s", "reduce_s", "decode_s"),
)


def no_figures() -> dict[str, float]:
    """Return the statistics of a reducer that has done nothing."""
    return dict.fromkeys(_FIGURES, 0)


class Reducer(Protocol):
    """The interface that carries out requests on the tensors of one kind of device."""

    def submit(self, request: Request) -> PolledWork: ...

    def stats(self) -> dict[str, float]: ...

    def reset_stats(self) -> None: ...

    def set_timeout(self, timeout: timedelta) -> None: ...

    def close(self) -> None: ...


class LoneReducer:
    """The reducer of a group of one rank: sums and averages are the values themselves."""

    def __init__(self, context: GroupContext) -> None:
        self._completions = context.completions

    def submit(self, request: Request) -> PolledWork:
        if request.share is not None and request.factor != 1.0:
            copy_values(request.share, request.share * request.factor)
        if request.residual is not None:  # nothing is lost
            request.residual.zero_()
        return DoneWork(request.result, self._completions)

    def stats(self) -> dict[str, float]:
        return no_figures()

    def reset_stats(self) -> None: ...

    def set_timeout(self, timeout: timedelta) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Known:
    """The part that all requests of one shape have in common."""

    prepared: Prepared
    info: OpInfo
    layers: tuple[Layer, ...] | None  # the request's own; kept alive here so that no other object gets their id
    widened: bool  # runs on a float32 copy, because sums are made in several steps


@dataclass(slots=True)
class _Kept:
    """The objects that must stay alive until an operation is done."""

    what: object
    number: int | None = None


class SharedReducer:
    """The reducer that hands requests to the native executor."""

    def __init__(self, shared: SharedGroup, context: GroupContext, chooser: Chooser) -> None:
        self._shared = shared
        self._context = context
        self._chooser = chooser
        self._lock = threading.Lock()
        self._known: dict[object, _Known] = {}
        self._pending: deque[_Kept] = deque()
        self._recorder = context.recorder
        self._write_down = context.recorder.append

    def submit(self, request: Request) -> PolledWork:
        tensor = request.tensor
        if request.root != self._context.rank:  # a root only reads its values
            note_change(request)
        key = (
            *(request.operation, tensor.shape, tensor.stride(), tensor.dtype),
            *(request.reduction, request.compression, id(request.layers), self._context.layers.version),
            *(request.stochastic, request.algorithm, request.factor, request.shape, request.root),
        )
        # Layers are compared by identity, because hashing hundreds of them would dominate a call.
        known = self._known.get(key) or self._prepare(key, request)
        values = tensor.detach().float() if known.widened else tensor
        with self._lock:
            # A caller may drop its work and its tensor while the operation runs, or be interrupted right here.
            kept = _Kept((known, values, tensor, request.residual, request.share))
            self._pending.append(kept)
            residual_ptr = None if request.residual is None else request.residual.data_ptr()
            try:
                number, completed = self._shared.submit(
                    *(known.prepared, values.data_ptr(), residual_ptr, request.timeout_ms),
                    wake=request.asynchronous,
                    share_ptr=None if request.share is None else request.share.data_ptr(),
                )
            except CGXError as error:  # the group has failed before; nothing was queued
                self._recorder.fail(error)
                raise
            self._write_down(NativeEntry(self._recorder, number, known.info))
            for earlier in self._pending:
                if earlier.number is None:  # this one, or an interrupted one, which if queued at all precedes it
                    earlier.number = number if earlier is kept else number - 1
            self._release(completed)
        result, completions = request.result, self._context.completions
        work = SharedWork(self._shared, number, self.release, result, completions)
        if not known.widened:
            return work
        return CompositeWork([work], partial(copy_values, tensor.detach(), values), result, completions)

    @property
    def topology(self) -> Topology:
        """Return the topology of allreduces for which no other algorithm is faster."""
        return self._chooser.topology

    def _topology_for(self, request: Request, layers: Sequence[Layer]) -> Topology:
        if request.root is not None:
            return Topology.broadcast(self._shared.nodes, request.root)
        if request.algorithm is not None:
            return Topology.flat(request.algorithm, self._context.world)
        slice_nbytes = min(self._context.settings.fusion_nbytes, LINK_CHUNK_NBYTES * self.topology.n_chunks)
        return self._chooser.topology_for(layers, request.tensor.element_size(), slice_nbytes)

    def release(self, completed: int) -> None:
        """Release the tensors of the operations up to this number, which are done."""
        with self._lock:
            self._release(completed)

    def _release(self, completed: int) -> None:
        pending = self._pending
        while pending and (number := pending[0].number) is not None and number <= completed:
            pending.popleft()

    def _prepare(self, key: object, request: Request) -> _Known:
        tensor, context = request.tensor, self._context
        layers = cut(request, context)
        topology = self._topology_for(request, layers)
        # Partial sums of a ring or a node would be rounded to 16 bits, and might overflow.
        is_short = tensor.element_size() == 2 and not request.only_moves
        widened = self._shared.linked and is_short and topology.sums_in_steps
        plan = make_plan(
            layers,
            context.rank,
            topology,
            torch.float32 if widened else torch.uint8 if request.only_moves else tensor.dtype,
            nodes=self._shared.nodes,
            slice_nbytes=context.settings.fusion_nbytes,
            limit_nbytes=self._shared.limit_nbytes,
            by_sockets=self._shared.by_sockets,
        )
        prepared = Prepared(
            plan,
            call_of(request, context),
            scale=scale_of(request, context),
            nbytes=tensor.numel() * tensor.element_size(),
            compressed=is_compressed(layers),
            stochastic=is_stochastic(request, context),
            seed=context.settings.seed,
        )
        if len(self._known) >= PREPARED:
            self._known.clear()
        known = self._known[key] = _Known(prepared, info_of(request), request.layers, widened)
        return known

    def stats(self) -> dict[str, float]:
        native = self._shared.stats()
        return {
            name: getattr(native, f"{name[:-2]}_ns") * 1e-9 if name.endswith("_s") else getattr(native, name)
            for name in _FIGURES
        }

    def reset_stats(self) -> None:
        self._shared.reset_stats()

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: every request has its own timeout."""

    def close(self) -> None:
        self._shared.close()
        self._pending.clear()


class PlainReducer:
    """The reducer that runs requests over Gloo with a `PlainEngine`, in one order with Gloo's other calls."""

    def __init__(self, engine: PlainEngine, ledger: Ledger, context: GroupContext) -> None:
        self._engine = engine
        self._ledger = ledger
        self._context = context
        self._meanings = Meanings(context, Chooser.fixed(Topology.flat("SRA", context.world)))
        self._share_meanings = share_meanings(context)
        self.reset_stats()

    def submit(self, request: Request) -> TorchWork:
        context = self._context
        meanings = self._meanings if request.algorithm is None else self._share_meanings[request.algorithm]
        meaning = meanings.of(request, context.settings.fusion_nbytes)
        call = meanings.call(request, meaning)
        reduction = make_reduction(request, meaning, context)
        timeout = timedelta(milliseconds=request.timeout_ms)
        with context.lock:
            # It runs on the thread that starts Gloo's calls, so that an interrupted caller leaves nothing half done.
            with context.recorder.noting_failures():
                entry = self._ledger.enter(call, asynchronous=True, timeout=timeout)
            trail = begin_trail(request, context, reduction, entry.number)
            run = partial(self._run, entry, reduction.numbered(entry.number), timeout, trail)
            handle = entry.start(run, asynchronous=True)
            self._counts.add(request, meaning)
        return TorchWork(handle, entry, request.result, context.completions, trail)

    def _run(self, entry: Entry, reduction: Reduction, timeout: timedelta, trail: Trail) -> Nothing:
        trail.start()
        try:
            self._engine.run(reduction, timeout, trail)
        except Exception as error:
            told = error
            if not isinstance(told, RuntimeError) or (not isinstance(told, CGXError) and trouble_of(told) is None):
                told = CGXError(f"the operation failed: {error}")  # this rank's own error, which peers must be told
            failure = entry.explained(told)
            trail.finish(failure)
            self._context.recorder.fail(failure)
            raise GroupFailedError(failure) from error
        trail.finish()
        return Nothing()

    def stats(self) -> dict[str, float]:
        return {**self._counts.figures, **self._engine.figures}

    def reset_stats(self) -> None:
        self._counts = Counts()
        self._engine.reset_figures()

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: every request has its own timeout."""

    def close(self) -> None:
        """Do nothing: the group's ledger ends the operations that Gloo carries."""
