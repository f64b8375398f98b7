"""What a process says once, on rank 0, about variables that do nothing: misspelled ones, and bits without use."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.gradients import BITS
from tests.support.harness import Rank, observe_ranks

pytestmark = pytest.mark.ranks

MISSPELLED = "CGX_COMPRESSION_BITS"
UNKNOWN = f"{MISSPELLED} is set, but there is no such variable. Did you mean {BITS}?"
UNUSED = f"{BITS}=4 is set, but this process compressed nothing"


def logs_of(function: Any, backend: str | None, *arguments: Any, **variables: str) -> tuple[str, str]:
    """What two ranks write that leave through the interpreter's shutdown."""
    env = {BITS: "4", **variables}
    outcomes = observe_ranks(function, 2, backend, *arguments, env=env, real_exit=True)
    assert all(outcome.ok for outcome in outcomes), outcomes
    return outcomes[0].log, outcomes[1].log


def too_small_or_of_other_types(me: Rank, values: int) -> None:
    import torch_cgx

    for _ in range(3):
        dist.all_reduce(torch.ones(5000, dtype=torch.int64))
    dist.all_reduce(torch.ones(values))
    dist.broadcast(torch.ones(5000), 0, group=dist.new_group())
    dist.all_reduce(torch.ones(5000), dist.ReduceOp.MAX)
    dist.barrier()
    if values == 5000:
        torch_cgx.reset_stats()  # what was compressed before counts all the same


@pytest.mark.parametrize("over", ["SHM", "TCP"])
def test_a_group_that_compressed_nothing_says_at_exit_what_it_was_asked_for(over: str) -> None:
    where = {"CGX_INNER_COMMUNICATOR_TYPE": over}
    first, second = logs_of(too_small_or_of_other_types, "cgx", 15, **where, **{MISSPELLED: "4"})
    assert first.count(UNKNOWN) == first.count(UNUSED) == 1, first
    seen = "3 all_reduce of int64, 1 all_reduce of fewer than 16 values, 1 broadcast, 1 all_reduce with MAX"
    assert f"{UNUSED}: it called {seen}. That compresses an all_reduce (SUM or AVG) of at least 16" in first
    assert "is set, but" not in second


def test_a_group_that_compressed_something_says_nothing_at_exit() -> None:
    assert not any("is set, but" in log for log in logs_of(too_small_or_of_other_types, "cgx", 5000))


def another_backend(me: Rank) -> None:
    dist.all_reduce(torch.ones(5000))
    # As a data loader's worker: it has its parent's variables and a copy of its parent's group.
    worker = multiprocessing.get_context("fork").Process(target=torch.ones, args=(2,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0


def test_another_backend_is_named_at_exit_once_on_rank_0() -> None:
    first, second = logs_of(another_backend, "gloo")
    assert first.count(UNUSED) == 1, first
    assert f'{UNUSED}: its backend is "gloo", and that is for backend "cgx". Call init_process_group("cgx")' in first
    assert "is set, but" not in second


def asked_of_another_backend(me: Rank) -> None:
    import torch_cgx

    torch_cgx.set_default(bits=2)
    dist.all_reduce(torch.ones(5000))


def test_what_the_program_asked_of_another_backend_is_told_too() -> None:
    first, second = logs_of(asked_of_another_backend, "gloo", **{BITS: ""})
    assert 'torch_cgx.set_default(bits=2) was called, but this process compressed nothing: its backend is "gl' in first
    assert "compressed nothing" not in second


def in_a_child(me: Rank) -> None:
    child = multiprocessing.get_context("fork").Process(target=reduce_by_gloo, args=(me,))
    child.start()
    child.join()
    assert child.exitcode == 0


def reduce_by_gloo(me: Rank) -> None:
    me.start_group("gloo")
    dist.all_reduce(torch.ones(5000))
    dist.destroy_process_group()


def test_ranks_that_multiprocessing_forked_say_it_too() -> None:
    first, second = logs_of(in_a_child, None)
    assert (first.count(UNUSED), second.count(UNUSED)) == (1, 0), first
