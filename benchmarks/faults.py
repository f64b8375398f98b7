"""Injects every fault into cgx over every transport, and into gloo: what is raised, on which ranks, after how long.

    python benchmarks/faults.py --json benchmarks/results/faults.json --doc docs/reliability.md

Real processes; a fault is what `tests/distributed/fault_cases.py` says. Time runs from the fault to the exception. A
rank that still lives after a while is killed, and counted as hanging. `--doc` rewrites the table between its markers;
`--from` does so from a saved run; `--only` and `--on` run a part, and keep the rest of the JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from distributed import fault_runs, harness  # noqa: E402
from distributed.fault_cases import FAULTS  # noqa: E402
from distributed.fault_runs import ENDED, shortfalls  # noqa: E402
from distributed.harness import Outcome  # noqa: E402
from markers import write_between  # noqa: E402
from torch_cgx.cli.hosts import HostsUnavailable  # noqa: E402

GROUP_TIMEOUT_S = 5.0
LIMIT_S = 20.0
MPI_LIMIT_S = 60.0  # mpirun, and three interpreters that import torch
COLUMNS = ("SHM", "GLOO", "MPI", "HIERARCHY", "gloo")
TITLES = {
    "SHM": "cgx, shared memory",
    "GLOO": "cgx, messages over Gloo",
    "MPI": "cgx, messages over MPI",
    "HIERARCHY": "cgx, 2 nodes of 2 ranks",
    "gloo": "gloo",
}
BEGIN, END = "<!-- faults: begin (python benchmarks/faults.py) -->", "<!-- faults: end -->"


def observe(name: str, column: str) -> dict[str, Any]:
    """One fault on one backend and transport: what became of each rank."""
    backend, transport = ("gloo", "GLOO") if column == "gloo" else ("cgx", column)
    if column == "gloo" and transport not in FAULTS[name].transports:
        transport = FAULTS[name].transports[0]
    limit_s = MPI_LIMIT_S if transport == "MPI" else LIMIT_S
    before = harness.shared_memory_names()
    started = time.monotonic()
    outcomes = fault_runs.run(name, transport, backend, GROUP_TIMEOUT_S, limit_s)
    found: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1)}
    found["ranks"] = [told(outcome) for outcome in outcomes]
    if backend == "cgx":
        found["shortfalls"] = shortfalls(name, transport, outcomes, GROUP_TIMEOUT_S)
        left = harness.left_in_shared_memory(before)
        found["shortfalls"] += [f"left in /dev/shm: {sorted(left)}"] if left else []
    return found


def told(outcome: Outcome) -> dict[str, Any]:
    line = outcome.message.partition("\n")[0][:400]
    milliseconds = None if outcome.after_mark_s is None else round(outcome.after_mark_s * 1000, 1)
    return {"end": ending(outcome), "message": line, "ms": milliseconds}


def ending(outcome: Outcome) -> str:
    """What a rank's end looks like to its user."""
    if outcome.timed_out:
        return f"hangs (killed after {outcome.seconds:.0f} s)"
    if outcome.exit_code == ENDED:
        return "ended by mpirun"
    if outcome.exit_code < 0:
        return f"crashes ({signal.Signals(-outcome.exit_code).name})"
    if outcome.error_kinds:
        kind = outcome.error_kinds[0]
        return {"WrongResult": "wrong result", "NotNoticed": "notices nothing"}.get(kind, kind)
    return "goes on"


def cell(name: str, found: dict[str, Any] | None) -> str:
    """One place of the table: the ends of the others, and of the faulty rank where it has something to say."""
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


def table(results: dict[str, Any]) -> str:
    found = results["faults"]
    columns = [column for column in COLUMNS if any(column in found.get(name, {}) for name in FAULTS)]
    lines = [
        "| the last rank ... | " + " | ".join(TITLES[column] for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in FAULTS:
        if name in found:
            lines.append(f"| {name} | " + " | ".join(cell(name, found[name].get(column)) for column in columns) + " |")
    return "\n".join([summary(results), "", *lines])


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


def write_doc(path: Path, results: dict[str, Any]) -> None:
    write_between(path, BEGIN, END, table(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write all that was found here")
    parser.add_argument("--doc", type=Path, help="write the table into this file, between its markers")
    parser.add_argument("--from", dest="saved", type=Path, help="run nothing: take what this file holds")
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--on", default=",".join(COLUMNS), help=f"some of {', '.join(COLUMNS)}")
    arguments = parser.parse_args()
    if arguments.saved:
        results = json.loads(arguments.saved.read_text())
    else:
        machine = f"{os.cpu_count()} cores, Linux {platform.release()}"
        results = {"group_timeout_s": GROUP_TIMEOUT_S, "torch": torch.__version__, "machine": machine, "faults": {}}
        if (arguments.only or arguments.on != ",".join(COLUMNS)) and arguments.json and arguments.json.exists():
            results["faults"] = json.loads(arguments.json.read_text())["faults"]
        run_all(results, arguments)
    if arguments.doc:
        write_doc(arguments.doc, results)
    print(table(results))
    return int(any(f.get("shortfalls") for row in results["faults"].values() for f in row.values()))


def run_all(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    try:
        for name, fault in FAULTS.items():
            for column in arguments.on.split(","):
                if arguments.only not in name or (column != "gloo" and column not in fault.transports):
                    continue
                if column == "gloo" and not fault.gloo:
                    continue
                try:
                    found = observe(name, column)
                except HostsUnavailable as reason:
                    found = {"skipped": str(reason)}
                results["faults"].setdefault(name, {})[column] = found
                print(
                    f"{name} on {column}: {cell(name, found)}", *found.get("shortfalls", []), sep="\n    ", flush=True
                )
                if arguments.json:
                    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        harness.close()


if __name__ == "__main__":
    sys.exit(main())
