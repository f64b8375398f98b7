"""Calls as a rank writes them on the board: operations, dtypes and reductions as numbers, shapes as dims."""

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

# The names that the native library uses in its messages.
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
    """Return one call. `shape` None: it may differ between ranks. `layout`: a hash of anything else to be identical."""
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
    """Return a call as a list of whole numbers, for JSON."""
    return [*(getattr(call, name) for name in _FIELDS), *call.dims]


def call_from(fields: Sequence[object]) -> _native.Call:
    """Return the call from a list that `fields_of` made. Anything else, which a peer may send, is a `ValueError`."""
    if len(fields) != len(_FIELDS) + _MAX_DIMS or not all(type(field) is int for field in fields):
        raise ValueError(f"expected {len(_FIELDS) + _MAX_DIMS} whole numbers, got {fields!r:.200}")
    call = _native.Call()
    for name, value in zip(_FIELDS, fields, strict=False):
        setattr(call, name, value)
    call.dims[:] = fields[len(_FIELDS) :]
    return call


def alike(a: _native.Call, b: _native.Call) -> bool:
    """Return whether ranks that make these two calls are in step, by the board's rule (csrc/engine/board.cpp)."""
    if a.ndim < 0 and b.ndim < 0:  # shapes may differ; only the rest counts
        return (a.operation, a.dtype, a.reduction, a.root) == (b.operation, b.dtype, b.reduction, b.root)
    return bytes(a) == bytes(b)


def digest(call: _native.Call) -> int:
    """Return a hash of a call, below 2^56: identical for identical calls, different for nearly all others."""
    return int.from_bytes(hashlib.blake2b(bytes(call), digest_size=7).digest(), "little")


def describe(call: _native.Call) -> str:
    """Describe a call in the board's words: all_reduce(float32[1000], SUM, exact)."""
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
    """Return the part of a message that names a codec; "" for the default one."""
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
    """Return the name of a reduction that comes in either of torch's two forms."""
    return _BY_OP[getattr(op, "op", op)]


def premultiplier(op: ReduceOp | ReduceOp.RedOpType) -> float:
    """Return the factor of a PREMUL_SUM; 1 for all other reductions."""
    if reduction_name(op) != "PREMUL_SUM":
        return 1.0
    # Python has no name for the factor, but it is part of the operation's pickled state.
    return float(op.__getstate__()[1])  # type: ignore[index]


def options_from(kind: Any, given: Any) -> Any:
    """Return torch's options, from either of its calling forms."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None:
        options.reduceOp = given
    return options
