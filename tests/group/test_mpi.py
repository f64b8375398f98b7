"""MPI as a carrier: what groups must do over it, how carriers are chosen, and training under mpirun."""

from __future__ import annotations

import functools
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.support import mpi_cases
from tests.support.gradients import BITS
from tests.support.harness import OVER_GLOO, Rank, describe, needs_native, observe_ranks, run_ranks, warm_python
from tests.support.in_shares import sweep
from tests.support.launching import LIBRARIES, clean_environ, finish, run, start, start_ranks, with_mpi4py_on
from tests.support.mpi_cases import CASES, WORLD
from tests.support.nursery import WITHOUT_ENGINE
from tests.support.training import make_net, train

pytestmark = pytest.mark.ranks

INNER, CROSS = "CGX_INNER_COMMUNICATOR_TYPE", "CGX_CROSS_COMMUNICATOR_TYPE"

MORE = {"MPICH": [pytest.mark.matrix]}
EACH_LIBRARY = [pytest.param(name, marks=MORE.get(name, []), id=name) for name in LIBRARIES]


@functools.cache
def over_mpi(library: str) -> tuple[int, str, frozenset[str]]:
    """Run all cases in one mpirun, which takes seconds to start. Return exit code, output, and which ranks did well."""
    with tempfile.TemporaryDirectory() as folder:
        environ = with_mpi4py_on(library, clean_environ(Path(folder))) | {INNER: "MPI", CROSS: "MPI"}
        environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
        process = start([*start_ranks(library, WORLD), warm_python(), mpi_cases.__file__, folder], environ)
        output = finish(process)
        return process.returncode, output, frozenset(os.listdir(folder))


@pytest.mark.parametrize("library", EACH_LIBRARY)
@pytest.mark.parametrize("case", CASES)
def test_over_mpi(library: str, case: str) -> None:
    _, output, well = over_mpi(library)
    assert {f"{case}.{rank}" for rank in range(WORLD)} <= well, output


@pytest.mark.parametrize("library", EACH_LIBRARY)
def test_a_rank_that_raises_ends_the_whole_job_instead_of_waiting_in_finalize(library: str) -> None:
    code, output, _ = over_mpi(library)
    assert output.count(mpi_cases.ENOUGH) >= 1
    assert code != 0


TRAINING = """
import sys
from datetime import timedelta

import torch.distributed as dist

from tests.group.test_mpi import losses, shares

dist.init_process_group("cgx", timeout=timedelta(seconds=60))
sys.stdout.write(f"{losses()}\\n{shares()}\\n")  # in one write: two ranks share the terminal
"""


def losses(*_: Any) -> str:
    """Of a small model in DDP, and over what its gradients went."""
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    found = train(DistributedDataParallel(make_net(), bucket_cap_mb=0.005), dist.get_rank(), 10)
    return f"{group.carrier}: rank {dist.get_rank()} {found}"


def shares(*_: Any) -> str:
    """Of compressed reduce-scatters and all-gathers, and over what they went."""
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    return f"{group.carrier}: shares of rank {dist.get_rank()} {sweep(dist.get_rank(), dist.get_world_size())}"


def training(folder: Path) -> tuple[Path, dict[str, str]]:
    environ = clean_environ(folder) | {BITS: "4", INNER: "MPI", CROSS: "MPI"}
    environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
    script = folder / "train.py"
    script.write_text(TRAINING)
    return script, environ


@pytest.mark.matrix
@pytest.mark.parametrize("library", EACH_LIBRARY)
def test_training_and_shares_over_mpi_under_mpirun_are_those_over_tcp_to_the_bit(library: str, tmp_path: Path) -> None:
    script, environ = training(tmp_path)
    process = start([*start_ranks(library), warm_python(), script], with_mpi4py_on(library, environ))
    output = finish(process)
    for what, found in (
        (losses, r"MPI: rank \d \[.*?\]"),
        (shares, r"MPI: shares of rank \d \[.*?\]"),
    ):
        over_tcp = run_ranks(what, 2, "cgx", env={BITS: "4", INNER: "TCP"})
        expected = [line.replace("TCP", "MPI") for line in over_tcp]
        assert expected != over_tcp
        assert sorted(re.findall(found, output)) == expected, output
    assert process.returncode == 0, output


