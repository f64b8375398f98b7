"""What a rank says on the board that it calls: operations, dtypes and reductions as numbers, shapes as dims."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed import ReduceOp

from torch_cgx import _native, codecs
from torch_cgx.config import DEFAULT_QUANTIZER, EXACT

__all__ = [
    "NAMES",
    "alike",
    "call_from",
    "collective_call",
    "describe",
    "digest",
    "fields_of",
    "operation_name",
    "options_from",
    "premultiplier",
    "reduction_name",
]

_OPERATIONS = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)
_DTYPES = tuple(
    sorted(str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))
)
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

# The lists that the native library writes its messages with.
NAMES = (_OPERATIONS, _DTYPES, _REDUCTIONS)

_MAX_DIMS = 6


@lru_cache(maxsize=4096)
def collective_call(
    operation: str,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    reduction: str | None = None,
    root: int = -1,
    bits: int = 0,
    block: int = 0,
    kind: int = 0,
    layout: int = 0,
) -> _native.Call:
    """One call. `shape` None: it may differ between ranks. `layout`: a hash of whatever else must be alike."""
    call = _native.Call()
    call.operation = _OPERATIONS.index(operation)
    call.dtype = -1 if dtype is None else _DTYPES.index(str(dtype).removeprefix("torch."))
    call.reduction = -1 if reduction is None else _REDUCTIONS.index(reduction)
    call.root = root
    call.bits = bits
    call.block = block
    call.kind = kind
    call.ndim = -1 if shape is None else len(shape)
    call.numel = 0 if shape is None else torch.Size(shape).numel()
    call.layout = ctypes.c_int64(layout).value
    for i, dim in enumerate((shape or ())[:_MAX_DIMS]):
        call.dims[i] = dim
    return call


_FIELDS = tuple(field[0] for field in _native.Call._fields_[:-1])


def fields_of(call: _native.Call) -> list[int]:
    """As a list of whole numbers, for JSON."""
    return [*(getattr(call, name) for name in _FIELDS), *call.dims]


def call_from(fields: Sequence[object]) -> _native.Call:
    """What `fields_of` made such a list of; anything else, which may come from a peer, is a `ValueError`."""
    if len(fields) != len(_FIELDS) + _MAX_DIMS or not all(type(field) is int for field in fields):
        raise ValueError(f"expected {len(_FIELDS) + _MAX_DIMS} whole numbers, got {fields!r:.200}")
    call = _native.Call()
    for name, value in zip(_FIELDS, fields, strict=False):
        setattr(call, name, value)
    call.dims[:] = fields[len(_FIELDS) :]
    return call


def alike(a: _native.Call, b: _native.Call) -> bool:
    """Whether ranks that make these two calls have kept step: the board's rule (csrc/engine/board.cpp)."""
    if a.ndim < 0 and b.ndim < 0:  # shapes may differ: only what is done to them counts
        return (a.operation, a.dtype, a.reduction, a.root) == (b.operation, b.dtype, b.reduction, b.root)
    return bytes(a) == bytes(b)


def digest(call: _native.Call) -> int:
    """The same number for calls that are alike, another for nearly all others; below 2^56."""
    return int.from_bytes(hashlib.blake2b(bytes(call), digest_size=7).digest(), "little")


def describe(call: _native.Call) -> str:
    """In the board's words: all_reduce(float32[1000], SUM, exact)."""
    tensor = _name(_DTYPES, call.dtype) if call.dtype >= 0 else ""
    if call.ndim >= 0:
        more = ", ..." if call.ndim > _MAX_DIMS else ""
        tensor += f"[{', '.join(map(str, call.dims[: min(call.ndim, _MAX_DIMS)]))}{more}]"
    parts = [tensor] if tensor else []
    if call.reduction >= 0:
        parts.append(_name(_REDUCTIONS, call.reduction))
    if call.root >= 0:
        parts.append(f"root {call.root}")
    if call.bits == EXACT.bits:
        parts.append("exact")
    elif call.bits > 0:
        parts.append(f"{call.bits} bits, bucket size {call.block}{_codec_suffix(call.kind)}")
    if call.layout != 0:
        parts.append(f"layers and strides #{call.layout & 0xFFFFFFFF:x}")
    return f"{_name(_OPERATIONS, call.operation)}({', '.join(parts)})"


def _codec_suffix(kind: int) -> str:
    """Return how a message names a codec: by default not at all."""
    if kind <= codecs.family(DEFAULT_QUANTIZER).kind:
        return ""
    return next((f", {name}" for name in codecs.names() if codecs.family(name).kind == kind), f", codec {kind}")


def operation_name(call: _native.Call) -> str:
    """Return the name of the operation."""
    return _name(_OPERATIONS, call.operation)


def _name(names: Sequence[str], index: int) -> str:
    return names[index] if 0 <= index < len(names) else "?"


_BY_OP = {getattr(ReduceOp.RedOpType, name): name for name in _REDUCTIONS}


def reduction_name(op: ReduceOp | ReduceOp.RedOpType) -> str:
    """The name of a reduction, in whichever of torch's two forms it comes."""
    return _BY_OP[getattr(op, "op", op)]


def premultiplier(op: ReduceOp | ReduceOp.RedOpType) -> float:
    """What a PREMUL_SUM multiplies by; 1 for all others."""
    if reduction_name(op) != "PREMUL_SUM":
        return 1.0
    # The factor has no name in Python; it is what a copy of the operation is made of.
    return float(op.__getstate__()[1])  # type: ignore[index]


def options_from(kind: Any, given: Any) -> Any:
    """Torch's options, from whichever of its calling forms this one is."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None:
        options.reduceOp = given
    return options
