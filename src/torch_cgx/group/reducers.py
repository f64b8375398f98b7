"""Reducers run the collectives that cgx carries out itself: natively, or over Gloo if a rank has no native engine.

Both take the same `Request` and return a handle. The backend decides what is asked of them; they decide nothing, but
keep what can be kept between operations of the same shape.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch

from torch_cgx.engines.computing import Reduction
from torch_cgx.engines.host.native import Prepared, SharedGroup
from torch_cgx.engines.host.plans import make_plan
from torch_cgx.engines.plain import PlainEngine
from torch_cgx.engines.recorder import Trail
from torch_cgx.errors import CGXError
from torch_cgx.group.ledger import Entry, Ledger, trouble_of
from torch_cgx.group.ledger.starter import GroupFailedError, Nothing
from torch_cgx.group.requests import (
    PREPARED,
    Counts,
    Meanings,
    Place,
    Request,
    begin_trail,
    call_of,
    is_compressed,
    make_reduction,
    note_change,
    share_meanings,
)
from torch_cgx.group.work import CarriedWork, CompositeWork, PolledWork, SharedWork
from torch_cgx.plan.algorithms import IN_SHARES, Topology
from torch_cgx.tensors import copy_values

__all__ = ["PlainReducer", "Reducer", "SharedReducer"]


class Reducer(Protocol):
    def submit(self, request: Request) -> PolledWork: ...

    def stats(self) -> dict[str, float]: ...

    def reset_stats(self) -> None: ...

    def set_timeout(self, timeout: timedelta) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Kept:
    """What an operation needs until it is done."""

    what: object
    number: int | None = None


class SharedReducer:
    """Hands requests to the native executor."""

    def __init__(self, shared: SharedGroup, place: Place, topology: Topology) -> None:
        self._shared = shared
        self._place = place
        self._topologies: dict[object, Topology] = {
            name: Topology.flat(name, place.world) for name in (*IN_SHARES, "EXCHANGE")
        }
        self._topologies[None] = topology
        self._lock = threading.Lock()
        self._prepared: dict[object, Prepared] = {}
        self._pending: deque[_Kept] = deque()
        self._recorder = place.recorder
        self._write_down = place.recorder.append

    def submit(self, request: Request) -> PolledWork:
        tensor = request.tensor
        if request.root != self._place.rank:  # a root only reads its values
            note_change(request)
        key = (
            *(request.operation, tensor.shape, tensor.stride(), tensor.dtype),
            *(request.reduction, request.compression, request.layers, self._place.layers.version),
            *(request.stochastic, request.algorithm, request.factor, request.shape, request.root),
        )
        prepared = self._prepared.get(key) or self._prepare(key, request)
        # Partial sums, of a ring or a node, would be rounded to 16 bits, and might overflow.
        widened = self._is_widened(request)
        values = tensor.detach().float() if widened else tensor
        with self._lock:
            # A caller may drop its work and its tensor while the operation is under way, or be interrupted right here.
            kept = _Kept((prepared, values, tensor, request.residual, request.share))
            self._pending.append(kept)
            residual_ptr = None if request.residual is None else request.residual.data_ptr()
            try:
                number, completed = self._shared.submit(
                    *(prepared, values.data_ptr(), residual_ptr, request.timeout_ms),
                    wake=request.asynchronous,
                    share_ptr=None if request.share is None else request.share.data_ptr(),
                )
            except CGXError as error:  # the group has failed before; nothing was queued
                self._recorder.fail(error)
                raise
            self._write_down((self._recorder, number, key))
            for earlier in self._pending:
                if earlier.number is None:  # this one, or one that was interrupted and is queued before it, if at all
                    earlier.number = number if earlier is kept else number - 1
            self._release(completed)
        result, completions = request.result, self._place.completions
        work = SharedWork(self._shared, number, self.release, result, completions)
        if not widened:
            return work
        return CompositeWork([work], partial(copy_values, tensor.detach(), values), result, completions)

    @property
    def topology(self) -> Topology:
        """Return how allreduces go between ranks."""
        return self._topologies[None]

    def _topology_for(self, request: Request) -> Topology:
        key = request.algorithm if request.root is None else request.root
        if key not in self._topologies:
            assert request.root is not None
            self._topologies[key] = Topology.broadcast(self._shared.nodes, request.root)
        return self._topologies[key]

    def _is_widened(self, request: Request) -> bool:
        """Return whether a request is carried out on a float32 copy: its sums are made in several steps."""
        if not self._shared.linked or request.tensor.element_size() != 2 or request.only_moves:
            return False
        return self._topology_for(request).sums_in_steps

    def release(self, completed: int) -> None:
        """Let go of the tensors of operations up to this number, which are done."""
        with self._lock:
            self._release(completed)

    def _release(self, completed: int) -> None:
        pending = self._pending
        while pending and (number := pending[0].number) is not None and number <= completed:
            pending.popleft()

    def _prepare(self, key: object, request: Request) -> Prepared:
        tensor, place = request.tensor, self._place
        layers = place.cut(request)
        call = call_of(request, place)
        plan = make_plan(
            layers,
            place.rank,
            self._topology_for(request),
            torch.float32 if self._is_widened(request) else torch.uint8 if request.only_moves else tensor.dtype,
            nodes=self._shared.nodes,
            slice_nbytes=place.settings.fusion_nbytes,
            limit_nbytes=self._shared.limit_nbytes,
        )
        prepared = Prepared(
            plan,
            call,
            scale=place.scale(request),
            nbytes=tensor.numel() * tensor.element_size(),
            compressed=is_compressed(layers),
            stochastic=place.stochastic(request),
            seed=place.settings.seed,
        )
        if len(self._prepared) >= PREPARED:
            self._prepared.clear()
        self._prepared[key] = prepared
        return prepared

    def stats(self) -> dict[str, float]:
        native = self._shared.stats()
        counts = ("operations", "compressed_operations", "bytes_before", "bytes_after", "bytes_sent")
        phases = ("encode", "wait", "reduce", "decode")
        return {name: getattr(native, name) for name in counts} | {
            f"{phase}_s": getattr(native, f"{phase}_ns") * 1e-9 for phase in phases
        }

    def reset_stats(self) -> None:
        self._shared.reset_stats()

    def set_timeout(self, timeout: timedelta) -> None:
        """Requests bring theirs."""

    def close(self) -> None:
        self._shared.close()
        self._pending.clear()


class PlainReducer:
    """Run requests over Gloo with a `PlainEngine`, in one order with the other calls that Gloo carries."""

    def __init__(self, engine: PlainEngine, ledger: Ledger, place: Place, lock: threading.Lock) -> None:
        self._engine = engine
        self._ledger = ledger
        self._place = place
        self._lock = lock
        self._meanings = Meanings(place, Topology.flat("SRA", place.world))
        self._share_meanings = share_meanings(place)
        self.reset_stats()

    def submit(self, request: Request) -> CarriedWork:
        place = self._place
        meanings = self._meanings if request.algorithm is None else self._share_meanings[request.algorithm]
        meaning = meanings.of(request, place.settings.fusion_nbytes)
        call = meanings.call(request, meaning)
        reduction = make_reduction(request, meaning, place, meanings.topology)
        timeout = timedelta(milliseconds=request.timeout_ms)
        with self._lock:
            # On the thread that starts what Gloo carries: a caller that is interrupted leaves nothing half done.
            with place.recorder.noting_failures():
                entry = self._ledger.enter(call, asynchronous=True, timeout=timeout)
            trail = begin_trail(request, place, reduction, entry.number)
            run = partial(self._run, entry, reduction.numbered(entry.number), timeout, trail)
            handle = entry.start(run, asynchronous=True)
            self._counts.add(request, meaning)
        return CarriedWork(handle, entry, request.result, place.completions, trail)

    def _run(self, entry: Entry, reduction: Reduction, timeout: timedelta, trail: Trail) -> Nothing:
        trail.start()
        try:
            self._engine.run(reduction, timeout, trail)
        except Exception as error:
            told = error
            if not isinstance(told, RuntimeError) or (not isinstance(told, CGXError) and trouble_of(told) is None):
                told = CGXError(f"the operation failed: {error}")  # this rank's own, which its peers have to be told
            failure = entry.explained(told)
            trail.finish(failure)
            self._place.recorder.fail(failure)
            raise GroupFailedError(failure) from error
        trail.finish()
        return Nothing()

    def stats(self) -> dict[str, float]:
        return {**self._counts.figures, **self._engine.figures}

    def reset_stats(self) -> None:
        self._counts = Counts()
        self._engine.reset_figures()

    def set_timeout(self, timeout: timedelta) -> None:
        """Requests bring theirs."""

    def close(self) -> None:
        """Do nothing: the group's ledger ends what Gloo carries."""
