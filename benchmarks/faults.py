"""Make the table of faults in docs/reliability.md of a file that `python -m tests.faults --json FILE` wrote.

    python benchmarks/faults.py FILE --doc docs/reliability.md

The table stands between its markers. Without `--doc` it is printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from markers import write_between

TITLES = {
    "SHM": "cgx, shared memory",
    "TCP": "cgx, TCP",
    "MPI": "cgx, MPI",
    "HIERARCHY": "cgx, 2 nodes of 2 ranks",
    "GLOO": "cgx, without the native library",
    "gloo": "gloo",
}
BEGIN, END = "<!-- faults: begin (make faults) -->", "<!-- faults: end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("results", type=Path, help="what python -m tests.faults found")
    parser.add_argument("--doc", type=Path, help="write the table into this file, between its markers")
    arguments = parser.parse_args()
    text = table(json.loads(arguments.results.read_text()))
    if arguments.doc:
        write_between(arguments.doc, BEGIN, END, text)
    else:
        print(text)


def table(results: dict[str, Any]) -> str:
    found = results["faults"]
    columns = [column for column in TITLES if any(column in row for row in found.values())]
    lines = [
        "| the last rank ... | " + " | ".join(TITLES[column] for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, row in found.items():
        lines.append(f"| {name} | " + " | ".join(cell(row.get(column)) for column in columns) + " |")
    return "\n".join([summary(results), "", *lines])


def cell(found: dict[str, Any] | None) -> str:
    """Show the ends of the healthy ranks, and of the faulty one where it has something to say."""
    if found is None:
        return "—"
    if "skipped" in found:
        return "not run"
    ranks = found["ranks"]
    faulty = len(ranks) - 1
    groups: dict[str, list[int]] = {}
    for rank, each in enumerate(ranks):
        groups.setdefault(each["end"], []).append(rank)
    parts = []
    for end, members in groups.items():
        times = [ranks[rank]["ms"] for rank in members if ranks[rank]["ms"] is not None]
        if members == [faulty] and (end.startswith("crashes (SIGKILL") or end in ("KeyError", "KeyboardInterrupt")):
            continue  # that was the fault
        who = "all" if len(members) == len(ranks) else "rank " + ", ".join(map(str, members))
        parts.append(f"{who}: {end}" + (f", {spread(times)}" if times else ""))
    return "; ".join(parts) or "—"


def spread(times: list[float]) -> str:
    low, high = min(times), max(times)
    return f"{high:.0f} ms" if high - low < max(10, 0.1 * high) else f"{low:.0f} to {high:.0f} ms"


def summary(results: dict[str, Any]) -> str:
    runs = [(c, f) for row in results["faults"].values() for c, f in row.items() if "skipped" not in f]
    ours = [f for c, f in runs if c != "gloo"]
    short = sum(bool(f["shortfalls"]) for f in ours)
    theirs = [f for c, f in runs if c == "gloo"]
    bad = ("hangs", "crashes (SIGABRT", "crashes (SIGSEGV", "wrong", "notices nothing")
    lost = sum(any(each["end"].startswith(bad) for each in f["ranks"]) for f in theirs)
    return (
        f"Faults injected into cgx: **{len(ours)}**, of which lost or wrong: **{short}**. Into gloo: {len(theirs)}, of "
        f"which ended in a hang, a crash of a healthy rank, or a wrong result that nobody noticed: {lost}. The group's "
        f"time-out was {results['group_timeout_s']:g} s, torch {results['torch']}, {results['machine']}."
    )


if __name__ == "__main__":
    main()
