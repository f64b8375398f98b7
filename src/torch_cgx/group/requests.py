"""Requests to a reducer, and what they mean to an executor of programs. Shared by the reducers of all devices.

A `Request` is one operation. A `Meaning` is common to all requests of the same shape. It is computed once and cached.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torch_cgx import _native
from torch_cgx.config import Compression
from torch_cgx.engines.computing import Reduction
from torch_cgx.engines.recorder import OpInfo, Trail
from torch_cgx.group.bootstrap.topology import Chooser
from torch_cgx.group.calls import collective_call
from torch_cgx.group.context import GroupContext
from torch_cgx.kernels import Rounding
from torch_cgx.plan.algorithms import IN_SHARES, Topology
from torch_cgx.plan.layout import Layer, Layout
from torch_cgx.plan.programs import layout_for

__all__ = [
    "PREPARED",
    "Counts",
    "Meaning",
    "Meanings",
    "Request",
    "begin_trail",
    "call_of",
    "cut",
    "info_of",
    "is_compressed",
    "is_stochastic",
    "make_reduction",
    "note_change",
    "scale_of",
    "share_meanings",
    "stable_hash",
]

_MOVING = ("ALL_GATHER", "EXCHANGE", "BROADCAST")
PREPARED = 1024  # cached per group; a training run has a few dozen shapes


@dataclass(slots=True)
class Request:
    """One tensor to be reduced in place by SUM or AVG. It is dense, not empty, and of a type that the kernels support.

    With `algorithm` it is another operation. The tensor then has one share per rank, to be summed up into `share`,
    gathered in place, or exchanged for the other ranks' shares. A broadcast takes a tensor of any type.
    """

    operation: str  # the call that the user made, for the board
    tensor: Tensor
    result: list[Tensor]
    reduction: str | None  # None: nothing is reduced
    compression: Compression
    timeout_ms: int
    asynchronous: bool  # False: the caller waits at once
    layers: tuple[Layer, ...] | None = None  # of the tensor, or of each share of it; None: the registered ones
    residual: Tensor | None = None  # float32, same length, contiguous: receives what this rank's encoding loses
    stochastic: bool | None = None  # None: the group's setting
    algorithm: str | None = None  # REDUCE_SCATTER, ALL_GATHER, EXCHANGE or BROADCAST; None: an allreduce
    # In a reduce-scatter it holds this rank's own values of its share, and receives the sum. In an exchange it receives
    # all shares except this rank's own.
    share: Tensor | None = None
    factor: float = 1.0  # the sum is multiplied by it, for PREMUL_SUM
    shape: tuple[int, ...] | None = None  # of the caller's tensor, for the board; None: the shape of `tensor`
    root: int | None = None  # of a broadcast

    @property
    def only_moves(self) -> bool:
        """Return whether values are only moved, neither reduced nor compressed, so that they count as bytes."""
        return self.algorithm in _MOVING and self.compression.is_exact


def cut(request: Request, context: GroupContext) -> tuple[Layer, ...]:
    """Return the layers of a request's tensor, or of each share of it."""
    return request.layers or context.layers.cut(request.tensor.numel(), request.compression, context.settings)


def is_stochastic(request: Request, context: GroupContext) -> bool:
    return context.settings.stochastic if request.stochastic is None else request.stochastic


def scale_of(request: Request, context: GroupContext) -> float:
    """Return the factor that the sum is multiplied by."""
    return 1.0 / context.world if request.reduction == "AVG" else request.factor


def call_of(request: Request, context: GroupContext) -> _native.Call:
    """Return the ledger's entry for a request."""
    if request.operation == "barrier":  # its values are irrelevant
        return collective_call("barrier")
    tensor, compression = request.tensor, request.compression
    plain = request.layers is None and context.layers.find(tensor.numel()) is None  # bits and block describe it
    plain = plain or (request.algorithm is not None and compression.is_exact)
    told = (tensor.stride(), cut(request, context), *((request.factor,) if request.factor != 1.0 else ()))
    return collective_call(
        request.operation,
        tensor.dtype,
        tuple(tensor.shape) if request.shape is None else request.shape,
        reduction=request.reduction,
        root=-1 if request.root is None else request.root,
        bits=0 if request.root is not None else compression.bits,
        block=0 if compression.is_exact else compression.block,
        kind=compression.codec().kind if request.root is None else 0,
        layout=0 if plain and tensor.is_contiguous() else stable_hash(told),
    )


@dataclass(slots=True)
class Meaning:
    """A request as an executor of programs sees it, without its tensor and its number."""

    layers: tuple[Layer, ...] | None  # the request's own; kept alive here so that no other object gets their id
    topology: Topology
    layout: Layout
    widened: bool  # in a float32 copy: 16-bit partial sums would be rounded between steps, and might overflow
    agreed: int
    compressed: bool
    payload_nbytes: int
    call: _native.Call | None = None  # its entry on the board, made on first use


