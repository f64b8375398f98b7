"""What a process says of its chance to use MPI, before any MPI is loaded; the rest needs an mpirun."""

from __future__ import annotations

import importlib.util

import pytest

from torch_cgx.config import Settings
from torch_cgx.group.bootstrap.carriers import Carriers, check_choice
from torch_cgx.group.bootstrap.mpi_process import problem_here

CROSS = "CGX_CROSS_COMMUNICATOR_TYPE"


@pytest.fixture
def with_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("with_mpi4py")
@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"])
def test_what_an_mpi_launcher_started_may_use_mpi(variable: str) -> None:
    assert problem_here({variable: "0"}) == ""


@pytest.mark.usefixtures("with_mpi4py")
def test_what_no_mpi_launcher_started_is_told_to_be_started_by_one() -> None:
    assert "mpirun" in problem_here({"RANK": "0", "SLURM_PROCID": "0"})


@pytest.mark.usefixtures("with_mpi4py")
def test_ranks_of_a_torchrun_that_mpirun_started_share_its_place_and_may_not() -> None:
    assert "torchrun started this process" in problem_here({"OMPI_COMM_WORLD_RANK": "0", "TORCHELASTIC_RUN_ID": "x"})


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(ValueError, match=r"^CGX_CROSS_COMMUNICATOR_TYPE=MPI: .*pip install '\.\[mpi\]'.*=TCP$"):
        check_choice(CROSS, "MPI")


@pytest.mark.parametrize("name", ["GLOO", "SHM", None])
def test_other_choices_need_nothing_of_mpi(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_choice(CROSS, name)


@pytest.mark.parametrize(
    ("inner", "cross", "all_have_mpi", "within", "between"),
    [
        ("SHM", None, False, "TCP", "TCP"),
        ("SHM", None, True, "MPI", "MPI"),
        ("SHM", "MPI", True, "MPI", "MPI"),
        ("SHM", "TCP", True, "TCP", "TCP"),
        ("SHM", "GLOO", True, "TCP", "TCP"),
        ("TCP", None, True, "TCP", "TCP"),
        ("TCP", "MPI", True, "TCP", "MPI"),
        ("GLOO", "MPI", True, "TCP", "MPI"),
        ("MPI", None, False, "MPI", "TCP"),
        ("MPI", None, True, "MPI", "MPI"),
        ("MPI", "TCP", True, "MPI", "TCP"),
    ],
)
def test_payloads_go_by_the_inner_choice_within_a_node_and_by_the_cross_choice_else(
    inner: str, cross: str | None, all_have_mpi: bool, within: str, between: str
) -> None:
    carriers = Carriers.of(Settings(inner_communicator=inner, cross_communicator=cross), all_have_mpi)
    assert carriers == Carriers(within, between)
    assert (carriers.name(one_host=True), carriers.name(one_host=False)) == (within, between)
