"""Execution of programs on a device's stream. Kernels and exchanges are enqueued, slices overlap, and nothing blocks.

The steps of a level are enqueued on one stream. Then that level's messages of all ranks are exchanged at once, on the
exchange's own streams. The steps of the next level wait for them on the device. Slices take turns as in `schedule`:
while one is exchanged, the next is encoded. The caller provides the device, its kernels and the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_cgx.engines.computing import Reduction, compute
from torch_cgx.engines.cuda.device import Device
from torch_cgx.engines.cuda.exchange import Arrival, Exchange
from torch_cgx.kernels import Kernels
from torch_cgx.plan.layout import Chunk, Slice
from torch_cgx.plan.program import Receive, Send, Slot
from torch_cgx.plan.rounds import Round, rounds_for
from torch_cgx.plan.schedule import Schedule, schedule_for

__all__ = ["CudaExecutor", "Enqueued"]


@dataclass(slots=True)
class _Underway:
    """A slice between its first and its last step."""

    part: Slice
    schedule: Schedule
    rounds: tuple[tuple[Round, ...], ...]
    room_nbytes: int  # of the longest payload
    slots: dict[Slot, Tensor] = field(default_factory=dict)
    arriving: list[Arrival] = field(default_factory=list)

    def coded(self, slot: Slot) -> Chunk:
        """Return the chunk that the slot's payload encodes, with its coding."""
        shared = self.schedule.slots[slot]
        return self.part.joined(shared.chunks).coded(shared.exact)


@dataclass(slots=True)
class Enqueued:
    """An operation between the caller's stream and the one that it runs on."""

    ready: Any  # event: the values are there
    stream: Any
    done: Any = None  # event: the result is there; None until all is enqueued


class CudaExecutor:
    """One rank's executor. `make_kernels` is called at the first operation, because Triton takes a second to load."""

    def __init__(self, device: Device, make_kernels: Callable[[], Kernels], exchange: Exchange, rank: int) -> None:
        self._device = device
        self._make_kernels = make_kernels
        self._kernels: Kernels | None = None
        self._exchange = exchange
        self._rank = rank
        self._sides: dict[torch.device, Any] = {}
        self.reset_stats()

    def reset_stats(self) -> None:
        self.bytes_sent = 0

    def take(self, operation: Reduction) -> Enqueued:
        """Do the first part, on the caller's thread. From here on the values belong to the operation."""
        values, device = operation.values, self._device
        if device.is_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and a compressed operation cannot be part of one: leave it outside "
                "of the graph, or make it exact with torch_cgx.uncompressed()"
            )
        if values.device not in self._sides:
            self._sides[values.device] = device.side_stream(values.device)
        side = self._sides[values.device]
        for tensor in (values, operation.residual, operation.share):
            if tensor is not None:
                device.keep(tensor, side)
        return Enqueued(device.record(device.current_stream(values.device)), side)

    def enqueue(self, operation: Reduction, enqueued: Enqueued, *, widened: bool) -> None:
        """Do the second part: enqueue everything on the side stream. `widened`: use a float32 copy of the values."""
        device, values = self._device, operation.values
        if self._kernels is None:
            self._kernels = self._make_kernels()
        device.hold_back(enqueued.stream, enqueued.ready)
        with device.using(enqueued.stream), torch.inference_mode():  # the values may be a tensor of that mode
            if widened:
                wide = values.to(torch.float32)
                self._run(replace(operation, values=wide), self._kernels)
                values.copy_(wide)
            else:
                self._run(operation, self._kernels)
            enqueued.done = device.record(enqueued.stream)

    def _run(self, operation: Reduction, kernels: Kernels) -> None:
        operation = replace(operation, rounding=replace(operation.rounding, rank=self._rank))
        slices = [self._prepare(part, operation) for part in operation.layout.slices]
        depth = operation.topology.depth + 1
        self._exchange.begin(operation.agreed)
        for tick in range(len(slices) + depth - 1):
            for level in range(depth):
                if 0 <= tick - level < len(slices):
                    self._make_level(slices[tick - level], level, operation, kernels)

    def _prepare(self, part: Slice, operation: Reduction) -> _Underway:
        nonempty = tuple(chunk.nbytes > 0 for chunk in part.chunks)
        key = (operation.topology, nonempty, self._rank)
        codings = (False,) if operation.topology.compress_inside else (False, True)
        longest_nbytes = max(chunk.coded(exact).nbytes for chunk in part.chunks for exact in codings)
        room_nbytes = longest_nbytes * operation.topology.most_chunks
        return _Underway(part, schedule_for(*key), rounds_for(*key), room_nbytes)

    def _make_level(self, each: _Underway, level: int, operation: Reduction, kernels: Kernels) -> None:
        for arrival in each.arriving:
            arrival.wait()
        each.arriving.clear()
        values = operation.values
        take = partial(self._device.empty, where=values.device)
        for step in each.schedule.levels[level]:
            if not isinstance(step, Send | Receive):
                compute(step, operation, kernels, each.slots, each.coded, take)
        for turn in each.rounds[level]:
            nothing = take(0)
            outgoing, incoming = ([nothing] * operation.topology.world for _ in range(2))
            for peer, slot in turn.sends.items():
                outgoing[peer] = each.slots[slot]
                self.bytes_sent += outgoing[peer].numel()
            for peer, slot in turn.receives.items():
                incoming[peer] = each.slots[slot] = take(each.coded(slot).nbytes)
            each.arriving.append(self._exchange.start(outgoing, incoming, each.room_nbytes))
        if level == len(each.schedule.levels) - 1:
            each.slots.clear()
