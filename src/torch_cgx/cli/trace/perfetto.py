"""Merged traces as Chrome trace events, for ui.perfetto.dev and chrome://tracing.

A rank is a process, a group is a track (more if its operations overlap), and its phases are below it. Only the phases'
durations are known, not their times: they are drawn one after the other from the operation's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_cgx.cli.trace.files import GroupKey, Operation, RankFile
from torch_cgx.engines.recorder import PHASES

__all__ = ["trace_events"]

ARGUMENTS = ("state", "carrier", "nbytes", "payload_nbytes", "sent_nbytes", "waited_for", "waiting_for", "error")
LANES = 8  # overlapping operations of a group that get tracks of their own


def trace_events(files: Sequence[RankFile]) -> dict[str, Any]:
    """Return the trace events. Times are microseconds from the first event on."""
    begin = min((each.submitted for file in files for each in file.operations if each.submitted), default=0.0)
    events: list[dict[str, Any]] = []
    for file in files:
        name = f"rank {file.rank} ({file.told['host']}, pid {file.told['pid']})"
        events.append(_metadata("process_name", file.rank, 0, name))
        events.append({**_metadata("process_sort_index", file.rank, 0, ""), "args": {"sort_index": file.rank}})
        for place, key in enumerate(file.groups):
            mine = [each for each in file.operations if each.group == key and each.submitted is not None]
            events += _of_group(file, key, mine, 1 + place * (LANES + 1), begin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_group(
    file: RankFile, key: GroupKey, operations: Sequence[Operation], track: int, begin: float
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    free = [float("-inf")] * LANES  # the time until which each track is taken
    phases_until = float("-inf")
    title = f"group {key[0]}"
    used = set()
    for each in sorted(operations, key=_start):
        start, end = _start(each), _end(each, file)
        lane = next((lane for lane, until in enumerate(free) if until <= start), None)
        if lane is None:  # all tracks are taken, so leave this one out
            continue
        free[lane] = end
        used.add(lane)
        events.append(_slice(file.rank, track + lane, _named(each), start - begin, end - start, _arguments(each)))
        if each.told.get("phases_ns") and start >= phases_until:
            at = start
            for phase in PHASES:
                seconds = each.told["phases_ns"].get(phase, 0) * 1e-9
                seconds = min(seconds, end - at)  # over messages, slices overlap
                if seconds > 0:
                    events.append(_slice(file.rank, track + LANES, phase, at - begin, seconds, {"of": _named(each)}))
                    at += seconds
            phases_until = end
    for lane in sorted(used):
        events.append(_metadata("thread_name", file.rank, track + lane, title + (f" ({lane + 1})" if lane else "")))
    if phases_until > float("-inf"):
        events.append(_metadata("thread_name", file.rank, track + LANES, f"{title}: phases"))
    return events


def _start(each: Operation) -> float:
    return each.started if each.started is not None else each.submitted or 0.0


def _end(each: Operation, file: RankFile) -> float:
    if each.finished is not None:
        return max(each.finished, _start(each))
    failed = file.time(file.groups[each.group].get("failed_ns"))
    return max(_start(each), file.written if failed is None else failed)


def _named(each: Operation) -> str:
    return f"{each.text()} #{each.number}" + ("" if each.ended else f" ({each.state})")


def _arguments(each: Operation) -> dict[str, Any]:
    told = {name: each.told[name] for name in ARGUMENTS if each.told.get(name) is not None}
    if each.started is not None and each.submitted is not None:
        told["queued_us"] = round((each.started - each.submitted) * 1e6, 3)
    return told


def _slice(pid: int, tid: int, name: str, start: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    where = {"ph": "X", "cat": "cgx", "name": name, "pid": pid, "tid": tid}
    return {**where, "ts": round(start * 1e6, 3), "dur": round(seconds * 1e6, 3), "args": args}


def _metadata(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
