"""Trainings that lose a process and go on, the way their users do it: checkpoints, and torchrun restarts the rest."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.harness import warm_python
from tests.support.launching import clean_environ, finish, free_port, start

pytestmark = pytest.mark.ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "restart_train.py"
STEPS, EVERY = 120, 5
PATIENCE_S = 120


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    # torchrun itself is a real process, under which its workers are found. What it starts them with is forked.
    return clean_environ(tmp_path) | {"PYTHONUNBUFFERED": "1", "PYTHON_EXEC": warm_python()}


def program(folder: Path, text: Path) -> list[str | Path]:
    return [EXAMPLE, "--data", text, "--folder", folder, "--steps", str(STEPS), "--every", str(EVERY)]


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} ships of {n * n % 97} sailors, " for n in range(2000)))
    return path


def wait_for_checkpoint(folder: Path, launchers: list[subprocess.Popen[str]], past: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(int(path.name[5:]) > past for path in folder.glob("step-*")):
        assert all(each.poll() is None for each in launchers), "ended before it could be disturbed"
        assert time.monotonic() < deadline, f"no checkpoint past step {past}"
        time.sleep(0.02)


def wait_for_workers(launchers: list[subprocess.Popen[str]], world: int) -> None:
    """Until all of them are in one training: who comes late makes the others begin again."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(workers_of(each, world) for each in launchers):
        assert time.monotonic() < deadline, f"there was no training of {world} processes"
        time.sleep(0.02)


def last_step(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("step-*")), default=0)


def workers_of(launcher: subprocess.Popen[str], world: int | None = None) -> dict[int, int]:
    """Process ids by rank; only those of a world of this size, if one is given."""
    found = {}
    for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        try:
            text = Path(f"/proc/{pid}/environ").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        environ = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
        if "RANK" in environ and world in (None, int(environ["WORLD_SIZE"])):
            found[int(environ["RANK"])] = int(pid)
    return found


def loss_in(output: str, processes: int) -> str:
    match = re.search(rf"loss (\S+) after {STEPS} steps with {processes} processes", output)
    assert match, output
    return match[1]


@pytest.mark.matrix
def test_a_training_whose_process_is_killed_goes_on_and_ends_with_the_same_loss(
    tmp_path: Path, text: Path, environ: Mapping[str, str]
) -> None:
    command = torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=3")
    undisturbed = finish(start([*command, *program(tmp_path / "a", text)], environ))

    launcher = start([*command, *program(tmp_path / "b", text)], environ)
    wait_for_checkpoint(tmp_path / "b", [launcher], past=2 * EVERY)
    os.kill(workers_of(launcher)[1], signal.SIGKILL)
    output = finish(launcher)

    assert launcher.returncode == 0, output
    assert re.search(r"goes on from step [1-9]\d*5? with 2 processes", output), output
    assert loss_in(output, 2) == loss_in(undisturbed, 2)


@pytest.mark.matrix
def test_a_training_goes_on_with_the_processes_that_are_left(
    tmp_path: Path, text: Path, environ: Mapping[str, str]
) -> None:
    common = ("--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=test")
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    quick = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=10"
    launchers = []
    for is_host in (1, 0, 0):  # without the one that holds the rendezvous, nobody could go on
        command = torchrun(*common, endpoint, f"--rdzv-conf={quick},is_host={is_host}")
        launchers.append(start([*command, *program(tmp_path / "run", text)], environ))
    lost = launchers[-1]
    try:
        wait_for_workers(launchers, 3)
        wait_for_checkpoint(tmp_path / "run", launchers, past=max(EVERY, last_step(tmp_path / "run")))
        launchers.remove(lost)
        for pid in [*workers_of(lost).values(), lost.pid]:
            os.kill(pid, signal.SIGKILL)
        outputs = [finish(each) for each in launchers]
    finally:
        lost.wait()
    whole = "\n".join(outputs)
    assert [each.returncode for each in launchers] == [0, 0], whole
    assert re.search(r"goes on from step [1-9]\d* with 2 processes", whole), whole
    assert float(loss_in(whole, 2)) < 3.0, "it had learnt less than the frequencies of letters"
