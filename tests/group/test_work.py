"""Handles on operations, over fake ones: what an engine's errors are told as, and what a handle remembers."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_cgx.errors import CGXError, CGXTimeoutError, MismatchError, PeerLostError
from torch_cgx.group.futures import Completions
from torch_cgx.group.ledger.board import _BoardEntry
from torch_cgx.group.ledger.store import _StoreEntry
from torch_cgx.group.work import CompositeWork, DoneWork, TorchWork

WHAT = "broadcast (operation 7 of rank 1)"
LONG_S = 60  # a future that is forgotten is never done

# As torch 2.13 and Gloo word them.
SLICE_ENDED = "Operation timed out!"
TIMED_OUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"
TIMED_OUT_BEFORE = "[gloo/transport/tcp/unbound_buffer.cc:81] Application timeout caused pair closure"
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
RESET = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:4711: Connection reset by peer"
REFUSED = "Cannot use ReduceOp.BAND with Float"


class FakeInner:
    """What Gloo returns: `script` is what each wait does, None for an operation that is done."""

    def __init__(self, *script: str | None) -> None:
        self.script = list(script)
        self.waits = 0

    def is_completed(self) -> bool:
        return self.script[0] != SLICE_ENDED

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits += 1
        text = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if text is not None:
            raise RuntimeError(text)
        return True

    def source_rank(self) -> int:
        return 3

    def get_future(self) -> Any:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


class FakeBoard:
    """A shared group as far as a carried work uses it."""

    def __init__(self, behind: str = "", trouble: CGXError | None = None) -> None:
        self.behind = behind
        self.trouble = trouble
        self.told: list[CGXError] = []

    def check(self, sequence: int) -> None:
        if self.trouble is not None:
            raise self.trouble

    check_missing = check_alive = check

    def laggards(self, sequence: int) -> str:
        return self.behind

    def fail(self, error: CGXError) -> None:
        self.told.append(error)


@pytest.fixture(autouse=True)
def peers_die_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or not at all: nobody waits long for a fake one."""
    monkeypatch.setattr("torch_cgx.group.ledger.board._DYING_S", 0.01)


@pytest.fixture
def completions() -> Iterator[Completions]:
    found = Completions("cgx-test-futures")
    yield found
    found.close()


class FakeInquiry:
    """What ranks without a board ask, as far as a carried work uses it."""

    def check(self) -> None: ...

    def explain(self, error: CGXError, number: int) -> CGXError:
        return error


def carried(inner: FakeInner, completions: Completions, board: FakeBoard | None = None) -> TorchWork:
    entry: Any = _BoardEntry(board, 7, WHAT)  # type: ignore[arg-type]
    if board is None:
        unused: Any = None
        entry = _StoreEntry(FakeInquiry(), unused, unused, 7, WHAT)  # type: ignore[arg-type]
    trail: Any = SimpleNamespace(finish=lambda error=None: None)
    return TorchWork(inner, entry, [torch.ones(2)], completions, trail)


@pytest.mark.parametrize("board", [None, FakeBoard()], ids=["no board", "board"])
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (TIMED_OUT, CGXTimeoutError),
        (TIMED_OUT_BEFORE, CGXTimeoutError),
        (CLOSED, PeerLostError),
        (RESET, PeerLostError),
    ],
    ids=["time-out", "time-out before", "closed", "reset"],
)
def test_trouble_between_ranks_is_one_of_our_errors_and_keeps_the_engines_words(
    text: str, kind: type[CGXError], board: FakeBoard | None, completions: Completions
) -> None:
    with pytest.raises(kind) as caught:
        carried(FakeInner(text), completions, board).wait()
    assert type(caught.value) is kind
    assert WHAT in str(caught.value) and text in str(caught.value)
    assert kind is not CGXTimeoutError or " Timed out " in str(caught.value).replace(text, "")


@pytest.mark.parametrize("board", [None, FakeBoard()], ids=["no board", "board"])
def test_what_the_engine_refuses_is_raised_as_it_is_and_not_told_to_peers(
    board: FakeBoard | None, completions: Completions
) -> None:
    with pytest.raises(RuntimeError) as caught:
        carried(FakeInner(REFUSED), completions, board).wait()
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == REFUSED
    assert board is None or not board.told


def test_a_time_out_names_the_ranks_that_have_not_called_and_tells_the_peers(completions: Completions) -> None:
    board = FakeBoard(behind="rank 2 has made 6 calls")
    with pytest.raises(CGXTimeoutError, match="rank 2 has made 6 calls") as caught:
        carried(FakeInner(TIMED_OUT), completions, board).wait()
    assert board.told == [caught.value]


