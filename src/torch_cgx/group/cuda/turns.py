"""One order, on each device, of what two communicators of NCCL do there: that of the calls, the same on all ranks.

The carrier's operations are enqueued by whoever calls them, those of an exchange by the thread that stages the rest of
it. Left alone, one rank's device would begin with the one and another's with the other, and both might wait for ever.
So

1. before the carrier's operation the host waits until all that was called earlier is enqueued, and its stream for that;
2. what is called after it waits, on the device, until it is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_cgx.engines.cuda.device import Device
from torch_cgx.engines.cuda.executor import Enqueued
from torch_cgx.engines.jobs import Job
from torch_cgx.errors import CGXError

__all__ = ["Turns"]

_SLICE_S = 0.1  # of a wait; another one follows


class Turns:
    """All but `wait` is called with the group's lock held, whose order is that of the calls."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._staged: dict[torch.device, Enqueued] = {}  # the last one since the carrier's last
        self._carried: dict[torch.device, Any] = {}  # events: the carrier's last one since the last that was staged
        self._streams: dict[torch.device, Any] = {}
        self._job: weakref.ref[Job] | None = None  # the last one; it keeps its tensors, so it is not kept

    def wait(self) -> None:
        """Let the host wait until all staged operations are enqueued; raises what one of them failed with."""
        job = self._last_job
        while job is not None and not job.wait(_SLICE_S):
            pass

    @property
    def is_carriers(self) -> bool:
        """Whether there is nothing to wait for."""
        job = self._last_job
        return job is None or job.wait(0)

    @property
    def _last_job(self) -> Job | None:
        return None if self._job is None else self._job()

    def after_carried(self, where: torch.device, enqueued: Enqueued) -> None:
        """Before a staged operation is given to its thread, which has nothing to do if the carrier came before."""
        if where in self._carried:
            self._device.hold_back(enqueued.stream, self._carried.pop(where))

    def note_staged(self, where: torch.device, enqueued: Enqueued, job: Job) -> None:
        self._staged[where] = enqueued
        self._job = weakref.ref(job)

    def carry(self, run: partial[Any]) -> Any:
        """Run what enqueues an operation of the carrier."""
        device, tensors = self._device, list(_tensors_in(run.args))
        if device.is_capturing():  # a graph can wait for nothing outside of it
            return run()
        places = {tensor.device for tensor in tensors} or set(self._staged)  # a barrier has none
        for where in places & self._staged.keys():
            done = self._staged[where].done
            if done is None:
                raise CGXError("a compressed operation failed while it was enqueued, and so has its group")
            device.hold_back(device.current_stream(where), done)
        inner = run()
        for where in places:
            self._staged.pop(where, None)
            self._carried[where] = self._end_of(inner, where, tensors)
        return inner

    def _end_of(self, inner: Any, where: torch.device, tensors: list[Tensor]) -> Any:
        """An event: the carrier's operation is done."""
        device = self._device
        if inner is None:
            return device.record(device.current_stream(where))
        if where not in self._streams:
            self._streams[where] = device.side_stream(where)
        stream = self._streams[where]
        for tensor in tensors:
            device.keep(tensor, stream)  # NCCL lets go of them at the first wait, which may be long before the caller's
        with device.using(stream):
            inner.wait()
        return device.record(stream)


def _tensors_in(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors_in(argument)
