"""`cgx trace`: a report from the flight recorders of all ranks of a job. The analysis is in findings.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_cgx.cli import registry
from torch_cgx.cli.registry import CommandFailed, command
from torch_cgx.cli.table import format_seconds, format_table

if TYPE_CHECKING:
    from torch_cgx.cli.trace.files import GroupKey, RankFile
    from torch_cgx.cli.trace.findings import Standing, Stop

SHOWN_SLOWEST = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="FOLDER|FILE", help="what CGX_TRACE_DIR named, of all hosts"
    )
    parser.add_argument(
        "--perfetto", type=registry.output_file, metavar="OUT.json", help="write it for ui.perfetto.dev"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


@command("trace", summary="who was waited for, from the ranks' traces", arguments=add_arguments)
def trace(options: argparse.Namespace) -> int:
    """Merge the files that ranks have written to CGX_TRACE_DIR, and say who was waited for.

    Ranks write them when their group fails or ends, and when they get SIGUSR2:

        CGX_TRACE_DIR=/shared/trace torchrun ... train.py
        pkill -USR2 -f train.py        # on each host, if it hangs
        cgx trace /shared/trace
    """
    from torch_cgx.cli.trace.files import align, find_files, read_files
    from torch_cgx.cli.trace.perfetto import trace_events

    files = read_files(find_files(options.paths))
    moved = align(files)
    if options.perfetto:
        try:
            options.perfetto.write_text(json.dumps(trace_events(files)), encoding="utf-8")
        except OSError as error:
            raise CommandFailed(f"{options.perfetto}: cannot be written: {error.strerror}") from None
    findings = as_dict(files, moved)
    print(json.dumps(findings, indent=2) if options.json else "\n\n".join(paragraphs(files, findings)))
    return 0


def as_dict(files: Sequence[RankFile], moved: dict[str, float]) -> dict[str, Any]:
    from torch_cgx.cli.trace.findings import find_stops, latenesses, missing_ranks, phase_totals, slowest

    return {
        "ranks": [file.rank for file in files],
        "missing": missing_ranks(files),
        "clocks_moved_s": {file.rank: moved[file.clock] for file in files},
        "stops": [dataclasses.asdict(stop) for stop in find_stops(files)],
        "late": [dataclasses.asdict(each) for each in latenesses(files)],
        "slowest": [
            {
                "group": each.group[0],
                "number": each.number,
                "what": each.text(),
                "seconds": seconds,
                "last_rank": rank,
                "last_rank_late_s": late,
            }
            for seconds, each, late, rank in slowest(files, SHOWN_SLOWEST)
        ],
        "phases_s": {file.rank: phase_totals(file) for file in files},
    }


def paragraphs(files: Sequence[RankFile], findings: dict[str, Any]) -> list[str]:
    from torch_cgx.cli.trace.findings import find_stops

    stops = find_stops(files)
    found = [_headline(files, findings)]
    found += [_stop_text(stop) for stop in stops] or ["All operations on record have ended."]
    if any(each["operations"] for each in findings["late"]):
        found.append(_late_table(findings))
    if findings["slowest"]:
        found.append(_slowest_table(findings))
    if any(any(phases.values()) for phases in findings["phases_s"].values()):
        found.append(_phase_table(findings))
    return found


def _headline(files: Sequence[RankFile], findings: dict[str, Any]) -> str:
    lines = [f"{len(files)} files, of ranks {_listed(findings['ranks'])}; written at: " + _reasons(files)]
    if findings["missing"]:
        lines.append(f"No file of ranks {_listed(findings['missing'])}: killed, stopped, or on a host not given here.")
    moved = {rank: seconds for rank, seconds in findings["clocks_moved_s"].items() if seconds}
    if moved:
        shown = ", ".join(f"rank {rank} by {seconds * 1e3:+.3f} ms" for rank, seconds in moved.items())
        lines.append(f"Clocks of hosts differ; moved, by the ends of common operations: {shown}.")
    return "\n".join(lines)


def _reasons(files: Sequence[RankFile]) -> str:
    reasons: dict[str, list[int]] = {}
    for file in files:
        reasons.setdefault(str(file.told["why"]), []).append(file.rank)
    return ", ".join(f"{why} ({_listed(ranks)})" for why, ranks in reasons.items())


def _stop_text(stop: Stop) -> str:
    who = f"waited for: rank {_listed(stop.culprits)} ({stop.reason})" if stop.culprits else stop.reason
    lines = [f"{_group_name(stop.group)} stopped at operation {stop.number}, {stop.what}", who]
    rows = [
        [
            f"rank {each.rank}",
            {True: "yes", False: "NO", None: "?"}[each.called],
            "" if each.waits_for is None else f"rank {each.waits_for}",
            "" if each.seconds is None else format_seconds(max(each.seconds, 0.0)),
            _doing(each),
        ]
        for each in stop.standings
    ]
    lines.append(format_table(["rank", "called it", "waits for", "since", "what it did"], rows, left=5))
    lines += [f"rank {rank} raised {text}" for rank, text in stop.failures.items()]
    return "\n".join(lines)


def _doing(standing: Standing) -> str:
    notes = {"gone": "its process is gone", "left": "it has left the group"}
    note = "" if standing.has_file else notes.get(standing.life, "")
    return standing.doing + (f"; {note}" if note else "") + ("" if standing.has_file else "; no file")


def _late_table(findings: dict[str, Any]) -> str:
    rows = [
        [
            *(f"rank {each['rank']}", each["worst"], format_seconds(each["worst_seconds"])),
            *(format_seconds(each["seconds"]), str(each["operations"]), str(each["last"])),
        ]
        for each in sorted(findings["late"], key=lambda each: -each["seconds"])
    ]
    header = ["late", "most in", "there", "in all", "operations", "was the last"]
    return "How long after the first rank's call a rank called\n" + format_table(header, rows, left=2)


def _slowest_table(findings: dict[str, Any]) -> str:
    rows = [
        [
            *(f"{each['number']} of group {each['group']}", each["what"], format_seconds(each["seconds"])),
            *(f"rank {each['last_rank']}", format_seconds(each["last_rank_late_s"])),
        ]
        for each in findings["slowest"]
    ]
    header = ["slowest", "what", "from first call to last end", "last to call", "late by"]
    return format_table(header, rows, left=2)


def _phase_table(findings: dict[str, Any]) -> str:
    rows = [
        [f"rank {rank}", *(format_seconds(seconds) for seconds in phases.values())]
        for rank, phases in findings["phases_s"].items()
    ]
    return format_table(["time in", *next(iter(findings["phases_s"].values()))], rows)


def _group_name(key: GroupKey) -> str:
    return f"group {key[0]}" + (f" (made {key[2] + 1} times)" if key[2] else "")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
