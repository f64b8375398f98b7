"""Scripts as users have them, under the launchers that users have: real mpirun, real torchrun.

Each test starts whole programs, because what is tested is how a program finds out who it is. Each launcher has tests
with real interpreters. Where a script differs, not the launcher, it is forked with torch imported. srun needs a
cluster, so its ranks are started by hand with the variables that it sets.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.harness import warm_python
from tests.support.launching import (
    TORCHRUN,
    clean_environ,
    finish,
    free_port,
    mpirun,
    run,
    start,
    start_ranks,
    torchrun,
)

pytestmark = pytest.mark.ranks

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


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return clean_environ(tmp_path)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def assert_both_ranks_have_the_sum(output: str) -> None:
    ranks = sorted(re.findall(r"rank \d of \d has \[.*?\]", output))
    assert ranks == ["rank 0 of 2 has [3.0]", "rank 1 of 2 has [3.0]"], output


@pytest.mark.parametrize("library", ["Open MPI", pytest.param("MPICH", marks=pytest.mark.matrix)])
def test_an_unmodified_script_runs_under_mpirun(library: str, script: Path, environ: dict[str, str]) -> None:
    script.write_text(READS_WHAT_TORCHRUN_SETS)
    assert_both_ranks_have_the_sum(run([*start_ranks(library), sys.executable, script], environ))


@pytest.mark.matrix  # `make test` runs the example of the first page (test_tour.py) under it
def test_an_unmodified_script_runs_under_torchrun(script: Path, environ: dict[str, str]) -> None:
    script.write_text(READS_WHAT_TORCHRUN_SETS)
    assert_both_ranks_have_the_sum(run([*TORCHRUN, script], environ))


@pytest.mark.matrix
def test_torchrun_itself_may_be_started_by_mpirun(script: Path, environ: dict[str, str]) -> None:
    script.write_text(READS_WHAT_TORCHRUN_SETS)
    assert_both_ranks_have_the_sum(run([mpirun("Open MPI"), "-np", "1", *torchrun(), script], environ))


@pytest.mark.matrix
def test_ranks_meet_where_each_has_a_wrapper_script(script: Path, environ: dict[str, str]) -> None:
    script.write_text(SCRIPT)
    wrapper = ["sh", "-c", '"$@"; exit $?', "wrapper"]
    assert_both_ranks_have_the_sum(run([*start_ranks("MPICH"), *wrapper, sys.executable, script], environ))


@pytest.mark.matrix
@pytest.mark.parametrize("library", VARIABLES)
def test_a_script_that_translates_by_hand_works(library: str, script: Path, environ: dict[str, str]) -> None:
    script.write_text(_fill(TRANSLATES_BY_HAND, port=free_port(), **VARIABLES[library]))
    assert_both_ranks_have_the_sum(run([*start_ranks(library), warm_python(), script], environ))


@pytest.mark.matrix
def test_a_script_that_gives_only_its_rank_works(script: Path, environ: dict[str, str]) -> None:
    script.write_text(_fill(GIVES_ITS_RANK, **VARIABLES["Open MPI"]))
    assert_both_ranks_have_the_sum(run([*start_ranks("Open MPI"), warm_python(), script], environ))


@pytest.mark.matrix
def test_a_script_that_spawns_its_ranks_works(script: Path, environ: dict[str, str]) -> None:
    script.write_text(_fill(SPAWNS, port=free_port()))
    assert_both_ranks_have_the_sum(run([sys.executable, script], environ))


@pytest.mark.matrix
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


@pytest.mark.matrix
def test_plain_environment_variables_work(script: Path, environ: dict[str, str]) -> None:
    script.write_text(SCRIPT)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [start([sys.executable, script], {**environ, **shared, "RANK": rank}) for rank in ("0", "1")]
    assert_both_ranks_have_the_sum("".join([finish(process) for process in processes]))


# Hydra starts each "host" as a child of its own here, so that it sees two hosts where there is one.
TWO_HOSTS = ["-launcher", "fork", "-hosts", "node1,node2"]


@pytest.mark.matrix
def test_several_hosts_without_an_address_are_an_error_that_says_what_to_set(
    script: Path, environ: dict[str, str]
) -> None:
    script.write_text(SCRIPT)
    output = run([*start_ranks("MPICH"), *TWO_HOSTS, warm_python(), script], environ)
    assert "ValueError: MPICH started 2 ranks on several hosts" in output
    assert "Set MASTER_ADDR to the host of rank 0" in output


@pytest.mark.matrix
def test_several_hosts_with_an_address_meet(script: Path, environ: dict[str, str]) -> None:
    script.write_text(SCRIPT)
    address = ["-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", str(free_port())]
    command = [*start_ranks("MPICH"), *TWO_HOSTS, *address, warm_python(), str(script)]
    assert_both_ranks_have_the_sum(run(command, environ))


@pytest.mark.matrix
def test_on_several_hosts_too_a_script_may_set_the_address_itself(script: Path, environ: dict[str, str]) -> None:
    script.write_text(_fill(TRANSLATES_BY_HAND, port=free_port(), **VARIABLES["MPICH"]))
    assert_both_ranks_have_the_sum(run([*start_ranks("MPICH"), *TWO_HOSTS, warm_python(), script], environ))


def _fill(script: str, **values: object) -> str:
    for name, value in values.items():
        script = script.replace(f"{{{name}}}", str(value))
    return script