@pytest.mark.matrix
def test_mpi4py_on_another_mpi_than_the_launcher_s_is_an_error_that_says_so(tmp_path: Path) -> None:
    script, environ = training(tmp_path)
    output = run([*start_ranks("MPICH"), warm_python(), script], with_mpi4py_on("Open MPI", environ))
    assert output.count("TransportError: MPI cannot be used: rank 0 reports: mpi4py uses Open MPI") == 2
    assert "set MPI4PY_LIBMPI" in output


FINALIZING = """
import sys

import torch
import torch.distributed as dist
from mpi4py import MPI

dist.init_process_group("cgx")
for group in (dist.new_group(), None):
    x = torch.ones(100_000)
    dist.all_reduce(x, group=group)
    assert (x == 2).all()
    dist.destroy_process_group(group)
MPI.COMM_WORLD.Barrier()
MPI.Finalize()
sys.stdout.write("finalized\\n")
"""


@pytest.mark.matrix
@pytest.mark.parametrize("library", EACH_LIBRARY)
def test_a_user_may_initialise_and_finalise_mpi(library: str, tmp_path: Path) -> None:
    script, environ = training(tmp_path)
    script.write_text(FINALIZING)
    process = start([*start_ranks(library), warm_python(), script], with_mpi4py_on(library, environ))
    output = finish(process)
    assert process.returncode == 0 and output.count("finalized") == 2, output


def start_with(me: Rank) -> None:
    me.start_group("cgx")


@pytest.mark.parametrize("variable", [INNER, CROSS])
def test_mpi_without_mpirun_fails_on_all_ranks_and_says_what_to_do(variable: str) -> None:
    for outcome in observe_ranks(start_with, 2, None, env={variable: "MPI"}):
        assert not outcome.ok
        assert f"{variable}=MPI: no MPI launcher started this process: start it with mpirun" in outcome.message


def test_ranks_that_chose_different_carriers_raise() -> None:
    outcomes = observe_ranks(start_with, 2, None, rank_env={0: {INNER: "GLOO"}, 1: {INNER: "SHM"}})
    for outcome in outcomes:
        assert "MismatchError" in outcome.error_kinds, describe(outcomes)
        assert f"{INNER} is 'GLOO' on rank 0 and 'SHM' on rank 1" in outcome.message


def test_without_the_native_engine_compressed_operations_go_over_gloo() -> None:
    assert run_ranks(carrier_of, 2, "cgx", env=OVER_GLOO) == ["GLOO"] * 2


@pytest.mark.parametrize("variable", [INNER, CROSS])
def test_tcp_is_refused_by_all_ranks_where_one_lacks_the_native_engine(variable: str) -> None:
    outcomes = observe_ranks(start_with, 2, None, env={variable: "TCP"}, rank_env={1: {WITHOUT_ENGINE: "1"}})
    assert f"{variable}=TCP needs the native library: reinstall torch_cgx" in outcomes[1].message, describe(outcomes)
    assert "rank 1 could not join the group" in outcomes[0].message
    assert f"{variable}=TCP needs the native library" in outcomes[0].message


def carrier_of(me: Rank) -> str:
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    return str(group.carrier)


@needs_native
@pytest.mark.parametrize("variable", [INNER, CROSS])
def test_gloo_is_another_name_for_tcp_with_one_warning(variable: str) -> None:
    rank_env = {rank: {"CGX_NODE_ID": f"host-{rank}"} for rank in range(2)} if variable == CROSS else {}
    outcomes = observe_ranks(carrier_of, 2, "cgx", env={variable: "GLOO"}, rank_env=rank_env)
    assert [outcome.value for outcome in outcomes] == ["TCP", "TCP"], describe(outcomes)
    assert [outcome.log.count("GLOO is another name for TCP") for outcome in outcomes] == [1, 0]


@pytest.mark.parametrize(("nodes", "carrier"), [("00", "SHM"), ("01", "TCP"), ("001", "TCP")])
def test_between_nodes_it_is_tcp_where_no_mpirun_started_the_ranks(nodes: str, carrier: str) -> None:
    places = {rank: {"CGX_NODE_ID": node} for rank, node in enumerate(nodes)}
    assert run_ranks(carrier_of, len(nodes), "cgx", rank_env=places) == [carrier] * len(nodes)
