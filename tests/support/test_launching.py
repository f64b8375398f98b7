"""A program of a test that does not end tells what it printed and where it is, and leaves nothing behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import launching
from tests.support.harness import warm_python

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in Linux's /proc"),
]

LIMIT_S = 60.0
STUCK = """
import os, sys, time
from pathlib import Path
def stuck_in_the_child():
    time.sleep(1000)
print("printed before", flush=True)
Path(sys.argv[1]).write_text(str(os.getpid()))
Path(sys.argv[1]).rename(sys.argv[2])
stuck_in_the_child()
"""
# As torchrun starts ranks: in a session of their own.
STARTS_IT = f"""
import subprocess, sys
def stuck_in_the_parent():
    subprocess.run([sys.executable, "-c", {STUCK!r}, *sys.argv[1:]], start_new_session=True)
stuck_in_the_parent()
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("python", [warm_python, lambda: sys.executable], ids=["forked", "interpreter"])
def test_a_program_that_does_not_end_shows_its_output_and_stacks(
    python: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, child = tmp_path / "partial", tmp_path / "child"
    program = launching.start([python(), "-c", STARTS_IT, partial, child], os.environ)
    wait_until(child.exists)
    monkeypatch.setattr(launching, "LIMIT_S", 0)
    with pytest.raises(pytest.fail.Exception) as failure:
        launching.finish(program)
    text = str(failure.value)
    assert "printed before" in text
    assert "in stuck_in_the_child" in text
    assert "in stuck_in_the_parent" in text
    wait_until(lambda: not Path(f"/proc/{child.read_text()}").exists())
    assert program.processes().keys() <= {program.pid}
