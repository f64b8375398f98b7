"""The checks of `cgx doctor` on GPUs: their libraries, the bytes that kernels produce, and sums.

1. Names, NCCL (or RCCL), Triton, and the pairs of GPUs that reach each other's memory.
2. On one GPU: the payloads of the Triton kernels against those of the CPU kernels, byte by byte.
3. On all GPUs, if there are several: a compressed all_reduce of 64 MB with one process per GPU, against the exact sum.

The last two take a while, and report their progress on stderr.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import permutations
from typing import Any

import torch

from torch_cgx.cli.gpus import Gpus, Place
from torch_cgx.cli.processes import RankFailed, TooSlow, run_ranks
from torch_cgx.cli.progress import Progress
from torch_cgx.codecs import MaxMin
from torch_cgx.kernels import Kernels, Rounding
from torch_cgx.kernels.native import default_kernels
from torch_cgx.plan.layout import Layer, make_layout

__all__ = ["Findings", "check_allreduce", "differing_kernels", "examine"]

CHECK_NBYTES = 64 << 20
LIMIT_S = 600.0  # Triton compiles in the ranks, too
BITS, BLOCK = 4, 1024
KERNEL_NUMEL = 100_003  # has an incomplete block and, at odd widths, a byte that two blocks share
# Width, type, stochastic. Every width, type and rounding occurs, but few combinations, because Triton compiles three
# kernels for each.
TRIALS = (
    *((bits, torch.float32, False) for bits in range(1, 9)),
    (BITS, torch.float32, True),
    (BITS, torch.float16, False),
    (3, torch.bfloat16, False),
)


@dataclass(slots=True)
class Findings:
    facts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def examine(
    gpus: Gpus,
    make_kernels: Callable[[], Kernels],
    check: Callable[[int], dict[str, Any]] | None = None,
    only_look: bool = False,
) -> Findings:
    """Return the findings about the GPUs. `check` runs an all_reduce on that many GPUs, or raises `RankFailed`."""
    count = gpus.count()
    if count == 0:
        return Findings({"GPUs": "none that torch sees"})
    found = Findings({f"GPU {index}": gpus.name(index) for index in range(count)})
    library = gpus.library()
    found.facts["collectives on GPUs"] = library or "missing"
    if library is None:
        found.problems.append("torch was built without NCCL: install torch for CUDA (or ROCm)")
    apart = [f"{one}-{other}" for one, other in permutations(range(count), 2) if not gpus.reaches(one, other)]
    found.facts["peer access"] = f"all but {', '.join(apart)}" if apart else "all" if count > 1 else "-"
    if apart:
        found.advice.append(
            "GPUs that do not reach each other's memory: NCCL goes through the host, and so does "
            "CGX_INNER_COMMUNICATOR_TYPE=SHM; try which is faster"
        )
    if find_spec("triton") is None:
        found.facts["kernels on GPUs"] = "missing"
        found.problems.append("Triton is missing, CUDA tensors cannot be compressed: pip install triton")
        return found
    if only_look:
        return found
    with Progress("cgx doctor") as progress:
        try:
            differing = differing_kernels(make_kernels(), gpus, progress)
        except Exception as error:  # compilers and drivers may raise anything; the rest of the report must follow
            differing = [f"they failed: {type(error).__name__}: {error}"]
        found.facts["kernels on GPUs"] = "not those of the CPU" if differing else "the bytes of the CPU's"
        found.problems += [f"kernels on GPUs: {what}" for what in differing]
        if library is not None and count > 1 and not differing:
            progress.update(len(TRIALS) / (len(TRIALS) + 1), f"all_reduce on {count} GPUs")
            _try_allreduce(found, count, check or check_allreduce)
    return found


def _try_allreduce(found: Findings, count: int, check: Callable[[int], dict[str, Any]]) -> None:
    name = f"all_reduce of 64 MB at {BITS} bits on {count} GPUs"
    try:
        told = check(count)
    except (RankFailed, TooSlow) as error:
        found.facts[name] = "failed"
        found.problems.append(f"{name}: {error}")
        return
    found.facts[name] = f"right: relative error {told['relative_error']:.1e}, the same bits on all GPUs"


def check_allreduce(count: int) -> dict[str, Any]:
    """Check an all_reduce with one process per GPU and return rank 0's result. A wrong sum also raises `RankFailed`."""
    settings = {"bits": BITS, "bucket_size": BLOCK, "dtype": "float32", "nbytes": CHECK_NBYTES, "device": "cuda"}
    told = run_ranks(
        "torch_cgx.cli.bench.allreduce_ranks:check", settings, count, lambda rank, message: None, limit_s=LIMIT_S
    )
    return dict(told[0])


def differing_kernels(kernels: Kernels, place: Place, progress: Progress) -> list[str]:
    """Return the widths and types at which these kernels differ from the CPU's. Empty if all bytes are identical."""
    differing = []
    generator = torch.Generator().manual_seed(0)
    for number, (bits, dtype, stochastic) in enumerate(TRIALS):
        name = f"{bits} bits, {str(dtype).removeprefix('torch.')}, {'stochastic' if stochastic else 'nearest'}"
        progress.update(number / (len(TRIALS) + 1), f"kernels: {name}")
        values = torch.randn(KERNEL_NUMEL, generator=generator).to(dtype)
        ours = _trial(default_kernels(), values.clone(), bits, stochastic)
        theirs = _trial(kernels, place.put(values.clone()), bits, stochastic)
        if not all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)):
            differing.append(f"{name}: other bytes")
    return differing


def _trial(kernels: Kernels, values: torch.Tensor, bits: int, stochastic: bool) -> list[torch.Tensor]:
    """Return a payload, the encoded sum of it and the values, the values after that reduce, and the sum decoded."""
    layout = make_layout((Layer(values.numel(), MaxMin(bits, BLOCK)),), 1, values.element_size(), 1 << 30)
    (chunk,) = layout.slices[0].chunks
    payload, total = (torch.zeros(chunk.nbytes, dtype=torch.uint8, device=values.device) for _ in range(2))
    rounding = Rounding(stochastic, seed=1, op=2, rank=3)
    kernels.encode(chunk.pieces, values, payload, rounding)
    kernels.reduce(chunk.pieces, values, [payload], total, 0.5, rounding)
    decoded = torch.zeros_like(values)
    kernels.decode(chunk.pieces, total, decoded)
    return [each.cpu().view(torch.uint8) for each in (payload, total, values, decoded)]
