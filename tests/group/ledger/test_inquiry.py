"""What ranks tell each other of their calls, and what is made of it; several ranks of one process, over one store."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from torch_cgx.errors import CGXError, CGXTimeoutError, MismatchError, PeerLostError, PoisonedError
from torch_cgx.group.bootstrap import host
from torch_cgx.group.calls import alike, call_from, collective_call, describe, digest, fields_of
from torch_cgx.group.ledger.inquiry import Inquiry, Report, find_mismatch, find_missing, read_report

SUM = collective_call("all_reduce", torch.float32, (1000,), reduction="SUM", bits=4, block=512)
LONGER = collective_call("all_reduce", torch.float32, (1001,), reduction="SUM", bits=4, block=512)
BROADCAST = collective_call("broadcast", torch.int64, (2, 3), root=1)
GATHER = collective_call("gather", torch.float32, None, root=0)
BARRIER = collective_call("barrier")
NAMES = ["rank 4", "rank 5", "rank 6"]


@pytest.mark.parametrize("call", [SUM, BROADCAST, GATHER, BARRIER])
def test_a_call_survives_json_and_keeps_its_hash(call: ctypes.Structure) -> None:
    again = call_from(json.loads(json.dumps(fields_of(call))))
    assert bytes(again) == bytes(call) and alike(again, call) and digest(again) == digest(call)


def test_calls_that_differ_have_other_hashes() -> None:
    calls = [SUM, LONGER, BROADCAST, GATHER, BARRIER]
    assert len({digest(call) for call in calls}) == len(calls)
    assert not any(alike(a, b) for a in calls for b in calls if a is not b)


def test_calls_are_described_in_the_words_of_the_board() -> None:
    assert describe(SUM) == "all_reduce(float32[1000], SUM, 4 bits, bucket size 512)"
    assert describe(BROADCAST) == "broadcast(int64[2, 3], root 1)"
    assert describe(GATHER) == "gather(float32, root 0)"
    assert describe(BARRIER) == "barrier()"
    rotated = collective_call("all_reduce", torch.float32, (8,), reduction="SUM", bits=2, block=1024, kind=2)
    assert describe(rotated) == "all_reduce(float32[8], SUM, 2 bits, bucket size 1024, rotated)"
    many = collective_call("all_reduce", torch.float64, (1,) * 7, reduction="AVG", bits=32, layout=0x1ABCD)
    assert describe(many) == "all_reduce(float64[1, 1, 1, 1, 1, 1, ...], AVG, exact, layers and strides #1abcd)"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"asked": 1, "calls": [[1, [1, 2]]], "age_s": 0, "left": false}',
        b'{"asked": 1, "calls": [[1, ["x", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]]], "age_s": 0, "left": false}',
        b'{"asked": 1, "calls": 7, "age_s": 0, "left": false}',
        b" " * (1 << 20),
    ],
)
def test_what_is_no_report_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        read_report(text)


def test_a_report_survives_its_way() -> None:
    asked, report = read_report(Report({6: SUM, 7: BROADCAST}, 2.5, True).written(3).encode())
    assert asked == 3 and report.last == 7 and report.age_s == 2.5 and report.has_left
    assert alike(report.calls[6], SUM) and alike(report.calls[7], BROADCAST)


def test_the_first_difference_is_told_with_both_calls() -> None:
    reports = {0: Report({5: SUM, 6: SUM, 7: SUM}), 1: Report({6: SUM}), 2: Report({6: LONGER, 7: BROADCAST})}
    assert find_mismatch(reports, 0, NAMES) == (
        "ranks have lost step at operation 6: rank 4 called all_reduce(float32[1000], SUM, 4 bits, bucket size 512), "
        "rank 6 called all_reduce(float32[1001], SUM, 4 bits, bucket size 512)"
    )
    assert find_mismatch({0: reports[0], 1: reports[1]}, 0, NAMES) == ""


def test_who_is_missing_is_told_with_what_it_did_last() -> None:
    reports = {0: Report({7: SUM}), 1: Report({6: BROADCAST}, 3.2), 2: Report({7: SUM})}
    assert find_missing(reports, 7, 0, NAMES, {}) == (
        "rank 5 has not called it: it called operation 6, broadcast(int64[2, 3], root 1), last, 3 s ago"
    )
    assert find_missing({0: reports[0]}, 7, 0, NAMES, {1: "is gone"}) == (
        "rank 5 is gone; rank 6 does not answer: dead, stopped or cut off"
    )
    left = {0: reports[0], 1: Report({7: SUM}), 2: Report({}, has_left=True)}
    assert find_missing(left, 7, 0, NAMES, {}).startswith("rank 6 has left the group")


Make = Callable[[int], Inquiry]


@pytest.fixture
def make() -> Iterator[Make]:
    """Inquiries of the ranks of one group, in this process."""
    store, made = dist.HashStore(), []

    def make_one(rank: int) -> Inquiry:
        hung_up: list[int] = []
        one = Inquiry(dist.PrefixStore("group", store), rank, (4, 5, 6), lambda: hung_up.append(rank))
        made.append(one)
        return one

    yield make_one
    for one in made:
        one.close()
        one._thread.join(30)
    assert not any(thread.name.startswith("cgx-inquiry") for thread in threading.enumerate())


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_waits_finds_out_that_another_has_called_something_else(make: Make) -> None:
    ranks = [make(rank) for rank in range(3)]
    for one, call in zip(ranks, (SUM, SUM, BROADCAST), strict=True):
        assert one.note(call) == 1
    ranks[0].wonder()
    until(lambda: all(one.failure is not None for one in ranks))
    for one, name in zip(ranks, NAMES, strict=True):
        assert isinstance(one.failure, MismatchError)
        assert f"{name} called" in str(one.failure) and "lost step at operation 1" in str(one.failure)
        with pytest.raises(MismatchError):
            one.note(SUM)


def test_who_waits_for_one_that_only_computes_goes_on_waiting(make: Make) -> None:
    ranks = [make(rank) for rank in range(3)]
    ranks[0].note(SUM)
    ranks[0].wonder()
    until(lambda: all(one._asked == 1 for one in ranks) and not ranks[0]._wondered)
    time.sleep(0.1)
    assert [one.failure for one in ranks] == [None] * 3


def test_a_time_out_names_the_one_that_has_not_called_and_poisons_the_others(make: Make) -> None:
    ranks = [make(rank) for rank in range(3)]
    for one in ranks[:2]:
        one.note(SUM)
    error = ranks[0].explain(CGXTimeoutError("gave up after 2 s"), 1)
    assert type(error) is CGXTimeoutError
    assert "rank 4: Timed out in operation 1, all_reduce(float32[1000]" in str(error)
    assert "rank 6 has not called it: it has called nothing yet" in str(error) and "gave up after 2 s" in str(error)
    until(lambda: all(one.failure is not None for one in ranks))
    for one in ranks[1:]:
        assert isinstance(one.failure, PoisonedError)
        assert str(one.failure).startswith("rank 4 failed, and so rank")


def test_one_that_has_left_is_told_from_one_that_is_silent(make: Make) -> None:
    ranks = [make(rank) for rank in range(2)]  # the third never joins
    ranks[0].note(SUM)
    ranks[1].close()
    error = ranks[0].explain(PeerLostError("connection closed"), 1)
    assert isinstance(error, PeerLostError)
    assert "rank 5 has left the group" in str(error) and "rank 6 does not answer" in str(error)


def test_a_connection_that_one_closed_who_waited_long_enough_is_a_time_out(make: Make) -> None:
    ranks = [make(rank) for rank in range(3)]
    for one in ranks[:2]:
        one.note(SUM)
    error = ranks[0].explain(PeerLostError("connection closed by peer"), 1)
    assert type(error) is CGXTimeoutError, "all live, and one has not called"
    assert "rank 6 has not called it" in str(error)


@pytest.mark.parametrize(
    ("state", "kind"),
    [("is stopped", CGXTimeoutError), (host.GONE, PeerLostError), ("", PeerLostError)],
)
def test_a_connection_that_was_closed_because_of_a_stopped_rank_is_a_time_out(
    make: Make, monkeypatch: pytest.MonkeyPatch, state: str, kind: type[CGXError]
) -> None:
    """The first whose wait is over closes its connections, and another may see that before its own is."""
    one = make(0)
    one.note(SUM)
    monkeypatch.setattr(one, "_state", lambda peer: state if peer == 2 else "")
    reports = {0: one._mine(), 1: Report({1: SUM})}
    error = one._diagnosis(PeerLostError, 1, reports, one._states(reports), "connection closed by peer")
    assert type(error) is kind and f"rank 6 {state}" in str(error)


def test_an_abort_reaches_the_others(make: Make) -> None:
    ranks = [make(rank) for rank in range(3)]
    ranks[2].close(CGXError("rank 6 called abort()"))
    until(lambda: all(one.failure is not None for one in ranks[:2]))
    assert "rank 6 called abort()" in str(ranks[0].failure)


def test_who_hears_of_lost_step_raises_that_even_where_the_other_call_is_not_known_yet(make: Make) -> None:
    one = make(0)
    one.note(SUM)
    first = {"rank": 1, "kind": "MismatchError", "text": "ranks have lost step at operation 1"}
    error = one._echo(first, {0: one._mine()})
    assert isinstance(error, MismatchError) and "rank 5 noticed it first: ranks have lost step" in str(error)


def test_who_hears_of_a_time_out_names_the_one_that_was_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to give up wrote only whose message it missed, who may have waited for another as well."""
    one = make(1)
    one.note(SUM)
    first = {"rank": 0, "kind": "CGXTimeoutError", "text": "rank 4 waited for a message from rank 5"}
    for state, said in (
        ("does not answer: it is stopped", "rank 6 does not answer: it is stopped"),
        ("", "rank 6 has"),
    ):
        monkeypatch.setattr(one, "_state", lambda peer, state=state: state if peer == 2 else "")
        others = {} if state else {2: Report({}, age_s=0.0)}
        error = one._echo(first, {0: Report({1: SUM}), 1: one._mine(), **others})
        assert isinstance(error, PoisonedError)
        assert said in str(error) and "(rank 4 waited for a message from rank 5)" in str(error)


