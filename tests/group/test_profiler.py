"""What torch.profiler shows of our operations: `cgx::` names, on the caller's thread and on the one that waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.support.harness import Rank, apart, run_ranks

pytestmark = pytest.mark.ranks

BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"
NODES = {
    "shared memory": {},
    "Gloo": apart(2),
    "links": apart(2, "TCP"),
}


@pytest.fixture(params=list(NODES))
def nodes(request: pytest.FixtureRequest) -> dict[int, dict[str, str]]:
    return NODES[request.param]


def names_of(recorded: profile) -> set[str]:
    return {event.name for event in recorded.events() or ()}


def ours(me: Rank, **options: Any) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU], **options) as recorded:
        x = torch.ones(5000)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        work.get_future().wait()
        dist.all_reduce(torch.ones(100, dtype=torch.int64))
        dist.barrier()
    torch.testing.assert_close(x, torch.full((5000,), float(me.world**2)))
    return {name for name in names_of(recorded) if name.startswith("cgx::")}


def on_the_callers_thread(me: Rank) -> set[str]:
    return ours(me)


def test_operations_are_shown_under_our_names(nodes: dict[int, dict[str, str]]) -> None:
    for found in run_ranks(on_the_callers_thread, 2, "cgx", env={BITS: "4"}, rank_env=nodes):
        assert {"cgx::all_reduce 4 bits", "cgx::broadcast", "cgx::all_reduce"} <= found, found


def on_all_threads(me: Rank) -> set[str]:
    return ours(me, experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True))


def test_all_threads_show_how_long_an_operation_ran(nodes: dict[int, dict[str, str]]) -> None:
    for found in run_ranks(on_all_threads, 2, "cgx", env={BITS: "4"}, rank_env=nodes):
        assert {"cgx::all_reduce 4 bits", "cgx::broadcast", "cgx::run all_reduce"} <= found, found


def exactly(me: Rank) -> set[str]:
    return ours(me)


def test_exact_operations_are_shown_too(nodes: dict[int, dict[str, str]]) -> None:
    for found in run_ranks(exactly, 2, "cgx", rank_env=nodes):
        assert any(name.startswith("cgx::all_reduce") for name in found), found
        assert "cgx::broadcast" in found


def failing(me: Rank) -> None:
    import torch_cgx

    with (
        profile(experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)),
        pytest.raises(torch_cgx.CGXError),
    ):
        dist.all_reduce(torch.ones(1000 + me.rank))
    dist.destroy_process_group()
    me.start_group("cgx", name="again")
    with profile():
        x = torch.ones(1000)
        dist.all_reduce(x)
    assert (x == me.world).all()


def test_a_failure_under_the_profiler_is_raised_as_ever() -> None:
    run_ranks(failing, 2, "cgx", env={BITS: "4"})


def outside(me: Rank) -> None:
    """Operations issued before the profiler starts, or waited for after it has stopped."""
    x = torch.ones(5000)
    before = dist.all_reduce(x, async_op=True)
    with profile():
        assert before is not None
        before.wait()
        after = dist.all_reduce(x, async_op=True)
    assert after is not None
    after.wait()
    torch.testing.assert_close(x, torch.full((5000,), float(me.world**2)))


def test_operations_may_begin_and_end_outside_of_the_profile(nodes: dict[int, dict[str, str]]) -> None:
    run_ranks(outside, 2, "cgx", env={BITS: "4"}, rank_env=nodes)
