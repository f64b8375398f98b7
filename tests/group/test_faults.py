"""What ranks see when another one dies, stalls or calls something else: an error that names it, and soon.

Nothing here may hang or crash: the harness would report either. That nothing stays in /dev/shm is asserted
after every test by a fixture.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.dying import die_after, reduce_until_one_dies
from tests.support.families import each_once, only
from tests.support.harness import Outcome, Rank, describe, names, observe_ranks, raised, run_ranks

BITS, BUCKET_SIZE = "CGX_COMPRESSION_QUANTIZATION_BITS", "CGX_COMPRESSION_BUCKET_SIZE"
SOON_S = 30.0  # promised is one second; a loaded machine shall not fail the test
GROUP_TIMEOUT_S = 4.0

pytestmark = pytest.mark.ranks


def soon(outcome: Outcome) -> None:
    assert outcome.after_mark_s is not None
    assert outcome.after_mark_s < SOON_S, f"raised only after {outcome.after_mark_s:.1f} s"


@pytest.mark.parametrize(("numel", "bits"), each_once([4, 1000, 4_000_000], ["32", "4"]))
def test_survivors_of_a_kill_in_the_middle_of_all_reduce_name_the_dead_rank(numel: int, bits: str) -> None:
    outcomes = observe_ranks(reduce_until_one_dies, 3, "cgx", numel, env={BITS: bits}, real_exit=True)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for outcome in outcomes[:2]:
        raised(outcome, "PeerLostError", "PoisonedError")
        names(outcome, r"rank 2\b", r"(?i)all_?reduce")
        soon(outcome)


def other_collectives_until_one_dies(me: Rank, name: str) -> None:
    x = torch.ones(1000)
    gathered = torch.zeros(1000 * me.world)
    calls: dict[str, Any] = {
        "broadcast": lambda: dist.broadcast(x, 0),
        "barrier": lambda: dist.barrier(),
        "all_gather": lambda: dist.all_gather_into_tensor(gathered, x),
    }
    if me.rank == 1:
        die_after(me, 0.3)
    while True:
        calls[name]()


@pytest.mark.parametrize("name", ["broadcast", "barrier", "all_gather"])
def test_survivors_of_a_kill_in_another_collective_name_the_dead_rank(name: str) -> None:
    outcomes = observe_ranks(other_collectives_until_one_dies, 2, "cgx", name)
    raised(outcomes[0], "PeerLostError", "PoisonedError")
    names(outcomes[0], r"rank 1\b")
    soon(outcomes[0])


def backward_until_one_dies(me: Rank) -> None:
    from torch.nn.parallel import DistributedDataParallel

    net = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(6)]), bucket_cap_mb=0.5
    )
    if me.rank == 1:
        die_after(me, 0.4)
    x = torch.ones(4, 300)
    while True:
        net(x).sum().backward()


@pytest.mark.parametrize("bits", only(["4"], ["32", "4"]))
def test_a_kill_inside_ddps_backward_raises_there(bits: str) -> None:
    outcomes = observe_ranks(backward_until_one_dies, 2, "cgx", env={BITS: bits}, real_exit=True)
    raised(outcomes[0], "RuntimeError")  # DDP keeps the text and not the type
    names(outcomes[0], r"rank 1\b")
    soon(outcomes[0])


def one_raises(me: Rank) -> None:
    dist.all_reduce(torch.ones(100))
    if me.rank == 1:
        me.mark()
        raise KeyError("a mistake of the user's")
    dist.all_reduce(torch.ones(100))


def test_a_rank_that_ends_by_an_exception_is_noticed() -> None:
    first, second = observe_ranks(one_raises, 2, "cgx")
    raised(second, "KeyError")
    raised(first, "PeerLostError", "PoisonedError")
    names(first, r"rank 1\b")
    soon(first)


def call_differently(me: Rank, how: str) -> None:
    import torch_cgx

    dist.all_reduce(torch.ones(100))
    other = me.rank == 1
    me.mark()
    if how == "operation":
        dist.broadcast(torch.ones(1000), 0) if other else dist.all_reduce(torch.ones(1000))
    elif how == "reversed operation":
        dist.all_reduce(torch.ones(1000)) if other else dist.broadcast(torch.ones(1000), 0)
    elif how == "shape":
        dist.all_reduce(torch.ones(1001 if other else 1000))
    elif how == "small shape":
        dist.all_reduce(torch.ones(7 if other else 1000))
    elif how == "dtype":
        dist.all_reduce(torch.ones(1000, dtype=torch.float16 if other else torch.float32))
    elif how == "integer dtype":
        dist.all_reduce(torch.ones(1000, dtype=torch.int64 if other else torch.float32))
    elif how == "bits":
        torch_cgx.set_default(bits=8 if other else 4)
        dist.all_reduce(torch.ones(1000))
    elif how == "exact or not":
        torch_cgx.set_default(bits=32 if other else 4)
        dist.all_reduce(torch.ones(1000))
    elif how == "registered layers":
        torch_cgx.set_default(bits=4)
        torch_cgx.register_layer(0, 0, 600, 4, 64)
        torch_cgx.register_layer(0, 1, 400, 2 if other else 8, 64)
        dist.all_reduce(torch.ones(1000))
    elif how == "many outstanding calls ago":
        works = [dist.all_reduce(torch.ones(17 if other and i == 3 else 16), async_op=True) for i in range(300)]
        for work in works:
            assert work is not None
            work.wait()
    elif how == "reduce op":
        dist.all_reduce(torch.ones(1000), dist.ReduceOp.MAX if other else dist.ReduceOp.SUM)
    elif how == "root":
        dist.broadcast(torch.ones(1000), 1 if other else 0)
    elif how == "gathered shape":
        numel = 20 if other else 10
        dist.all_gather_into_tensor(torch.zeros(numel * me.world), torch.ones(numel))
    else:
        raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "patterns"),
    [
        ("operation", (r"(?i)all_?reduce", r"(?i)broadcast")),
        ("reversed operation", (r"(?i)all_?reduce", r"(?i)broadcast")),
        ("shape", (r"\b1000\b", r"\b1001\b")),
        ("small shape", (r"\b1000\b", r"\b7\b")),
        ("dtype", ("float32", "float16")),
        ("integer dtype", ("float32", "int64")),
        ("bits", (r"\b4\b", r"\b8\b")),
        ("exact or not", (r"\b4\b", r"\b32\b|exact")),
        ("registered layers", (r"\b1000\b", r"layers and strides #")),
        ("many outstanding calls ago", (r"lost step at operation 5\b",)),
        ("reduce op", (r"(?i)\bsum\b", r"(?i)\bmax\b")),
        ("root", (r"(?i)broadcast", r"(?i)(root|src|source)")),
        ("gathered shape", (r"\b10\b", r"\b20\b")),
    ],
)
def test_ranks_that_call_differently_both_see_both_calls(how: str, patterns: tuple[str, ...]) -> None:
    outcomes = observe_ranks(call_differently, 2, "cgx", how)
    for outcome in outcomes:
        raised(outcome, "MismatchError")
        names(outcome, *patterns, r"rank 0\b", r"rank 1\b")
        soon(outcome)


def wait_in(name: str, group: dist.ProcessGroup | None = None) -> None:
    """A collective that cannot end as long as the peer does not call it."""
    if name == "all_reduce":
        dist.all_reduce(torch.ones(100), group=group)
    elif name == "large all_reduce":
        dist.all_reduce(torch.ones(3_000_000), group=group)
    elif name == "async all_reduce":
        work = dist.all_reduce(torch.ones(100), group=group, async_op=True)
        assert work is not None
        work.wait()
    elif name == "future of all_reduce":
        work = dist.all_reduce(torch.ones(100), group=group, async_op=True)
        assert work is not None
        work.get_future().wait()
    elif name == "broadcast":
        dist.broadcast(torch.ones(100), 1, group=group)
    else:
        assert name == "barrier"
        dist.barrier(group=group)


WAITING = ("all_reduce", "large all_reduce", "async all_reduce", "future of all_reduce", "broadcast", "barrier")
Raised = tuple[float, tuple[str, ...], str]  # after how many seconds, names of its classes, its text


def what_it_raises(call: Callable[[], object]) -> Raised:
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return time.monotonic() - started, tuple(kind.__name__ for kind in type(error).__mro__), str(error)
    return time.monotonic() - started, (), ""


def one_never_calls(me: Rank) -> dict[str, Raised]:
    """Rank 0 waits in all of them at once, each in a group of its own; rank 1 calls when the time is over."""
    groups = {name: dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S)) for name in WAITING}
    for group in groups.values():
        dist.all_reduce(torch.ones(100), group=group)
    if me.rank == 1:
        me.store.wait(["rank 0 has raised"])
        return {
            name: what_it_raises(partial(dist.all_reduce, torch.ones(100), group=group))
            for name, group in groups.items()
        }
    with ThreadPoolExecutor(len(WAITING)) as pool:
        waits = {name: pool.submit(what_it_raises, partial(wait_in, name, group)) for name, group in groups.items()}
    me.store.set("rank 0 has raised", "")
    return {name: wait.result() for name, wait in waits.items()}


def test_waiting_for_a_rank_that_never_calls_ends_with_the_groups_timeout() -> None:
    waited, late = run_ranks(one_never_calls, 2, "cgx")
    for name in WAITING:
        seconds, kinds, text = waited[name]
        assert ("RuntimeError" if "future" in name else "CGXTimeoutError") in kinds, (name, kinds, text)
        for pattern in (r"rank 1\b", f"(?i){name.split()[-1].replace('_', '_?')}", " Timed out "):
            assert re.search(pattern, text), (name, pattern, text)
        assert GROUP_TIMEOUT_S - 0.5 < seconds < GROUP_TIMEOUT_S + SOON_S, (name, seconds)
        # The group is lost: whoever comes late learns it at once.
        seconds, kinds, text = late[name]
        assert "CGXError" in kinds, (name, kinds, text)
        assert seconds < SOON_S, (name, seconds)
        # It makes the same call, or another one.
        assert (" Timed out " in text) or name != "all_reduce", text


def one_is_stopped(me: Rank) -> None:
    dist.all_reduce(torch.ones(100))
    me.store.set(f"pid/{me.rank}", str(os.getpid()))
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    stopped = int(me.store.get("pid/1"))
    try:
        dist.all_reduce(torch.ones(100))
    finally:
        os.kill(stopped, signal.SIGKILL)


def test_waiting_for_a_stopped_rank_ends_with_the_groups_timeout() -> None:
    first, _ = observe_ranks(one_is_stopped, 2, "cgx", group_timeout_s=GROUP_TIMEOUT_S)
    raised(first, "CGXTimeoutError")
    names(first, r"rank 1\b")


def interrupted(me: Rank, name: str) -> None:
    dist.all_reduce(torch.ones(100))
    if me.rank == 1:
        pid = int(me.store.get("pid"))
        time.sleep(0.5)  # until rank 0 waits
        me.mark()
        os.kill(pid, signal.SIGINT)
        me.store.wait(["rank 0 has raised"])
        return
    try:
        me.store.set("pid", str(os.getpid()))
        wait_in(name)
    finally:
        me.store.set("rank 0 has raised", "")


@pytest.mark.parametrize(
    "name",
    only(
        ["large all_reduce", "barrier"], ["all_reduce", "large all_reduce", "async all_reduce", "broadcast", "barrier"]
    ),
)
def test_ctrl_c_ends_a_waiting_rank(name: str) -> None:
    first, second = observe_ranks(interrupted, 2, "cgx", name, real_exit=True)
    raised(first, "KeyboardInterrupt")
    soon(first)
    assert second.exit_code >= 0 and not second.timed_out, describe([second])


def destroyed_twice(me: Rank) -> None:
    for turn in range(4):
        me.start_group("cgx", name=f"turn {turn}")
        x = torch.ones(1000)
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((1000,), float(me.world)))
        dist.destroy_process_group()
        with pytest.raises((AssertionError, ValueError, RuntimeError)):
            dist.destroy_process_group()
        assert not dist.is_initialized()


def test_a_group_may_be_destroyed_twice_and_made_again() -> None:
    run_ranks(destroyed_twice, 2, None, real_exit=True)


_pending: list[Any] = []


def leave_work_pending(me: Rank, what: str) -> None:
    dist.all_reduce(torch.ones(100))
    if me.rank == 0:
        x: Tensor = torch.ones(2_000_000 if what == "large" else 100)
        work = dist.broadcast(x, 1, async_op=True) if what == "broadcast" else dist.all_reduce(x, async_op=True)
        if what == "future":
            assert work is not None
            _pending.append(work.get_future().then(lambda future: future.value()))
        _pending.append((work, x))
        time.sleep(0.2)
    else:
        me.store.wait(["left/0"])
    me.store.set(f"left/{me.rank}", "")


@pytest.mark.parametrize(("what", "destroy"), each_once(["small", "large", "broadcast", "future"], [False, True]))
def test_the_interpreter_exits_with_work_pending(what: str, destroy: bool) -> None:
    outcomes = observe_ranks(leave_work_pending, 2, "cgx", what, destroy=destroy, real_exit=True, timeout_s=45.0)
    for outcome in outcomes:
        assert outcome.exit_code >= 0 and not outcome.timed_out, describe([outcome])


def leave_without_destroying(me: Rank) -> None:
    dist.all_reduce(torch.ones(5000))


def test_the_interpreter_exits_without_destroying_the_group() -> None:
    run_ranks(leave_without_destroying, 3, "cgx", destroy=False, real_exit=True)


def start_and_reduce(me: Rank) -> None:
    me.mark()
    me.start_group("cgx")
    dist.all_reduce(torch.ones(1000))


def test_ranks_with_different_settings_refuse_to_work_together() -> None:
    outcomes = observe_ranks(start_and_reduce, 2, None, rank_env={1: {"CGX_FUSION_BUFFER_SIZE_MB": "8"}})
    for outcome in outcomes:
        raised(outcome, "MismatchError")
        names(outcome, "CGX_FUSION_BUFFER_SIZE_MB is not set on rank 0 and '8' on rank 1\\. Set it to the same value")
        soon(outcome)


def start_with_other_variables(me: Rank, variables: dict[str, str], where: str) -> None:
    """Rank 0 has variables that the others have not, when the default group is made or a later one of ranks 0 and 1."""
    if where == "sub-group":
        me.start_group("cgx")
    if me.rank == 0:
        os.environ.update(variables)
    me.mark()
    if where == "sub-group":
        dist.new_group([0, 1])
    else:
        me.start_group("cgx")


OPEN_MPI = dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "0")
OPEN_MPI |= dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "3")


@pytest.mark.parametrize(
    ("name", "value", "env", "where", "how"),
    [
        (BITS, "4", {}, "default group", "Set it to the same value on every host"),
        (BUCKET_SIZE, "64", OPEN_MPI, "sub-group", f"mpirun -x {BUCKET_SIZE} "),
    ],
)
def test_bits_or_bucket_size_on_some_ranks_only_are_refused_at_creation(
    name: str, value: str, env: dict[str, str], where: str, how: str
) -> None:
    inside = 2 if where == "sub-group" else 3
    outcomes = observe_ranks(start_with_other_variables, 3, None, {name: value}, where, env=env)
    for outcome in outcomes[:inside]:
        raised(outcome, "MismatchError")
        others = "ranks 1, 2" if inside == 3 else "rank 1"
        names(outcome, f"{name} is '{value}' on rank 0 and not set on {others}\\. .*{how}")
        soon(outcome)


def start_and_change_bits(me: Rank) -> None:
    os.environ[BITS] = "32" if me.rank == 0 else ""  # the same, said in two ways
    me.start_group("cgx")
    os.environ[BITS] = "4"
    dist.all_reduce(torch.ones(1000))


def test_variables_that_mean_the_same_may_differ_and_may_change_afterwards() -> None:
    run_ranks(start_and_change_bits, 2, None)


def test_a_setting_out_of_range_is_refused_at_creation() -> None:
    outcomes = observe_ranks(start_and_reduce, 2, None, env={"CGX_FUSION_BUFFER_SIZE_MB": "many"})
    for outcome in outcomes:
        raised(outcome, "ValueError")
        names(outcome, "CGX_FUSION_BUFFER_SIZE_MB", "many")


def use_after_failure(me: Rank) -> None:
    with pytest.raises(RuntimeError, match="1001"):
        dist.all_reduce(torch.ones(1000 + me.rank))
    for call in (
        lambda: dist.all_reduce(torch.ones(1000)),
        lambda: dist.broadcast(torch.ones(10), 0),
        dist.barrier,
    ):
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            call()
        assert time.monotonic() - started < SOON_S
    dist.destroy_process_group()
    me.start_group("cgx", name="again")
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((1000,), float(me.world)))


def test_after_a_failure_a_group_only_raises_and_a_new_one_works() -> None:
    run_ranks(use_after_failure, 2, "cgx")


def other_groups_go_on(me: Rank) -> None:
    pair = dist.new_group([0, 1])
    if me.rank < 2:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1000 + me.rank), group=pair)
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((1000,), float(me.world)))


def test_a_failed_group_leaves_the_others_alone() -> None:
    run_ranks(other_groups_go_on, 3, "cgx")
