"""The harness itself: whatever ranks do, it comes back, tells what they did, and leaves nobody behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest
import torch

from tests.support.harness import (
    Rank,
    left_in_shared_memory,
    needs_native,
    observe_ranks,
    run_ranks,
    shared_memory_names,
)
from torch_cgx import _native

pytestmark = pytest.mark.ranks


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
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_rank_that_raises_is_told_apart() -> None:
    well, failed = observe_ranks(fail_in_a_way, 2, None, "raise")
    assert well.ok
    assert (failed.ok, failed.exit_code, failed.timed_out) == (False, 1, False)
    assert "KeyError" in failed.error_kinds
    with pytest.raises(AssertionError, match="rank 1: FAILED"):
        run_ranks(fail_in_a_way, 2, None, "raise")


def test_a_rank_that_crashes_is_told_apart() -> None:
    well, failed = observe_ranks(fail_in_a_way, 2, None, "crash")
    assert well.ok
    assert (failed.ok, failed.exit_code, failed.timed_out) == (False, -signal.SIGSEGV, False)
    assert "fail_in_a_way" in failed.log  # its stack


def never_end(me: Rank) -> None:
    if me.rank == 1:
        time.sleep(100)
    if me.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_ranks_that_hang_or_are_stopped_are_killed_when_their_time_is_over() -> None:
    well, hangs, stopped = observe_ranks(never_end, 3, None, timeout_s=5.0)
    assert well.ok
    for failed in (hangs, stopped):
        assert (failed.ok, failed.exit_code, failed.timed_out) == (False, -signal.SIGKILL, True)
    assert "never_end" in hangs.log  # its stack


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


def leave_a_segment(me: Rank) -> str:
    library = _native.library()
    assert library is not None
    name, error = ctypes.create_string_buffer(64), ctypes.create_string_buffer(512)
    assert library.cgx_control_create(2, name, len(name), error, len(error)) == 0, error.value
    return name.value.decode()


@needs_native
def test_a_segment_that_a_rank_leaves_is_found() -> None:
    before = shared_memory_names()
    (name,) = run_ranks(leave_a_segment, 1, None)
    try:
        assert left_in_shared_memory(before, patience_s=0.1) == {name}
    finally:
        Path("/dev/shm", name).unlink()
    assert not left_in_shared_memory(before)


@pytest.mark.parametrize("name", ["mpich_shm_1", "sem.mp-1", "vader_segment.1", "torch_1_2_3", "cgx-1"])
def test_files_of_other_libraries_do_not_count_as_left(name: str) -> None:
    before = shared_memory_names()
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix=name):
        assert not left_in_shared_memory(before, patience_s=0.0)


def test_a_segment_that_another_sessions_process_holds_does_not_count_as_left() -> None:
    before = shared_memory_names()
    path = Path("/dev/shm", f"cgx-{uuid.uuid4().hex}")
    strange = {variable: value for variable, value in os.environ.items() if variable != "TEST_SESSION"}
    try:
        with path.open("x") as file:
            for environ, left in ((dict(os.environ), {path.name}), (strange, set())):
                holder = subprocess.Popen(["sleep", "100"], env=environ, stdin=file)
                try:
                    assert left_in_shared_memory(before, patience_s=0.0) == left
                finally:
                    holder.kill()
                    holder.wait()
    finally:
        path.unlink()


def test_a_segment_of_processes_outside_of_this_session_is_not_even_seen() -> None:
    before = shared_memory_names()
    outside = Path(f"/proc/{os.getppid()}/root/dev/shm")
    if not os.access(outside, os.W_OK) or outside.stat().st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("a private /dev/shm needs root")
    path = outside / f"cgx-{uuid.uuid4().hex}"
    path.touch()
    try:
        assert shared_memory_names() == before
    finally:
        path.unlink()
