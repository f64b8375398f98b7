"""What a process says of its chance to use MPI, before any MPI is loaded; the rest needs an mpirun."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from torch_cgx.config import Settings
from torch_cgx.transports.factory import check_choice
from torch_cgx.transports.mpi_process import Progress, problem_here

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
    ("inner", "cross", "one_host", "expected"),
    [
        ("SHM", None, True, None),
        ("SHM", "MPI", True, "MPI"),
        ("GLOO", "MPI", True, "GLOO"),
        ("GLOO", "MPI", False, "MPI"),
        ("MPI", None, False, None),
    ],
)
def test_messages_go_by_the_inner_choice_within_a_node_and_by_the_cross_choice_else(
    inner: str, cross: str | None, one_host: bool, expected: str | None
) -> None:
    settings = Settings(inner_communicator=inner, cross_communicator=cross)
    assert settings.message_transport(one_host) == expected


def test_pauses_of_the_progress_thread_grow_with_idle_time_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    progress: Any = Progress()
    clock_s = [1000.0]
    monkeypatch.setattr("torch_cgx.transports.mpi_process.time.monotonic", lambda: clock_s[0])
    progress.seen()
    for idle_s, pause_s in ((0.0, 0.001), (0.04, 0.001), (0.2, 0.02), (0.4, 0.04), (60.0, 0.05)):
        clock_s[0] = 1000.0 + idle_s
        assert progress._pause_s() == pytest.approx(pause_s)
