"""Findings from the merged traces of a job: the ranks that others waited for when it stopped, and late ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch_cgx.cli.trace.files import GroupKey, Operation, RankFile
from torch_cgx.engines.recorder import PHASES

__all__ = ["Lateness", "Standing", "Stop", "find_stops", "latenesses", "missing_ranks", "phase_totals", "slowest"]


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of one rank at the operation where its group stopped."""

    rank: int
    called: bool | None  # None: unknown
    doing: str  # what it did there, or instead
    seconds: float | None  # for how long, until the end of the trace
    waits_for: int | None
    has_file: bool
    life: str  # according to its peers: present, left, gone; empty: unknown


@dataclass(frozen=True, slots=True)
class Stop:
    """The first incomplete operation of a group."""

    group: GroupKey
    number: int
    what: str
    standings: tuple[Standing, ...]
    culprits: tuple[int, ...]  # the ranks that others waited for
    reason: str
    failures: dict[int, str]  # by rank: its error


@dataclass(frozen=True, slots=True)
class Lateness:
    """The lateness of one rank, over all operations for which every rank's call is known."""

    rank: int
    seconds: float  # sum of its calls' delays after the first rank's call
    last: int  # how often it called last
    operations: int
    worst_seconds: float
    worst: str


def missing_ranks(files: Sequence[RankFile]) -> list[int]:
    """Return the ranks of the files' groups that have no file."""
    known = {rank for file in files for key in file.groups for rank in key[1]}
    return sorted(known - {file.rank for file in files})


def find_stops(files: Sequence[RankFile]) -> list[Stop]:
    """Return one stop for each group that did not complete all its operations."""
    keys = list(dict.fromkeys(key for file in files for key in file.groups))
    return [stop for key in keys if (stop := _stop_of(key, files)) is not None]


def _stop_of(key: GroupKey, files: Sequence[RankFile]) -> Stop | None:
    members = {file.rank: file for file in files if key in file.groups}
    mine = {rank: [each for each in file.operations if each.group == key] for rank, file in members.items()}
    stuck = [each for operations in mine.values() if (each := _first_unfinished(operations)) is not None]
    numbered = [each.number for each in stuck if each.number is not None]
    if not numbered:
        return None
    number = min(numbered)
    what = next(each for each in stuck if each.number == number)
    standings = tuple(_standing(rank, key, what, members, mine.get(rank, [])) for rank in key[1])
    culprits, reason = _blame(standings, what, mine)
    failures = {rank: str(text) for rank, file in members.items() if (text := file.groups[key]["failure"])}
    return Stop(key, number, what.text(), standings, culprits, reason, failures)


def _first_unfinished(operations: Sequence[Operation]) -> Operation | None:
    """Return the first unfinished operation after the last ended one. Handles never waited for were not seen to end."""
    ended = [place for place, each in enumerate(operations) if each.ended]
    rest = operations[ended[-1] + 1 if ended else 0 :]
    return next((each for each in rest if each.state in ("submitted", "running", "failed")), None)


def _standing(
    rank: int, key: GroupKey, stop: Operation, members: dict[int, RankFile], operations: Sequence[Operation]
) -> Standing:
    life = _by_board(rank, key, members, "life") or ""
    if rank in members:
        return _by_file(members[rank], key, stop, operations, str(life))
    number = _by_board(rank, key, members, "number")
    if number is None:
        return Standing(rank, None, "unknown: it has no file", None, None, False, str(life))
    assert isinstance(number, int) and stop.number is not None
    call = _by_board(rank, key, members, "call")
    doing = f"by its peers: last called operation {number}, {call}" if number else "by its peers: called nothing yet"
    waits_for = _by_board(rank, key, members, "waits_for")
    seconds = _by_board(rank, key, members, "seconds")
    return Standing(
        *(rank, number >= stop.number, doing, seconds if isinstance(seconds, float) else None),
        *(waits_for if isinstance(waits_for, int) else None, False, str(life)),
    )


def _by_file(file: RankFile, key: GroupKey, stop: Operation, operations: Sequence[Operation], life: str) -> Standing:
    assert stop.number is not None
    end = _end_of(file, key)
    here = next((each for each in operations if each.number == stop.number), None)
    if here is not None:
        doing = here.text() if here.signature() != stop.signature() else here.state
        since = None if here.submitted is None else end - here.submitted
        return Standing(file.rank, True, doing, since, here.waiting_for, True, life)
    latest = max((each.number for each in operations if each.number is not None), default=0)
    if latest > stop.number:
        return Standing(file.rank, True, "has got past it", None, None, True, life)
    last = file.operations[-1] if file.operations else None
    if last is None:
        return Standing(file.rank, False, "has called nothing yet", None, None, True, life)
    where = "" if last.group == key else f" in group {last.group[0]}"
    seen = last.finished if last.ended and last.finished is not None else last.submitted
    doing = f"last: operation {last.number}{where}, {last.text()}, {last.state}"
    return Standing(file.rank, False, doing, None if seen is None else end - seen, last.waiting_for, True, life)


