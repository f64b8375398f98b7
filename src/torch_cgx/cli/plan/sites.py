"""The constants of `cgx plan` and their origins: kernels, links, communicators."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_cgx.cli.plan.model import Site
from torch_cgx.cli.registry import UsageError
from torch_cgx.config import DEFAULT_QUANTIZER
from torch_cgx.plan.costs import CUDA, ETHERNET, HOST, Speeds, Wire

__all__ = ["CPU", "GPUS", "gpu_speeds", "make_site", "read_speeds"]

# Memory bandwidth, bytes per second. Kernels are bound by it (docs/gpu.md). We have not measured on a GPU yet how close
# they come to it, so we assume half of it.
GPUS = {"rtx3090": 936e9, "a100": 2039e9, "h100": 3350e9}
_OF_ROOFLINE = 0.5
_LAUNCH_S = 5e-6

CPU = "cpu"

_STAGED_S = 1 / 12e9  # per byte from a GPU to pinned memory, or back

# Gloo's own all_reduce, calibrated like the engine's constants (`costs.HOST`). Its start time is mostly waiting.
_GLOO = Wire(latency_s=50e-6, byte_s=1.03e-9)
_GLOO_START_S = 2.7e-3


def gpu_speeds(bandwidth: float, bits: int = 4, block: int = 1024) -> Speeds:
    """Return speeds from bytes moved over memory bandwidth for float32, counted as in benchmarks/gpu_estimates.py."""
    coded = bits / 8 + 8 / block
    bandwidth *= _OF_ROOFLINE

    def speed(moved: float) -> float:
        return bandwidth * 4 / moved

    return Speeds(
        encode=speed(4 + coded),
        decode=speed(4 + coded),
        add=speed(8 + coded),
        reduce=speed(8 + 2 * coded),
        more=speed(coded),
        copy=speed(8),
        sum=speed(12),
        call_s=_LAUNCH_S,
    )


def read_speeds(path: Path, bits: int = 4) -> Speeds:
    """Return the speeds in a file of `cgx bench kernels --json`: float32, one thread, the largest size."""
    try:
        report: Any = json.loads(path.read_text())
        cells = report["cells"] if report["kind"] == "kernels" else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"argument --kernels: cannot read {str(path)!r} ({error}): {_allowed()}") from None
    largest = max((cell["nbytes"] for cell in cells), default=0)

    def speed(operation: str, backend: str = "cgx") -> float:
        for cell in cells:
            found = (cell["nbytes"], cell["operation"], cell["backend"], cell["dtype"], cell["threads"])
            if found == (largest, operation, backend, "float32", 1) and cell["bits"] in (bits, None):
                return float(cell["gb_per_s"]) * 1e9
        raise UsageError(
            f"argument --kernels: {str(path)!r} has no {operation} of float32 at {bits} bits: {_allowed()}"
        )

    decode, copy = speed("dequantize"), speed("memcpy", "memcpy")
    return Speeds(
        encode=speed("quantize"),
        decode=decode,
        add=speed("dequantize-add"),
        reduce=speed("reduce"),
        more=decode,
        copy=copy,
        sum=copy * 3 / 4,  # two reads and a write; a copy has a read and a write (which reads first)
        call_s=HOST.speeds.call_s,
    )


def _allowed() -> str:
    return f"allowed are {', '.join(GPUS)}, cpu, or a file of `cgx bench kernels --json`"


def speeds_named(text: str) -> tuple[str, Speeds]:
    """Return the device of these kernels, and their speeds."""
    if text in GPUS:
        return "gpu", gpu_speeds(GPUS[text])
    return CPU, HOST.speeds if text == CPU else read_speeds(Path(text))


def make_site(
    kernels: str,
    ranks: int,
    intra_bit_per_s: float,
    inter_bit_per_s: float,
    *,
    latency_s: float | None = None,
    cores: float | None = None,
    block: int = 1024,
    quantizer: str = DEFAULT_QUANTIZER,
) -> Site:
    """Return a site with these kernels and links. `latency_s`: between nodes, for every communicator."""
    device, speeds = speeds_named(kernels)
    cores = 2.0 if cores is None else cores
    near = intra_bit_per_s / 8
    known = {"bytes_per_s": inter_bit_per_s / 8 * ETHERNET} | ({} if latency_s is None else {"latency_s": latency_s})
    if device == "gpu":
        within, between = replace(CUDA.within, bytes_per_s=near), replace(CUDA.between, **known)
        return Site(
            ranks,
            device,
            {"NCCL": within, "SHM": replace(HOST.within, bytes_per_s=near, byte_s=_STAGED_S)},
            {"NCCL": between},
            speeds,
            within,
            between,
            cores=cores,
            block=block,
            quantizer=quantizer,
            tree=True,
        )
    return Site(
        ranks,
        device,
        {"SHM": HOST.within},
        {"TCP": replace(HOST.between, **known)},
        speeds,
        replace(_GLOO, bytes_per_s=near),
        replace(_GLOO, **known),
        cores=cores,
        block=block,
        quantizer=quantizer,
        steals_kernels=cores <= 1,
        steals_transport=cores <= 1,
        start_s=HOST.start_s,
        exact_start_s=_GLOO_START_S,
    )
