"""The flight recorder with real ranks: whoever does not come is named by `cgx trace`, from the survivors' files."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import OVER_GLOO, Rank, observe_ranks, run_ranks
from torch_cgx.cli import main

BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"
GLOO = {**OVER_GLOO, BITS: "4"}
LINKS = {"CGX_INNER_COMMUNICATOR_TYPE": "TCP", BITS: "4"}
WAYS = [pytest.param({}, id="shared memory"), pytest.param(GLOO, id="Gloo")]
GROUP_TIMEOUT_S = 5.0
PATIENCE_S = 50.0
CULPRIT = 2

pytestmark = pytest.mark.ranks


def findings(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["trace", str(folder), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def until(condition: Callable[[], object]) -> None:
    """By looking: a wait would keep this rank's other threads from the store."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def one_does_not_come(me: Rank, how: str) -> None:
    dist.all_reduce(torch.ones(1000))
    dist.broadcast(torch.ones(10), 0)
    me.store.set(f"pid/{me.rank}", str(os.getpid()))
    if me.rank != CULPRIT:
        culprit = int(me.store.get(f"pid/{CULPRIT}"))
        work = dist.all_reduce(torch.ones(3, 1000), async_op=True)
        me.store.set(f"called/{me.rank}", "")
        try:
            assert work is not None
            work.wait()
        finally:
            me.store.set(f"raised/{me.rank}", "")
            if how == "stopped" and me.rank == 0:
                until(lambda: me.store.check(["raised/1"]))
                os.kill(culprit, signal.SIGKILL)
        return
    # They are past the broadcast, and have called: a death before would stop that, or make the other's call no call.
    me.store.wait(["called/0", "called/1"])
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        me.store.wait(["raised/0", "raised/1"])


@pytest.mark.parametrize("env", WAYS)
@pytest.mark.parametrize("how", [pytest.param("never calls", marks=pytest.mark.matrix), "killed", "stopped"])
def test_the_rank_that_was_waited_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, env: dict[str, str]
) -> None:
    outcomes = observe_ranks(
        *(one_does_not_come, 3, "cgx", how),
        env={**env, "CGX_TRACE_DIR": str(tmp_path)},
        group_timeout_s=GROUP_TIMEOUT_S,
    )
    assert all("CGXError" in outcome.error_kinds for outcome in outcomes[:CULPRIT])
    found = findings(tmp_path, capsys)
    assert found["missing"] == ([] if how == "never calls" else [CULPRIT])
    (stop,) = found["stops"]
    assert (stop["number"], stop["culprits"]) == (3, [CULPRIT])
    assert "float32[3, 1000]" in stop["what"]
    assert set(stop["failures"]) == {"0", "1"}
    assert [each["called"] for each in stop["standings"][:CULPRIT]] == [True, True]


def tells_of_a_wait(pid: int, folder: Path) -> bool:
    """Ask for its file, and say whether the last one was of a process that waits: it may not have come to that yet."""
    os.kill(pid, signal.SIGUSR2)
    return any(json.loads(path.read_text())["operations"][-1]["waiting_for"] for path in folder.glob("*.json"))


def hang_and_be_asked(me: Rank, folder: str) -> list[str]:
    dist.all_reduce(torch.ones(1000))
    me.store.set(f"pid/{me.rank}", str(os.getpid()))
    if me.rank == 1:
        asked = int(me.store.get("pid/0"))
        until(lambda: tells_of_a_wait(asked, Path(folder)))
        names = [path.read_text() for path in Path(folder).glob("*.json")]
        dist.all_reduce(torch.ones(2000))
        return names
    dist.all_reduce(torch.ones(2000))
    return []


