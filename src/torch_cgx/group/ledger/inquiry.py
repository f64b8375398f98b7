"""Messages through the group's store, for ranks that share no board, when something goes wrong.

Every rank keeps its last calls. In normal operation nothing is sent; a thread only checks, twice per second, for a
question. A rank that has waited long asks. A rank that fails reports it and asks. All answer with their last calls.
From the answers each rank finds the first call at which ranks differ, and which ranks have not called yet, have left,
or do not answer.

Only this thread uses the store, because a store that cannot be reached blocks its caller. Not here: the comparison of
calls before Gloo's operations start (starter.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from torch_cgx import _native, errors
from torch_cgx.errors import CGXError, CGXTimeoutError, MismatchError, PeerLostError, PoisonedError
from torch_cgx.group.bootstrap.host import GONE, place, state_of, who_am_i
from torch_cgx.group.bootstrap.store_json import parse_answer
from torch_cgx.group.calls import alike, call_from, describe, fields_of

__all__ = ["Inquiry", "Report", "find_mismatch", "find_missing", "read_report"]

KEPT = 32  # calls in a report
LOOK_S = 0.5  # between two checks for a question
# For peers to answer after a failure: a live rank notices the question within LOOK_S, and then needs processor time.
# Ranks that are known to be gone or stopped are not waited for.
ANSWER_S = 1.5
ANSWER_CALMLY_S = 2.0  # when a rank only waits
_ACCUSED_S = 1.0  # for the store to take a failure, before connections are closed
_SILENT_S = 0.7  # more, if the store has not taken it
_POLL_S = 0.01
_TEXT_CHARS = 2000
_REPORT_NBYTES = 64 << 10
_SHARED = (MismatchError, PeerLostError)  # concern every rank as much as the one that noticed first
_ADVICE = {
    MismatchError: "All ranks must make the same calls with the same shapes, types and settings, in one order.",
    PeerLostError: "Look at that rank's output for the cause, then restart all ranks.",
    CGXTimeoutError: "Make sure that all ranks call the same collectives, or give init_process_group a longer timeout.",
}


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's report on itself: its last calls, by number, and the age of the last one."""

    calls: Mapping[int, _native.Call]
    age_s: float = 0.0
    has_left: bool = False

    @property
    def last(self) -> int:
        return max(self.calls, default=0)

    def position(self) -> str:
        if not self.calls:
            return "has called nothing yet"
        return f"called operation {self.last}, {describe(self.calls[self.last])}, last, {self.age_s:.0f} s ago"

    def written(self, asked: int) -> str:
        calls = [[number, fields_of(call)] for number, call in self.calls.items()]
        return json.dumps({"asked": asked, "calls": calls, "age_s": self.age_s, "left": self.has_left})


