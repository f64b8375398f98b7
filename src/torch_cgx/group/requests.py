"""What is asked of a reducer, and what that means to an executor of programs: shared by the reducers of all devices.

A `Request` is one operation; a `Meaning` is what all requests of its shape have in common, found once and kept.
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
PREPARED = 1024  # kept a group; a training has a few dozen shapes


@dataclass(slots=True)
class Request:
    """One tensor to be reduced in place by SUM or AVG; dense, not empty, of a type that the kernels know.

    Or, with `algorithm`, another operation: on a tensor of one share a rank, to be summed up into `share`, gathered in
    place, or exchanged for the other ranks' shares; or on a tensor of any type, to be broadcast from a root.
    """

    operation: str  # what the user called, for the board
    tensor: Tensor
    result: list[Tensor]
    reduction: str | None  # None: nothing is reduced
    compression: Compression
    timeout_ms: int
    asynchronous: bool  # False: the caller waits at once
    layers: tuple[Layer, ...] | None = None  # what the tensor, or each share of it, consists of; None: as registered
    residual: Tensor | None = None  # float32, as long, contiguous: gets what this rank's encoding loses
    stochastic: bool | None = None  # None: as the group's settings say
    algorithm: str | None = None  # REDUCE_SCATTER, ALL_GATHER, EXCHANGE or BROADCAST; None: an allreduce
    # Of a reduce-scatter: holds this rank's own values of its share, and gets the sum. Of an exchange: gets all shares
    # but its own.
    share: Tensor | None = None
    factor: float = 1.0  # the sum is multiplied by it, as PREMUL_SUM asks
    shape: tuple[int, ...] | None = None  # of what the user called with, for the board; None: the tensor's
    root: int | None = None  # of a broadcast

    @property
    def only_moves(self) -> bool:
        """Return whether values are neither computed with nor compressed, so that they count as bytes."""
        return self.algorithm in _MOVING and self.compression.is_exact


def cut(request: Request, context: GroupContext) -> tuple[Layer, ...]:
    """Return the layers of a request's tensor, or of each share of it."""
    return request.layers or context.layers.cut(request.tensor.numel(), request.compression, context.settings)


def is_stochastic(request: Request, context: GroupContext) -> bool:
    return context.settings.stochastic if request.stochastic is None else request.stochastic


def scale_of(request: Request, context: GroupContext) -> float:
    """Return what a sum is multiplied by."""
    return 1.0 / context.world if request.reduction == "AVG" else request.factor


def call_of(request: Request, context: GroupContext) -> _native.Call:
    """Return what the ledger gets of it."""
    if request.operation == "barrier":  # its values are nobody's business
        return collective_call("barrier")
    tensor, compression = request.tensor, request.compression
    plain = request.layers is None and context.layers.find(tensor.numel()) is None  # told by bits and block
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
    """What a request means to an executor of programs, but for its tensor and its number."""

    layers: tuple[Layer, ...] | None  # the request's own: as long as they live here, no others have their id
    topology: Topology
    layout: Layout
    widened: bool  # in a float32 copy: sums of several steps would be rounded to 16 bits, and might overflow, between
    agreed: int
    compressed: bool
    payload_nbytes: int
    call: _native.Call | None = None  # what the board says of it, once asked


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
        """What the board says of it."""
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
    """Return caches for reduce-scatters and all-gathers, which go from rank to rank whatever nodes these are on."""
    flat = {algorithm: Topology.flat(algorithm, context.world) for algorithm in IN_SHARES}
    return {algorithm: Meanings(context, Chooser.fixed(topology)) for algorithm, topology in flat.items()}


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


def note_change(request: Request) -> None:
    """Autograd shall notice that values it saved have changed."""
    changed = request.tensor if request.share is None else request.share
    if not changed.is_inference():
        increment_version(changed)


def make_reduction(request: Request, meaning: Meaning, context: GroupContext) -> Reduction:
    """For an executor of programs, but for its number."""
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
    """Return what the flight recorder writes down of a request."""
    if request.operation == "barrier":  # its values are nobody's business
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
    """Write a request down in the flight recorder."""
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
    """The same in every process, as `hash` of a string is not."""
    return zlib.crc32(repr(facts).encode())
