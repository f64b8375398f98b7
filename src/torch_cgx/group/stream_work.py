"""Handles on operations of a device. A wait makes the caller's stream wait, not the host."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor

from torch_cgx.engines.cuda.device import Device
from torch_cgx.engines.cuda.executor import Enqueued
from torch_cgx.engines.jobs import Job
from torch_cgx.group.futures import Completions
from torch_cgx.group.work import PolledWork

__all__ = ["CoalescedWork", "StagedWork", "StreamWork"]


class StreamWork(PolledWork):
    """An operation that is fully enqueued. `wait` ignores its timeout, because it does not block."""

    def __init__(
        self, device: Device, where: torch.device, enqueued: Enqueued, result: list[Tensor], completions: Completions
    ) -> None:
        super().__init__(result, completions)
        self._device = device
        self._where = where
        self._enqueued = enqueued

    def _poll(self, slice_ms: int) -> bool:
        return self._device.is_done(self._enqueued.done)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._device.hold_back(self._device.current_stream(self._where), self._enqueued.done)
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future = self.new_future()
        self.settle(future)
        return future

    def new_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._device.future(self._where)

    def settle(self, future: torch.futures.Future[list[Tensor]]) -> None:
        """Complete the future on a side stream that waits for this operation, and for no later one.

        Readers of the future wait for the stream that is current when it is set.
        """
        device, enqueued = self._device, self._enqueued
        stream = device.side_stream(self._where)
        if stream == enqueued.stream:
            stream = device.side_stream(self._where)
        device.hold_back(stream, enqueued.done)
        with device.using(stream):
            future.set_result(self._result)


class StagedWork(StreamWork):
    """An operation that a thread enqueues, payload by payload as they arrive. The host waits until all is enqueued."""

    def __init__(
        self,
        job: Job,
        device: Device,
        where: torch.device,
        enqueued: Enqueued,
        result: list[Tensor],
        completions: Completions,
    ) -> None:
        super().__init__(device, where, enqueued, result, completions)
        self._job = job

    def _poll(self, slice_ms: int) -> bool:
        return self._job.wait(slice_ms / 1000)

    def wait(self, timeout: timedelta | None = None) -> bool:
        PolledWork.wait(self, timeout)
        return super().wait()

    def is_completed(self) -> bool:
        """Return whether the device is done too. `poll` only tells whether all is enqueued."""
        return super().is_completed() and (self._failure is not None or self._device.is_done(self._enqueued.done))

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._completions.future_of(self)

    def settle(self, future: torch.futures.Future[list[Tensor]]) -> None:
        self._device.adopt(self._where)  # this is a thread of ours
        super().settle(future)


class CoalescedWork(PolledWork):
    """Several operations on one device, each with its own handle, that a caller waits for as one."""

    def __init__(
        self, parts: list[torch.distributed.Work], device: Device, result: list[Tensor], completions: Completions
    ) -> None:
        super().__init__(result, completions)
        self._parts = parts
        self._device = device

    def _poll(self, slice_ms: int) -> bool:
        return all(part.is_completed() for part in self._parts)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for part in self._parts:
            part.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        where = self._result[0].device
        future = self._device.future(where)
        with self._device.using(self._device.side_stream(where)):
            self.wait()
            future.set_result(self._result)
        return future
