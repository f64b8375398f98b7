"""The kernels in Triton, on CUDA (or ROCm) tensors; on CPU tensors under Triton's interpreter, for tests.

One launch per call, enqueued on the current stream, without waiting for the device; one for each codec where a table
has pieces of both. Pieces whose block is not a multiple of 32, or longer than 4096, take one more to encode. This file
checks, keeps tables on the device, and launches; `encode.py`, `decode.py` and `rotated.py`, with the files that they
import, have what runs there. Triton is imported when `TritonKernels` is made, not before.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cgx.kernels import NEAREST, Piece, Rounding
from torch_cgx.kernels.random import key
from torch_cgx.kernels.summing import Total, add_payloads
from torch_cgx.kernels.triton.table import Launch, Table, make_table

__all__ = ["OPTIONS", "TritonKernels"]

# For each dtype its number in device.py, and the integers that its bits are.
_TYPES = {
    torch.float32: (0, torch.int32),
    torch.float16: (1, torch.int16),
    torch.bfloat16: (2, torch.int16),
    torch.float64: (3, torch.int64),
}
_KEPT_TABLES = 4096
_OLDEST_TRITON = (3, 4)  # that compiles the kernels: older ones know no tuples as arguments
# What all kernels are compiled with: no multiply-add is fused, and nothing is prefetched through shared memory.
OPTIONS = {"enable_fp_fusion": False, "num_stages": 1}


class TritonKernels:
    """`torch_cgx.kernels.Kernels` by Triton."""

    name = "triton"

    def __init__(self) -> None:
        self._code = _import_code()
        self._device = "cpu" if self.interpreted else "cuda"  # which torch's ROCm says, too
        self._tables: dict[tuple[int, torch.dtype, torch.device, bool], _Kept] = {}
        # The interpreter patches triton.language while it runs: one call at a time.
        self._turn = threading.Lock() if self.interpreted else contextlib.nullcontext()

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels, on CPU tensors (TRITON_INTERPRET=1)."""
        return self._code.interpreted

    def encode(
        self,
        pieces: Sequence[Piece],
        values: Tensor,
        payload: Tensor,
        rounding: Rounding,
        residual: Tensor | None = None,
    ) -> None:
        self._encode(pieces, values, (), payload, 1.0, rounding, residual, reduce=False)

    def decode(self, pieces: Sequence[Piece], payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        kept = self._checked(pieces, values, payload)
        number, bits_dtype = _TYPES[values.dtype]
        args = (values.view(bits_dtype), payload.data_ptr())
        constants = {"TYPE": number, "WORDS": kept.table.words, "ADD": add}
        if kept.rotated is not None:
            self._launch(self._code.decode_rotated_kernel, kept.rotated, args, constants)
        self._launch(self._code.decode_kernel, kept.main, args, {**constants, "EXACT": kept.table.exact})

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
        self._encode(pieces, values, payloads, out, scale, rounding, residual, reduce=True)

    def sum(self, pieces: Sequence[Piece], values: Tensor, payloads: Sequence[Tensor], scale: float) -> None:
        """In one launch, but pieces of the max-min codec: a wide copy, a launch for each payload, and the rounding."""
        kept = self._checked(pieces, values, *payloads)
        if kept.rotated is not None:
            number, bits_dtype = _TYPES[values.dtype]
            args = (values.view(bits_dtype), _addresses(payloads), len(payloads), _bits(scale))
            constants = {"TYPE": number, "WORDS": kept.table.words}
            self._launch(self._code.sum_rotated_kernel, kept.rotated, args, constants)
        if not kept.table.main_pieces:
            return
        total = Total.of(kept.table.main_pieces, values.dtype, values.device)
        total.take(values)
        add_payloads(self, total, payloads, values.dtype)
        total.hand_out(values, scale)

    def _encode(
        self,
        pieces: Sequence[Piece],
        values: Tensor,
        payloads: Sequence[Tensor],
        out: Tensor,
        scale: float,
        rounding: Rounding,
        residual: Tensor | None,
        *,
        reduce: bool,
    ) -> None:
        kept = self._checked(pieces, values, out, *payloads)
        _check_residual(residual, values)
        table = kept.table
        number, bits_dtype = _TYPES[values.dtype]
        bits = values.view(bits_dtype)
        addresses = _addresses(payloads or [out])
        constants = {"TYPE": number, "WORDS": table.words, "REDUCE": reduce}
        if kept.headers is not None:
            summed = (bits, out.data_ptr(), addresses, len(payloads), _bits(scale))
            self._launch(self._code.headers_kernel, kept.headers, summed, constants)
        constants["RESIDUAL"] = residual is not None
        lost = values if residual is None else residual
        reducing = (addresses, len(payloads), _bits(scale), _bits(1.0 / scale))
        args = (bits, out.data_ptr(), lost, *reducing)
        if kept.rotated is not None:
            signs = replace(rounding, rank=0, stage=0) if rounding.stochastic else NEAREST
            self._launch(self._code.encode_rotated_kernel, kept.rotated, (*args, *key(signs)), constants)
        constants |= {"EXACT": table.exact, "FLAT": kept.headers is not None, "STOCHASTIC": rounding.stochastic}
        numbers = key(rounding if rounding.stochastic else NEAREST)
        self._launch(self._code.encode_kernel, kept.main, (*args, *numbers), constants)

    def _launch(self, kernel: Any, part: _OnDevice, args: Sequence[Any], constants: dict[str, Any]) -> None:
        launch = part.launch
        constants = {**constants, "ROWS": launch.rows, "TILE": launch.tile}
        if launch.bits is not None:
            constants["BITS"] = launch.bits
        if not launch.programs:
            return
        with self._turn, _on(part.runs.device):
            self._enqueue(kernel, launch.programs, (part.programs, part.runs, *args), constants, launch.warps)

    def _enqueue(self, kernel: Any, n: int, args: Sequence[Any], constants: dict[str, Any], warps: int) -> None:
        """The one line that calls into Triton."""
        kernel[(n,)](*args, **constants, num_warps=warps, **OPTIONS)

    def _checked(self, pieces: Sequence[Piece], values: Tensor, *slots: Tensor) -> _Kept:
        """The table, once it is certain that no piece reaches outside of a tensor."""
        if values.dtype not in _TYPES or not values.is_contiguous() or values.device.type != self._device:
            raise TypeError(
                f"values: expected a contiguous float {self._device} tensor, got {values.dtype} on {values.device}"
            )
        for slot in slots:
            if slot.dtype != torch.uint8 or not slot.is_contiguous() or slot.device != values.device:
                raise TypeError(
                    f"payload: expected a contiguous uint8 tensor on {values.device}, got {slot.dtype} on {slot.device}"
                )
        aligned = all(slot.data_ptr() % 8 == 0 for slot in slots)
        kept = self._kept(pieces, values, aligned)
        table = kept.table
        if table.numel > values.numel():
            raise ValueError(f"values: expected at least {table.numel} of them for these pieces, got {values.numel()}")
        for slot in slots:
            if slot.numel() < table.nbytes:
                raise ValueError(f"payload: expected at least {table.nbytes} bytes, got {slot.numel()}")
        return kept

    def _kept(self, pieces: Sequence[Piece], values: Tensor, aligned: bool) -> _Kept:
        """Tables by the very object they were made of, as in `kernels/native.py`; here they are on the device, too."""
        at = (id(pieces), values.dtype, values.device, aligned)
        found = self._tables.get(at)
        if found is not None and found.pieces is pieces:
            return found
        if self._device == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph is being captured: run the same operation once before, outside of it")
        table = make_table(pieces, values.element_size(), aligned)
        main, headers, rotated = (
            None if launch is None else _OnDevice(launch, *launch.tensors(values.device))
            for launch in (table.main, table.headers, table.rotated)
        )
        assert main is not None
        kept = _Kept(pieces, table, main, headers, rotated)
        if isinstance(pieces, tuple):  # a list may change
            if len(self._tables) >= _KEPT_TABLES:
                self._tables.clear()
            self._tables[at] = kept
        return kept


@dataclass(frozen=True, slots=True)
class _OnDevice:
    launch: Launch
    programs: Tensor
    runs: Tensor


@dataclass(frozen=True, slots=True)
class _Kept:
    pieces: Sequence[Piece]
    table: Table
    main: _OnDevice
    headers: _OnDevice | None
    rotated: _OnDevice | None


class _Code(NamedTuple):
    encode_kernel: Any
    headers_kernel: Any
    decode_kernel: Any
    encode_rotated_kernel: Any
    decode_rotated_kernel: Any
    sum_rotated_kernel: Any
    interpreted: bool


def _import_code() -> _Code:
    try:
        from triton import __version__ as version
        from triton.runtime import JITFunction
    except ImportError as error:
        raise RuntimeError(
            "CUDA tensors need Triton, which is not installed: torch for CUDA brings it along, "
            "for other builds there is `pip install triton`"
        ) from error
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_TRITON:
        raise RuntimeError(
            f"CUDA tensors: expected Triton {'.'.join(map(str, _OLDEST_TRITON))} or newer, as torch has from 2.8 on; "
            f"got {version}"
        )
    from torch_cgx.kernels.triton.decode import decode_kernel
    from torch_cgx.kernels.triton.encode import encode_kernel, headers_kernel
    from torch_cgx.kernels.triton.rotated import decode_rotated_kernel, encode_rotated_kernel, sum_rotated_kernel

    return _Code(
        encode_kernel,
        headers_kernel,
        decode_kernel,
        encode_rotated_kernel,
        decode_rotated_kernel,
        sum_rotated_kernel,
        interpreted=not isinstance(encode_kernel, JITFunction),
    )


def _addresses(slots: Sequence[Tensor]) -> tuple[int, ...]:
    """2 * address + 1 of each payload, and so many more that their number, for which is compiled, is a power of two.

    Odd, because Triton compiles once more for each pattern of arguments that are multiples of 16.
    """
    room = 1 << (len(slots) - 1).bit_length()
    return tuple(2 * slot.data_ptr() + 1 for slot in [*slots] + [slots[0]] * (room - len(slots)))


def _bits(x: float) -> int:
    """Of a float64, as an integer."""
    return int.from_bytes(struct.pack("<d", x), "little", signed=True)


def _check_residual(residual: Tensor | None, values: Tensor) -> None:
    if residual is None:
        return
    if residual.dtype != torch.float32 or not residual.is_contiguous() or residual.numel() < values.numel():
        raise ValueError(
            f"residual: expected at least {values.numel()} contiguous float32 values, "
            f"got {residual.numel()} of {residual.dtype}"
        )
    if residual.device != values.device:
        raise ValueError(f"residual: expected it on {values.device}, got {residual.device}")


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, whatever its arguments are on."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)
