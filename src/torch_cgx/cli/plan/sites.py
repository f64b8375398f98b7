"""The constants that `cgx plan` starts from: kernels, links, communicators. Each with where it comes from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_cgx.cli.plan.model import Site
from torch_cgx.cli.registry import UsageError
from torch_cgx.plan.simulate import Speeds, Wire

__all__ = ["CPU", "GPUS", "cpu_speeds", "gpu_speeds", "make_site", "read_speeds"]

# Memory bandwidth, bytes a second. Kernels are bound by it (docs/gpu.md): no GPU of ours has shown yet how nearly they
# reach it, so half of it is counted on.
GPUS = {"rtx3090": 936e9, "a100": 2039e9, "h100": 3350e9}
_OF_ROOFLINE = 0.5
_LAUNCH_S = 5e-6

CPU = "cpu"

# The share of an Ethernet link's rate that TCP's payload has: 1448 bytes of each 1514.
ETHERNET = 1448 / 1514

# Seconds a message takes on its way, a processor for it at each end, and for each byte of it at each end. NCCL's: usual
# figures, not measured by us. Gloo's: what benchmarks/plan_validation.py calibrates on two cores, for our messages and
# for Gloo's own; MPI's from those, and from mpi-link-1gbit.json, where 4 MB took 4.9 ms over MPI and 6.3 over Gloo.
_NCCL = (10e-6, 2e-6, 0.0)
_NCCL_BETWEEN = (20e-6, 2e-6, 0.0)
_SHM = (2e-6, 1e-6, 0.0)
_STAGED_S = 1 / 12e9  # a byte from a GPU to pinned memory, or back
GLOO = (50e-6, 520e-6, 0.91e-9)
GLOO_EXACT = (50e-6, 0.0, 0.91e-9)
_MPI = (50e-6, 200e-6, 0.91e-9)


def gpu_speeds(bandwidth: float, bits: int = 4, block: int = 1024) -> Speeds:
    """Bytes moved over memory bandwidth, as benchmarks/gpu_estimates.py counts them, for float32."""
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


# AMD EPYC, AVX2, one thread, 64 MB in 4 bits: kernels-best-level.json in benchmarks/results.
_CPU_SPEEDS = Speeds(
    encode=10.7e9, decode=17.5e9, add=10.5e9, reduce=6.9e9, more=17.5e9, copy=8.2e9, sum=6.0e9, call_s=10e-6
)


def cpu_speeds() -> Speeds:
    return _CPU_SPEEDS


def read_speeds(path: Path, bits: int = 4) -> Speeds:
    """Of a file of `cgx bench kernels --json`: float32, one thread, the largest size that it has."""
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
        sum=copy * 3 / 4,  # two reads and a write, where a copy has a read and a write (which reads first)
        call_s=_CPU_SPEEDS.call_s,
    )


def _allowed() -> str:
    return f"allowed are {', '.join(GPUS)}, cpu, or a file of `cgx bench kernels --json`"


def speeds_named(text: str) -> tuple[str, Speeds]:
    """The device that it is of, and the speeds."""
    if text in GPUS:
        return "gpu", gpu_speeds(GPUS[text])
    return CPU, cpu_speeds() if text == CPU else read_speeds(Path(text))


def make_site(
    kernels: str,
    ranks: int,
    intra_bit_per_s: float,
    inter_bit_per_s: float,
    *,
    latency_s: float | None = None,
    cores: float | None = None,
    block: int = 1024,
) -> Site:
    """What nodes with such kernels and links have. `latency_s`: between nodes, whatever carries messages."""
    device, speeds = speeds_named(kernels)
    near, far = intra_bit_per_s / 8, inter_bit_per_s / 8 * ETHERNET

    def wire(bytes_per_s: float, constants: Sequence[float], staged_s: float = 0.0, between: bool = False) -> Wire:
        latency, message, byte = constants
        latency = latency_s if between and latency_s is not None else latency
        return Wire(bytes_per_s, latency, message, byte + staged_s)

    if device == "gpu":
        return Site(
            ranks,
            device,
            {"NCCL": wire(near, _NCCL), "SHM": wire(near, _SHM, _STAGED_S)},
            {
                "NCCL": wire(far, _NCCL_BETWEEN, between=True),
                "MPI": wire(far, _MPI, _STAGED_S, True),
                "GLOO": wire(far, GLOO, _STAGED_S, True),
            },
            speeds,
            wire(near, _NCCL),
            wire(far, _NCCL_BETWEEN, between=True),
            cores=2.0 if cores is None else cores,
            block=block,
            tree=True,
        )
    cores = 2.0 if cores is None else cores
    return Site(
        ranks,
        device,
        {"SHM": wire(near, _SHM), "GLOO": wire(near, GLOO), "MPI": wire(near, _MPI)},
        {"GLOO": wire(far, GLOO, between=True), "MPI": wire(far, _MPI, between=True)},
        speeds,
        wire(near, GLOO_EXACT),
        wire(far, GLOO_EXACT, between=True),
        cores=cores,
        block=block,
        steals_kernels=cores <= 1,
        steals_transport=cores <= 1,
    )
