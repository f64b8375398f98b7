"""This machine's means for CUDA tensors: NCCL, streams, Triton. Tests use an engine of CPU tensors instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torch_cgx.engines.cuda.device import CudaDevice, Device
from torch_cgx.group.bootstrap.handshake import Joining
from torch_cgx.kernels import Kernels

__all__ = ["Engine", "cuda_engine", "cuda_problem", "triton_kernels"]


@dataclass(frozen=True, slots=True)
class Engine:
    """The means for tensors of one kind of device."""

    kind: str  # of torch.device
    new_group: Callable[[], Any]  # makes a torch group of all ranks; all ranks call it
    device: Device
    make_kernels: Callable[[], Kernels]


def cuda_problem() -> str:
    """Return why this process cannot have CUDA tensors, or "". With ROCm the same names mean AMD's GPUs and RCCL."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return "" if dist.is_nccl_available() else "torch was built without NCCL"


def cuda_engine(joining: Joining) -> Engine:
    return Engine("cuda", partial(_new_nccl, joining), CudaDevice(), triton_kernels)


def _new_nccl(joining: Joining) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = joining.timeout
    return dist.ProcessGroupNCCL(joining.prefixed("nccl"), joining.rank, joining.world, options)


def triton_kernels() -> Kernels:
    from torch_cgx.kernels.triton import TritonKernels

    return TritonKernels()