class Meanings:
    """Cache of meanings. Layers are compared by identity, because hashing hundreds of them would dominate a call."""

    def __init__(self, context: GroupContext, chooser: Chooser) -> None:
        self._context = context
        self._chooser = chooser
        self._kept: dict[object, Meaning] = {}

    def of(self, request: Request, slice_nbytes: int) -> Meaning:
        tensor = request.tensor
        key = (
            *(request.operation, tensor.shape, tensor.stride(), tensor.dtype, request.reduction),
            *(request.compression, id(request.layers), self._context.layers.version, slice_nbytes, request.factor),
        )
        return self._kept.get(key) or self._find(key, request, slice_nbytes)

    def call(self, request: Request, meaning: Meaning) -> _native.Call:
        """Return the board's entry for a request."""
        if meaning.call is None:
            meaning.call = call_of(request, self._context)
        return meaning.call

    def _find(self, key: object, request: Request, slice_nbytes: int) -> Meaning:
        tensor = request.tensor
        layers = cut(request, self._context)
        topology = self._chooser.topology_for(layers, tensor.element_size(), slice_nbytes)
        widened = tensor.element_size() == 2 and topology.sums_in_steps
        strides = None if tensor.is_contiguous() else tensor.stride()
        facts = (request.operation, tuple(tensor.shape), strides, str(tensor.dtype), request.reduction, request.factor)
        layout = layout_for(topology, layers, 4 if widened else tensor.element_size(), slice_nbytes)
        meaning = Meaning(
            *(request.layers, topology, layout, widened, stable_hash((*facts, _hash_of(layers)))),
            compressed=is_compressed(layers),
            payload_nbytes=sum(part.nbytes for part in layout.slices),
        )
        if len(self._kept) >= PREPARED:
            self._kept.clear()
        self._kept[key] = meaning
        return meaning


def share_meanings(context: GroupContext) -> dict[str, Meanings]:
    """Return the caches for reduce-scatters and all-gathers, which go directly from rank to rank on any nodes."""
    flat = {algorithm: Topology.flat(algorithm, context.world) for algorithm in IN_SHARES}
    return {algorithm: Meanings(context, Chooser.fixed(topology)) for algorithm, topology in flat.items()}


class Counts:
    """The statistics that are known when an operation is submitted."""

    def __init__(self) -> None:
        names = ("operations", "compressed_operations", "bytes_before", "bytes_after")
        self.figures: dict[str, float] = dict.fromkeys(names, 0)

    def add(self, request: Request, meaning: Meaning) -> None:
        self.figures["operations"] += 1
        self.figures["compressed_operations"] += meaning.compressed
        self.figures["bytes_before"] += request.tensor.numel() * request.tensor.element_size()
        self.figures["bytes_after"] += meaning.payload_nbytes


def note_change(request: Request) -> None:
    """Tell autograd that the values have changed, in case it saved them."""
    changed = request.tensor if request.share is None else request.share
    if not changed.is_inference():
        increment_version(changed)


def make_reduction(request: Request, meaning: Meaning, context: GroupContext) -> Reduction:
    """Return the `Reduction` for a request, not numbered yet."""
    tensor = request.tensor
    note_change(request)
    return Reduction(
        values=torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)),
        layout=meaning.layout,
        topology=meaning.topology,
        scale=scale_of(request, context),
        rounding=Rounding(is_stochastic(request, context), context.settings.seed),
        agreed=meaning.agreed,
        residual=request.residual,
        share=request.share,
    )


def info_of(request: Request, payload_nbytes: int | None = None) -> OpInfo:
    """Return the flight recorder's description of a request."""
    if request.operation == "barrier":  # its values are irrelevant
        return OpInfo("barrier")
    tensor = request.tensor
    return OpInfo(
        request.operation,
        tensor.dtype,
        tuple(tensor.shape) if request.shape is None else request.shape,
        request.reduction,
        request.compression.bits,
        -1 if request.root is None else request.root,
        None if payload_nbytes is None else tensor.numel() * tensor.element_size(),
        payload_nbytes,
    )


def begin_trail(request: Request, context: GroupContext, reduction: Reduction, number: int) -> Trail:
    """Record a request in the flight recorder."""
    topology, recorder = reduction.topology, context.recorder
    way = topology.algorithm if topology.is_flat else f"{topology.algorithm} of {max(topology.nodes) + 1} nodes"
    payload_nbytes = sum(chunk.nbytes for part in reduction.layout.slices for chunk in part.chunks)
    carrier = recorder.carrier if request.tensor.device.type == "cpu" else "cuda"
    return recorder.begin(info_of(request, payload_nbytes), f"{carrier} {way}", number)


@lru_cache(maxsize=256)
def _hash_of(layers: tuple[Layer, ...]) -> int:
    return stable_hash(layers)


def is_compressed(layers: Sequence[Layer]) -> bool:
    return any(not layer.is_exact for layer in layers)


def stable_hash(facts: Sequence[object]) -> int:
    """Return a hash that is identical in every process, unlike `hash` of a string."""
    return zlib.crc32(repr(facts).encode())
