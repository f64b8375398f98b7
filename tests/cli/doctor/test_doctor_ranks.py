"""`cgx doctor` with its processes: what it tries, that it ends, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import warm_python
from torch_cgx.cli.doctor import trial
from torch_cgx.config import Compression
from torch_cgx.kernels.native import available

pytestmark = pytest.mark.ranks

CGX = ["-m", "torch_cgx.cli"]
LIMIT_S = 300.0
SHM = "/dev/shm"


def doctor(*arguments: str, before: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CGX_")}
    command = [*before, warm_python(), *CGX, "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environ | variables)


def is_right(attempt: dict[str, Any], bits: int) -> bool:
    """Its error is that of so many bits, and so are the bytes; headers of blocks aside."""
    sent = attempt["nbytes"] * bits / 32
    return (
        attempt["error"] == ""
        and attempt["same_bits"] is True
        and attempt["bits"] == bits
        and 0.1 / 2**bits < attempt["relative_error"] < 5 / 2**bits
        and sent < attempt["sent_nbytes"] < 1.2 * sent
    )


def test_tries_a_compressed_allreduce_over_all_that_there_is_and_is_ready() -> None:
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "ready"
    assert any(line.split()[:2] == ["TCP", "right"] for line in lines)
    assert any(line.split()[:3] == ["shared", "memory", "right" if available() else "not"] for line in lines)
    assert "all_reduce over TCP" in done.stderr


@pytest.mark.matrix
def test_settings_hold_in_the_trial_but_for_those_that_would_leave_it_out(tmp_path: Path) -> None:
    done = doctor(
        "--json",
        CGX_COMPRESSION_QUANTIZATION_BITS="6",
        CGX_COMPRESSION_MINIMAL_SIZE="100000000",
        CGX_INTRA_COMPRESS="0",
        CGX_CROSS_COMMUNICATOR_TYPE="GLOO",
        CGX_TRACE_DIR=str(tmp_path / "trace"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    shared, messages = facts["trials"]
    assert is_right(messages, 6), messages
    assert is_right(shared, 6) or not available(), shared
    assert facts["settings"]["minimal_numel"] == 100_000_000
    assert not (tmp_path / "trace").exists(), "the trial's ranks leave no trace of theirs"
    (loopback,) = (each for each in facts["interfaces"] if "127.0.0.1" in each["addresses"])
    assert loopback["loopback_bit_per_s"] > 1e6


def test_ranks_that_take_too_long_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT_S", 0.3)  # less than an interpreter with torch takes to start
    started = time.monotonic()
    attempts = trial.try_ways(Compression(4), lambda way: None)
    assert [attempt.error for attempt in attempts] == ["no result within 0.3 s, and was given up"] * 2
    assert time.monotonic() - started < LIMIT_S
    assert not [child for child in children() if "torch_cgx.cli.processes" in child]


def children() -> list[str]:
    found = []
    for number in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        found.append(Path(f"/proc/{number}/cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.matrix
@pytest.mark.skipif(not available(), reason="installed without the native library")
def test_with_a_tiny_shared_memory_it_goes_over_messages_and_says_what_to_do() -> None:
    mount = ("sh", "-c", f'mount -t tmpfs -o size=1m tmpfs {SHM} && exec "$@"', "sh")
    for how in (("unshare", "--mount"), ("unshare", "--map-root-user", "--mount")):
        if shutil.which("unshare") and subprocess.run([*how, *mount, "true"], capture_output=True).returncode == 0:
            break
    else:
        pytest.skip(f"a private {SHM} needs permission to unshare and mount")
    done = doctor("--json", before=(*how, *mount))
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    shared, messages = facts["trials"]
    assert SHM in shared["note"] and shared["relative_error"] is None
    assert is_right(messages, 4), messages
    assert facts["shared_memory"]["size_nbytes"] == 1 << 20
    assert [line for line in facts["advice"] if SHM in line] == [
        f"{SHM} is small: give the container more (docker run --shm-size=1g)"
    ]


def test_a_host_without_any_network_is_told_at_once_what_to_do() -> None:
    how = ("unshare", "--net")
    if not shutil.which("unshare") or subprocess.run([*how, "true"], capture_output=True).returncode != 0:
        pytest.skip("a network of its own needs permission to unshare")
    done = doctor(before=how)
    assert done.returncode == 1
    assert "ip link set lo up" in done.stdout and "ready" not in done.stdout
