"""The harness itself: whatever ranks do, it comes back, tells what they did, and leaves nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch

from distributed.harness import Rank, left_in_shared_memory, observe_ranks, run_ranks, shared_memory_names

pytestmark = pytest.mark.alone


def who_am_i(me: Rank, base: int) -> tuple[int, int, str, torch.Tensor]:
    return base + me.rank, me.world, os.environ["GREETING"], torch.full((2,), float(me.rank))


def test_each_rank_returns_its_own_value() -> None:
    values = run_ranks(who_am_i, 3, None, 10, env={"GREETING": "hello"}, rank_env={1: {"GREETING": "hi"}})
    assert [value[:3] for value in values] == [(10, 3, "hello"), (11, 3, "hi"), (12, 3, "hello")]
    assert torch.equal(values[2][3], torch.full((2,), 2.0))


def fail_in_a_way(me: Rank, how: str) -> None:
    if me.rank == 1:
        if how == "raise":
            raise KeyError("lost")
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "hang":
            time.sleep(100)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("how", "exit_code"),
    [("raise", 1), ("crash", -signal.SIGSEGV), ("hang", -signal.SIGKILL), ("stop", -signal.SIGKILL)],
)
def test_a_rank_that_fails_is_told_apart(how: str, exit_code: int) -> None:
    timeout_s = 15.0 if how in ("hang", "stop") else 60.0
    well, failed = observe_ranks(fail_in_a_way, 2, None, how, timeout_s=timeout_s)
    assert well.ok
    assert not failed.ok
    assert failed.exit_code == exit_code
    assert failed.timed_out == (how in ("hang", "stop"))
    if how == "raise":
        assert "KeyError" in failed.error_kinds
    if how in ("crash", "hang"):
        assert "fail_in_a_way" in failed.log  # its stack
    if how == "raise":
        with pytest.raises(AssertionError, match="rank 1: FAILED"):
            run_ranks(fail_in_a_way, 2, None, how, timeout_s=timeout_s)


def leave_a_child(me: Rank) -> int:
    return subprocess.Popen(["sleep", "100"]).pid


def test_what_a_rank_started_ends_with_it() -> None:
    (pid,) = run_ranks(leave_a_child, 1, None)
    deadline = time.monotonic() + 30.0
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_is_left_in_shared_memory_is_found_unless_somebody_else_holds_it() -> None:
    before = shared_memory_names()
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="left-") as file:
        name = Path(file.name).name
        assert left_in_shared_memory(before, patience_s=0.0) == {name}
        strange = {variable: value for variable, value in os.environ.items() if variable != "TEST_SESSION"}
        for environ, left in ((dict(os.environ), {name}), (strange, set())):
            holder = subprocess.Popen(["sleep", "100"], env=environ, stdin=file)
            try:
                assert left_in_shared_memory(before, patience_s=0.0) == left
            finally:
                holder.kill()
                holder.wait()
    assert not left_in_shared_memory(before)
