"""Inject every fault into cgx over every transport, and into gloo: what is raised, on which ranks, after how long.

    python -m tests.faults --json FILE

Real processes; a fault is what `cases.py` says. Time runs from the fault to the exception. A rank that still lives
after a while is killed, and counted as hanging. `--only` and `--on` run a part, and keep the rest of the JSON file.
`benchmarks/faults.py` makes the table of docs/reliability.md of that file.
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

import torch

from tests.faults import runs
from tests.faults.cases import FAULTS
from tests.faults.runs import ENDED, shortfalls
from tests.support import harness
from tests.support.harness import Outcome
from torch_cgx.cli.hosts import HostsUnavailable

GROUP_TIMEOUT_S = 5.0
LIMIT_S = 20.0
MPI_LIMIT_S = 60.0  # mpirun, and three interpreters that import torch
COLUMNS = ("SHM", "TCP", "MPI", "HIERARCHY", "GLOO", "gloo")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="write all that was found here")
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--on", default=",".join(COLUMNS), help=f"some of {', '.join(COLUMNS)}")
    arguments = parser.parse_args()
    machine = f"{os.cpu_count()} cores, Linux {platform.release()}"
    results = {"group_timeout_s": GROUP_TIMEOUT_S, "torch": torch.__version__, "machine": machine, "faults": {}}
    if (arguments.only or arguments.on != ",".join(COLUMNS)) and arguments.json.exists():
        results["faults"] = json.loads(arguments.json.read_text())["faults"]
    try:
        short = run_all(results, arguments)
    finally:
        harness.close()
    return int(short > 0)


def run_all(results: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Run what was asked for, and write the file after each run. Return how many runs fell short of a promise."""
    short = 0
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
            ends = [rank["end"] for rank in found.get("ranks", [])]
            print(f"{name} on {column}: {ends or 'not run'}", *found.get("shortfalls", []), sep="\n    ", flush=True)
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
            short += bool(found.get("shortfalls"))
    return short


def observe(name: str, column: str) -> dict[str, Any]:
    """Inject one fault on one backend and transport, and return what became of each rank."""
    backend, transport = ("gloo", "GLOO") if column == "gloo" else ("cgx", column)
    if column == "gloo" and transport not in FAULTS[name].transports:
        transport = FAULTS[name].transports[0]
    limit_s = MPI_LIMIT_S if transport == "MPI" else LIMIT_S
    before = harness.shared_memory_names()
    started = time.monotonic()
    outcomes = runs.run(name, transport, backend, GROUP_TIMEOUT_S, limit_s)
    found: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1)}
    found["ranks"] = [described(outcome) for outcome in outcomes]
    if backend == "cgx":
        found["shortfalls"] = shortfalls(name, transport, outcomes, GROUP_TIMEOUT_S)
        left = harness.left_in_shared_memory(before)
        found["shortfalls"] += [f"left in /dev/shm: {sorted(left)}"] if left else []
    return found


def described(outcome: Outcome) -> dict[str, Any]:
    line = outcome.message.partition("\n")[0][:400]
    milliseconds = None if outcome.after_mark_s is None else round(outcome.after_mark_s * 1000, 1)
    return {"end": ending(outcome), "message": line, "ms": milliseconds}


def ending(outcome: Outcome) -> str:
    """Say what a rank's end looks like to its user."""
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


if __name__ == "__main__":
    sys.exit(main())
