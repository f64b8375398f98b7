"""GPUs for `cgx doctor` and `cgx bench --device cuda`: the ones torch sees, and where a rank puts its tensors.

Each method of `Cuda` is one call into torch, because no machine of ours can execute it. All other code takes it as an
argument, so that tests can pass a different one.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Cpu", "Cuda", "Gpus", "Place", "all_gpus", "place_of"]


class Place(Protocol):
    """The device of a rank's tensors."""

    def put(self, values: Tensor) -> Tensor:
        """Return a copy of CPU values on the device, or the values themselves."""

    def finish(self) -> None:
        """Wait until all enqueued work is done."""


class Gpus(Place, Protocol):
    def count(self) -> int: ...

    def name(self, index: int) -> str: ...

    def reaches(self, index: int, other: int) -> bool:
        """Return whether one GPU reads another's memory without the host's help."""

    def library(self) -> str | None:
        """Return the library for collectives between GPUs with its version, or None if torch was built without it."""


class Cpu:
    def put(self, values: Tensor) -> Tensor:
        return values

    def finish(self) -> None:
        pass


class Cuda:
    """CUDA, or ROCm, which torch calls by the same names. A rank uses the GPU of its local rank."""

    def put(self, values: Tensor) -> Tensor:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return values.cuda()

    def finish(self) -> None:
        torch.cuda.synchronize()

    def count(self) -> int:
        return torch.cuda.device_count()

    def name(self, index: int) -> str:
        return torch.cuda.get_device_name(index)

    def reaches(self, index: int, other: int) -> bool:
        return torch.cuda.can_device_access_peer(index, other)

    def library(self) -> str | None:
        if not torch.distributed.is_nccl_available():
            return None
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return f"{'NCCL' if torch.version.hip is None else 'RCCL'} {version}"


def all_gpus() -> Gpus:
    return Cuda()


def place_of(kind: str) -> Place:
    """Return the place for a value of `--device`."""
    return all_gpus() if kind == "cuda" else Cpu()
