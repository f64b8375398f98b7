"""A device that is none: streams and events that write down what is asked of them, on CPU tensors.

What runs on it is the CUDA path but for the calls into CUDA themselves: `StandInDevice` takes the place of
`CudaDevice`, a Gloo group that of NCCL's, and CPU tensors are taken for CUDA tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_cgx.backend import ProcessGroupCGX
from torch_cgx.cuda import Engine
from torch_cgx.kernels import Kernels, Piece, Rounding
from torch_cgx.kernels.cpu import default_kernels
from torch_cgx.membership import Joining

UNWRITTEN = 0xA5  # what fresh memory holds: a byte that somebody reads too early shows by it


@dataclass(eq=False)
class Stream:
    name: str


@dataclass(frozen=True)
class Event:
    number: int


class StandInDevice:
    """Implements `torch_cgx.executors.device.Device`. `log` has a tuple a call, in order; streams by name."""

    registers = True  # memory of the host, when asked

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.capturing = False
        self.registered: dict[int, int] = {}  # address and length of memory on the host
        self._default = Stream("caller")
        self._here = threading.local()
        self._sides = 0
        self._events = 0

    @property
    def here(self) -> Stream:
        stream: Stream = getattr(self._here, "stream", self._default)
        return stream

    def say(self, *what: Any) -> None:
        self.log.append(what)

    def adopt(self, where: torch.device) -> None:
        self.say("adopt", threading.current_thread().name.rstrip("-0123456789"))

    def side_stream(self, where: torch.device) -> Stream:
        self._sides += 1
        return Stream(f"side {self._sides}")

    def current_stream(self, where: torch.device) -> Stream:
        return self.here

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.here, stream
        try:
            yield
        finally:
            self._here.stream = before

    def record(self, stream: Stream) -> Event:
        self._events += 1
        self.say("record", self._events, stream.name)
        return Event(self._events)

    def hold_back(self, stream: Stream, event: Event) -> None:
        self.say("hold back", stream.name, event.number)

    def is_done(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event) -> None:
        self.say("synchronize", event.number)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        self.say("keep", tensor.numel(), stream.name)

    def is_capturing(self) -> bool:
        return self.capturing

    def empty(self, nbytes: int, where: torch.device) -> Tensor:
        return torch.full((nbytes,), UNWRITTEN, dtype=torch.uint8, device=where)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), UNWRITTEN, dtype=torch.uint8)

    def register(self, tensor: Tensor) -> bool:
        if self.registers:
            self.registered[tensor.data_ptr()] = tensor.numel()
        return self.registers

    def unregister(self, tensor: Tensor) -> None:
        del self.registered[tensor.data_ptr()]

    def future(self, where: torch.device) -> torch.futures.Future[list[Tensor]]:
        self.say("future")
        return torch.futures.Future()


class NotedKernels:
    """Kernels that write down when, and on which stream, they are launched."""

    def __init__(self, kernels: Kernels, device: StandInDevice) -> None:
        self._kernels = kernels
        self._device = device
        self.fails_at: str | None = None

    @property
    def name(self) -> str:
        return self._kernels.name

    def _note(self, kernel: str) -> None:
        self._device.say(kernel, self._device.here.name)
        if kernel == self.fails_at:
            raise RuntimeError("an illegal memory access was encountered")

    def encode(
        self,
        pieces: Sequence[Piece],
        values: Tensor,
        payload: Tensor,
        rounding: Rounding,
        residual: Tensor | None = None,
    ) -> None:
        self._note("encode")
        self._kernels.encode(pieces, values, payload, rounding, residual)

    def decode(self, pieces: Sequence[Piece], payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        self._note("decode")
        self._kernels.decode(pieces, payload, values, add=add)

    def reduce(
        self,
        pieces: Sequence[Piece],
        values: Tensor,
        payloads: Sequence[Tensor],
        out: Tensor,
        scale: float,
        rounding: Rounding,
        residual: Tensor | None = None,
    ) -> None:
        self._note("reduce")
        self._kernels.reduce(pieces, values, payloads, out, scale, rounding, residual)


class GlooForNccl(dist.ProcessGroupGloo):  # type: ignore[misc]
    """What NCCL has and Gloo has not: `alltoall` of lists, and averages."""

    def __init__(self, device: StandInDevice, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._device = device
        self._tag = 0

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        self._device.say("exchange", self._device.here.name, sum(payload.numel() for payload in inputs))
        self._tag += 1
        works = []
        for peer, (output, payload) in enumerate(zip(outputs, inputs, strict=True)):
            if peer == self.rank():
                assert not output.numel() and not payload.numel()
                continue
            # As NCCL does, which meets every peer, empty messages too.
            works.append(self.recv([output], peer, self._tag))
            works.append(self.send([payload], peer, self._tag))
        return _Meeting(self._device, works)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        average = opts.reduceOp == dist.ReduceOp.AVG
        if average:
            opts.reduceOp = dist.ReduceOp.SUM
        work = super().allreduce(tensors, opts)
        if average:
            work.wait()
            for tensor in tensors:
                tensor.div_(self.size())
        return work

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._device.say("timeout", timeout.total_seconds())
        super()._set_default_timeout(timeout)

    def shutdown(self) -> None:
        self._device.say("shutdown")

    def abort(self) -> None:
        self._device.say("abort")


class _Meeting:
    def __init__(self, device: StandInDevice, works: list[Any]) -> None:
        self._device = device
        self._works = works

    def wait(self) -> None:
        self._device.say("arrived", self._device.here.name)
        for work in self._works:
            work.wait()


class StandInGroup(ProcessGroupCGX):
    """A cgx group that takes CPU tensors for CUDA tensors."""

    make_kernels: Callable[[], Kernels] = staticmethod(default_kernels)

    def _cuda_problem(self) -> str:
        return ""

    def _engine(self, joining: Joining) -> Engine:
        self.device = StandInDevice()
        self.kernels: NotedKernels | None = None

        def make_kernels() -> Kernels:
            self.kernels = NotedKernels(type(self).make_kernels(), self.device)
            return self.kernels

        return Engine("cpu", partial(self._new_group, joining), self.device, make_kernels)

    def _new_group(self, joining: Joining, name: str, ranks: Sequence[int]) -> GlooForNccl:
        store = joining.prefixed(name)
        return GlooForNccl(self.device, store, ranks.index(joining.rank), len(ranks), joining.timeout)


def create(options: Any, backend_options: Any = None) -> StandInGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return StandInGroup(options.store, options.group_rank, options.group_size, options.timeout, ranks)


def register(kernels: Callable[[], Kernels] | None = None) -> None:
    """From now on `init_process_group("standin")` makes such groups, with these kernels."""
    if kernels is not None:
        StandInGroup.make_kernels = staticmethod(kernels)
    if "STANDIN" not in dist.Backend.backend_list and "standin" not in dist.Backend.backend_list:
        dist.Backend.register_backend("standin", create, extended_api=True, devices=["cpu"])
