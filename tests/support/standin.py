"""A device that is none: streams and events that write down what is asked of them, on CPU tensors.

What runs on it is the CUDA path but for the calls into CUDA themselves: `StandInDevice` takes the place of
`CudaDevice`, a Gloo group that of NCCL's, and CPU tensors are taken for CUDA tensors. Whatever uses memory is held to
the order that streams and events make (happens_before.py): a missing wait raises, though all runs in order here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support.happens_before import Actor, Clock, Order
from tests.support.ordered_staging import OrderedSharedExchange
from torch_cgx.group.bootstrap.handshake import Joining
from torch_cgx.group.cuda import Engine, exchanges
from torch_cgx.group.process_group import ProcessGroupCGX
from torch_cgx.kernels import Kernels, Piece, Rounding
from torch_cgx.kernels.native import default_kernels

UNWRITTEN = 0xA5  # what fresh memory holds: a byte that somebody reads too early shows by it


class Stream(Actor):
    """Known by its name."""


@dataclass(frozen=True)
class Event:
    number: int
    clock: Clock = field(default_factory=dict, compare=False, repr=False)


class StandInDevice:
    """Implements `torch_cgx.engines.cuda.device.Device`. `log` has a tuple a call, in order; streams by name."""

    registers = True  # memory of the host, when asked

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.capturing = False
        self.registered: dict[int, int] = {}  # address and length of memory on the host
        self._default = Stream("caller")
        self.order = Order(self._default)
        self._here = threading.local()
        self._sides = 0
        self._callbacks = 0
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
            with self.watching():
                yield
        finally:
            self._here.stream = before

    def watching(self) -> AbstractContextManager[None]:
        """Meanwhile torch's operations on this thread are held to the order, too; as they are inside of `using`."""
        return self.order.watching(lambda: self.here)

    def record(self, stream: Stream) -> Event:
        self._events += 1
        self.say("record", self._events, stream.name)
        return Event(self._events, self.order.record(stream))

    def hold_back(self, stream: Stream, event: Event) -> None:
        self.say("hold back", stream.name, event.number)
        self.order.hold_back(stream, event.clock)

    def is_done(self, event: Event) -> bool:
        self.order.host_waits(event.clock)
        return True

    def synchronize(self, event: Event) -> None:
        self.say("synchronize", event.number)
        self.order.host_waits(event.clock)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        self.say("keep", tensor.numel(), stream.name)
        self.order.keep(tensor, stream)

    def is_capturing(self) -> bool:
        return self.capturing

    def empty(self, nbytes: int, where: torch.device) -> Tensor:
        with self.order.unseen():
            fresh = torch.full((nbytes,), UNWRITTEN, dtype=torch.uint8, device=where)
        return self.order.allocated(fresh, self.here)

    def pinned(self, nbytes: int) -> Tensor:
        with self.order.unseen():
            fresh = torch.full((nbytes,), UNWRITTEN, dtype=torch.uint8)
        return self.order.allocated(fresh, None)

    def register(self, tensor: Tensor) -> bool:
        if self.registers:
            self.registered[tensor.data_ptr()] = tensor.numel()
        return self.registers

    def unregister(self, tensor: Tensor) -> None:
        del self.registered[tensor.data_ptr()]

    def future(self, where: torch.device) -> torch.futures.Future[list[Tensor]]:
        self.say("future")
        return StandInFuture(self)

    def callback_stream(self) -> Stream:
        self._callbacks += 1
        return Stream(f"callback {self._callbacks}")

    def meet(self, stream: Stream, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Meeting:
        """An exchange as NCCL makes it: on a stream of its own, which first waits for the current one."""
        self.order.hold_back(stream, self.order.record(self.here))
        self.order.enqueue(stream, "exchange", outgoing, incoming)
        return Meeting(self, self.order.record(stream), (outgoing, incoming))


@dataclass(eq=False, slots=True)
class Meeting:
    device: StandInDevice
    end: Clock
    stashed: object  # the payloads, which NCCL holds until it is waited for

    def wait(self) -> None:
        self.device.say("arrived", self.device.here.name)
        self.device.order.hold_back(self.device.here, self.end)
        self.stashed = None


class StandInFuture(torch.futures.Future[Any]):
    """As torch's futures of CUDA: whoever waits holds back his stream; a callback has a stream of its own, held back.

    Both streams are told to the allocator, as far as the result's tensors go. DDP waits for what callbacks have made in
    C++, which nobody sees: the caller's stream is held back for it at once.
    """

    def __init__(self, device: StandInDevice) -> None:
        super().__init__()
        self._device = device
        self._end: Clock = {}
        self._tensors: list[Tensor] = []

    def set_result(self, result: Any) -> None:
        self._end = self._device.order.record(self._device.here)
        self._tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        super().set_result(result)

    def wait(self) -> Any:
        result = super().wait()
        self._synchronize(self._device.here)
        return result

    def _synchronize(self, stream: Stream) -> None:
        self._device.order.hold_back(stream, self._end)
        for tensor in self._tensors:
            self._device.order.keep(tensor, stream)

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        made = StandInFuture(self._device)

        def run(_: object) -> None:
            stream = self._device.callback_stream()
            self._synchronize(stream)
            with self._device.using(stream):
                try:
                    result = callback(self)
                except Exception as error:
                    made.set_exception(error)  # type: ignore[arg-type]
                    return
                # Before anybody can know that it is done: whoever does may go on at once, on another thread.
                order = self._device.order
                order.hold_back(self._device._default, order.record(stream))
                made.set_result(result)

        super().then(run)
        return made


class NotedKernels:
    """Kernels that write down when, and on which stream, they are launched."""

    def __init__(self, kernels: Kernels, device: StandInDevice) -> None:
        self._kernels = kernels
        self._device = device
        self.fails_at: str | None = None

    @property
    def name(self) -> str:
        return self._kernels.name

    @contextmanager
    def _launched(self, kernel: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Iterator[None]:
        device = self._device
        device.say(kernel, device.here.name)
        if kernel == self.fails_at:
            raise RuntimeError("an illegal memory access was encountered")
        device.order.enqueue(device.here, kernel, reads, writes)
        with device.order.unseen():
            yield

    def _used(self, pieces: Sequence[Piece], values: Tensor | None) -> list[Tensor]:
        """The part of a tensor that the pieces lie in."""
        if values is None or not pieces:
            return []
        first = min(piece.offset for piece in pieces)
        return [values[first : max(piece.offset + piece.numel for piece in pieces)]]

    def encode(
        self,
        pieces: Sequence[Piece],
        values: Tensor,
        payload: Tensor,
        rounding: Rounding,
        residual: Tensor | None = None,
    ) -> None:
        with self._launched("encode", self._used(pieces, values), [payload, *self._used(pieces, residual)]):
            self._kernels.encode(pieces, values, payload, rounding, residual)

    def decode(self, pieces: Sequence[Piece], payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        used = self._used(pieces, values)
        with self._launched("decode", [payload, *(used if add else ())], used):
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
        used = self._used(pieces, values)
        with self._launched("reduce", [*used, *payloads], [*used, out, *self._used(pieces, residual)]):
            self._kernels.reduce(pieces, values, payloads, out, scale, rounding, residual)

    def sum(self, pieces: Sequence[Piece], values: Tensor, payloads: Sequence[Tensor], scale: float) -> None:
        used = self._used(pieces, values)
        with self._launched("sum", [*used, *payloads], used):
            self._kernels.sum(pieces, values, payloads, scale)


class GlooForNccl(dist.ProcessGroupGloo):  # type: ignore[misc]
    """What NCCL has and Gloo has not: `alltoall` of lists, and averages."""

    def __init__(self, device: StandInDevice, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._device = device
        self._stream = Stream("NCCL's")
        self._met: list[Meeting] = []
        self._tag = 0

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        self._device.say("exchange", self._device.here.name, sum(payload.numel() for payload in inputs))
        meeting = self._device.meet(self._stream, inputs, outputs)
        self._met = [meeting, *(each for each in self._met if each.stashed is not None)]
        self._tag += 1
        works = []
        for peer, (output, payload) in enumerate(zip(outputs, inputs, strict=True)):
            if peer == self.rank():
                output.copy_(payload)
                continue
            # As NCCL does, which meets every peer, empty messages too.
            works.append(self.recv([output], peer, self._tag))
            works.append(self.send([payload], peer, self._tag))
        return _GlooMeeting(meeting, works)

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

    def _start_coalescing(self) -> None:
        self._device.say("coalesce")

    def _end_coalescing(self) -> None:
        self._device.say("coalesced")

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._device.say("timeout", timeout.total_seconds())
        super()._set_default_timeout(timeout)

    def shutdown(self) -> None:
        self._device.say("shutdown")

    def abort(self) -> None:
        self._device.say("abort")


@dataclass(frozen=True, slots=True)
class _GlooMeeting:
    meeting: Meeting
    works: list[Any]

    def wait(self) -> None:
        self.meeting.wait()
        for work in self.works:
            work.wait()


class StandInGroup(ProcessGroupCGX):
    """A cgx group that takes CPU tensors for CUDA tensors."""

    make_kernels: Callable[[], Kernels] = staticmethod(default_kernels)

    def _cuda_problem(self) -> str:
        return ""

    def _engine(self, joining: Joining) -> Engine:
        self.device = StandInDevice()
        exchanges.SharedExchange = OrderedSharedExchange  # type: ignore[misc]
        self.kernels: NotedKernels | None = None

        def make_kernels() -> Kernels:
            self.kernels = NotedKernels(type(self).make_kernels(), self.device)
            return self.kernels

        return Engine("cpu", partial(self._new_group, joining), self.device, make_kernels)

    def _new_group(self, joining: Joining) -> GlooForNccl:
        return GlooForNccl(self.device, joining.prefixed("nccl"), joining.rank, joining.world, joining.timeout)

    def shutdown(self) -> None:
        super().shutdown()
        self._check_order()

    def abort(self) -> None:
        super().abort()
        self._check_order()

    def leave_at_exit(self) -> None:
        super().leave_at_exit()
        self._check_order()

    def _check_order(self) -> None:
        if self._parts.cuda is not None:  # all ranks have what it takes
            self.device.order.check()


def create(options: Any, backend_options: Any = None) -> StandInGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return StandInGroup(options.store, options.group_rank, options.group_size, options.timeout, ranks)


def register(kernels: Callable[[], Kernels] | None = None) -> None:
    """From now on `init_process_group("standin")` makes such groups, with these kernels."""
    if kernels is not None:
        StandInGroup.make_kernels = staticmethod(kernels)
    if "STANDIN" not in dist.Backend.backend_list and "standin" not in dist.Backend.backend_list:
        dist.Backend.register_backend("standin", create, extended_api=True, devices=["cpu"])