# Over Gloo all exchange at once, and nobody is waited for in particular.
@pytest.mark.parametrize("env", [pytest.param({}, id="shared memory"), pytest.param(LINKS, id="links")])
def test_a_hanging_rank_writes_its_file_on_a_signal_and_lives_on(tmp_path: Path, env: dict[str, str]) -> None:
    _, (text,) = run_ranks(hang_and_be_asked, 2, "cgx", str(tmp_path), env={**env, "CGX_TRACE_DIR": str(tmp_path)})
    told = json.loads(text)
    assert (told["why"], told["rank"]) == ("signal", 0)
    last = told["operations"][-1]
    assert (last["number"], last["state"], last["shape"]) == (2, "running", [2000])
    assert last["waiting_for"]["rank"] == 1


def asked_while_in_native_code(me: Rank, folder: str) -> str:
    """The main thread sleeps in C and runs no Python: a handler of Python's would not run before the end."""
    import ctypes
    import threading

    def ask() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGUSR2)
        deadline = time.monotonic() + PATIENCE_S
        while not list(Path(folder).glob("*.json")) and time.monotonic() < deadline:
            time.sleep(0.02)
        seen.append(sum(1 for _ in Path(folder).glob("*.json")))
        release.post(gate)

    class Release:
        def __init__(self) -> None:
            self.lib = ctypes.CDLL(None)

        def post(self, semaphore: Any) -> None:
            self.lib.sem_post(semaphore)

    seen: list[int] = []
    release = Release()
    gate = ctypes.create_string_buffer(64)
    release.lib.sem_init(gate, 0, 0)
    thread = threading.Thread(target=ask)
    thread.start()
    while release.lib.sem_wait(gate) != 0:  # interrupted by the signal, if it came to this thread
        pass
    thread.join()
    return str(seen)


def test_a_rank_stuck_in_native_code_writes_its_file_on_a_signal(tmp_path: Path) -> None:
    env = {"CGX_TRACE_DIR": str(tmp_path)}
    assert run_ranks(asked_while_in_native_code, 1, "cgx", str(tmp_path), env=env) == ["[1]"]


def use_the_signal_oneself(me: Rank, folder: str) -> tuple[int, int]:
    got = []
    signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
    me.start_group("cgx")
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0.2)
    return len(got), len(list(Path(folder).glob("*.json")))


def test_a_users_own_handler_of_the_signal_is_left_alone(tmp_path: Path) -> None:
    env = {"CGX_TRACE_DIR": str(tmp_path)}
    assert run_ranks(use_the_signal_oneself, 1, None, str(tmp_path), env=env) == [(1, 0)]


def some_operations(me: Rank) -> None:
    pair = dist.new_group([0, 1])
    for numel in (10, 1000):
        dist.all_reduce(torch.ones(numel))
    dist.broadcast(torch.ones(10), 1)
    dist.barrier()
    if me.rank < 2:
        dist.all_gather_into_tensor(torch.zeros(6), torch.ones(3), group=pair)


@pytest.mark.parametrize("env", WAYS)
def test_a_healthy_job_leaves_files_in_which_all_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], env: dict[str, str]
) -> None:
    run_ranks(some_operations, 3, "cgx", env={**env, "CGX_TRACE_DIR": str(tmp_path)})
    found = findings(tmp_path, capsys)
    assert (found["ranks"], found["missing"], found["stops"]) == ([0, 1, 2], [], [])
    assert [each["operations"] for each in found["late"]] == [5, 5, 4]
    told = json.loads(next(tmp_path.glob("*rank0*")).read_text())
    assert [each["operation"] for each in told["operations"]] == [
        *("all_reduce", "all_reduce", "broadcast", "barrier", "all_gather_into_tensor")
    ]
    assert [each["number"] for each in told["operations"]] == [1, 2, 3, 4, 1]


def start(me: Rank) -> None:
    me.start_group("cgx")


def test_a_trace_folder_that_is_none_is_refused_at_creation(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    for outcome in observe_ranks(start, 2, None, env={"CGX_TRACE_DIR": str(path)}):
        assert "ValueError" in outcome.error_kinds
        assert "CGX_TRACE_DIR" in outcome.message
