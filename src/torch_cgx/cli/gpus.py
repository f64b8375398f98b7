"""GPUs, as `cgx doctor` and `cgx bench --device cuda` know them: what there is, and where a rank puts its tensors.

`Cuda` is a call into torch a method, because no machine of ours can execute it; all else takes it as it comes, so that
tests can give another.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Cpu", "Cuda", "Gpus", "Place", "all_gpus", "place_of"]


class Place(Protocol):
    """Where a rank's tensors are."""

    def put(self, values: Tensor) -> Tensor:
        """A copy of CPU values there, or these themselves."""

    def finish(self) -> None:
        """Wait until all that was enqueued is done."""


class Gpus(Place, Protocol):
    def count(self) -> int: ...

    def name(self, index: int) -> str: ...

    def reaches(self, index: int, other: int) -> bool:
        """Whether one GPU reads another's memory without the host's help."""

    def library(self) -> str | None:
        """What carries collectives between them, with its version; None: torch was built without."""


class Cpu:
    def put(self, values: Tensor) -> Tensor:
        return values

    def finish(self) -> None:
        pass


class Cuda:
    """CUDA, and ROCm, which torch calls by the same names. A rank has the GPU of its number on this host."""

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
    """By the names that `--device` has."""
    return all_gpus() if kind == "cuda" else Cpu()
