"""Gradients that any rank can make for any other, and what their compressed sum must look like."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.error_bound import bound_by_quantizations, error_bound
from tests.support.harness import Rank

BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"
BUCKET_SIZE = "CGX_COMPRESSION_BUCKET_SIZE"
SLACK = 1.001  # the bound itself is worked out in float64
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def noise(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's gradient: any rank can make any other's, and so work out the sum."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def exact_sum(world: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([noise(r, numel, dtype).double() for r in range(world)]).sum(0)


def digest(x: Tensor) -> str:
    return hashlib.sha1(x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def within_bound(
    x: Tensor,
    world: int,
    bits: int,
    block: int = 512,
    average: bool = False,
    quantizations: int | None = None,
    **more: float,
) -> None:
    """Of the sum of all ranks' noise; by SRA among all ranks, or with so many quantizations by any algorithm."""
    inputs = [noise(r, x.numel(), x.dtype) for r in range(world)]
    scale = 1 / world if average else 1.0
    if quantizations is None:
        expected, allowed = error_bound(inputs, bits, block, scale, **more)
    else:
        expected, allowed = bound_by_quantizations(inputs, bits, block, quantizations, scale)
    error = (x.double() - expected).abs()
    excess = (error / (allowed * SLACK)).max().item()
    assert excess <= 1.0, f"{bits} bits, {x.dtype}, {x.numel()} values: error {excess:.3f} times the bound"


def is_exact(x: Tensor, world: int) -> bool:
    """Whether x is the sum of all ranks' noise but for rounding to its dtype on the way."""
    error = (x.double() - exact_sum(world, x.numel(), x.dtype)).abs().max().item()
    return error <= 8 * world * torch.finfo(x.dtype).eps


def summed(me: Rank, numel: int = 5000, **options: Any) -> Tensor:
    x = noise(me.rank, numel)
    dist.all_reduce(x, **options)
    return x
