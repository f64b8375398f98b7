"""Turns of NCCL's carrier and of a staged exchange on one device: what the order of real ranks' calls does not meet."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.standin import StandInDevice
from torch_cgx.engines.cuda.executor import Enqueued
from torch_cgx.engines.jobs import Job
from torch_cgx.errors import CGXError
from torch_cgx.group.cuda.turns import Turns

HERE = torch.device("cpu")


class Carrier:
    """Like NCCL's group: a call that is not asynchronous has no handle, and runs on the caller's stream."""

    def __init__(self, device: StandInDevice) -> None:
        self._device = device

    def carry(self, tensors: list[Tensor], asynchronous: bool = True) -> Any:
        self._device.say("carried", self._device.here.name)
        return self if asynchronous else None

    def wait(self) -> None:
        self._device.say("waited", self._device.here.name)


class Case:
    def __init__(self) -> None:
        self.device = StandInDevice()
        self.turns = Turns(self.device)
        self.carrier = Carrier(self.device)
        self.side = self.device.side_stream(HERE)

    def stage(self, *, fails: bool = False) -> Job:
        """An operation that is enqueued at once, or fails."""
        enqueued = Enqueued(self.device.record(self.device.here), self.side)

        def run() -> None:
            if fails:
                raise RuntimeError("an illegal memory access was encountered")
            self.device.say("enqueued")
            enqueued.done = self.device.record(self.side)

        self.turns.after_carried(HERE, enqueued)
        job = Job(run)
        self.turns.note_staged(HERE, enqueued, job)
        return job

    def carry(self, *tensors: Tensor, **options: bool) -> Any:
        return self.turns.carry(partial(self.carrier.carry, list(tensors), **options))


def end(job: Job) -> None:
    job.run()
    job.end()


def test_it_is_the_carrier_s_turn_when_all_that_is_staged_is_enqueued() -> None:
    case = Case()
    assert case.turns.is_carriers
    case.turns.wait()
    job = case.stage()
    assert not case.turns.is_carriers
    end(job)
    case.turns.wait()
    assert case.turns.is_carriers


def test_the_carrier_s_stream_waits_for_what_is_staged_and_the_next_one_for_it() -> None:
    case, tensor = Case(), torch.zeros(7)
    end(job := case.stage())
    assert case.carry(tensor) is case.carrier
    end(job := case.stage())  # noqa: F841
    assert case.device.log == [
        *[("record", 1, "caller"), ("enqueued",), ("record", 2, "side 1")],
        *[("hold back", "caller", 2), ("carried", "caller")],
        *[("keep", 7, "side 2"), ("waited", "side 2"), ("record", 3, "side 2")],
        *[("record", 4, "caller"), ("hold back", "side 1", 3), ("enqueued",), ("record", 5, "side 1")],
    ]


def test_what_runs_on_the_caller_s_own_stream_is_done_when_that_is() -> None:
    case = Case()
    assert case.carry(torch.zeros(7), asynchronous=False) is None
    case.stage()
    assert case.device.log[-3:] == [("record", 1, "caller"), ("record", 2, "caller"), ("hold back", "side 1", 1)]


def test_a_barrier_has_no_tensors_and_waits_for_what_is_staged_on_any_device() -> None:
    case = Case()
    end(job := case.stage())  # noqa: F841
    case.carry()
    assert ("hold back", "caller", 2) in case.device.log and ("waited", "side 2") in case.device.log


def test_a_graph_that_is_captured_waits_for_nothing_outside() -> None:
    case = Case()
    end(job := case.stage())  # noqa: F841
    case.device.log.clear()
    case.device.capturing = True
    case.carry(torch.zeros(7))
    assert case.device.log == [("carried", "caller")]


def test_after_a_failure_nothing_is_carried() -> None:
    case = Case()
    job = case.stage(fails=True)
    end(job)
    with pytest.raises(CGXError, match="illegal memory access"):
        case.turns.wait()
    del job
    gc.collect()
    assert case.turns.is_carriers  # nobody holds it any longer
    with pytest.raises(CGXError, match="a compressed operation failed"):
        case.carry(torch.zeros(7))
    assert ("carried", "caller") not in case.device.log
