"""`cgx bench allreduce` with its processes: what it measures and writes, and that it leaves none behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import LIMIT_S, bench, start_long_bench

pytestmark = pytest.mark.ranks


def test_prints_a_checked_row_for_every_size_and_backend_and_writes_the_raw_samples(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    done = bench("--nproc", "2", "--bits", "4", "--sizes", "4,64K", "--busy", "--json", str(output))
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(output.read_text())
    assert (report["schema"], report["schema_version"], report["kind"]) == ("cgx-bench", 1, "allreduce")
    assert report["settings"]["nproc"] == 2
    assert ("cores were busy at the start" in done.stdout) == (report["busy_cores"] > 0.5)
    assert [(cell["nbytes"], cell["backend"]) for cell in report["cells"]] == [
        (4, "cgx"),
        (4, "gloo"),
        (65536, "cgx"),
        (65536, "gloo"),
    ]
    for cell in report["cells"]:
        assert cell["check"]["same_bits"]
        assert cell["check"]["max_error"] <= cell["check"]["max_error_allowed"]
        assert cell["check"]["relative_error_allowed"] is None
        assert len(cell["batch_ns"]) == len(cell["op_ns"]) >= 5
        assert all(len(batch) == cell["ops_per_batch"] for batch in cell["op_ns"])
        assert 0 < cell["median_s"] < LIMIT_S
    tiny, _, compressed, exact = (cell["check"]["relative_error"] for cell in report["cells"])
    assert exact < 1e-6
    assert tiny < 1e-6, "a single value is not compressed"
    assert 0.01 < compressed < 0.5, "4 bits of normal values lose some, not all"
    sent = [cell["check"]["sent_nbytes"] for cell in report["cells"][2:]]
    assert sent[0] < sent[1] / 7
    clocks = {cell["backend"]: cell["clock"] for cell in report["busy"]}
    assert clocks == {"cgx": "native", "gloo": "callback"}
    rows = [line.split() for line in done.stdout.splitlines()]
    assert sum(row[2:3] == ["cgx"] for row in rows) == 4, "two sizes, in both tables"


def test_rotated_values_are_checked_by_their_relative_error(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    arguments = ("--quantizer", "rotated", "--bits", "2", "--sizes", "4,64K", "--seconds", "0.05")
    done = bench("--nproc", "2", *arguments, "--json", str(output))
    assert done.returncode == 0, done.stderr
    assert "cgx: rotated 2 bits, bucket size 1024" in done.stdout
    tiny, _, ours, gloo = json.loads(output.read_text())["cells"]
    assert tiny["check"]["relative_error"] < 1e-6
    assert (ours["quantizer"], gloo["quantizer"]) == ("rotated", None)
    check = ours["check"]
    assert check["max_error_allowed"] is None and check["same_bits"]
    assert 0.3 < check["relative_error"] <= check["relative_error_allowed"] < 0.7
    assert check["sent_nbytes"] < gloo["check"]["sent_nbytes"] / 15


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_with_32_bits_the_sum_is_exact(dtype: str, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    done = bench("--nproc", "3", "--bits", "32", "--dtype", dtype, "--sizes", "20002", "--json", str(output))
    assert done.returncode == 0, done.stderr
    ours, gloo = json.loads(output.read_text())["cells"]
    assert ours["check"]["relative_error"] < 0.01
    assert gloo["check"]["relative_error"] < 0.01


@pytest.mark.matrix
def test_without_another_backend_it_measures_cgx_alone() -> None:
    done = bench("--sizes", "4K", "--against", "none")
    assert done.returncode == 0, done.stderr
    assert "gloo" not in done.stdout


def all_end_within(limit_s: float, pids: list[int]) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.matrix
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks through /proc")
def test_ctrl_c_ends_the_ranks_too() -> None:
    parent, ranks = start_long_bench()
    parent.send_signal(signal.SIGINT)
    _, error = parent.communicate(timeout=LIMIT_S)
    assert parent.returncode == 130
    assert "interrupted" in error
    assert "Traceback" not in error
    assert all_end_within(30.0, ranks)


@pytest.mark.matrix
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks through /proc")
def test_ranks_do_not_outlive_a_killed_parent() -> None:
    parent, ranks = start_long_bench()
    parent.kill()
    parent.communicate(timeout=LIMIT_S)
    assert all_end_within(30.0, ranks)


@pytest.mark.matrix
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks through /proc")
def test_a_killed_rank_is_named_and_the_others_are_ended() -> None:
    parent, ranks = start_long_bench()
    os.kill(ranks[1], signal.SIGKILL)
    _, error = parent.communicate(timeout=LIMIT_S)
    assert parent.returncode == 1
    assert "rank" in error.splitlines()[-1]
    assert all_end_within(30.0, ranks)
