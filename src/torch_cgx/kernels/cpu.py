"""The kernels of the native library, on CPU tensors. The SIMD level is chosen at run time, or forced by CGX_SIMD."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from torch_cgx import _native
from torch_cgx.kernels import Kernels, Piece, Rounding
from torch_cgx.kernels.reference import ReferenceKernels

__all__ = ["DTYPES", "NativeKernels", "available", "default_kernels", "piece_table", "simd_level", "simd_number"]

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
_SIMD_NAMES = ("scalar", "avx2")


def available() -> bool:
    """Whether the native library is there."""
    return _native.library() is not None


def simd_number(forced: str | None = None) -> int:
    """The library's number for a level: the forced one, which this processor must have, or the best it has."""
    lib = _native.library()
    if lib is None:
        raise RuntimeError("torch_cgx was installed without its native library")
    if forced is None:
        return int(lib.cgx_best_simd())
    if forced not in _SIMD_NAMES or not lib.cgx_simd_available(_SIMD_NAMES.index(forced)):
        have = ", ".join(name for i, name in enumerate(_SIMD_NAMES) if lib.cgx_simd_available(i))
        raise ValueError(f"CGX_SIMD={forced}: this processor runs {have}")
    return _SIMD_NAMES.index(forced)


def simd_level(forced: str | None = None) -> str:
    """The name of the level that the kernels run at; "none" without the native library."""
    return _SIMD_NAMES[simd_number(forced)] if available() else "none"


@lru_cache(maxsize=4096)
def piece_table(pieces: tuple[Piece, ...]) -> ctypes.Array[_native.Piece]:
    """Pieces as the C table that the library reads."""
    rows = (_native.Piece(p.offset, p.numel, p.payload, p.raw_tail, p.block, p.bits) for p in pieces)
    return (_native.Piece * len(pieces))(*rows)


class NativeKernels:
    """`torch_cgx.kernels.Kernels` by the native library."""

    def __init__(self, simd: str | None = None) -> None:
        self._simd = simd_number(simd)
        lib = _native.library()
        assert lib is not None
        self._lib = lib

    @property
    def name(self) -> str:
        return _SIMD_NAMES[self._simd]

    def encode(self, pieces: Sequence[Piece], values: Tensor, payload: Tensor, rounding: Rounding) -> None:
        table, count = self._table(pieces, values, payload)
        how = _rounding(rounding)
        status = self._lib.cgx_encode(
            self._simd, DTYPES[values.dtype], table, count, values.data_ptr(), payload.data_ptr(), how
        )
        _check(status)

    def decode(self, pieces: Sequence[Piece], payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        table, count = self._table(pieces, values, payload)
        status = self._lib.cgx_decode(
            self._simd, DTYPES[values.dtype], table, count, payload.data_ptr(), values.data_ptr(), int(add)
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
    ) -> None:
        table, count = self._table(pieces, values, out, *payloads)
        pointers = (ctypes.c_void_p * len(payloads))(*(payload.data_ptr() for payload in payloads))
        status = self._lib.cgx_reduce(
            self._simd,
            DTYPES[values.dtype],
            table,
            count,
            values.data_ptr(),
            pointers,
            len(payloads),
            scale,
            out.data_ptr(),
            _rounding(rounding),
        )
        _check(status)

    def _table(
        self, pieces: Sequence[Piece], values: Tensor, *payloads: Tensor
    ) -> tuple[ctypes.Array[_native.Piece], int]:
        """The C table, once it is certain that no piece reaches outside of a tensor: the library trusts it."""
        table = piece_table(tuple(pieces))
        if values.dtype not in DTYPES or not values.is_contiguous() or values.device.type != "cpu":
            raise TypeError(f"values: expected a contiguous float CPU tensor, got {values.dtype} on {values.device}")
        last = max((p.offset + p.numel for p in pieces), default=0)
        if last > values.numel():
            raise ValueError(f"values: expected at least {last} of them for these pieces, got {values.numel()}")
        dtype = DTYPES[values.dtype]
        needed = max(
            (p.payload + self._lib.cgx_piece_payload_nbytes(c, dtype) for p, c in zip(pieces, table, strict=True)),
            default=0,
        )
        for payload in payloads:
            if payload.dtype != torch.uint8 or not payload.is_contiguous():
                raise TypeError(f"payload: expected a contiguous uint8 tensor, got {payload.dtype}")
            if payload.numel() < needed:
                raise ValueError(f"payload: expected at least {needed} bytes, got {payload.numel()}")
        return table, len(pieces)


def default_kernels(simd: str | None = None) -> Kernels:
    """The best kernels for CPU tensors that this installation has."""
    return NativeKernels(simd) if available() else ReferenceKernels()


def _rounding(rounding: Rounding) -> _native.Rounding:
    return _native.Rounding(rounding.seed, rounding.op, rounding.rank, rounding.stage, int(rounding.stochastic))


def _check(status: int) -> None:
    if status != 0:
        raise ValueError("the native library refused these pieces: bits must be 1 to 8 or 32, block at least 1")
