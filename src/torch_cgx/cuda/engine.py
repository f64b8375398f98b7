"""What this machine has for CUDA tensors: NCCL, streams, Triton. Tests have an engine of CPU tensors instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torch_cgx.executors.device import CudaDevice, Device
from torch_cgx.kernels import Kernels
from torch_cgx.membership import Joining

__all__ = ["Engine", "cuda_engine", "triton_kernels"]


@dataclass(frozen=True, slots=True)
class Engine:
    """What serves tensors of one kind of device."""

    kind: str  # of torch.device
    new_group: Callable[[str], Any]  # a new group of torch's, of all ranks, by a name of its own in the store
    device: Device
    make_kernels: Callable[[], Kernels]


def cuda_engine(joining: Joining) -> Engine | None:
    """None where torch finds no GPU, or was built without NCCL. With ROCm the same names mean AMD's GPUs and RCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    return Engine("cuda", partial(_new_nccl, joining), CudaDevice(), triton_kernels)


def _new_nccl(joining: Joining, name: str) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = joining.timeout
    return dist.ProcessGroupNCCL(joining.prefixed(name), joining.rank, joining.world, options)


def triton_kernels() -> Kernels:
    from torch_cgx.kernels.triton import TritonKernels

    return TritonKernels()
