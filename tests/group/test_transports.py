"""The transports: one suite that each must pass, how they are chosen, and training over each of them."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support import transport_cases
from tests.support.gradients import BITS
from tests.support.harness import OVER_MESSAGES, Rank, describe, needs_native, observe_ranks, run_ranks
from tests.support.in_shares import sweep
from tests.support.launching import LIBRARIES, clean_environ, finish, run, start, start_ranks, with_mpi4py_on
from tests.support.training import make_net, train
from tests.support.transport_cases import CASES, WORLD, Ranks

pytestmark = pytest.mark.ranks

INNER, CROSS = "CGX_INNER_COMMUNICATOR_TYPE", "CGX_CROSS_COMMUNICATOR_TYPE"

MORE = {"MPICH": [pytest.mark.matrix]}
EACH_LIBRARY = [pytest.param(name, marks=MORE.get(name, []), id=name) for name in LIBRARIES]


@functools.cache
def over_mpi(library: str) -> tuple[int, str, frozenset[str]]:
    """All cases in one run of mpirun, because it takes seconds to start: exit code, output, which ranks did well."""
    with tempfile.TemporaryDirectory() as folder:
        environ = with_mpi4py_on(library, clean_environ(Path(folder)))
        environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
        process = start([*start_ranks(library, WORLD), sys.executable, transport_cases.__file__, folder], environ)
        output = finish(process)
        return process.returncode, output, frozenset(os.listdir(folder))


def case_over_gloo(me: Rank, case: str) -> None:
    transport_cases.run_case(case, "GLOO", me.rank, me.store)


@pytest.mark.parametrize(
    "transport", ["Gloo", *(pytest.param(name, marks=pytest.mark.matrix, id=name) for name in LIBRARIES)]
)
@pytest.mark.parametrize("case", CASES)
def test_transport(transport: str, case: str) -> None:
    if transport == "Gloo":
        run_ranks(case_over_gloo, WORLD, None, case)
    else:
        _, output, well = over_mpi(transport)
        assert {f"{case}.{rank}" for rank in range(WORLD)} <= well, output


def wait_for_one_that_dies(me: Rank) -> None:
    transport = Ranks("GLOO", me.rank, me.store).open("world")
    me.meet("all are here")
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.receive(torch.zeros(10, dtype=torch.uint8), 1, 6).wait()


def test_a_killed_peer_is_named_over_gloo() -> None:
    outcomes = observe_ranks(wait_for_one_that_dies, WORLD, None)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert "PeerLostError" in outcomes[rank].error_kinds, describe(outcomes)
        assert f"rank {rank} waited for message 6 of 10 bytes from rank 1" in outcomes[rank].message


@pytest.mark.parametrize("library", EACH_LIBRARY)
def test_a_rank_that_raises_ends_the_whole_job_instead_of_waiting_in_finalize(library: str) -> None:
    code, output, _ = over_mpi(library)
    assert output.count(transport_cases.ENOUGH) >= 1
    assert code != 0


TRAINING = """
import sys
from datetime import timedelta

import torch.distributed as dist

from tests.group.test_transports import losses, shares

dist.init_process_group("cgx", timeout=timedelta(seconds=60))
sys.stdout.write(f"{losses()}\\n{shares()}\\n")  # in one write: two ranks share the terminal
"""


def transport_name(group: Any) -> str:
    """The class of what carries messages to all peers."""
    (name,) = {type(transport).__name__ for transport in group._reducer._executor._transports if transport is not None}
    return name


def losses(*_: Any) -> str:
    """Of a small model in DDP, and over what its gradients went."""
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    found = train(DistributedDataParallel(make_net(), bucket_cap_mb=0.005), dist.get_rank(), 10)
    return f"{transport_name(group)}: rank {dist.get_rank()} {found}"


def shares(*_: Any) -> str:
    """Of compressed reduce-scatters and all-gathers, and over what they went."""
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    return f"{transport_name(group)}: shares of rank {dist.get_rank()} {sweep(dist.get_rank(), dist.get_world_size())}"


def training(folder: Path) -> tuple[Path, dict[str, str]]:
    environ = clean_environ(folder) | {BITS: "4", INNER: "MPI", CROSS: "MPI"}
    environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
    script = folder / "train.py"
    script.write_text(TRAINING)
    return script, environ


@pytest.mark.matrix
@pytest.mark.parametrize("library", EACH_LIBRARY)
def test_training_and_shares_over_mpi_under_mpirun_are_those_over_gloo_to_the_bit(library: str, tmp_path: Path) -> None:
    script, environ = training(tmp_path)
    process = start([*start_ranks(library), sys.executable, script], with_mpi4py_on(library, environ))
    output = finish(process)
    for what, found in (
        (losses, r"MpiTransport: rank \d \[.*?\]"),
        (shares, r"MpiTransport: shares of rank \d \[.*?\]"),
    ):
        over_gloo = run_ranks(what, 2, "cgx", env={BITS: "4", **OVER_MESSAGES})
        expected = [line.replace("GlooTransport", "MpiTransport") for line in over_gloo]
        assert expected != over_gloo
        assert sorted(re.findall(found, output)) == expected, output
    assert process.returncode == 0, output


@pytest.mark.matrix
def test_mpi4py_on_another_mpi_than_the_launcher_s_is_an_error_that_says_so(tmp_path: Path) -> None:
    script, environ = training(tmp_path)
    output = run([*start_ranks("MPICH"), sys.executable, script], with_mpi4py_on("Open MPI", environ))
    assert output.count("TransportError: the MPI transport cannot be used: rank 0 reports: mpi4py uses Open MPI") == 2
    assert "set MPI4PY_LIBMPI" in output


def start_with(me: Rank) -> None:
    me.start_group("cgx")


@pytest.mark.parametrize("variable", [INNER, CROSS])
def test_mpi_without_mpirun_fails_on_all_ranks_and_says_what_to_do(variable: str) -> None:
    for outcome in observe_ranks(start_with, 2, None, env={variable: "MPI"}):
        assert not outcome.ok
        assert f"{variable}=MPI: no MPI launcher started this process: start it with mpirun" in outcome.message


def test_ranks_that_chose_different_transports_raise() -> None:
    outcomes = observe_ranks(start_with, 2, None, rank_env={0: {INNER: "GLOO"}, 1: {INNER: "SHM"}})
    for outcome in outcomes:
        assert "MismatchError" in outcome.error_kinds, describe(outcomes)
        assert f"{INNER} is 'GLOO' on rank 0 and 'SHM' on rank 1" in outcome.message


def carried_by(me: Rank) -> str:
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    return transport_name(group)


def test_without_the_native_engine_messages_go_over_gloo() -> None:
    assert run_ranks(carried_by, 2, "cgx", env=OVER_MESSAGES) == ["GlooTransport"] * 2


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
