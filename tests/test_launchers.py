"""What `torch_cgx.launchers` makes of the variables that launchers set."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_cgx import launchers

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "3",
    "PMIX_NAMESPACE": "prterun-node1-6309@1",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "0",
}
ON_ONE_HOST = {"Open MPI": OPEN_MPI, "MPICH": MPICH, "Slurm": SLURM}

OPEN_MPI_TWO_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH_TWO_HOSTS = {**MPICH, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
SLURM_TWO_HOSTS = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
ON_TWO_HOSTS = {"Open MPI": OPEN_MPI_TWO_HOSTS, "MPICH": MPICH_TWO_HOSTS, "Slurm": SLURM_TWO_HOSTS}


def adopted(variables: dict[str, str]) -> dict[str, str]:
    """What `adopt` adds to these variables; it must leave the rest alone."""
    environ = dict(variables)
    launchers.adopt(environ)
    assert environ.items() >= variables.items()
    return {name: value for name, value in environ.items() if name not in variables}


@pytest.mark.parametrize("launcher", ON_ONE_HOST)
def test_ranks_on_one_host_get_all_that_torchrun_would_set(launcher: str) -> None:
    environ = dict(ON_ONE_HOST[launcher])
    assert launchers.adopt(environ) == launcher
    rank = {"Open MPI": "3", "MPICH": "1", "Slurm": "2"}[launcher]
    world_size = {"Open MPI": "4", "MPICH": "2", "Slurm": "4"}[launcher]
    assert environ["RANK"] == environ["LOCAL_RANK"] == rank
    assert environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"] == world_size
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert 20000 <= int(environ["MASTER_PORT"]) < 30000
    assert launchers.missing_address(environ) is None


def test_all_ranks_of_a_job_derive_one_port_and_another_job_another() -> None:
    other_rank = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    other_job = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-node1-6310@1"}
    port = adopted(OPEN_MPI)["MASTER_PORT"]
    assert adopted(other_rank)["MASTER_PORT"] == port
    assert adopted(other_job)["MASTER_PORT"] != port
    assert adopted({**SLURM, "SLURM_PROCID": "0"})["MASTER_PORT"] == adopted(SLURM)["MASTER_PORT"]
    assert adopted({**SLURM, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != adopted(SLURM)["MASTER_PORT"]


@pytest.mark.parametrize("launcher", ON_TWO_HOSTS)
def test_ranks_on_several_hosts_get_no_address(launcher: str) -> None:
    added = adopted(ON_TWO_HOSTS[launcher])
    assert added["RANK"] and added["WORLD_SIZE"]
    assert added["LOCAL_WORLD_SIZE"] != added["WORLD_SIZE"]
    assert "MASTER_ADDR" not in added


@pytest.mark.parametrize("launcher", ON_TWO_HOSTS)
def test_several_hosts_without_an_address_are_told_what_to_set(launcher: str) -> None:
    environ = dict(ON_TWO_HOSTS[launcher])
    launchers.adopt(environ)
    problem = launchers.missing_address(environ)
    assert problem is not None
    assert launcher in problem and "MASTER_ADDR" in problem and "for example" in problem
    environ |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert launchers.missing_address(environ) is None


def test_several_hosts_with_an_address_agree_on_a_port_where_the_job_has_a_name() -> None:
    given = {"MASTER_ADDR": "node1"}
    assert "MASTER_PORT" in adopted(OPEN_MPI_TWO_HOSTS | given)
    assert "MASTER_PORT" in adopted(SLURM_TWO_HOSTS | given)
    environ = MPICH_TWO_HOSTS | given
    launchers.adopt(environ)
    assert "MASTER_PORT" not in environ, "a process id of one host means nothing on the other"
    problem = launchers.missing_address(environ)
    assert problem is not None and "but MASTER_PORT is not set" in problem


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("launcher", ON_ONE_HOST)
def test_a_rank_or_world_size_that_is_there_is_left_alone(launcher: str, name: str) -> None:
    environ = {**ON_ONE_HOST[launcher], name: "1"}
    assert launchers.adopt(environ) is None
    assert environ == {**ON_ONE_HOST[launcher], name: "1"}


def test_a_given_address_local_rank_and_port_stay() -> None:
    given = {"MASTER_ADDR": "node7", "MASTER_PORT": "4242", "LOCAL_RANK": "0"}
    assert set(adopted(OPEN_MPI | given)) == {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


def test_adopting_twice_is_adopting_once() -> None:
    environ = dict(MPICH)
    launchers.adopt(environ)
    once = dict(environ)
    assert launchers.adopt(environ) is None
    assert environ == once


def test_without_a_launcher_nothing_is_set() -> None:
    assert adopted({}) == {}
    assert adopted({"PATH": "/usr/bin", "PMIX_RANK": "0"}) == {}
    assert launchers.missing_address({}) is None


@pytest.mark.parametrize("broken", ["", "abc", "-1", "4", "99"])
def test_a_rank_that_makes_no_sense_is_not_adopted(broken: str) -> None:
    assert adopted({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": broken}) == {}


@pytest.mark.parametrize("missing", ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_half_of_a_launchers_variables_are_not_adopted(missing: str) -> None:
    assert adopted({name: value for name, value in OPEN_MPI.items() if name != missing}) == {}


@pytest.mark.parametrize(
    "variables",
    [
        # The batch script of a job of four tasks.
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        # A step of one task.
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"},
        # The shell that salloc opens on a node.
        {**SLURM, "SLURM_STEP_ID": "4294967290"},
    ],
)
def test_slurm_counts_only_in_an_srun_step_of_several_tasks(variables: dict[str, str]) -> None:
    assert adopted(variables) == {}


def test_slurm_nodes_may_have_different_numbers_of_tasks() -> None:
    step = {
        **SLURM,
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_LOCALID": "0",
    }
    assert adopted({**step, "SLURM_NODEID": "1", "SLURM_PROCID": "2"})["LOCAL_WORLD_SIZE"] == "2"
    assert adopted({**step, "SLURM_NODEID": "3", "SLURM_PROCID": "6"})["LOCAL_WORLD_SIZE"] == "1"


def test_mpirun_inside_a_slurm_job_counts_and_not_the_step_of_its_daemons() -> None:
    environ = {**SLURM_TWO_HOSTS, **OPEN_MPI}
    assert launchers.adopt(environ) == "Open MPI"
    assert environ["RANK"] == "3"


def test_srun_with_pmi2_is_slurm() -> None:
    environ = {**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}
    assert launchers.adopt(environ) == "Slurm"
    assert environ["LOCAL_WORLD_SIZE"] == "4"


def test_a_pmi_launcher_that_does_not_tell_of_hosts_needs_an_address() -> None:
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    assert launchers.adopt(environ) is not None
    assert environ["RANK"] == "0" and "LOCAL_RANK" not in environ and "MASTER_ADDR" not in environ
    problem = launchers.missing_address(environ)
    assert problem is not None and "perhaps on several hosts" in problem


def test_the_launchers_process_is_found_behind_wrapper_scripts(tmp_path: Path) -> None:
    def process(pid: int, parent: int, environ: bytes) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\nPid:\t{pid}\nPPid:\t{parent}\n")
        (tmp_path / str(pid) / "environ").write_bytes(environ)

    process(1, 0, b"PATH=/bin\0")
    process(40, 1, b"PATH=/bin\0NOT_PMI_RANK=1\0")  # the launcher
    process(41, 40, b"PATH=/bin\0PMI_RANK=0\0")
    process(42, 40, b"PMI_RANK=1\0PATH=/bin\0")
    process(43, 42, b"PMI_RANK=1\0")
    assert launchers.launcher_pid("PMI_RANK", pid=41, proc=tmp_path) == 40
    assert launchers.launcher_pid("PMI_RANK", pid=43, proc=tmp_path) == 40
    assert launchers.launcher_pid("PMI_RANK", pid=40, proc=tmp_path) == 40


def test_without_proc_the_parent_stands_for_the_launcher(tmp_path: Path) -> None:
    assert launchers.launcher_pid("PMI_RANK", pid=41, proc=tmp_path) == 41


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (OPEN_MPI, "mpirun -x CGX_A -x CGX_B ..."),
        (MPICH, "mpirun -genv CGX_A VALUE -genv CGX_B VALUE ..."),
        (SLURM, "srun --export=ALL,CGX_A=VALUE,CGX_B=VALUE ..."),
        ({}, "torchrun hands its own environment to the ranks it starts"),
    ],
)
def test_each_launcher_has_its_way_to_hand_variables_to_all_ranks(environ: dict[str, str], words: str) -> None:
    assert words in launchers.how_to_pass(["CGX_A", "CGX_B"], environ)