def test_who_hears_of_another_failure_than_a_time_out_blames_nobody_else(make: Make) -> None:
    one = make(1)
    one.note(SUM)
    first = {"rank": 0, "kind": "CGXError", "text": "no memory"}
    error = one._echo(first, {0: Report({1: SUM}), 1: one._mine(), 2: Report({})})
    assert isinstance(error, PoisonedError) and "no memory" in str(error) and "rank 6" not in str(error)


def test_one_that_has_answered_before_it_died_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make(0)
    one.note(SUM)
    monkeypatch.setattr(one, "_state", lambda peer: host.GONE if peer == 1 else "")
    reports = {rank: Report({1: SUM}) for rank in range(3)}
    assert one._states(reports) == {1: host.GONE}
    error = one._diagnosis(PeerLostError, 1, reports, one._states(reports), "")
    assert isinstance(error, PeerLostError) and f"rank 5 {host.GONE}" in str(error) and "rank 6" not in str(error)
    reports[1] = Report({1: BROADCAST})
    assert isinstance(one._diagnosis(PeerLostError, 1, reports, one._states(reports), ""), MismatchError)


class DeadStore:
    """As a store whose link is down: nothing comes back."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        def fall_silent(*arguments: object) -> None:
            if name != "set":
                time.sleep(3)
                raise RuntimeError("the store has not answered within 3 s")

        return fall_silent


def test_a_store_that_does_not_answer_holds_up_nobody_for_long() -> None:
    one = Inquiry(DeadStore(), 0, (4, 5), lambda: None)  # type: ignore[arg-type]
    number = one.note(SUM)
    error = one.explain(CGXTimeoutError("gave up"), number)
    assert isinstance(error, CGXTimeoutError)
    assert "rank 5 does not answer" in str(error) and "operation 1, all_reduce(float32[1000]" in str(error)


def test_the_state_of_a_process_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        began = host.stat(child.pid)[1]
        assert host.state_of(child.pid, began) == ""
        assert "is gone" in host.state_of(child.pid, "another start")
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: "is stopped" in host.state_of(child.pid, began))
    finally:
        child.kill()
        until(lambda: "is gone" in host.state_of(child.pid, began))
        child.wait()
