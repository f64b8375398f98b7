"""Programs that are forked with torch imported live, and end, as a new interpreter's would."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.harness import warm_python

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not warm.possible(), reason="programs are forked where Linux has pidfds"),
]

LIMIT_S = 60.0
WHO_AM_I = """
import json, os, sys
facts = {
    "forked": "torch" in sys.modules,
    "arguments": sys.argv[1:],
    "name": __name__,
    "file": globals().get("__file__"),
    "first": sys.path[0],
    "folder": os.getcwd(),
    "variable": os.environ.get("SOME_VARIABLE"),
    "path": os.environ["PATH"],
    "input": sys.stdin.read(),
    "files": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "cores": sorted(os.sched_getaffinity(0)),
    "network": os.readlink("/proc/self/ns/net"),
}
print(json.dumps(facts))
"""


def run(*arguments: str | Path, before: tuple[str, ...] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*before, warm_python(), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **options)


def facts_of(*arguments: str | Path, **options: Any) -> dict[str, Any]:
    done = run(*arguments, input="said to it", **options)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(WHO_AM_I)
    return path


def test_a_program_has_the_arguments_files_folder_and_environment_of_who_starts_it(
    script: Path, tmp_path: Path
) -> None:
    read, write = os.pipe()
    folder = tmp_path / "folder"
    folder.mkdir()
    facts = facts_of(
        *(script, "--flag", "two words"),
        pass_fds=[write],
        cwd=folder,
        env={**os.environ, "SOME_VARIABLE": "a value"},
    )
    os.close(read)
    os.close(write)
    assert facts == {
        "forked": True,
        "arguments": ["--flag", "two words"],
        "name": "__main__",
        "file": str(script),
        "first": str(script.parent),
        "folder": str(folder),
        "variable": "a value",
        "path": os.environ["PATH"],
        "input": "said to it",
        "files": [0, 1, 2, write],
        "cores": sorted(os.sched_getaffinity(0)),
        "network": os.readlink("/proc/self/ns/net"),
    }


def test_modules_and_lines_of_code_are_run_as_the_interpreter_runs_them(script: Path) -> None:
    assert facts_of("-c", WHO_AM_I, "x")["arguments"] == ["x"]
    as_module = facts_of("-u", "-m", "script", "x", cwd=script.parent)
    assert (as_module["name"], as_module["file"], as_module["arguments"]) == ("__main__", str(script), ["x"])


@pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset")
def test_a_program_keeps_to_the_cores_of_who_starts_it(script: Path) -> None:
    core = max(os.sched_getaffinity(0))
    assert facts_of(script, before=("taskset", "--cpu-list", str(core)))["cores"] == [core]


def test_a_program_is_in_the_network_of_who_starts_it(script: Path) -> None:
    unshare = ("unshare", "--net")
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("a network of its own needs permission to unshare")
    facts = facts_of(script, before=unshare)
    assert facts["forked"] and facts["network"] != os.readlink("/proc/self/ns/net")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise KeyError('which')", 1),
        ("import os; os._exit(4)", 4),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", -signal.SIGABRT),
    ],
)
def test_who_starts_a_program_ends_as_the_program_does(code: str, expected: int) -> None:
    done = run("-c", code)
    assert done.returncode == expected
    assert ("KeyError: 'which'" in done.stderr) == ("KeyError" in code)


WAITS = """
import os, signal, time
print(os.getpid(), flush=True)
try:
    time.sleep(1000)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def start_waiting() -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([warm_python(), "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_signals_are_passed_on() -> None:
    process, pid = start_waiting()
    assert pid != process.pid
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=LIMIT_S)[0] == "interrupted\n"
    assert process.returncode == 0
    process, _ = start_waiting()
    process.terminate()
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_a_program_does_not_outlive_who_started_it() -> None:
    process, pid = start_waiting()
    process.kill()
    process.communicate(timeout=LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_fork_could_not_do_a_new_interpreter_does(script: Path) -> None:
    for arguments, environ in (
        (("-X", "dev", script), {}),
        ((script,), {"PYTHONHASHSEED": "1"}),
        ((script,), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    ):
        facts = facts_of(*arguments, env={**os.environ, **environ})
        assert not facts["forked"] and facts["file"] == str(script)


def test_programs_that_a_program_starts_are_forked_too() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WHO_AM_I!r}], check=True)"
    assert facts_of("-c", code)["forked"]
    assert warm_python() != sys.executable
