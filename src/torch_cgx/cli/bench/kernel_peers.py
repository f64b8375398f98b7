"""Other quantizers that `cgx bench kernels` compares with, each on one thread and as fast as its users can run it.

FBGEMM, as torch ships it: rows of the block's length, each with its own range, at 8, 4 and 2 bits, float32. It
allocates its results; see `reused_memory`.

piquant (PyPI: pypiquant): one range for the whole tensor, at 8, 4 and 2 bits, float32 and bfloat16. Its users
must find scale and zero point with its own function before they quantize. That counts here, because finding a
block's range counts for ours. Outputs are allocated in advance, and its context has one thread.

memcpy: torch's copy of one float32 buffer to another.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_cgx.cli.bench.kernel_check import Bound, Check, check_result

WIDTHS = {8: "byte", 4: "4bit", 2: "2bit"}


@dataclass(frozen=True, slots=True)
class PeerCase:
    """One operation of a peer: the function to time, and its check."""

    operation: str
    run: Callable[[], object]
    check: Callable[[], Check]
    restore: Callable[[], object] | None = None


def fbgemm_missing() -> str | None:
    return None if "fbgemm" in torch.backends.quantized.supported_engines else "this torch was built without it"


def fbgemm_cases(values: Tensor, work: Tensor, bits: int, block: int) -> list[PeerCase]:
    per_byte = 8 // bits
    if bits not in WIDTHS or values.dtype != torch.float32 or block % per_byte:
        return []
    pack = getattr(torch.ops.quantized, f"embedding_bag_{WIDTHS[bits]}_prepack")
    unpack = getattr(torch.ops.quantized, f"embedding_bag_{WIDTHS[bits]}_unpack")
    rows = values.view(-1, block)
    packed = pack(rows)
    # 4 and 2 bits: scale and bias are float16.
    bound = Bound(bits, block, 0.5, coarseness=0.0 if bits == 8 else 2.0**-9)

    def check() -> Check:
        return check_result(f"FBGEMM at {bits} bits", values, unpack(pack(rows)).view(-1), bound)

    return [
        PeerCase("quantize", lambda: pack(rows), check),
        PeerCase("dequantize", lambda: unpack(packed), check),
    ]


def piquant_missing() -> str | None:
    try:
        importlib.import_module("piquant")
    except ModuleNotFoundError:
        return "not installed: pip install pypiquant"
    except Exception as error:  # it loads a library by hand and may raise anything; ours can still be measured
        return f"cannot be imported ({type(error).__name__}: {error}): pip install pypiquant"
    return None


def piquant_cases(values: Tensor, work: Tensor, bits: int, block: int) -> list[PeerCase]:
    if bits not in WIDTHS or values.dtype not in (torch.float32, torch.bfloat16):
        return []
    piquant: Any = importlib.import_module("piquant")
    context = piquant.Context(1)
    kinds, rounds, reductions = piquant.DataType, piquant.RoundMode, piquant.ReduceOp
    packed = {8: kinds.UINT8, 4: kinds.UINT4, 2: kinds.UINT2}[bits]
    is_float = values.dtype == torch.float32
    unpacked = kinds.F32 if is_float else kinds.BF16
    find_range = context.compute_quant_params_ptr_float32 if is_float else context.compute_quant_params_ptr_bfloat16
    numel = values.numel()
    payload, out = (torch.zeros(-(-numel * bits // 8), dtype=torch.uint8) for _ in range(2))
    source, target = values.data_ptr(), work.data_ptr()

    def quantize(to: Tensor = out, mode: Any = rounds.NEAREST) -> tuple[float, int]:
        scale, zero = find_range(source, packed, numel)
        context.quantize_ptr(source, unpacked, to.data_ptr(), packed, numel, scale, zero, mode)
        return scale, zero

    scale, zero = quantize(payload)

    def dequantize(frm: Tensor = payload, reduction: Any = reductions.SET) -> None:
        context.dequantize_ptr(frm.data_ptr(), packed, target, unpacked, numel, scale, zero, reduction)

    def check_mode(mode: Any) -> Check:
        quantize(out, mode)
        dequantize(out)
        # Its zero point is a whole level, so that an end of the range can be cut by half a level.
        bound = Bound(bits, block, 1.0 if mode == rounds.NEAREST else 1.5, whole=True)
        return check_result(f"piquant at {bits} bits", values, work, bound)

    def check_add() -> Check:
        work.copy_(values)
        dequantize(payload, reductions.ADD)
        bound = Bound(bits, block, 1.0, whole=True)
        return check_result(f"piquant at {bits} bits, adding", values, work, bound, factor=2.0)

    return [
        PeerCase("quantize", lambda: quantize(out), lambda: check_mode(rounds.NEAREST)),
        PeerCase("dequantize", lambda: dequantize(payload), lambda: check_mode(rounds.NEAREST)),
        PeerCase("dequantize-add", lambda: dequantize(payload, reductions.ADD), check_add, lambda: work.copy_(values)),
        PeerCase(
            "quantize-stochastic",
            lambda: quantize(out, rounds.STOCHASTIC),
            lambda: check_mode(rounds.STOCHASTIC),
        ),
    ]


@dataclass(frozen=True, slots=True)
class Peer:
    missing: Callable[[], str | None]  # the reason why it cannot be measured
    version: Callable[[], str]
    cases: Callable[[Tensor, Tensor, int, int], list[PeerCase]]  # values, a buffer like them, bits, block


PEERS = {
    "fbgemm": Peer(fbgemm_missing, lambda: f"torch {torch.__version__}", fbgemm_cases),
    "piquant": Peer(piquant_missing, lambda: importlib.metadata.version("pypiquant"), piquant_cases),
}

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@contextmanager
def reused_memory() -> Iterator[None]:
    """Let glibc keep freed memory for the next allocation, however large.

    By default a large tensor is new memory from the kernel each time. FBGEMM allocates its results, and would spend
    nine tenths of an unpack in page faults, which tell nothing about its kernels.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        mallopt(_M_MMAP_MAX, 65536)  # glibc's own defaults
        mallopt(_M_TRIM_THRESHOLD, 128 * 1024)
