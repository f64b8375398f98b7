"""Calls that every rank refuses, and waits that are interrupted: the group stays usable, as gloo's does."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import OVER_GLOO, Rank, run_ranks

pytestmark = pytest.mark.ranks

REFUSALS = (RuntimeError, ValueError, TypeError)
LINKS = {"CGX_INNER_COMMUNICATOR_TYPE": "TCP"}
GROUP_TIMEOUT_S = 20.0


def still_works(me: Rank) -> None:
    x = torch.arange(4) + me.rank
    dist.all_reduce(x)
    assert torch.equal(x, me.world * torch.arange(4) + sum(range(me.world)))
    rows = list(torch.zeros(me.world, 2))
    dist.all_gather(rows, torch.full((2,), float(me.rank)))
    assert [row[0].item() for row in rows] == list(range(me.world))


def refused(me: Rank, how: str, asynchronous: bool) -> Any:
    """Make a call that gloo refuses on all ranks."""
    if how == "split sizes of floats":
        sizes: list[Any] = [1.0] * me.world
        return dist.all_to_all_single(torch.empty(me.world), torch.ones(me.world), sizes, sizes, async_op=asynchronous)
    if how == "too many split sizes":
        sizes = [1] * (me.world + 1)
        return dist.all_to_all_single(torch.empty(me.world), torch.ones(me.world), sizes, sizes, async_op=asynchronous)
    if how == "outputs of another shape":
        return dist.all_gather(list(torch.empty(me.world, 3)), torch.ones(2), async_op=asynchronous)
    if how == "too few outputs":
        return dist.all_gather([torch.empty(2)] * (me.world - 1), torch.ones(2), async_op=asynchronous)
    if how == "outputs of another dtype":
        return dist.all_gather(list(torch.empty(me.world, 2).half()), torch.ones(2), async_op=asynchronous)
    if how == "uneven inputs":
        outputs = [torch.empty(rank + 1) for rank in range(me.world)]
        return dist.all_gather(outputs, torch.ones(me.rank + 1), async_op=asynchronous)
    if how == "uneven inputs of one tensor":
        size = sum(range(1, me.world + 1))
        return dist.all_gather_into_tensor(torch.empty(size), torch.ones(me.rank + 1), async_op=asynchronous)
    assert how == "no such root"
    return dist.reduce(torch.ones(2, dtype=torch.int64), me.world + 3, async_op=asynchronous)


AT_THE_CALL = (
    *("outputs of another shape", "too few outputs", "outputs of another dtype"),
    *("uneven inputs", "uneven inputs of one tensor", "split sizes of floats"),
)
REFUSED = (*AT_THE_CALL, "too many split sizes", "no such root")


def refuse_and_go_on(me: Rank) -> None:
    for how in REFUSED:
        if how == "no such root":  # torch itself refuses it on groups that are not the world
            continue
        with pytest.raises(REFUSALS):
            refused(me, how, asynchronous=False)
        still_works(me)
    for late in (-1, 0, 1):
        for how in REFUSED:
            if me.rank == late:
                time.sleep(0.05)
            before = dist.all_reduce(torch.ones(3, dtype=torch.int64), async_op=True)
            try:
                work = refused(me, how, asynchronous=True)
            except REFUSALS:
                work = None
            else:
                assert how not in AT_THE_CALL, f"{how}: not refused at the call"
            behind = torch.ones(3, dtype=torch.int64)
            after = dist.all_reduce(behind, async_op=True)
            assert before is not None and after is not None
            after.wait()
            assert behind.tolist() == [me.world] * 3
            if work is not None:
                with pytest.raises(REFUSALS):
                    work.wait()
                assert work.is_completed() and not work.is_success()
            before.wait()
            still_works(me)


def fail_before_a_barrier(me: Rank) -> None:
    """Sparse tensors of different sizes, which Gloo refuses on its own thread."""
    sparse = torch.ones(3 + me.rank, 2).to_sparse()
    work = dist.all_reduce(sparse, async_op=True)
    assert work is not None
    if me.rank == 0:
        with pytest.raises(RuntimeError):
            work.wait()
    dist.barrier()
    with pytest.raises(RuntimeError):
        work.wait()
    still_works(me)


def interrupt_a_wait(me: Rank) -> None:
    """Ctrl-C in a wait that a peer holds up: the operation is carried out all the same, and the next one works."""
    dist.barrier()
    gathered = list(torch.zeros(me.world, 2))
    if me.rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.all_gather(gathered, torch.ones(2))
        me.store.set("interrupted", "")
    else:
        me.store.wait(["interrupted"])
        dist.all_gather(gathered, torch.ones(2))
    still_works(me)


def all_of_it(me: Rank) -> None:
    refuse_and_go_on(me)
    if (
        dist.get_backend() == "cgx"
    ):  # gloo's barrier waits for what is under way, and raises it; its waits see no signals
        fail_before_a_barrier(me)
        interrupt_a_wait(me)


@pytest.mark.parametrize(
    ("backend", "env"),
    [("cgx", {}), ("cgx", OVER_GLOO), ("cgx", LINKS), ("gloo", {})],
    ids=["shared memory", "Gloo", "links", "gloo"],
)
def test_a_refused_call_raises_itself_and_no_other(backend: str, env: dict[str, str]) -> None:
    run_ranks(all_of_it, 2, backend, env=env, group_timeout_s=GROUP_TIMEOUT_S)