def _end_of(file: RankFile, key: GroupKey) -> float:
    """Return the time until which a rank waited: until its group failed, or its file was written."""
    return file.time(file.groups[key].get("failed_ns")) or file.written


def _by_board(rank: int, key: GroupKey, members: dict[int, RankFile], what: str) -> object:
    """Return a field that the latest file of a peer has for a rank."""
    for file in sorted(members.values(), key=lambda each: each.written, reverse=True):
        for peer in file.groups[key]["peers"]:
            if peer["rank"] != rank or file.rank == rank:
                continue
            if what == "seconds":
                called = file.time(peer["called_ns"]) if peer["number"] else None
                return None if called is None else _end_of(file, key) - called
            found: object = peer[what]
            return found
    return None


def _blame(
    standings: Sequence[Standing], stop: Operation, mine: dict[int, list[Operation]]
) -> tuple[tuple[int, ...], str]:
    """Return the ranks that others waited for, and how that is known. The surest sign is checked first."""
    # A rank with a file was killed later, for example by a launcher that ends all ranks after the first failure.
    gone = tuple(each.rank for each in standings if each.life == "gone" and not each.has_file)
    if gone:
        return gone, "its process is gone"
    here = {rank: each for rank, all_ in mine.items() for each in all_ if each.number == stop.number}
    if len({each.signature() for each in here.values()}) > 1:
        return tuple(sorted(here)), "they called different things"
    absent = tuple(each.rank for each in standings if each.called is False)
    if absent:
        return absent, "it has not called the operation"
    silent = tuple(each.rank for each in standings if not each.has_file)
    waited = {each.waits_for for each in standings if each.waits_for is not None and each.called is not False}
    known = tuple(rank for rank in silent if rank in waited)
    if known:
        return known, "it was waited for, and has written no file"
    # Ranks that others wait for, and that wait for no rank themselves.
    waiting = {each.rank for each in standings if each.waits_for is not None}
    idle = tuple(sorted(rank for rank in waited if rank is not None and rank not in waiting))
    if idle:
        return idle, "all have called it; it was waited for, and waited for nobody"
    if silent:
        return silent, "it has written no file"
    return (), "all have called it, and wait for each other or for the network"


def latenesses(files: Sequence[RankFile]) -> list[Lateness]:
    """Return each rank's summed delay after the first rank's calls. The sum includes work between calls."""
    seconds: dict[int, float] = {file.rank: 0.0 for file in files}
    last: dict[int, int] = dict.fromkeys(seconds, 0)
    count: dict[int, int] = dict.fromkeys(seconds, 0)
    worst: dict[int, tuple[float, str]] = dict.fromkeys(seconds, (0.0, ""))
    for calls in _complete(files):
        times = {each.rank: each.submitted for each in calls if each.submitted is not None}
        first = min(times.values())
        last[max(times, key=lambda rank: times[rank])] += 1
        for each in calls:
            late = times[each.rank] - first
            seconds[each.rank] += late
            count[each.rank] += 1
            if late > worst[each.rank][0]:
                worst[each.rank] = (late, f"operation {each.number} of group {each.group[0]}, {each.text()}")
    return [Lateness(rank, seconds[rank], last[rank], count[rank], *worst[rank]) for rank in seconds]


def _complete(files: Sequence[RankFile]) -> list[list[Operation]]:
    """Return the operations that every rank of their group has recorded."""
    found: dict[tuple[GroupKey, int], list[Operation]] = defaultdict(list)
    for file in files:
        for each in file.operations:
            if each.number is not None and each.submitted is not None:
                found[each.group, each.number].append(each)
    return [calls for (key, _), calls in found.items() if len(calls) == len(key[1]) > 1]


def slowest(files: Sequence[RankFile], most: int) -> list[tuple[float, Operation, float, int]]:
    """Return the slowest: seconds from the first call to the last end, operation, its last rank's delay, that rank."""
    found = []
    for calls in _complete(files):
        if all(each.state == "done" and each.finished is not None for each in calls):
            last = max(calls, key=lambda each: each.submitted or 0.0)
            first = min(each.submitted or 0.0 for each in calls)
            end = max(each.finished or 0.0 for each in calls)
            found.append((end - first, last, (last.submitted or 0.0) - first, last.rank))
    return sorted(found, key=lambda each: -each[0])[:most]


def phase_totals(file: RankFile) -> dict[str, float]:
    """Return the seconds of each phase, over operations with known phases: ours, on CPU tensors."""
    totals = dict.fromkeys(PHASES, 0.0)
    for each in file.operations:
        for phase, ns in (each.told.get("phases_ns") or {}).items():
            totals[phase] += ns * 1e-9
    return totals