def read_report(text: bytes) -> tuple[int, Report]:
    """Return the number of the question and the report that answers it.

    Anything but a report of at most 64 KB is a `ValueError`.
    """
    if len(text) > _REPORT_NBYTES:
        raise ValueError(f"a report of {len(text)} bytes; at most {_REPORT_NBYTES} are read")
    try:
        found = json.loads(text)
        calls = {int(number): call_from(fields) for number, fields in found["calls"][-KEPT:]}
        return int(found["asked"]), Report(calls, float(found["age_s"]), bool(found["left"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a report: {text!r:.200}") from error


def find_mismatch(reports: Mapping[int, Report], me: int, names: Sequence[str]) -> str:
    """Describe the first operation at which a peer's call differs from this rank's; "" if there is none."""
    mine = reports[me].calls
    for number in sorted(mine):
        for peer, theirs in sorted(reports.items()):
            if number in theirs.calls and not alike(mine[number], theirs.calls[number]):
                return (
                    f"ranks have lost step at operation {number}: {names[me]} called {describe(mine[number])}, "
                    f"{names[peer]} called {describe(theirs.calls[number])}"
                )
    return ""


def find_missing(
    reports: Mapping[int, Report], number: int, me: int, names: Sequence[str], states: Mapping[int, str]
) -> str:
    """Describe the ranks that have not made the call of this number, or do not answer; "" if all have made it.

    `states` describes processes that do not answer.
    """
    found = []
    for peer, name in enumerate(names):
        report = reports.get(peer)
        if peer == me:
            continue
        if report is None:
            found.append(f"{name} {states.get(peer) or 'does not answer: dead, stopped or cut off'}")
        elif report.has_left:
            left = "has left the group (destroy_process_group, or the end of its script)"
            found.append(f"{name} {left}; it {report.position()}")
        elif report.last < number:
            found.append(f"{name} has not called it: it {report.position()}")
    return "; ".join(found)


@dataclass(slots=True)
class _Failure:
    """An operation that has failed on this rank."""

    error: CGXError
    number: int
    accused: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class Inquiry:
    """One rank's part in the inquiry. `hang_up` closes the group's connections, so that no rank waits on them."""

    def __init__(self, store: Store, rank: int, global_ranks: Sequence[int], hang_up: Callable[[], None]) -> None:
        self._store = store
        self._pid = os.getpid()
        self._rank = rank
        self._peers = [peer for peer in range(len(global_ranks)) if peer != rank]
        self._names = [f"rank {each}" for each in global_ranks]
        self.hang_up = hang_up
        self._calls: deque[tuple[int, _native.Call]] = deque(maxlen=KEPT)
        self._noted = 0
        self._noted_s = 0.0
        self._lock = threading.Lock()
        self._asked = 0  # the last question that this rank has answered
        self._failures: deque[_Failure] = deque()
        self._wondered = False
        self._wake = threading.Event()
        self._closing = False
        self._facts: dict[int, dict[str, Any]] = {}  # of peers' processes
        self.failure: CGXError | None = None  # from then on every call on this group fails with it
        self._store.set(f"who/{rank}", json.dumps(who_am_i()))
        self._thread = threading.Thread(target=self._run, name=f"cgx-inquiry-{rank}", daemon=True)
        self._thread.start()

    def note(self, call: _native.Call) -> int:
        """Keep a call and return its number. Raises if the group has failed."""
        if self.failure is not None:
            raise self.failure
        with self._lock:
            self._noted = number = self._noted + 1
            self._calls.append((number, call))
            self._noted_s = time.monotonic()
        return number

    def check(self) -> None:
        """Raise the error that the group has failed with, here or on a peer."""
        if os.getpid() != self._pid:
            raise CGXError("a process group does not survive fork: call init_process_group in the child")
        if self.failure is not None:
            raise self.failure

    def wonder(self) -> None:
        """Let the thread ask the other ranks what they are doing. Called after a long wait."""
        self._wondered = True
        self._wake.set()

    def explain(self, error: CGXError, number: int) -> CGXError:
        """Tell the peers that the operation of this number has failed, hang up, and return an error with the cause."""
        if self.failure is None and not self._closing:
            failure = _Failure(error, number)
            self._failures.append(failure)
            self._wake.set()
            taken = failure.accused.wait(_ACCUSED_S)
            self.hang_up()
            failure.ended.wait(2 * ANSWER_S if taken else _SILENT_S)
        else:
            self.hang_up()
        if self.failure is None:  # the store does not answer
            self.failure = self._diagnosis(type(error), number, {self._rank: self._mine()}, {}, str(error))
        return self.failure

    def close(self, reason: CGXError | None = None) -> None:
        """Leave the group. With a reason (abort), peers fail at once."""
        if self._closing:
            return
        if reason is not None:
            self._failures.append(_Failure(reason, 0))
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    # ---- on the thread ----

    def _run(self) -> None:
        # A store whose process has ended cannot answer.
        with contextlib.suppress(RuntimeError):
            while True:
                self._wake.wait(LOOK_S)
                self._wake.clear()
                if self._closing:
                    self._leave()
                    return
                if self._failures:
                    self._examine(self._failures.popleft())
                elif self._wondered:
                    self._wondered = False
                    self._look_around()
                elif self._store.check([f"asked/{self._asked + 1}"]):
                    self._answer()
                    self._hear()
        while self._failures:
            failure = self._failures.popleft()
            failure.accused.set()
            failure.ended.set()

    def _leave(self) -> None:
        for failure in self._failures:
            self._accuse(failure)
            self._ask()
        self._answer(has_left=True)

    def _mine(self, has_left: bool = False) -> Report:
        with self._lock:
            calls, age_s = dict(self._calls), time.monotonic() - self._noted_s
        return Report(calls, age_s if calls else 0.0, has_left)

    def _answer(self, has_left: bool = False) -> None:
        while self._store.check([f"asked/{self._asked + 1}"]):
            self._asked += 1
        self._store.set(f"calls/{self._rank}", self._mine(has_left).written(self._asked))

    def _ask(self) -> int:
        number = self._asked + 1
        self._store.set(f"asked/{number}", "")
        self._answer()
        return number

    def _accuse(self, failure: _Failure) -> dict[str, Any]:
        """Report a failure. Return the first failure that any rank reported, which may be this one."""
        kind, text = type(failure.error).__name__, str(failure.error)[:_TEXT_CHARS]
        mine = json.dumps({"rank": self._rank, "kind": kind, "text": text, "number": failure.number})
        return _read_failure(self._store.compare_set("failed", "", mine), len(self._names))

    def _hear(self) -> None:
        """Adopt a peer's failure, if there is one."""
        if self.failure is None and self._store.check(["failed"]):
            first = _read_failure(self._store.get("failed"), len(self._names))
            if first["rank"] != self._rank:
                self.failure = self._echo(first, self._collect(self._asked, ANSWER_S))
                self.hang_up()

    def _examine(self, failure: _Failure) -> None:
        try:
            first = self._accuse(failure)
            failure.accused.set()
            asked = self._ask()
            lost = isinstance(failure.error, PeerLostError)
            reports = self._collect(asked, ANSWER_S)
            if first["rank"] != self._rank and (lost or isinstance(failure.error, MismatchError)):
                self.failure = self._echo(first, reports)
            else:
                kind, said = type(failure.error), str(failure.error)
                self.failure = self._diagnosis(kind, failure.number, reports, self._states(reports), said)
        finally:
            failure.accused.set()
            failure.ended.set()

    def _look_around(self) -> None:
        """Fail the group, during a long wait, if ranks are out of step or a rank that it needs is gone."""
        reports = self._collect(self._ask(), ANSWER_CALMLY_S, hurried=True)
        self._hear()
        if self.failure is not None or self._failures:
            return
        found = find_mismatch(reports, self._rank, self._names)
        if found:
            error: CGXError = MismatchError(f"{found}. {_ADVICE[MismatchError]}")
        else:
            number = self._noted
            states = self._states(reports)
            left = any(report.has_left and report.last < number for report in reports.values())
            if not left and not any(GONE in state for state in states.values()):
                return
            error = self._diagnosis(PeerLostError, number, reports, states, "")
        first = self._accuse(_Failure(error, self._noted))
        self.failure = error if first["rank"] == self._rank else self._echo(first, reports)
        self._ask()
        self.hang_up()

    def _diagnosis(
        self, kind: type[CGXError], number: int, reports: Mapping[int, Report], states: Mapping[int, str], said: str
    ) -> CGXError:
        """Return the error for an operation that failed here with this kind of error and these words of the engine's.

        `states` describes ranks whose reports, if any, are used only to find out whether ranks are out of step.
        """
        found = find_mismatch(reports, self._rank, self._names)
        if found:
            return MismatchError(f"{found}. {_ADVICE[MismatchError]}")
        reports = {peer: report for peer, report in reports.items() if peer not in states}
        if kind is PeerLostError and self._is_waited_for(reports, states, number):
            kind = CGXTimeoutError  # a rank that had timed out closed the connection
        missing = find_missing(reports, number, self._rank, self._names, states) or "all ranks have called it"
        call = reports[self._rank].calls.get(number)
        what = f"operation {number}, {describe(call)}" if call is not None else "the group"
        advice = _ADVICE.get(kind, "Restart all ranks.")
        failed = ": Timed out in" if kind is CGXTimeoutError else " failed in"
        return kind(f"{self._names[self._rank]}{failed} {what}: {missing}. {advice}{f' ({said})' if said else ''}")

    def _is_waited_for(self, reports: Mapping[int, Report], states: Mapping[int, str], number: int) -> bool:
        """Return whether a live peer is stopped or has not made this rank's call; False if one may be dead or left."""
        found = False
        for peer in self._peers:
            report, state = reports.get(peer), states.get(peer, "")
            if report is None and (not state or GONE in state):
                return False
            if report is not None and report.has_left:
                return False
            found = found or report is None or report.last < number
        return found

    def _echo(self, first: Mapping[str, Any], reports: Mapping[int, Report]) -> CGXError:
        """Return the error that this rank raises for a peer's failure."""
        kind = getattr(errors, str(first["kind"]), CGXError)
        culprit, number = self._names[first["rank"]], self._noted
        shared = kind if kind in _SHARED else PeerLostError
        said = f"{culprit} noticed it first" + (f": {first['text']}" if kind is MismatchError else "")
        states = self._states(reports)
        error = self._diagnosis(shared, number, reports, states, said)
        if kind in _SHARED or isinstance(error, MismatchError):
            return error
        call = reports[self._rank].calls.get(number)
        where = f" in operation {number}, {describe(call)}" if call is not None else ""
        # Find the ranks that were waited for: the first rank to give up wrote its text before it knew them.
        heard = {peer: report for peer, report in reports.items() if peer not in states}
        found = find_missing(heard, number, self._rank, self._names, states) if kind is CGXTimeoutError else ""
        said = f"{found} ({first['text']})" if found else first["text"]
        return PoisonedError(
            f"{culprit} failed, and so {self._names[self._rank]} cannot go on{where}: {said}. "
            "Look at that rank's output for the cause, then restart all ranks."
        )

    def _collect(self, asked: int, limit_s: float, hurried: bool = False) -> dict[int, Report]:
        """Return the reports, by rank, of all that answer in time. Ranks that are known to be gone are not waited for.

        `hurried`: also stop waiting when something fails here meanwhile.
        """
        reports = {self._rank: self._mine()}
        deadline = time.monotonic() + limit_s
        waiting = set(self._peers)
        while True:
            if self._store.check([f"asked/{self._asked + 1}"]):
                self._answer()  # two ranks may ask at the same time
            for peer in sorted(waiting):
                if self._store.check([f"calls/{peer}"]):
                    with contextlib.suppress(ValueError):
                        answered, report = read_report(bytes(self._store.get(f"calls/{peer}")))
                        if answered >= asked or report.has_left:
                            reports[peer] = report
            waiting -= set(reports)
            over = time.monotonic() > deadline or self._closing or (hurried and bool(self._failures))
            if over or all(self._state(peer) for peer in waiting):
                return reports
            time.sleep(_POLL_S)

    def _states(self, reports: Mapping[int, Report]) -> dict[int, str]:
        """Return the states of peers that did not answer, or that answered and then died without leaving."""
        found = {}
        for peer in self._peers:
            report = reports.get(peer)
            state = "" if report is not None and report.has_left else self._state(peer)
            if report is None or GONE in state:
                found[peer] = state
        return found

    def _state(self, peer: int) -> str:
        """Return what is wrong with the process of a peer on this machine; "" if nothing, or if it is not visible."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if peer not in self._facts:
                if not self._store.check([f"who/{peer}"]):
                    return ""
                self._facts[peer] = json.loads(bytes(self._store.get(f"who/{peer}")))
            who = self._facts[peer]
            if who["place"] == place():
                return state_of(int(who["pid"]), str(who["started"]))
        return ""


def _read_failure(text: bytes, world: int) -> dict[str, Any]:
    found = parse_answer(bytes(text), "failed", {"rank": int, "kind": str, "text": str})
    if not 0 <= found["rank"] < world:
        raise MismatchError(f"rank {found['rank']} says that it has failed, and the group has {world} ranks")
    return {"rank": found["rank"], "kind": found["kind"], "text": found["text"][:_TEXT_CHARS]}
