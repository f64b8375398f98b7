"""What a rank says on the board that it calls: operations, dtypes and reductions as numbers, shapes as dims."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch.distributed import ReduceOp

from torch_cgx import _native

__all__ = ["NAMES", "collective_call", "options_from", "reduction_name"]

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
    call.ndim = -1 if shape is None else len(shape)
    call.numel = 0 if shape is None else torch.Size(shape).numel()
    call.layout = ctypes.c_int64(layout).value
    for i, dim in enumerate((shape or ())[:_MAX_DIMS]):
        call.dims[i] = dim
    return call


_BY_OP = {getattr(ReduceOp.RedOpType, name): name for name in _REDUCTIONS}


def reduction_name(op: ReduceOp | ReduceOp.RedOpType) -> str:
    """The name of a reduction, in whichever of torch's two forms it comes."""
    return _BY_OP[getattr(op, "op", op)]


def options_from(kind: Any, given: Any) -> Any:
    """torch's options, from whichever of its calling forms this one is."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None:
        options.reduceOp = given
    return options
