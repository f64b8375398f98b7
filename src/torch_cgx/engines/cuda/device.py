"""What the CUDA executor asks of CUDA: streams, events, memory. Everything else about it runs on any tensors.

`CudaDevice` is as thin as can be, one call into torch.cuda a method, because no machine of ours can execute it. Tests
put a stand-in in its place that notes the calls and works on CPU tensors.
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
    """Streams and events are the device's own objects, for its methods alone."""

    def adopt(self, where: torch.device) -> None:
        """From now on the calling thread, one of ours, works for this device."""

    def side_stream(self, where: torch.device) -> Any:
        """A stream; after some dozens, one that was given before."""

    def current_stream(self, where: torch.device) -> Any:
        """What the calling thread enqueues on."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Meanwhile this is the calling thread's current stream."""

    def record(self, stream: Any) -> Any:
        """An event: all that the stream has been given so far is done."""

    def hold_back(self, stream: Any, event: Any) -> None:
        """What the stream is given from now on waits for the event; the host does not."""

    def is_done(self, event: Any) -> bool:
        """Whether it has happened. Never waits."""

    def synchronize(self, event: Any) -> None:
        """Let the host wait for it."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Give the tensor's memory to nobody else before the stream has done what it has been given by then."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def empty(self, nbytes: int, where: torch.device) -> Tensor:
        """Bytes on the device, for use on the current stream."""

    def pinned(self, nbytes: int) -> Tensor:
        """Bytes on the host that the device copies from and to by itself."""

    def register(self, tensor: Tensor) -> bool:
        """Let the device copy from and to these bytes on the host as though they were pinned; whether it will."""

    def unregister(self, tensor: Tensor) -> None:
        """They are about to go."""

    def future(self, where: torch.device) -> torch.futures.Future[list[Tensor]]:
        """One whose result waits, on the device, for the stream that is current when it is set."""


class CudaDevice:
    """CUDA, and ROCm, which torch calls by the same names."""

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
