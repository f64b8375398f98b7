"""How groups with CUDA tensors end: timeouts, failures that peers learn of, leaving. On a stand-in device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import torch_cgx
from tests.support.gradients import BITS, noise
from tests.support.harness import Rank, names, observe_ranks, raised, run_ranks
from tests.support.on_device import STAGED, WAYS, start, the_group
from tests.support.standin import StandInGroup
from torch_cgx.group import process_group

pytestmark = pytest.mark.ranks


def how_it_left(log: list[tuple[Any, ...]]) -> list[str]:
    return [entry[0] for entry in log if entry[0] in ("shutdown", "abort")]


def leave(me: Rank, how: str) -> list[str]:
    group = start(me, "standin")
    log = group.device.log
    dist.all_reduce(noise(me.rank, 5000))
    me.meet("all have reduced")  # who leaves before would be missed by one that still does
    if how == "failed":
        group.kernels.fails_at = "encode"
        with pytest.raises(torch_cgx.CGXError):
            dist.all_reduce(noise(me.rank, 5000))
    elif how == "aborted":
        group.abort()
    elif how == "exited":
        process_group._close_all()  # as atexit calls it
        assert group.is_closed
    dist.destroy_process_group()
    return how_it_left(log)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["done", "failed", "aborted", "exited"])
def test_who_leaves_a_group_that_has_failed_or_exits_waits_for_nobody(how: str, way: str) -> None:
    lefts = run_ranks(leave, 2, None, how, env={BITS: "4", **WAYS[way]}, destroy=False)
    assert lefts == [["shutdown" if how == "done" else "abort"]] * 2


def one_fails(me: Rank) -> StandInGroup:
    """Rank 1, whose peers wait for nobody meanwhile."""
    group = start(me, "standin")
    dist.all_reduce(noise(me.rank, 5000))
    me.meet("all have reduced")
    if me.rank == 1:
        group.kernels.fails_at = "encode"
        with pytest.raises(torch_cgx.CGXError, match="illegal memory access"):
            dist.all_reduce(noise(me.rank, 5000))
    me.meet("one has failed")
    return the_group()


def leave_whose_peer_failed(me: Rank) -> list[str]:
    log = one_fails(me).device.log
    dist.destroy_process_group()
    return how_it_left(log)


@pytest.mark.parametrize("way", WAYS)
def test_so_does_who_leaves_when_a_peer_has_failed(way: str) -> None:
    env = {BITS: "4", **WAYS[way]}
    assert run_ranks(leave_whose_peer_failed, 2, None, env=env, destroy=False) == [["abort"]] * 2


def goes_on_exactly(me: Rank) -> None:
    one_fails(me)
    with torch_cgx.uncompressed():
        dist.all_reduce(noise(me.rank, 5000))


def test_peers_learn_of_a_staged_operation_that_failed() -> None:
    env = {BITS: "4", **STAGED}
    for outcome in observe_ranks(goes_on_exactly, 2, None, env=env, destroy=False):
        raised(outcome, "CGXError", "PoisonedError")
        names(outcome, "illegal memory access was encountered")


def told_timeouts(me: Rank) -> None:
    group = start(me, "standin")
    log = group.device.log
    group.set_timeout(timedelta(seconds=50))
    assert ("timeout", 50.0) in log
    log.clear()
    opts = dist.AllreduceOptions()
    for seconds in (7, 50):
        opts.timeout = timedelta(seconds=seconds)
        group.allreduce([noise(me.rank, 5000)], opts).wait()
    told = [entry for entry in log if entry[0] in ("timeout", "exchange")]
    assert [entry[1] for entry in told if entry[0] == "timeout"] == [7.0, 50.0]
    assert [entry[0] for entry in told] == ["timeout", "exchange", "exchange", "timeout", "exchange", "exchange"]


def test_timeouts_reach_nccl() -> None:
    run_ranks(told_timeouts, 2, None, env={BITS: "4"})


def set_it(me: Rank) -> None:
    group = start(me, "standin")
    group.set_timeout(timedelta(seconds=50))
    assert ("timeout", 50.0) in group.device.log, "what is exact is NCCL's all the same"


@pytest.mark.parametrize("world", [1, 2])
def test_a_timeout_reaches_nccl_where_payloads_are_staged(world: int) -> None:
    run_ranks(set_it, world, None, env={BITS: "4", **STAGED})


def waits_in_vain(me: Rank) -> None:
    group = start(me, "standin")
    dist.all_reduce(noise(me.rank, 5000))
    opts = dist.AllreduceOptions()
    opts.timeout = timedelta(seconds=1)
    if me.rank == 0:
        with pytest.raises(torch_cgx.CGXTimeoutError):
            group.allreduce([noise(me.rank, 5000)], opts).wait()
    me.meet("over")


def test_a_staged_operation_has_the_timeout_of_its_call() -> None:
    run_ranks(waits_in_vain, 2, None, env={BITS: "4", **STAGED}, group_timeout_s=600.0, destroy=False)
