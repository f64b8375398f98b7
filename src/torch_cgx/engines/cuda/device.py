"""The CUDA executor's interface to CUDA: streams, events, memory. The rest of the executor runs on any tensors.

`CudaDevice` is as thin as possible, with one call into torch.cuda per method, because none of our machines can execute
it. Tests replace it by a stand-in that records the calls and works on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CudaDevice", "Device"]

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices
_runtime: Callable[[], Any] = torch.cuda.cudart


class Device(Protocol):
    """The interface of a device. Streams and events are its own objects, for its methods only."""

    def adopt(self, where: torch.device) -> None:
        """Make this the current device of the calling thread, which is one of ours."""

    def side_stream(self, where: torch.device) -> Any:
        """Return a stream. After some dozens, streams are reused."""

    def current_stream(self, where: torch.device) -> Any:
        """Return the stream that the calling thread enqueues on."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make this the calling thread's current stream within the context."""

    def record(self, stream: Any) -> Any:
        """Return an event that happens when all work enqueued on the stream so far is done."""

    def hold_back(self, stream: Any, event: Any) -> None:
        """Make later work on the stream wait for the event. The host does not wait."""

    def is_done(self, event: Any) -> bool:
        """Return whether the event has happened, without waiting."""

    def synchronize(self, event: Any) -> None:
        """Make the host wait for the event."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep the tensor's memory from reuse until the stream has done all work enqueued when the tensor is freed."""

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""

    def empty(self, nbytes: int, where: torch.device) -> Tensor:
        """Return a tensor of bytes on the device, for use on the current stream."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return a tensor of bytes in pinned host memory, which the device copies from and to directly."""

    def register(self, tensor: Tensor) -> bool:
        """Register these bytes on the host, so that the device treats them as pinned. Return whether that worked."""

    def unregister(self, tensor: Tensor) -> None:
        """Undo `register`. Called before the bytes are freed."""

    def future(self, where: torch.device) -> torch.futures.Future[list[Tensor]]:
        """Return a future whose readers wait, on the device, for the stream that is current when its result is set."""


class CudaDevice:
    """The CUDA device, and ROCm's, which has the same names in torch."""

    def adopt(self, where: torch.device) -> None:
        torch.cuda.set_device(where)

    def side_stream(self, where: torch.device) -> Any:
        return torch.cuda.Stream(where, priority=-1)  # type: ignore[no-untyped-call]

    def current_stream(self, where: torch.device) -> Any:
        return torch.cuda.current_stream(where)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> Any:
        return stream.record_event()

    def hold_back(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def is_done(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def keep(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def empty(self, nbytes: int, where: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=where)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register(self, tensor: Tensor) -> bool:
        return not int(_runtime().cudaHostRegister(tensor.data_ptr(), tensor.numel(), _PORTABLE))

    def unregister(self, tensor: Tensor) -> None:
        _runtime().cudaHostUnregister(tensor.data_ptr())

    def future(self, where: torch.device) -> torch.futures.Future[list[Tensor]]:
        return torch.futures.Future(devices=[where])
