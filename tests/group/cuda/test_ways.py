"""CUDA tensors on the stand-in device, by every way: several slices, residuals, leaving after a failure, choosing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.gradients import BITS, digest, noise, within_bound
from tests.support.harness import Rank, describe, observe_ranks, run_ranks
from tests.support.on_device import STAGED, WAYS, large_sum, start, the_group, trained
from tests.support.training import same_on_all_ranks
from torch_cgx.engines.cuda.nccl import NcclExchange

pytestmark = pytest.mark.ranks


def sliced_sum(me: Rank, backend: str) -> str:
    group = start(me, backend)
    x = noise(me.rank, 900_000)  # 3.4 MB
    dist.all_reduce(x)
    if backend == "standin":
        steps = [entry[0] for entry in group.device.log]
        assert steps.count("encode") == steps.count("reduce") == 4
        assert steps.index("encode", steps.index("encode") + 1) < steps.index("reduce"), "slices do not overlap"
    return digest(x)


@pytest.mark.parametrize("way", WAYS)
def test_several_slices_have_the_bits_of_the_cpu_path(way: str) -> None:
    env = {BITS: "4", "CGX_FUSION_BUFFER_SIZE_MB": "1"}
    on_cpu = run_ranks(sliced_sum, 2, None, "cgx", env=env)
    assert run_ranks(sliced_sum, 2, None, "standin", env={**env, **WAYS[way]}) == on_cpu == [on_cpu[0]] * 2


# ---- error feedback ----


def test_error_feedback_over_shared_memory_has_the_bits_of_the_cpu_path() -> None:
    options = {"error_feedback": True, "stochastic": True}
    on_cpu = same_on_all_ranks(run_ranks(trained, 2, None, "cgx", options))
    on_device = same_on_all_ranks(run_ranks(trained, 2, None, "standin", options, env=WAYS["shared memory"]))
    assert torch.equal(on_device, on_cpu)


# ---- the end ----


def leave_after_a_failure(me: Rank) -> str:
    group = start(me, "standin")
    dist.all_reduce(noise(me.rank, 5000))
    if me.rank == 1:
        group.kernels.fails_at = "decode"
    with pytest.raises(RuntimeError) as failure:
        for _ in range(3):
            dist.all_reduce(noise(me.rank, 5000))
    del group
    dist.destroy_process_group()
    me.start_group("standin", name="another", timeout_s=60.0)
    x = noise(me.rank, 5000)
    dist.all_reduce(x)
    within_bound(x, me.world, 4)
    assert the_group().device.log
    return str(failure.value)


@pytest.mark.parametrize("way", WAYS)
def test_after_a_failure_a_group_can_be_left_and_another_one_works(way: str) -> None:
    texts = run_ranks(leave_after_a_failure, 2, None, env={BITS: "4", **WAYS[way]}, group_timeout_s=6.0, grace_s=30.0)
    assert "an illegal memory access was encountered" in texts[1]


# ---- what takes the place of shared memory ----


def sum_over_nccl(me: Rank) -> str:
    made = large_sum(me, "standin")
    group = the_group()
    assert group._parts.cuda is not None
    assert isinstance(group._parts.cuda.reducer._exchange, NcclExchange)
    assert any(entry[0] == "exchange" for entry in group.device.log)
    return made


def test_on_two_nodes_nccl_takes_the_place_of_shared_memory_and_one_rank_says_so() -> None:
    env = {BITS: "4", **STAGED}
    places = {rank: {"CGX_NODE_ID": node} for rank, node in enumerate("0011")}
    on_cpu = run_ranks(large_sum, 4, None, "cgx", env=env, rank_env=places)
    outcomes = observe_ranks(sum_over_nccl, 4, None, env=env, rank_env=places)
    assert all(outcome.ok for outcome in outcomes), describe(outcomes)
    assert [outcome.value for outcome in outcomes] == on_cpu == [on_cpu[0]] * 4
    assert [outcome.log.count("they go over NCCL instead") for outcome in outcomes] == [1, 0, 0, 0]
    assert "CGX_INNER_COMMUNICATOR_TYPE=SHM" in outcomes[0].log
