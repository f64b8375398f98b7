"""The kernels of the native library, on CPU tensors. The SIMD level is chosen at run time, or forced by CGX_SIMD."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_cgx import _native
from torch_cgx.kernels import Kernels, Piece, Rounding
from torch_cgx.kernels.reference import ReferenceKernels

__all__ = [
    "DTYPES",
    "NativeKernels",
    "available",
    "default_kernels",
    "means",
    "simd_level",
    "simd_levels",
    "thread_count",
]

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
_SIMD_NAMES = ("scalar", "avx2", "avx512", "neon")
_MOST_THREADS = 4  # by default: a few cores saturate the memory


def available() -> bool:
    """Return whether the native library is available."""
    return _native.library() is not None


def simd_levels() -> list[str]:
    """Return the levels that this processor runs and the library was built with."""
    lib = _native.library()
    return [] if lib is None else [name for i, name in enumerate(_SIMD_NAMES) if lib.cgx_simd_available(i)]


def simd_level(forced: str | None = None) -> str:
    """Return the name of the level that the kernels run at; "none" without the native library."""
    return _SIMD_NAMES[means(forced).simd] if available() else "none"


def thread_count(asked: int | None, ranks_here: int = 1) -> int:
    """Return the threads per large call: as asked, or torch's number within this rank's share of the cores."""
    share = _cores() // ranks_here
    return asked or max(1, min(torch.get_num_threads(), _MOST_THREADS, share))


def _cores() -> int:
    """Return how many cores this process may use if the system says (Linux), else how many the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def means(simd: str | None = None, threads: int = 1) -> _native.Means:
    """Return the level (the forced one, which this processor must have, or the best) and threads for the library."""
    lib = _native.library()
    if lib is None:
        raise RuntimeError("torch_cgx was installed without its native library")
    if simd is None:
        return _native.Means(int(lib.cgx_best_simd()), threads)
    have = simd_levels()
    if simd not in have:
        raise ValueError(f"CGX_SIMD={simd}: this processor runs {', '.join(have)}")
    return _native.Means(_SIMD_NAMES.index(simd), threads)