def test_what_the_board_knows_is_told_instead_of_the_engines_words(completions: Completions) -> None:
    trouble = MismatchError("rank 0 called broadcast, rank 1 called all_reduce")
    with pytest.raises(MismatchError) as caught:
        carried(FakeInner(CLOSED), completions, FakeBoard(trouble=trouble)).wait()
    assert caught.value is trouble
    # An operation that has ended is compared as well: two different calls may both come to an end.
    with pytest.raises(MismatchError):
        carried(FakeInner(None), completions, FakeBoard(trouble=trouble)).wait()


@pytest.mark.parametrize("board", [None, FakeBoard()], ids=["no board", "board"])
def test_the_end_of_a_slice_is_no_time_out(board: FakeBoard | None, completions: Completions) -> None:
    inner = FakeInner(SLICE_ENDED, SLICE_ENDED, None)
    assert carried(inner, completions, board).wait()
    assert inner.waits == 3


def test_a_wait_with_a_time_out_of_its_own_ends_and_the_operation_can_be_waited_for_again(
    completions: Completions,
) -> None:
    inner = FakeInner(SLICE_ENDED)
    work = carried(inner, completions)
    with pytest.raises(CGXTimeoutError, match=r" Timed out after the 0\.01 s "):
        work.wait(timedelta(seconds=0.01))
    assert not work.is_completed()
    inner.script = [None]
    assert work.wait()
    assert work.is_completed() and work.is_success()


def test_a_failure_is_remembered_and_raised_each_time(completions: Completions) -> None:
    inner = FakeInner(CLOSED)
    work = carried(inner, completions)
    for _ in range(3):
        with pytest.raises(PeerLostError):
            work.wait()
    assert inner.waits == 1
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), PeerLostError)


def test_asking_whether_it_is_done_neither_waits_nor_raises(completions: Completions) -> None:
    pending = FakeInner(SLICE_ENDED)
    assert not carried(pending, completions).is_completed()
    assert pending.waits == 0
    assert carried(FakeInner(None), completions).is_completed()
    failed = carried(FakeInner(CLOSED), completions)
    assert failed.is_completed() and not failed.is_success()


def test_the_result_and_the_source_are_passed_on(completions: Completions) -> None:
    work = carried(FakeInner(None), completions)
    assert work.source_rank() == 3
    assert torch.equal(work.result()[0], torch.ones(2))


def test_a_future_fails_with_the_same_words(completions: Completions) -> None:
    future = carried(FakeInner(SLICE_ENDED, CLOSED), completions, FakeBoard()).get_future()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        future.wait()
    done = carried(FakeInner(SLICE_ENDED, None), completions, FakeBoard()).get_future()
    assert torch.equal(done.wait()[0], torch.ones(2))


class Failing(DoneWork):
    def _poll(self, slice_ms: int) -> bool:
        raise PeerLostError("gone")


def test_several_that_make_one_finish_once(completions: Completions) -> None:
    finished: list[int] = []
    inner = FakeInner(SLICE_ENDED, None)
    parts = [DoneWork([], completions), carried(inner, completions)]
    work = CompositeWork(parts, lambda: finished.append(1), [torch.ones(2)], completions)
    future = work.get_future()
    threads = [threading.Thread(target=work.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    future.wait()
    assert finished == [1]


def test_several_that_make_one_fail_with_the_first_failure_and_finish_nothing(completions: Completions) -> None:
    finished: list[int] = []
    parts = [DoneWork([], completions), Failing([], completions)]
    work = CompositeWork(parts, lambda: finished.append(1), [], completions)
    with pytest.raises(PeerLostError, match="gone"):
        work.wait()
    assert work.is_completed() and not work.is_success()
    assert finished == []


def test_a_callback_may_ask_for_another_future_of_the_same_group(completions: Completions) -> None:
    def then_another(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        future.value()
        inner: list[Tensor] = DoneWork([torch.ones(3)], completions).get_future().wait()
        return inner[0]

    started = time.monotonic()
    chained = carried(FakeInner(SLICE_ENDED, None), completions, FakeBoard()).get_future().then(then_another)
    assert torch.equal(chained.wait(), torch.ones(3))
    assert time.monotonic() - started < LONG_S


def test_futures_may_be_closed_twice_and_asked_for_again() -> None:
    completions = Completions("cgx-test-futures")
    completions.close()
    assert DoneWork([], completions).get_future().wait() == []
    completions.close()
    completions.close()
    assert DoneWork([], completions).get_future().wait() == []
    completions.close()


def test_no_future_is_forgotten_when_threads_come_and_go(completions: Completions) -> None:
    """With a switch of threads wherever there can be one: a future without a thread would never be done."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(2000):
            futures = [DoneWork([], completions).get_future() for _ in range(4)]
            deadline = time.monotonic() + LONG_S
            while not all(future.done() for future in futures):
                assert time.monotonic() < deadline, "a future was not completed"
                time.sleep(0)
    finally:
        sys.setswitchinterval(before)
