"""Trouble between ranks that share no memory: what all of them raise, and how soon."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torch_cgx
from tests.support.dying import reduce_until_one_dies
from tests.support.gradients import BITS
from tests.support.harness import Outcome, Rank, apart, describe, needs_native, observe_ranks, run_ranks

pytestmark = pytest.mark.ranks

SOON_S = 30.0
GROUP_TIMEOUT_S = 4.0


def raised(outcome: Outcome, *kinds: str) -> None:
    report = describe([outcome])
    assert not outcome.timed_out and outcome.exit_code == 1, report
    assert set(kinds) & set(outcome.error_kinds), f"expected {' or '.join(kinds)}\n{report}"


def call_differently(me: Rank, how: str) -> None:
    dist.all_reduce(torch.ones(1000))
    other = me.rank == 1
    x, op = torch.ones(1000), dist.ReduceOp.SUM
    me.mark()
    if how == "far more values":
        x = torch.ones(500_000 if other else 1000)
    elif how == "one value more":
        x = torch.ones(1001 if other else 1000)
    elif how == "another shape":
        x = torch.ones(20, 50) if other else torch.ones(1000)
    elif how == "dtype":
        x = x.half() if other else x
    elif how == "bits":
        torch_cgx.set_default(bits=8 if other else 4)
    elif how == "bucket size":
        torch_cgx.set_default(bucket_size=64 if other else 512)
    elif how == "average":
        op = dist.ReduceOp.AVG if other else dist.ReduceOp.SUM
    elif how == "order":
        dist.all_reduce(torch.ones(1000 if other else 2000))
        x = torch.ones(2000 if other else 1000)
    elif how == "strides":
        x = torch.ones(20, 50).t() if other else torch.ones(50, 20)
    elif how == "exact":
        torch_cgx.set_default(bits=32 if other else 4)
    elif how == "another operation" and other:
        dist.all_gather(list(torch.zeros(me.world, 1000)), x)
        return
    dist.all_reduce(x, op)


HOW = (
    "far more values",
    "one value more",
    "another shape",
    "dtype",
    "bits",
    "bucket size",
    "average",
    "order",
    "strides",
)


@pytest.mark.parametrize("how", HOW)
def test_ranks_that_call_all_reduce_differently_all_raise(how: str) -> None:
    outcomes = observe_ranks(call_differently, 3, "cgx", how, env={BITS: "4"}, rank_env=apart(3))
    for outcome in outcomes:
        raised(outcome, "MismatchError")
        assert "rank 1" in outcome.message
        assert outcome.after_mark_s is not None and outcome.after_mark_s < SOON_S


def call_differently_and_late(me: Rank) -> None:
    dist.all_reduce(torch.ones(1000))
    if me.rank == 2:
        time.sleep(0.3)
    dist.all_reduce(torch.ones(1001 if me.rank == 1 else 1000))


def test_a_rank_that_comes_late_to_calls_that_differ_is_told_so_too() -> None:
    """Those that found out before must not have hung up: it would take them for dead."""
    for outcome in observe_ranks(call_differently_and_late, 3, "cgx", env={BITS: "4"}, rank_env=apart(3)):
        raised(outcome, "MismatchError")
        assert "rank 1" in outcome.message


@pytest.mark.parametrize("how", ["exact", "another operation"])
def test_ranks_that_call_something_else_are_told_what_each_has_called(how: str) -> None:
    # Gloo's own operations and our messages are different connections, so they wait until they ask each other.
    outcomes = observe_ranks(call_differently, 2, "cgx", how, env={BITS: "4"}, rank_env=apart(2))
    for outcome in outcomes:
        raised(outcome, "MismatchError")
        assert "lost step at operation 2" in outcome.message
        for called in (
            "all_reduce(float32[1000], SUM, 4 bits",
            "all_reduce(float32[1000], SUM)" if how == "exact" else "all_gather",
        ):
            assert called in outcome.message
        assert outcome.after_mark_s is not None and outcome.after_mark_s < GROUP_TIMEOUT_S + SOON_S


def other_layers(me: Rank) -> None:
    dist.all_reduce(torch.ones(100_000))  # so that there is shared memory enough for any layers
    torch_cgx.register_layer(0, 0, 4000, 2, 64 if me.rank == 1 else 128)
    dist.all_reduce(torch.ones(4000))


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=needs_native), 2])
def test_ranks_that_have_registered_other_layers_raise(nodes: int) -> None:
    rank_env = apart(2) if nodes == 2 else {}
    for outcome in observe_ranks(other_layers, 2, "cgx", env={BITS: "4"}, rank_env=rank_env):
        raised(outcome, "MismatchError")


@pytest.mark.parametrize("bits", ["4", "32"])
def test_survivors_of_a_kill_raise_soon(bits: str) -> None:
    outcomes = observe_ranks(reduce_until_one_dies, 3, "cgx", env={BITS: bits}, rank_env=apart(3), real_exit=True)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for outcome in outcomes[:2]:
        raised(outcome, "PeerLostError")
        assert outcome.after_mark_s is not None and outcome.after_mark_s < SOON_S
    if bits != "32":  # of an exact sum Gloo does not say whom it lost
        assert any("rank 2" in outcome.message for outcome in outcomes[:2])


def one_never_calls(me: Rank) -> None:
    dist.all_reduce(torch.ones(1000))
    if me.rank == 1:
        me.store.wait(["rank 0 has raised"])
        return
    me.mark()
    try:
        dist.all_reduce(torch.ones(1000))
    finally:
        me.store.set("rank 0 has raised", "")


@pytest.mark.matrix
def test_waiting_for_a_rank_that_never_calls_ends_with_the_groups_timeout() -> None:
    first, _ = observe_ranks(
        one_never_calls, 2, "cgx", env={BITS: "4"}, rank_env=apart(2), group_timeout_s=GROUP_TIMEOUT_S
    )
    raised(first, "CGXTimeoutError")
    assert "rank 0: Timed out in operation 2, all_reduce(" in first.message and "rank 1" in first.message
    assert first.after_mark_s is not None
    assert GROUP_TIMEOUT_S - 0.5 < first.after_mark_s < GROUP_TIMEOUT_S + SOON_S


def one_never_calls_after_a_shorter_timeout(me: Rank) -> None:
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))  # type: ignore[attr-defined]
    one_never_calls(me)


@pytest.mark.matrix
def test_a_timeout_can_be_changed() -> None:
    first, _ = observe_ranks(
        one_never_calls_after_a_shorter_timeout, 2, "cgx", env={BITS: "4"}, rank_env=apart(2), group_timeout_s=100
    )
    raised(first, "CGXTimeoutError")
    assert first.after_mark_s is not None
    assert GROUP_TIMEOUT_S - 0.5 < first.after_mark_s < GROUP_TIMEOUT_S + SOON_S


def after_a_failure(me: Rank) -> None:
    with pytest.raises(torch_cgx.CGXError):
        dist.all_reduce(torch.ones(1000 + me.rank))
    started = time.monotonic()
    with pytest.raises(torch_cgx.CGXError):
        dist.all_reduce(torch.ones(1000))
    assert time.monotonic() - started < SOON_S
    dist.destroy_process_group()
    me.start_group("cgx", name="again")
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((1000,), float(me.world)))


@pytest.mark.matrix
def test_after_a_failure_a_group_only_raises_and_a_new_one_works() -> None:
    run_ranks(after_a_failure, 2, "cgx", env={BITS: "4"}, rank_env=apart(2))


def fails_unseen(me: Rank) -> None:
    """The kernels of one rank fail in an operation that it does not wait for."""
    from torch_cgx.engines.plain import PlainEngine

    dist.all_reduce(torch.ones(1000))
    me.meet("all have reduced")
    if me.rank == 1:
        PlainEngine._run_slice = broken  # type: ignore[method-assign]
    me.mark()
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    assert work is not None
    if me.rank == 1:
        while not me.store.check(["raised/0", "raised/2"]):  # a wait would keep the store from its inquiry
            time.sleep(0.05)
        with pytest.raises(torch_cgx.CGXError, match="the operation failed: out of luck"):
            dist.all_reduce(torch.ones(1000))
    try:
        work.wait()
    finally:
        me.store.set(f"raised/{me.rank}", "")


def broken(*_: object) -> None:
    raise RuntimeError("out of luck")


def test_a_failure_that_its_own_rank_does_not_look_at_is_raised_by_all_others() -> None:
    outcomes = observe_ranks(fails_unseen, 3, "cgx", env={BITS: "4"}, rank_env=apart(3))
    for outcome in outcomes:
        raised(outcome, "CGXError")
        assert outcome.after_mark_s is not None and outcome.after_mark_s < SOON_S
        assert "out of luck" in outcome.message, describe(outcomes)


def destroys_while_a_thread_waits(me: Rank) -> None:
    """A thread waits for a rank that never calls, and the main thread leaves."""
    dist.all_reduce(torch.ones(1000))
    me.meet("all have reduced")
    if me.rank == 0:
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                dist.all_reduce(torch.ones(1000))
            except torch_cgx.CGXError as error:
                ended.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.5)
        dist.destroy_process_group()
        waiting.join(SOON_S)
        assert len(ended) == 1
    me.meet("one has left")


@pytest.mark.parametrize("cross", [None, pytest.param("TCP", marks=needs_native)], ids=["Gloo", "links"])
def test_destroying_a_group_ends_the_wait_of_another_thread(cross: str | None) -> None:
    run_ranks(destroys_while_a_thread_waits, 2, "cgx", env={BITS: "4"}, rank_env=apart(2, cross), destroy=False)
