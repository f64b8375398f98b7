"""Runs one function on N real processes and says what became of each: the pytest side of `nursery`.

`run_ranks` is for tests in which every rank succeeds, `observe_ranks` for those in which some must not.
Both always come back: a rank that is not done in time has its stacks written down and is killed, with
everything that it started, and the test fails with those stacks.

A test function stands at module level, takes a `Rank` first, and returns something that can be pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.nursery import WITHOUT_ENGINE, Job, Outcome, Rank, Serve
from torch_cgx.cli.hosts import Node
from torch_cgx.kernels.native import available

__all__ = [
    "OVER_GLOO",
    "Outcome",
    "Rank",
    "close",
    "left_in_shared_memory",
    "make_shared_memory_private",
    "nursery_started_by",
    "observe_ranks",
    "run_ranks",
    "shared_memory_names",
    "warm_python",
]

ROOT = Path(__file__).resolve().parents[2]
START = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.support.nursery import main
sys.exit(main(int(sys.argv[2])))
"""
START_S = 300.0  # importing torch on a loaded machine
ANSWER_MARGIN_S = 60.0  # forking, killing
TRACE_LINES = 60
SHARED_MEMORY = "/dev/shm/"
SEGMENT = re.compile("cgx-[0-9a-f]{32}")
CLONE_NEWNS = 0x20000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
DELETED = " (deleted)"  # what /proc adds to the names of files that have none any more
# What tells the processes that this session started, however they were, from all others.
SESSION = f"TEST_SESSION={uuid.uuid4()}".encode()
os.environ.update([SESSION.decode().split("=")])


class Nursery:
    """The child process that forks the ranks, started on first use and kept for the session."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        """`command`, if given, is what starts it, as in `unshare --mount python ...`."""
        self.connection, theirs = multiprocessing.Pipe()
        fd = theirs.fileno()
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", START, str(ROOT), str(fd)],
            pass_fds=[fd],
            start_new_session=True,  # Ctrl-C is for the test session, which then closes the nursery
            # Threads that a library starts at import would be missing after a fork.
            env={**_clean_environ(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        if not self.connection.poll(START_S):
            self.close()
            raise RuntimeError(f"the nursery did not start within {START_S:.0f} s")
        self.connection.recv_bytes()
        self.programs: tempfile.TemporaryDirectory[str] | None = None
        self.script = ""

    def serve(self) -> str:
        """Have whole programs forked, too; return the script that stands in for the interpreter."""
        if self.programs is None:
            self.programs = tempfile.TemporaryDirectory(prefix="cgx-test-")
            self.connection.send_bytes(pickle.dumps(Serve(Path(self.programs.name))))
            if not self.connection.poll(ANSWER_MARGIN_S):
                raise RuntimeError(f"the nursery did not answer {ANSWER_MARGIN_S:.0f} s long")
            self.script = self.connection.recv_bytes().decode()
        return self.script

    def run(self, job: Job) -> list[Outcome]:
        self.connection.send_bytes(pickle.dumps(job))
        if not self.connection.poll(job.timeout_s + ANSWER_MARGIN_S):
            self.close()
            raise RuntimeError(f"the nursery did not answer {job.timeout_s + ANSWER_MARGIN_S:.0f} s long")
        outcomes: list[Outcome] = pickle.loads(self.connection.recv_bytes())
        return outcomes

    def close(self) -> None:
        self.connection.close()  # it kills its ranks and leaves when it sees this
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.programs is not None:
            self.programs.cleanup()


_nursery: Nursery | None = None


def close() -> None:
    """End the nursery, if there is one; the next job starts another."""
    global _nursery
    if _nursery is not None:
        _nursery.close()
        _nursery = None


def warm_python() -> str:
    """Return what a test may start in place of `sys.executable`: programs are forked, with torch imported (`warm`)."""
    return _get().serve() if warm.possible() else sys.executable


def _get() -> Nursery:
    global _nursery
    if _nursery is None or _nursery.process.poll() is not None:
        _nursery = Nursery()
    return _nursery


@contextlib.contextmanager
def nursery_started_by(command: Sequence[str]) -> Iterator[None]:
    """Meanwhile ranks are forked by another nursery, which this command starts: in a namespace, say."""
    global _nursery
    usual, _nursery = _nursery, Nursery(command)
    try:
        yield
    finally:
        close()
        _nursery = usual


def observe_ranks(
    function: Callable[..., Any],
    world: int,
    backend: str | None,
    *arguments: Any,
    timeout_s: float = 90.0,
    group_timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    rank_env: Mapping[int, Mapping[str, str]] | None = None,
    destroy: bool = True,
    real_exit: bool = False,
    grace_s: float | None = None,
    nodes: Sequence[Node] = (),
) -> list[Outcome]:
    """Run `function(Rank, *arguments)` on `world` fresh processes; one outcome a rank, whatever happened.

    With a `backend` the group is started before the function and, with `destroy`, ended after it.
    `env` holds for all ranks, `rank_env` for one. `real_exit` goes through the interpreter's shutdown, which
    costs a fifth of a second a rank. After one rank has failed the others have `grace_s` (default: all the
    time there is) to end by themselves. With `nodes`, each rank lives on that of these test hosts which stands in its
    place.
    """
    assert len(nodes) in (0, world)
    nursery = _get()
    job = Job(
        function_file=inspect.getfile(function),
        function_module=function.__module__,
        function_name=function.__qualname__,
        arguments=arguments,
        world=world,
        backend=backend,
        timeout_s=timeout_s,
        group_timeout_s=group_timeout_s,
        environ=dict(env or {}),
        rank_environ={rank: dict(more) for rank, more in (rank_env or {}).items()},
        destroy=destroy,
        real_exit=real_exit,
        grace_s=timeout_s if grace_s is None else grace_s,
        nodes=tuple(nodes),
    )
    try:
        return nursery.run(job)
    except (EOFError, OSError, RuntimeError):
        close()
        raise


def run_ranks(
    function: Callable[..., Any], world: int, backend: str | None, *arguments: Any, **options: Any
) -> list[Any]:
    """Like `observe_ranks`, but every rank must succeed; returns what each returned, by rank."""
    options.setdefault("grace_s", 5.0)
    outcomes = observe_ranks(function, world, backend, *arguments, **options)
    if not all(outcome.ok for outcome in outcomes):
        raise AssertionError(describe(outcomes))
    return [outcome.value for outcome in outcomes]


def describe(outcomes: list[Outcome]) -> str:
    """All that is known of what went wrong, for the reader of a test report."""
    lines: list[str] = []
    for outcome in outcomes:
        how = "killed by the harness: out of time" if outcome.timed_out else f"exit code {outcome.exit_code}"
        state = "well" if outcome.ok else "FAILED"
        lines.append(f"rank {outcome.rank}: {state} after {outcome.seconds:.2f} s, {how}")
        lines.extend(f"    {line}" for line in outcome.trace.splitlines()[-TRACE_LINES:])
        if not outcome.ok and outcome.log.strip():
            lines.append("  wrote:")
            lines.extend(f"    {line}" for line in outcome.log.splitlines()[-TRACE_LINES:])
    return "\n".join(["not every rank did well", *lines])


def make_shared_memory_private() -> bool:
    """Give this process, and all that it starts, a /dev/shm of its own; return whether it is allowed to (as root)."""
    libc = ctypes.CDLL(None, use_errno=True)
    facts = os.statvfs(SHARED_MEMORY)
    options = f"size={facts.f_blocks * facts.f_frsize},mode=1777".encode()
    return (
        libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", SHARED_MEMORY.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options) == 0
    )


def shared_memory_names() -> frozenset[str]:
    """Names of groups' segments in /dev/shm. Files of other libraries lie there too."""
    return frozenset(filter(SEGMENT.fullmatch, os.listdir(SHARED_MEMORY)))