class NativeKernels:
    """The native library's `torch_cgx.kernels.Kernels`."""

    def __init__(self, simd: str | None = None, threads: int = 1) -> None:
        self._means = means(simd, threads)
        lib = _native.library()
        assert lib is not None
        self._lib = lib

    @property
    def name(self) -> str:
        return _SIMD_NAMES[self._means.simd]

    def encode(
        self,
        pieces: Sequence[Piece],
        values: Tensor,
        payload: Tensor,
        rounding: Rounding,
        residual: Tensor | None = None,
    ) -> None:
        table, count = self._table(pieces, values, payload)
        status = self._lib.cgx_encode(
            *(self._means, DTYPES[values.dtype], table, count, values.data_ptr(), payload.data_ptr()),
            *(_rounding(rounding), _residual(residual, values)),
        )
        _check(status)

    def decode(self, pieces: Sequence[Piece], payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        table, count = self._table(pieces, values, payload)
        status = self._lib.cgx_decode(
            self._means, DTYPES[values.dtype], table, count, payload.data_ptr(), values.data_ptr(), int(add)
        )
        _check(status)

    def reduce(
        self,
        pieces: Sequence[Piece],
        values: Tensor,
        payloads: Sequence[Tensor],
        out: Tensor,
        scale: float,
        rounding: Rounding,
        residual: Tensor | None = None,
    ) -> None:
        table, count = self._table(pieces, values, out, *payloads)
        pointers = (ctypes.c_void_p * len(payloads))(*(payload.data_ptr() for payload in payloads))
        status = self._lib.cgx_reduce(
            *(self._means, DTYPES[values.dtype], table, count, values.data_ptr(), pointers, len(payloads)),
            *(scale, out.data_ptr(), _rounding(rounding), _residual(residual, values)),
        )
        _check(status)

    def sum(self, pieces: Sequence[Piece], values: Tensor, payloads: Sequence[Tensor], scale: float) -> None:
        table, count = self._table(pieces, values, *payloads)
        pointers = (ctypes.c_void_p * len(payloads))(*(payload.data_ptr() for payload in payloads))
        status = self._lib.cgx_sum(
            self._means, DTYPES[values.dtype], table, count, values.data_ptr(), pointers, len(payloads), scale
        )
        _check(status)

    def _table(
        self, pieces: Sequence[Piece], values: Tensor, *payloads: Tensor
    ) -> tuple[ctypes.Array[_native.Piece], int]:
        """Return the C table after checking that no piece reaches outside of a tensor; the library trusts it."""
        if values.dtype not in DTYPES or not values.is_contiguous() or values.device.type != "cpu":
            raise TypeError(f"values: expected a contiguous float CPU tensor, got {values.dtype} on {values.device}")
        table = _tables(pieces, DTYPES[values.dtype])
        if table.numel > values.numel():
            raise ValueError(f"values: expected at least {table.numel} of them for these pieces, got {values.numel()}")
        for payload in payloads:
            if payload.dtype != torch.uint8 or not payload.is_contiguous():
                raise TypeError(f"payload: expected a contiguous uint8 tensor, got {payload.dtype}")
            if payload.numel() < table.nbytes:
                raise ValueError(f"payload: expected at least {table.nbytes} bytes, got {payload.numel()}")
        return table.rows, len(pieces)


@dataclass(frozen=True, slots=True)
class _Table:
    pieces: Sequence[Piece]
    rows: ctypes.Array[_native.Piece]
    numel: int  # of the smallest tensor that holds all pieces
    nbytes: int  # of the smallest slot


class _Tables:
    """A cache of tables by the identity of their pieces: comparing 200 pieces takes longer than encoding them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Table] = {}

    def __call__(self, pieces: Sequence[Piece], dtype: int) -> _Table:
        key = (id(pieces), dtype)
        found = self._kept.get(key)
        if found is not None and found.pieces is pieces:
            return found
        table = _make_table(pieces, dtype)
        if isinstance(pieces, tuple):  # a list may change
            if len(self._kept) >= _KEPT_TABLES:
                self._kept.clear()
            self._kept[key] = table
        return table


_KEPT_TABLES = 4096
_tables = _Tables()


def _make_table(pieces: Sequence[Piece], dtype: int) -> _Table:
    lib = _native.library()
    assert lib is not None
    rows = (_native.Piece * len(pieces))(
        *(_native.Piece(p.offset, p.numel, p.payload, p.raw_tail, p.block, p.bits, p.kind) for p in pieces)
    )
    numel = max((p.offset + p.numel for p in pieces), default=0)
    ends = (p.payload + lib.cgx_piece_payload_nbytes(row, dtype) for p, row in zip(pieces, rows, strict=True))
    return _Table(pieces, rows, numel, max(ends, default=0))


def default_kernels(simd: str | None = None, threads: int = 1) -> Kernels:
    """Return the best kernels for CPU tensors that this installation has."""
    return NativeKernels(simd, threads) if available() else ReferenceKernels()


def _rounding(rounding: Rounding) -> _native.Rounding:
    return _native.Rounding(rounding.seed, rounding.op, rounding.rank, rounding.stage, int(rounding.stochastic))


def _residual(residual: Tensor | None, values: Tensor) -> int | None:
    """Return the residual's address after checking that it has room for every value."""
    if residual is None:
        return None
    if residual.dtype != torch.float32 or not residual.is_contiguous() or residual.numel() < values.numel():
        raise ValueError(
            f"residual: expected at least {values.numel()} contiguous float32 values, "
            f"got {residual.numel()} of {residual.dtype}"
        )
    return residual.data_ptr()


def _check(status: int) -> None:
    if status != 0:
        raise ValueError(
            "the native library refused these pieces: expected 1 to 8 bits (float64: 32), or 32, blocks of at least 1 "
            "value, and a raw tail within each piece"
        )
