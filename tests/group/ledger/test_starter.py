"""Operations that Gloo carries between ranks that share no board: what one of them fails with, and who else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from torch_cgx.errors import PeerLostError
from torch_cgx.group.ledger.starter import GlooComparison, GroupFailedError, Nothing, Starter

LIMIT = timedelta(seconds=10)


class FakeGloo:
    """Compares calls at once, as if all ranks had made the same one; `outcomes` are raised first."""

    def __init__(self) -> None:
        self.outcomes: list[BaseException] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Nothing:
        if self.outcomes:
            raise self.outcomes.pop(0)
        return Nothing()


@pytest.fixture
def gloo() -> FakeGloo:
    return FakeGloo()


@pytest.fixture
def starter(gloo: FakeGloo) -> Iterator[Starter]:
    made = Starter(gloo)
    yield made
    made.close()


def raising(error: BaseException) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run


@pytest.mark.parametrize("kind", [TypeError, ValueError, RuntimeError, MemoryError])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_gloo_refuses_is_raised_by_that_operation_alone(
    starter: Starter, gloo: FakeGloo, kind: type[Exception], asynchronous: bool
) -> None:
    compare = partial(GlooComparison, gloo, 1, LIMIT)
    held = threading.Event()  # until all are queued
    first = starter.carry(compare, lambda: held.wait(10) and Nothing(), asynchronous=True)
    refused = starter.carry(compare, raising(kind("refused")), asynchronous)
    behind = starter.carry(compare, Nothing, asynchronous=True)
    held.set()
    behind.wait(LIMIT)
    first.wait(LIMIT)
    with pytest.raises(kind, match="refused"):
        refused.wait(LIMIT)
    assert refused.is_completed()


def test_no_operation_waits_for_ever_for_one_that_was_interrupted(starter: Starter, gloo: FakeGloo) -> None:
    compare = partial(GlooComparison, gloo, 1, LIMIT)
    gloo.outcomes = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        starter.carry(compare, Nothing, asynchronous=False)
    with pytest.raises(RuntimeError, match="was interrupted"):
        starter.carry(compare, Nothing, asynchronous=True).wait(LIMIT)


def test_what_fails_the_group_is_raised_by_all_operations_behind_it(starter: Starter, gloo: FakeGloo) -> None:
    compare = partial(GlooComparison, gloo, 1, LIMIT)
    held = threading.Event()  # until all are queued
    first = starter.carry(compare, lambda: held.wait(10) and Nothing(), asynchronous=True)
    failure = PeerLostError("gone")
    failing = starter.carry(compare, raising(GroupFailedError(failure)), asynchronous=True)
    behind = starter.carry(compare, Nothing, asynchronous=True)
    held.set()
    first.wait(LIMIT)
    for each in (failing, behind):
        with pytest.raises(PeerLostError) as caught:
            each.wait(LIMIT)
        assert caught.value is failure
