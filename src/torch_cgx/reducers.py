"""What carries out an allreduce that is ours: over shared memory, or over messages.

Both take the same `Request` and return a handle. The backend decides what is asked of them; they decide nothing, but
keep what can be kept between operations of the same shape.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torch_cgx import _native
from torch_cgx.algorithms import Topology
from torch_cgx.calls import collective_call
from torch_cgx.completions import Completions
from torch_cgx.config import Compression, Settings
from torch_cgx.errors import CGXError
from torch_cgx.executors.computing import Reduction
from torch_cgx.executors.messages import MessageExecutor
from torch_cgx.executors.shm import Prepared, SharedGroup, make_plan
from torch_cgx.executors.slicing import message_slice_nbytes
from torch_cgx.inquiry import Inquiry
from torch_cgx.kernels import Rounding
from torch_cgx.layers import LayerTable
from torch_cgx.layout import Layer, Layout, make_layout
from torch_cgx.recorder import GroupRecorder, Trail
from torch_cgx.work import JobWork, PolledWork, SharedWork

__all__ = [
    "Counts",
    "Meaning",
    "Meanings",
    "MessageReducer",
    "Place",
    "Reducer",
    "Request",
    "SharedReducer",
    "begin_trail",
    "call_of",
    "make_reduction",
    "stable_hash",
]

_PREPARED = 1024  # kept a group; a training has a few dozen shapes

# Everybody sends everything to all where this many bytes of values, times the ranks, or fewer are reduced: one message
# instead of two that wait for each other.
_TINY_NBYTES = 256 << 10


@dataclass(slots=True)
class Request:
    """One tensor to be reduced in place by SUM or AVG; dense, not empty, of a type that the kernels know."""

    operation: str  # what the user called, for the board
    tensor: Tensor
    result: list[Tensor]
    reduction: str
    compression: Compression
    timeout_ms: int
    asynchronous: bool  # False: the caller waits at once
    layers: tuple[Layer, ...] | None = None  # what the tensor consists of; None: as registered
    residual: Tensor | None = None  # float32, as long, contiguous: gets what this rank's encoding loses
    stochastic: bool | None = None  # None: as the group's settings say


class Reducer(Protocol):
    def submit(self, request: Request) -> PolledWork: ...

    def stats(self) -> dict[str, float]: ...

    def reset_stats(self) -> None: ...

    def set_timeout(self, timeout: timedelta) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """What is fixed for a group: who this rank is, its settings, its registered layers, who completes its futures."""

    rank: int
    world: int
    settings: Settings
    layers: LayerTable
    completions: Completions
    recorder: GroupRecorder = field(default_factory=GroupRecorder.unheard)

    def cut(self, request: Request) -> tuple[Layer, ...]:
        return request.layers or self.layers.cut(request.tensor.numel(), request.compression, self.settings)

    def stochastic(self, request: Request) -> bool:
        return self.settings.stochastic if request.stochastic is None else request.stochastic

    def scale(self, reduction: str) -> float:
        return 1.0 / self.world if reduction == "AVG" else 1.0


def call_of(request: Request, place: Place) -> _native.Call:
    """What the board says of it."""
    if request.operation == "barrier":  # its values are nobody's business
        return collective_call("barrier")
    tensor, compression = request.tensor, request.compression
    plain = request.layers is None and place.layers.find(tensor.numel()) is None  # told by bits and block
    return collective_call(
        request.operation,
        tensor.dtype,
        tuple(tensor.shape),
        reduction=request.reduction,
        bits=compression.bits,
        block=0 if compression.bits == 32 else compression.block,
        layout=0 if plain and tensor.is_contiguous() else stable_hash((tensor.stride(), place.cut(request))),
    )


@dataclass(slots=True)
class _Kept:
    """What an operation needs until it is done."""

    what: object
    number: int | None = None


class SharedReducer:
    """Hands requests to the native executor."""

    def __init__(self, shared: SharedGroup, place: Place) -> None:
        self._shared = shared
        self._place = place
        self._lock = threading.Lock()
        self._prepared: dict[object, Prepared] = {}
        self._pending: deque[_Kept] = deque()
        self._recorder = place.recorder
        self._write_down = place.recorder.append

    def submit(self, request: Request) -> SharedWork:
        tensor = request.tensor
        if not tensor.is_inference():
            increment_version(tensor)  # autograd shall notice that values it saved have changed
        key = (
            *(request.operation, tensor.shape, tensor.stride(), tensor.dtype),
            *(request.reduction, request.compression, request.layers, self._place.layers.version),
            request.stochastic,
        )
        prepared = self._prepared.get(key) or self._prepare(key, request)
        with self._lock:
            # A caller may drop its work and its tensor while the operation is under way, or be interrupted right here.
            kept = _Kept((prepared, tensor, request.residual))
            self._pending.append(kept)
            residual_ptr = None if request.residual is None else request.residual.data_ptr()
            try:
                number, completed = self._shared.submit(
                    prepared, tensor.data_ptr(), residual_ptr, request.timeout_ms, wake=request.asynchronous
                )
            except CGXError as error:  # the group has failed before; nothing was queued
                self._recorder.fail(error)
                raise
            self._write_down((self._recorder, number, key))
            for earlier in self._pending:
                if earlier.number is None:  # this one, or one that was interrupted and is queued before it, if at all
                    earlier.number = number if earlier is kept else number - 1
            self._release(completed)
        return SharedWork(self._shared, number, self.release, request.result, self._place.completions)

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
            place.world,
            tensor.dtype,
            algorithm=place.settings.inner_reduction,
            slice_nbytes=place.settings.fusion_nbytes,
            limit_nbytes=self._shared.limit_nbytes,
        )
        prepared = Prepared(
            plan,
            call,
            scale=place.scale(request.reduction),
            nbytes=tensor.numel() * tensor.element_size(),
            compressed=_is_compressed(layers),
            stochastic=place.stochastic(request),
            seed=place.settings.seed,
        )
        if len(self._prepared) >= _PREPARED:
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


@dataclass(slots=True)
class Meaning:
    """What a request means to an executor of programs, but for its tensor and its number."""

    layers: tuple[Layer, ...] | None  # the request's own: as long as they live here, no others have their id
    layout: Layout
    widened: bool  # in a float32 copy: sums of several steps would be rounded to 16 bits, and might overflow, between
    agreed: int
    compressed: bool
    payload_nbytes: int
    call: _native.Call | None = None  # what the board says of it, once asked


class Meanings:
    """Kept by what tells requests apart. Layers by identity: to hash hundreds of them takes longer than all else."""

    def __init__(self, place: Place, topology: Topology) -> None:
        self._place = place
        self.topology = topology
        self._kept: dict[object, Meaning] = {}

    def of(self, request: Request, slice_nbytes: int) -> Meaning:
        tensor = request.tensor
        key = (
            *(request.operation, tensor.shape, tensor.stride(), tensor.dtype, request.reduction),
            *(request.compression, id(request.layers), self._place.layers.version, slice_nbytes),
        )
        return self._kept.get(key) or self._find(key, request, slice_nbytes)

    def call(self, request: Request, meaning: Meaning) -> _native.Call:
        """What the board says of it."""
        if meaning.call is None:
            meaning.call = call_of(request, self._place)
        return meaning.call

    def _find(self, key: object, request: Request, slice_nbytes: int) -> Meaning:
        tensor, topology = request.tensor, self.topology
        layers = self._place.cut(request)
        widened = tensor.element_size() == 2 and (not topology.is_flat or topology.algorithm == "RING")
        strides = None if tensor.is_contiguous() else tensor.stride()
        facts = (request.operation, tuple(tensor.shape), strides, str(tensor.dtype), request.reduction)
        layout = make_layout(layers, topology.n_chunks, 4 if widened else tensor.element_size(), slice_nbytes)
        meaning = Meaning(
            *(request.layers, layout, widened, stable_hash((*facts, _hash_of(layers)))),
            compressed=_is_compressed(layers),
            payload_nbytes=sum(part.nbytes for part in layout.slices),
        )
        if len(self._kept) >= _PREPARED:
            self._kept.clear()
        self._kept[key] = meaning
        return meaning


class Counts:
    """What was done, as far as it is known when an operation is submitted."""

    def __init__(self) -> None:
        names = ("operations", "compressed_operations", "bytes_before", "bytes_after")
        self.figures: dict[str, float] = dict.fromkeys(names, 0)

    def add(self, request: Request, meaning: Meaning) -> None:
        self.figures["operations"] += 1
        self.figures["compressed_operations"] += meaning.compressed
        self.figures["bytes_before"] += request.tensor.numel() * request.tensor.element_size()
        self.figures["bytes_after"] += meaning.payload_nbytes


def make_reduction(request: Request, meaning: Meaning, place: Place, topology: Topology) -> Reduction:
    """For an executor of programs, but for its number."""
    tensor = request.tensor
    if not tensor.is_inference():
        increment_version(tensor)  # autograd shall notice that values it saved have changed
    return Reduction(
        values=torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)),
        layout=meaning.layout,
        topology=topology,
        scale=place.scale(request.reduction),
        rounding=Rounding(place.stochastic(request), place.settings.seed),
        agreed=meaning.agreed,
        residual=request.residual,
    )


def begin_trail(request: Request, place: Place, reduction: Reduction, number: int = 0) -> Trail:
    """Write a request down in the flight recorder. `number` 0: the group has no board to count calls."""
    tensor, topology = request.tensor, reduction.topology
    way = topology.algorithm if topology.is_flat else f"{topology.algorithm} of {max(topology.nodes) + 1} nodes"
    nbytes = tensor.numel() * tensor.element_size()
    payload_nbytes = sum(chunk.nbytes for part in reduction.layout.slices for chunk in part.chunks)
    called = (request.operation, tensor.dtype, tensor.shape, request.reduction)
    what = (*called, request.compression.bits, -1, nbytes, payload_nbytes)
    carrier = place.recorder.carrier if tensor.device.type == "cpu" else "cuda"
    return place.recorder.begin(what, f"{carrier} {way}", number)


class MessageReducer:
    """Hands requests to the message executor."""

    def __init__(self, executor: MessageExecutor, topology: Topology, place: Place, inquiry: Inquiry) -> None:
        self._executor = executor
        self._meanings = Meanings(place, topology)
        self._tiny_meanings = Meanings(place, Topology.flat("ALL_TO_ALL", place.world))
        self._place = place
        self._inquiry = inquiry
        self._lock = threading.Lock()
        self.reset_stats()

    def submit(self, request: Request) -> JobWork:
        tensor, place = request.tensor, self._place
        nbytes = tensor.numel() * tensor.element_size()
        meanings = self._tiny_meanings if nbytes * place.world <= _TINY_NBYTES else self._meanings
        slice_nbytes = message_slice_nbytes(nbytes, place.settings.fusion_nbytes, meanings.topology)
        meaning = meanings.of(request, slice_nbytes)
        reduction = make_reduction(request, meaning, place, meanings.topology)
        reduce = self._executor.allreduce_widened if meaning.widened else self._executor.allreduce
        with self._lock:
            number = self._inquiry.note(meanings.call(request, meaning))
            trail = begin_trail(request, place, reduction, number)
            explain = partial(self._inquiry.explain, number=number)
            job = reduce(reduction.numbered(number), trail, explain)
            self._counts.add(request, meaning)
        return JobWork(job, request.result, place.completions, self._inquiry)

    def stats(self) -> dict[str, float]:
        return {**self._counts.figures, **self._executor.stats()}

    def reset_stats(self) -> None:
        self._counts = Counts()
        self._executor.reset_stats()

    def set_timeout(self, timeout: timedelta) -> None:
        self._executor.set_timeout(timeout)

    def close(self) -> None:
        self._executor.close()


@lru_cache(maxsize=256)
def _hash_of(layers: tuple[Layer, ...]) -> int:
    return stable_hash(layers)


def _is_compressed(layers: Sequence[Layer]) -> bool:
    return any(layer.quantizer.bits != 32 for layer in layers)


def stable_hash(facts: Sequence[object]) -> int:
    """The same in every process, as `hash` of a string is not."""
    return zlib.crc32(repr(facts).encode())
