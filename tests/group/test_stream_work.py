"""Handles on operations of a device: what completes them, and what their futures wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.standin import Event, StandInDevice, Stream
from torch_cgx.engines.cuda.executor import Enqueued
from torch_cgx.engines.jobs import Job
from torch_cgx.errors import CGXError
from torch_cgx.group.futures import Completions
from torch_cgx.group.stream_work import CoalescedWork, StagedWork, StreamWork

WHERE = torch.device("cpu")
NAMED = ("hold back", "set")


class SlowDevice(StandInDevice):
    """Events happen when the test says so, and there are few streams, as with CUDA."""

    def __init__(self, n_streams: int = 32) -> None:
        super().__init__()
        self.happened: set[int] = set()
        self._streams = [Stream(f"pooled {number}") for number in range(n_streams)]
        self._given = 0

    def side_stream(self, where: torch.device) -> Stream:
        self._given += 1
        return self._streams[(self._given - 1) % len(self._streams)]

    def is_done(self, event: Event) -> bool:
        return event.number in self.happened

    def future(self, where: torch.device) -> Any:
        device = self

        class Noted(torch.futures.Future):  # type: ignore[type-arg]
            def set_result(self, result: Any) -> None:
                device.say("set", device.here.name)
                super().set_result(result)

        return Noted()


@pytest.fixture
def completions() -> Iterator[Completions]:
    made = Completions("futures")
    yield made
    made.close()


def enqueued_on(device: SlowDevice) -> Enqueued:
    side = device.side_stream(WHERE)
    return Enqueued(device.record(device.current_stream(WHERE)), side, device.record(side))


@pytest.mark.parametrize("n_streams", [32, 2, 3])
def test_a_future_waits_for_its_operation_and_not_for_the_next(completions: Completions, n_streams: int) -> None:
    device = SlowDevice(n_streams)
    enqueued = enqueued_on(device)
    work = StreamWork(device, WHERE, enqueued, [torch.ones(1)], completions)
    later = device.record(enqueued.stream)
    for _ in range(3):
        device.log.clear()
        future = work.get_future()
        held, told = [entry for entry in device.log if entry[0] in NAMED]
        assert held == ("hold back", held[1], enqueued.done.number) and told == ("set", held[1])
        assert held[1] != enqueued.stream.name, "that stream holds the next operation too"
        assert future.done()
    assert later.number not in [entry[-1] for entry in device.log]


def test_a_staged_operation_is_completed_when_the_device_is_done_too(completions: Completions) -> None:
    device = SlowDevice()
    enqueued = enqueued_on(device)
    job = Job(lambda: None)
    work = StagedWork(job, device, WHERE, enqueued, [torch.ones(1)], completions)
    assert not work.is_completed()
    job.run()
    job.end()
    both = CoalescedWork([work], device, [torch.ones(1)], completions)
    for _ in range(2):
        assert not work.is_completed() and not work.is_success() and not both.is_completed()
    work.wait()  # makes the stream wait, not the host
    assert device.log[-1] == ("hold back", "caller", enqueued.done.number)
    assert not work.is_completed()
    device.happened.add(enqueued.done.number)
    assert work.is_completed() and work.is_success() and both.is_completed()


def test_a_future_of_a_staged_operation_does_not_wait_for_the_device(completions: Completions) -> None:
    device = SlowDevice()
    job = Job(lambda: None)
    work = StagedWork(job, device, WHERE, enqueued_on(device), [torch.ones(1)], completions)
    future = work.get_future()
    job.run()
    job.end()
    assert future.wait()[0] == 1 and not work.is_completed()
    assert ("adopt", "futures") in device.log


def test_a_staged_operation_that_failed_is_completed(completions: Completions) -> None:
    def fail() -> None:
        raise CGXError("no")

    device = SlowDevice()
    enqueued = Enqueued(None, device.side_stream(WHERE))
    job = Job(fail)
    work = StagedWork(job, device, WHERE, enqueued, [torch.ones(1)], completions)
    job.run()
    job.end()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), CGXError)
    with pytest.raises(CGXError, match="no"):
        work.wait()
