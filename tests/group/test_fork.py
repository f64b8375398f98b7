"""A process that forks after init_process_group: the child is told that it has no group, and the group goes on.

Data loaders fork their workers, so this happens in every training.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import torch_cgx
from tests.support.harness import Rank, apart, run_ranks

BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"
NODES = {
    "shared memory": {},
    "Gloo": apart(2),
    "links": apart(2, "TCP"),
}
CHILD_S = 20.0  # far less than the group's timeout: a child that hangs, and not one that got no processor

pytestmark = pytest.mark.ranks


@pytest.fixture(params=list(NODES))
def nodes(request: pytest.FixtureRequest) -> dict[int, dict[str, str]]:
    return NODES[request.param]


def reduces(me: Rank) -> None:
    x = torch.ones(5000)
    dist.all_reduce(x)
    torch.testing.assert_close(x, torch.full((5000,), float(me.world)))


def in_a_fork(act: Callable[[], str], leave: Callable[[], object]) -> tuple[str, int]:
    """What `act` returned in a forked child, and how that ended after `leave`; a child that hangs is killed."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        theirs.send(act())
        theirs.close()
        leave()
        os._exit(99)
    theirs.close()
    said = ours.recv() if ours.poll(CHILD_S) else "nothing"
    watch = os.pidfd_open(pid)
    if not select.select([watch], [], [], CHILD_S)[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(watch)
    return said, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def every_collective_raises() -> str:
    """The message, if all of them raise the same one and at once."""
    x, gathered = torch.ones(5000), torch.zeros(10_000)
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
        lambda: dist.all_reduce(x, async_op=True),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather_into_tensor(gathered, x),
        lambda: dist.reduce_scatter_tensor(torch.zeros(2500), x),
        lambda: dist.barrier(),
        lambda: dist.isend(x, 1 - dist.get_rank()),
        lambda: dist.irecv(x, 1 - dist.get_rank()),
    ]
    messages = set()
    for index, call in enumerate(calls):
        started = time.monotonic()
        try:
            call()
            return f"call {index} did not raise"
        except torch_cgx.CGXError as error:
            messages.add(str(error))
        except Exception as error:
            return f"call {index} raised {error!r}"
        if time.monotonic() - started > CHILD_S / 2:
            return f"call {index} took its time"
    return " / ".join(sorted(messages))


def forks_and_goes_on(me: Rank) -> None:
    reduces(me)
    said, code = in_a_fork(every_collective_raises, lambda: os._exit(0))
    assert said == "a process group does not survive fork: call init_process_group in the child"
    assert code == 0
    reduces(me)
    dist.barrier()


def test_a_collective_in_a_forked_child_is_refused_and_the_group_goes_on(nodes: dict[int, dict[str, str]]) -> None:
    run_ranks(forks_and_goes_on, 2, "cgx", env={BITS: "4"}, rank_env=nodes)


def end_of_the_interpreter() -> None:
    """As far as a library can see it."""
    atexit._run_exitfuncs()
    os._exit(0)


def end_with_threads() -> None:
    """They take the places, and so the ids, of threads that the fork has left behind."""
    for _ in range(10):
        threading.Thread(target=time.sleep, args=(CHILD_S,), daemon=True).start()
    end_of_the_interpreter()


def drop_the_group() -> None:
    group: Any = dist.group.WORLD
    del group._parts
    gc.collect()
    os._exit(0)


WAYS = {"the end": end_of_the_interpreter, "the end, with threads": end_with_threads, "garbage": drop_the_group}


def child_leaves(me: Rank, how: str) -> None:
    reduces(me)
    if me.rank == 0:
        assert in_a_fork(lambda: "ready", WAYS[how]) == ("ready", 0)
        me.store.set("child has left", "")
    me.store.wait(["child has left"])
    reduces(me)
    dist.barrier()


@pytest.mark.parametrize("how", WAYS)
def test_a_forked_child_that_leaves_takes_nobody_with_it(how: str, nodes: dict[int, dict[str, str]]) -> None:
    run_ranks(child_leaves, 2, "cgx", how, env={BITS: "4"}, rank_env=nodes)


def pending_meanwhile(me: Rank) -> None:
    """A fork in the middle of an operation, as a data loader's at the start of an epoch may be."""
    x = torch.ones(2_000_000)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    said, code = in_a_fork(every_collective_raises, lambda: os._exit(0))
    assert "does not survive fork" in said and code == 0
    work.wait()
    torch.testing.assert_close(x, torch.full_like(x, float(me.world)))
    reduces(me)


def test_a_fork_in_the_middle_of_an_operation_leaves_it_alone(nodes: dict[int, dict[str, str]]) -> None:
    run_ranks(pending_meanwhile, 2, "cgx", env={BITS: "4"}, rank_env=nodes)


def loads_data(me: Rank) -> None:
    data = TensorDataset(torch.arange(64.0))
    for _ in range(2):
        loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
        total = torch.zeros(())
        for (batch,) in loader:
            total += batch.sum()
            reduces(me)
        assert total.item() == 64 * 63 / 2


def test_a_data_loader_with_forked_workers_beside_the_group(nodes: dict[int, dict[str, str]]) -> None:
    run_ranks(loads_data, 2, "cgx", env={BITS: "4"}, rank_env=nodes)