def left_in_shared_memory(before: frozenset[str], patience_s: float = 10.0) -> frozenset[str]:
    """Return the segments that were not there `before`, stay for a while, and are not held by others' processes."""
    deadline = time.monotonic() + patience_s
    left = shared_memory_names() - before
    while left:
        # Once more after that: a file may have gone together with the process that held it.
        left = (left - _held_by_others()) & shared_memory_names()
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def _held_by_others() -> set[str]:
    """Files of shared memory that processes have open which this session has not started: a test beside it, say."""
    held: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # One that has just ended, or is another user's, says nothing.
        with contextlib.suppress(OSError):
            if int(process.name) == os.getpid() or SESSION in (process / "environ").read_bytes().split(b"\0"):
                continue
            held.update(
                line.partition(SHARED_MEMORY)[2].removesuffix(DELETED)
                for line in (process / "maps").read_text().splitlines()
            )
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(os.readlink(file).partition(SHARED_MEMORY)[2].removesuffix(DELETED))
    with contextlib.suppress(OSError):
        held.update(entry.name for entry in os.scandir(SHARED_MEMORY) if entry.stat().st_uid != os.getuid())
    return held


def _clean_environ() -> dict[str, str]:
    """This environment without settings and launchers' variables: a test says itself what it wants."""
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TRITON_INTERPRET")
    return {k: v for k, v in os.environ.items() if not k.startswith("CGX_") and k not in others}


def raised(outcome: Outcome, *kinds: str) -> None:
    """The rank ended by an exception of one of these kinds: no crash, no kill, no success."""
    report = describe([outcome])
    assert not outcome.timed_out, report
    assert outcome.exit_code == 1, report
    assert set(kinds) & set(outcome.error_kinds), f"expected {' or '.join(kinds)}\n{report}"


def names(outcome: Outcome, *patterns: str) -> None:
    for pattern in patterns:
        assert re.search(pattern, outcome.message), f"{pattern!r} is not in:\n{outcome.message}"


# Groups that have no native engine run their programs over Gloo.
OVER_GLOO = {WITHOUT_ENGINE: "1", "CGX_INNER_COMMUNICATOR_TYPE": "GLOO"}


def apart(world: int, cross: str | None = None) -> dict[int, dict[str, str]]:
    """Put every rank on a node of its own; `cross` carries payloads between them. None: Gloo, without the engine."""
    how = {WITHOUT_ENGINE: "1"} if cross is None else {"CGX_CROSS_COMMUNICATOR_TYPE": cross}
    return {rank: {"CGX_NODE_ID": f"host-{rank}", **how} for rank in range(world)}


needs_native = pytest.mark.skipif(not available(), reason="installed without the native library")
