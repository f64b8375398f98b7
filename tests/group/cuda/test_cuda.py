"""CUDA tensors on a stand-in device, over real ranks: the CUDA path but for CUDA, held against the CPU path to the bit.

A group of backend "standin" (standin.py) takes CPU tensors for CUDA tensors.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from tests.support import standin
from tests.support.families import each_once
from tests.support.gradients import BITS, is_exact, noise, within_bound
from tests.support.harness import Rank, names, nursery_started_by, observe_ranks, raised, run_ranks
from tests.support.on_device import (
    CROSS,
    STAGED,
    WAYS,
    large_sum,
    needs_triton,
    start,
    sums,
    the_group,
    trained,
    watched,
)
from tests.support.training import flat, make_net, same_on_all_ranks, train

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("way", "stochastic"), each_once(WAYS, ["0", "1"]))
def test_the_bits_are_those_of_the_cpu_path(way: str, stochastic: str) -> None:
    env = {BITS: "4", "CGX_COMPRESSION_STOCHASTIC": stochastic}
    on_cpu = run_ranks(sums, 3, None, "cgx", env=env)
    on_device = run_ranks(sums, 3, None, "standin", env={**env, **WAYS[way]})
    assert on_device == on_cpu == [on_cpu[0]] * 3


@pytest.mark.parametrize(
    ("nodes", "variables"),
    [
        ("0101", {"CGX_INTRA_BROADCAST": "0", "CGX_INTRA_COMPRESS": "0"}),
        ("00011", {"CGX_CROSS_REDUCTION_TYPE": "RING"}),
        ("012", {CROSS: "GLOO"}),  # which is of CPU tensors alone
        pytest.param("001", {}, marks=pytest.mark.matrix),
        pytest.param("0101", {"CGX_INTRA_BROADCAST": "0"}, marks=pytest.mark.matrix),
        pytest.param("0101", {"CGX_INTRA_COMPRESS": "0"}, marks=pytest.mark.matrix),
        pytest.param("000", {"CGX_INNER_REDUCTION_TYPE": "RING"}, marks=pytest.mark.matrix),
    ],
    ids=[
        *("all speak, exact within", "a ring", "one rank a node", "one speaks", "all speak", "exact within"),
        "a ring in one node",
    ],
)
def test_the_hierarchy_has_the_bits_of_the_cpu_path(nodes: str, variables: dict[str, str]) -> None:
    env = {BITS: "4", **variables}
    places = {rank: {"CGX_NODE_ID": node} for rank, node in enumerate(nodes)}
    world = len(nodes)
    on_cpu = run_ranks(large_sum, world, None, "cgx", env=env, rank_env=places)
    on_device = run_ranks(large_sum, world, None, "standin", env=env, rank_env=places)
    assert on_device == on_cpu == [on_cpu[0]] * world


@pytest.mark.parametrize(
    ("way", "options"),
    [("NCCL", {"error_feedback": True, "stochastic": True}), ("shared memory", {"stochastic": True})],
)
def test_a_hooked_training_ends_with_the_bits_of_the_cpu_path(way: str, options: dict[str, Any]) -> None:
    on_cpu = same_on_all_ranks(run_ranks(trained, 2, None, "cgx", options))
    on_device = same_on_all_ranks(run_ranks(trained, 2, None, "standin", options, env=WAYS[way]))
    assert torch.equal(on_device, on_cpu)


def trained_plainly(me: Rank, backend: str, triton: bool) -> Tensor:
    """DDP without a hook, bits from the variable."""
    if triton:
        from torch_cgx.kernels.triton import TritonKernels

        standin.register(TritonKernels)
    start(me, backend)
    ddp = DistributedDataParallel(make_net())
    train(ddp, me.rank, steps=2)
    if backend == "standin":
        group = the_group()
        assert group.kernels is not None
        assert (group.kernels.name == "triton") == triton
    return flat(ddp)


@pytest.mark.parametrize(
    "triton", [False, pytest.param(True, marks=[needs_triton, pytest.mark.matrix])], ids=["native", "triton"]
)
def test_a_plain_training_ends_with_the_bits_of_the_cpu_path(triton: bool) -> None:
    env = {BITS: "4", "CGX_COMPRESSION_BUCKET_SIZE": "128"}
    on_cpu = same_on_all_ranks(run_ranks(trained_plainly, 2, None, "cgx", False, env=env))
    # Triton's interpreter is chosen when Triton is imported, which torch does in the usual nursery.
    with nursery_started_by(["env", "TRITON_INTERPRET=1"]) if triton else nullcontext():
        ends = run_ranks(trained_plainly, 2, None, "standin", triton, env=env, timeout_s=120)
    assert torch.equal(same_on_all_ranks(ends), on_cpu)


def last_done(log: list[tuple[Any, ...]]) -> int:
    """The event that was recorded last on the stream that operations run on."""
    return int([entry[1] for entry in log if entry[0] == "record" and entry[2] == "side 1"][-1])


def waits_and_futures(me: Rank, staged: bool) -> None:
    group = start(me, "standin")
    group.set_timeout(timedelta(seconds=60))
    log = group.device.log
    x = noise(me.rank, 5000)
    log.clear()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    if not staged:
        assert not any(entry[0] == "synchronize" for entry in log), "the host waited"
        assert log[-1][0] == "record" and log[-1][2] == "side 1", "not all was enqueued"
    work.wait()
    done = last_done(log)
    assert log[-1] == ("hold back", "caller", done)
    with group.device.using(standin.Stream("another")):
        work.wait()
    assert log[-1] == ("hold back", "another", done), "each stream that waits must be held back"
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result() == [x]
    work.synchronize()
    within_bound(x, me.world, 4)

    y = noise(me.rank, 5000)
    future = dist.all_reduce(y, async_op=True).get_future()  # type: ignore[union-attr]
    seen: list[str] = []

    def negated(done: Any) -> Tensor:
        seen.append(group.device.here.name)
        return -done.value()[0]

    after = future.then(negated)
    with watched():
        assert torch.equal(after.wait(), -x) and torch.equal(y, x)
    assert len(seen) == 1 and seen[0].startswith("callback")
    assert ("hold back", "side 2", last_done(log)) in log, "a future waits for its operation alone"
    adopted = {entry[1] for entry in log if entry[0] == "adopt"}
    assert adopted == ({"cgx-staging", "cgx-futures"} if staged else set()), "threads of ours, and only they"
    kept = [entry for entry in log if entry[0] == "keep"]
    assert kept == [("keep", 5000, "side 1")] * 2


@pytest.mark.parametrize("way", WAYS)
def test_waiting_holds_back_the_callers_stream_and_futures_are_set_on_the_side(way: str) -> None:
    run_ranks(waits_and_futures, 2, None, way != "NCCL", env={BITS: "4", **WAYS[way]})


def mixed_calls(me: Rank) -> None:
    """What is not compressed is carried; what is asked to be, is."""
    group = start(me, "standin")
    log = group.device.log

    def exchanged() -> bool:
        found = any(entry[0] == "exchange" for entry in log)
        log.clear()
        return found

    x = noise(me.rank, 5000)
    dist.all_reduce(x)
    assert is_exact(x, me.world) and not exchanged()
    assert group.can_compress(x) and not group.can_compress(x.double())
    torch_cgx.set_default(bits=4)
    x = noise(me.rank, 5000)
    with torch_cgx.uncompressed():
        dist.all_reduce(x)
    assert is_exact(x, me.world) and not exchanged()
    for x in (noise(me.rank, 15), noise(me.rank, 5000).double()):
        dist.all_reduce(x)
        assert is_exact(x, me.world) and not exchanged()
    largest = torch.tensor([float(me.rank)] * 100)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert largest.max() == me.world - 1 and not exchanged()
    dist.all_reduce(torch.empty(0))
    gathered = [torch.empty(3) for _ in range(me.world)]
    dist.all_gather(gathered, torch.full((3,), float(me.rank)))
    assert [float(each[0]) for each in gathered] == list(map(float, range(me.world)))
    dist.barrier()
    assert not exchanged()

    # Strided, as convolutions in channels_last are; and one with gaps, which is refused.
    x = noise(me.rank, 4 * 8 * 6 * 6).view(4, 8, 6, 6).to(memory_format=torch.channels_last)
    before = x.stride()
    dist.all_reduce(x)
    assert exchanged() and x.stride() == before
    with pytest.raises(ValueError, match="without gaps"):
        dist.all_reduce(noise(me.rank, 100)[::2])
    with torch.inference_mode():
        x = noise(me.rank, 5000)
        dist.all_reduce(x)
        assert exchanged()

    # Coalesced: exact ones are the carrier's own, others go one by one.
    tensors = [noise(me.rank, 600), noise(me.rank, 700), noise(me.rank, 8)]
    work = group.allreduce_coalesced([each.clone() for each in tensors[2:]])
    work.wait()
    assert not exchanged()
    work = group.allreduce_coalesced(tensors)
    assert work.get_future().wait()[0] is tensors[0] and work.is_completed()
    assert exchanged()
    for each in tensors[:2]:
        within_bound(each, me.world, 4)
    assert is_exact(tensors[2], me.world)

    group.device.capturing = True
    x = noise(me.rank, 5000)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        dist.all_reduce(x)
    assert torch.equal(x, noise(me.rank, 5000)) and not exchanged()
    group.device.capturing = False
    with torch.profiler.profile() as profile:
        dist.all_reduce(x)
    assert any("cgx::all_reduce 4 bits" in event.name for event in profile.events())
    assert torch_cgx.stats()["operations"] > 0
    torch_cgx.reset_stats()
    assert torch_cgx.stats()["operations"] == 0
    dist.destroy_process_group()
    assert log[-1] == ("shutdown",)


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_not_compressed_is_carried(world: int) -> None:
    if world == 1:
        run_ranks(alone, 1, None, env={BITS: "4"})
    else:
        run_ranks(mixed_calls, world, None)


def alone(me: Rank) -> None:
    group = start(me, "standin")
    x = noise(0, 5000)
    dist.all_reduce(x)
    assert torch.equal(x, noise(0, 5000)) and group.device.log == []


def kernels_fail(me: Rank, kernel: str) -> None:
    group = start(me, "standin")
    dist.all_reduce(noise(me.rank, 5000))
    if me.rank == 1:
        group.kernels.fails_at = kernel
    for _ in range(3):
        dist.all_reduce(noise(me.rank, 5000))


@pytest.mark.parametrize(("way", "kernel"), each_once(WAYS, ["encode", "decode"]))
def test_a_kernel_that_fails_is_an_error_on_its_rank_and_on_the_others(way: str, kernel: str) -> None:
    first, second = observe_ranks(
        kernels_fail, 2, None, kernel, env={BITS: "4", **WAYS[way]}, group_timeout_s=6.0, destroy=False
    )
    raised(second, "CGXError")
    names(second, "an illegal memory access was encountered")
    raised(first, "CGXError", "PeerLostError", "PoisonedError", "CGXTimeoutError", "RuntimeError")


def fails_for_good(me: Rank, failing: int) -> None:
    group = start(me, "standin")
    group.kernels = None
    dist.all_reduce(noise(me.rank, 5000))
    me.meet("all have reduced")
    if me.rank == failing:
        group.kernels.fails_at = "encode"
    for _ in range(2):
        with pytest.raises(torch_cgx.CGXError, match="illegal memory access" if me.rank == failing else ""):
            dist.all_reduce(noise(me.rank, 5000))


@pytest.mark.parametrize("failing", [0, 1])  # not both: the slower one would hear of the other before its own failure
@pytest.mark.parametrize("way", WAYS)
def test_a_group_that_has_failed_stays_so(way: str, failing: int) -> None:
    run_ranks(fails_for_good, 2, None, failing, env={BITS: "4", **WAYS[way]}, group_timeout_s=6.0, destroy=False)


def lose_step(me: Rank) -> None:
    start(me, "standin")
    dist.all_reduce(noise(me.rank, 5000))
    dist.all_reduce(noise(me.rank, 5000 + 64 * me.rank))


def test_ranks_that_lose_step_find_out_where_payloads_are_staged() -> None:
    for outcome in observe_ranks(lose_step, 2, None, env={BITS: "4", **STAGED}, group_timeout_s=5.0):
        raised(outcome, "MismatchError", "PoisonedError", "PeerLostError")


def benched(me: Rank) -> tuple[dict[str, Any], dict[str, Any]]:
    """`cgx bench allreduce --device cuda` and the check of `cgx doctor`, as their ranks run them."""
    from torch_cgx.cli import gpus
    from torch_cgx.cli.bench import allreduce_ranks
    from torch_cgx.group import process_group

    finished: list[int] = []

    class Noted(gpus.Cpu):
        def finish(self) -> None:
            finished.append(1)

    process_group.create = standin.create  # type: ignore[assignment]
    gpus.all_gpus = Noted  # type: ignore[assignment]
    allreduce_ranks.join_world = lambda timeout_s: me.start_group("gloo", name=f"bench {len(finished)}")
    shared = {"bits": 4, "bucket_size": 512, "dtype": "float32", "device": "cuda"}
    more = {"sizes": [65536], "against": ["gloo"], "seconds": 0.01, "busy": False, "nodes": 1}
    told = allreduce_ranks.run({**shared, **more}, lambda message: None)
    operations = sum(len(batch) for cell in told["cells"] for batch in cell["op_ns"])
    assert len(finished) > operations, "an operation is done when the device is"
    return told["cells"][0], allreduce_ranks.check({**shared, "nbytes": 65536}, lambda message: None)


def test_bench_and_doctor_check_and_time_what_is_on_the_device() -> None:
    for cell, check in run_ranks(benched, 2, None, destroy=False):
        assert cell["backend"] == "cgx" and cell["check"]["same_bits"] and check["same_bits"]
        assert 0.01 < cell["check"]["relative_error"] == check["relative_error"] < 0.5
        assert 0 < check["sent_nbytes"] < 65536 / 7 + 1


def call_differently(me: Rank, how: str) -> None:
    dist.set_debug_level_from_env()  # the nursery imported torch without it
    start(me, "standin")
    dist.all_reduce(torch.ones(1000))
    numel = 1001 if me.rank == 1 and how == "shape" else 1000
    with torch_cgx.uncompressed() if how == "exactness" and me.rank == 1 else nullcontext():
        dist.all_reduce(torch.ones(numel))


@pytest.mark.parametrize("how", ["shape", "exactness"])
def test_between_hosts_calls_are_compared_where_debugging_in_detail_is_asked_for(how: str) -> None:
    env = {BITS: "4", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    places = {rank: {"CGX_NODE_ID": f"host-{rank}"} for rank in range(2)}
    for outcome in observe_ranks(call_differently, 2, None, how, env=env, rank_env=places):
        raised(outcome, "MismatchError")
        names(
            outcome, "lost step at operation 2", r"rank 0 called|rank 1 called", "1001" if how == "shape" else "4 bits"
        )
