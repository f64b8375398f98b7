"""Runs a fault of `cases` over a transport, and says in what it fell short of what is promised."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import cases
from tests.faults.acts import BITS, SHM, set_netem
from tests.faults.cases import FAULTS, Fault, inject
from tests.support import harness
from tests.support.harness import Outcome
from tests.support.nursery import WITHOUT_ENGINE
from torch_cgx.cli.hosts import Hosts, Node

WORLDS = {"SHM": 3, "GLOO": 3, "TCP": 3, "MPI": 3, "HIERARCHY": 4}
ROUGH = "delay, loss and reordering"
LINKS = ("link down", "link 100 times slower", ROUGH)
FULL = "/dev/shm full"
LIBRARY = "Open MPI"
SOON_S = 5.0  # promised is one second
ENDED = 1000  # the exit code of a rank that mpirun has ended


def run(name: str, transport: str, backend: str, group_timeout_s: float, limit_s: float) -> list[Outcome]:
    """What became of each rank. `limit_s`: after which ranks that still live are killed."""
    fault, world = FAULTS[name], WORLDS[transport]
    if transport == "MPI":
        return _under_mpirun(name, world, backend, group_timeout_s, limit_s)
    with contextlib.ExitStack() as stack:
        nodes: list[Node] = []
        rank_env: dict[int, dict[str, str]] = {}
        if name in LINKS:
            hosts = stack.enter_context(Hosts(2 if transport == "HIERARCHY" else world))
            nodes = [hosts.nodes[_node(transport, rank)] for rank in range(world)]
            if name == ROUGH:
                set_netem(nodes[-1].namespace, "lo", ["limit", "1000"])  # here, where a test can be skipped
        elif transport != "SHM":
            rank_env = {rank: {"CGX_NODE_ID": f"host-{_node(transport, rank)}"} for rank in range(world)}
        if name == FULL:
            stack.enter_context(harness.nursery_started_by(_own_shared_memory()))
        return harness.observe_ranks(
            inject,
            world,
            None,
            *(name, backend, nodes[-1] if nodes else None),
            env={BITS: "4", **_chosen(transport)},
            rank_env=rank_env,
            nodes=nodes,
            group_timeout_s=group_timeout_s,
            timeout_s=limit_s,
            destroy=fault.destroy,
            real_exit=True,
        )


def _chosen(transport: str) -> dict[str, str]:
    if transport == "GLOO":
        return {WITHOUT_ENGINE: "1"}
    return {"CGX_CROSS_COMMUNICATOR_TYPE": "TCP"} if transport == "TCP" else {}


def _node(transport: str, rank: int) -> int:
    return rank // 2 if transport == "HIERARCHY" else rank


def _own_shared_memory() -> list[str]:
    """What starts ranks with a private /dev/shm of 64 MB; needs root, or user namespaces."""
    how = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    return [*how, "sh", "-c", f'mount -t tmpfs -o size=64m tmpfs {SHM} && exec "$@"', "sh"]


def _under_mpirun(name: str, world: int, backend: str, group_timeout_s: float, limit_s: float) -> list[Outcome]:
    from tests.support.launching import clean_environ, start, start_ranks, with_mpi4py_on

    with tempfile.TemporaryDirectory(prefix="cgx-test-") as folder:
        environ = with_mpi4py_on(LIBRARY, clean_environ(Path(folder, "environ")))
        environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
        environ |= {BITS: "4", "CGX_INNER_COMMUNICATOR_TYPE": "MPI", "CGX_CROSS_COMMUNICATOR_TYPE": "MPI"}
        program = [harness.warm_python(), cases.__file__, folder, name, backend, str(group_timeout_s)]
        started, timed_out = time.monotonic(), False
        process = start([*start_ranks(LIBRARY, world), *program], environ)
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.terminate()  # mpirun passes this on to its ranks
            try:
                output, _ = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
        seconds = time.monotonic() - started
        return [_told(Path(folder), rank, process.returncode, seconds, timed_out, output) for rank in range(world)]


def _told(folder: Path, rank: int, code: int, seconds: float, timed_out: bool, output: str) -> Outcome:
    file = folder / f"{rank}.json"
    if not file.exists():
        return Outcome(rank, ENDED, timed_out, seconds, None, (), "", "", None, output)
    found = json.loads(file.read_text())
    kinds = tuple(found["kinds"])
    result = None if kinds else b""
    exit_code = 1 if kinds else 0
    return Outcome(
        rank, exit_code, timed_out, seconds, result, kinds, found["message"], "", found.get("after_mark_s"), output
    )


def shortfalls(
    name: str, transport: str, outcomes: Sequence[Outcome], group_timeout_s: float, soon_s: float = SOON_S
) -> list[str]:
    """In what the ranks' ends differ from what is promised; nothing if in nothing."""
    fault, faulty = FAULTS[name], len(outcomes) - 1
    found = []
    for outcome in outcomes:
        who = f"rank {outcome.rank}"
        if outcome.timed_out:
            found.append(f"{who} had to be killed after {outcome.seconds:.0f} s")
        elif transport == "MPI" and outcome.exit_code == ENDED:
            if not _may_be_ended(fault):
                found.append(f"{who} was ended by mpirun")
        elif outcome.rank == faulty and fault.faulty != fault.raised:
            found += [f"{who}, the faulty one, {text}" for text in _of_faulty(fault, outcome)]
        else:
            found += [f"{who} {text}" for text in _of_others(fault, outcome, faulty, group_timeout_s, soon_s)]
    return found


def _may_be_ended(fault: Fault) -> bool:
    """mpirun ends a job when one of its ranks has ended badly, or before MPI_Finalize."""
    return bool(fault.raised) or fault.faulty is None or bool(fault.faulty)


def _of_faulty(fault: Fault, outcome: Outcome) -> list[str]:
    if fault.faulty is None:
        return [] if outcome.exit_code in (0, 1) else [f"ended with exit code {outcome.exit_code}"]
    if isinstance(fault.faulty, int):
        return [] if outcome.exit_code == -fault.faulty else [f"ended with exit code {outcome.exit_code}"]
    if not fault.faulty:
        return [] if outcome.exit_code == 0 else [f"raised {outcome.error_kinds[:1]}: {outcome.message}"]
    return [] if set(fault.faulty) & set(outcome.error_kinds) else [f"raised {outcome.error_kinds[:1]}"]


def _of_others(fault: Fault, outcome: Outcome, peer: int, group_timeout_s: float, soon_s: float) -> list[str]:
    if not fault.raised:
        return [] if outcome.exit_code == 0 else [f"raised {outcome.error_kinds[:1]}: {outcome.message}"]
    if outcome.exit_code != 1:
        return [f"ended with exit code {outcome.exit_code}, and raised nothing"]
    if not set(fault.raised) & set(outcome.error_kinds):
        return [f"raised {outcome.error_kinds[:1]}: {outcome.message}"]
    found = []
    limit_s = soon_s + (group_timeout_s if fault.waits else 0.0)
    if outcome.after_mark_s is None or outcome.after_mark_s > limit_s:
        found.append(f"raised only after {outcome.after_mark_s} s")
    for pattern in fault.says:
        if not re.search(pattern.format(me=outcome.rank, peer=peer), outcome.message):
            found.append(f"says nothing of {pattern!r}: {outcome.message}")
    return found
