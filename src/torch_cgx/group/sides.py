"""A group's sides, one per kind of device: torch's own group for exact operations, and an engine for cgx's own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from torch_cgx.errors import MismatchError
from torch_cgx.group.futures import Completions
from torch_cgx.group.reducers import Reducer
from torch_cgx.group.work import CompositeWork

__all__ = ["CpuSide", "Side", "Sides"]


class Side(Protocol):
    """One rank's part of a group for the tensors of one kind of device."""

    carrier: Any  # torch's own group: Gloo or NCCL
    carrier_name: str
    enqueues: bool  # operations are ordered by streams, and the carrier checks its tensors itself
    carries_exact: bool  # the reducer also runs exact operations, faster than the carrier
    compresses: bool  # the reducer can compress
    coalescing: bool  # the carrier is collecting calls, which it will launch as one

    @property
    def reducer(self) -> Reducer:
        """Return the reducer that runs cgx's programs."""

    def together(self, parts: list[Any], result: list[Tensor], completions: Completions) -> Work:
        """Return one handle on the operations of a coalesced call."""

    def record_use(self, tensor: Tensor) -> None:
        """Note that the calling thread's stream uses this tensor, which may have been made on another."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""


class CpuSide:
    """The side for CPU tensors."""

    carrier_name = "gloo"
    enqueues = False
    compresses = True
    coalescing = False

    def __init__(self, gloo: Any, reducer: Reducer, *, carries_exact: bool) -> None:
        self.carrier = gloo
        self.reducer = reducer
        self.carries_exact = carries_exact

    def together(self, parts: list[Any], result: list[Tensor], completions: Completions) -> Work:
        return CompositeWork(parts, _nothing, result, completions)

    def record_use(self, tensor: Tensor) -> None: ...

    def set_timeout(self, timeout: timedelta) -> None:
        self.reducer.set_timeout(timeout)


class Sides:
    """The sides of a group, by kind of device. CPU tensors always have one."""

    def __init__(self, host: Side, by_kind: Mapping[str, Side], without_cuda: str) -> None:
        """Keep the sides by kind of device.

        `host` also serves calls without a tensor. `without_cuda` names the ranks that keep the group from CUDA tensors.
        """
        self.host = host
        self._by_kind = {"cpu": host, **by_kind}
        self._without_cuda = without_cuda

    def of(self, tensor: Tensor) -> Side:
        """Return the side of this tensor's device."""
        return self.at(tensor.device)

    def at(self, device: torch.device) -> Side:
        """Return the side of this device."""
        side = self._by_kind.get(device.type)
        if side is not None:
            return side
        if device.type == "cuda":
            raise MismatchError(
                f"this group serves CPU tensors alone, and got one on {device}: CUDA tensors need a GPU and "
                f"NCCL on all of its ranks; without are {self._without_cuda}"
            )
        raise ValueError(f"backend cgx: expected tensors on cpu, or on cuda with NCCL; got one on {device}")

    def for_barrier(self, device: torch.device | None) -> Side:
        """Return the side of this device, or the host's if the group has none for it.

        torch names this rank's accelerator even if other ranks have none.
        """
        return self.host if device is None else self._by_kind.get(device.type, self.host)

    def all(self) -> list[Side]:
        """Return every side once, the host's first."""
        return list({id(side): side for side in (self.host, *self._by_kind.values())}.values())


def _nothing() -> None:
    pass
