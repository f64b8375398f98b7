"""Compressed reduce-scatters and all-gathers of CUDA tensors, on the stand-in device: the bits of the CPU path.

What the CPU path's bits are is held in test_shares.py. Order is watched as in test_cuda.py.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_cgx
from tests.support import standin
from tests.support.gradients import digest, exact_sum, noise
from tests.support.harness import Rank, nursery_started_by, observe_ranks, run_ranks
from tests.support.in_shares import LAYERS, NUMEL, OPS, quarter
from tests.support.on_device import WAYS, needs_triton, start, watched
from torch_cgx.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.ranks

STOCHASTIC = "CGX_COMPRESSION_STOCHASTIC"
CASES = [(17, torch.float32, "SUM"), (5001, torch.float16, "AVG"), (3000, torch.bfloat16, "PREMUL_SUM")]


def sums_and_gathers(me: Rank, backend: str, kernels: str = "native") -> list[str]:
    """Digests of what each call made; outputs have several dimensions where they can."""
    if kernels == "triton":
        from torch_cgx.kernels.triton import TritonKernels

        standin.register(TritonKernels)
    elif kernels == "reference":
        standin.register(ReferenceKernels)
    group: Any = start(me, backend)
    digests = []
    with torch_cgx.compressed(4, 128):
        for numel, dtype, name in CASES[:2] if kernels == "triton" else CASES:
            rows = 3 if numel % 3 == 0 else 1
            x, share = noise(me.rank, me.world * numel, dtype), torch.zeros(rows, numel // rows, dtype=dtype)
            whole = torch.zeros(me.world, numel, dtype=dtype)
            with watched():
                x.mul_(1)
                dist.reduce_scatter_tensor(share, x.view(me.world, -1), op=OPS[name][0]())
                share.add(1)
                dist.all_gather_into_tensor(whole, share.view(-1))
                whole.add(1)
                x.mul_(1)
            assert torch.equal(x, noise(me.rank, me.world * numel, dtype))
            digests += [digest(share), digest(whole)]
        kept = noise(me.rank, me.world * 100)
        dist.reduce_scatter_tensor(kept.view(me.world, -1)[me.rank], kept)  # its own place
        dist.all_gather_into_tensor(kept, kept.view(me.world, -1)[me.rank])
        digests.append(digest(kept))
    if backend == "standin":
        steps = [entry[0] for entry in group.device.log]
        assert steps.count("sum") == len(digests) // 2 + 1 and "reduce" not in steps
    counts = torch_cgx.stats()
    assert counts["compressed_operations"] == counts["operations"] == len(digests) + 1
    return digests


@functools.cache
def on_cpu(world: int, stochastic: str = "0") -> list[list[str]]:
    found = run_ranks(sums_and_gathers, world, None, "cgx", env={STOCHASTIC: stochastic})
    assert all(len({of_rank[place] for of_rank in found}) == 1 for place in (1, 3, 5, 6))  # what was gathered
    return found


@pytest.mark.parametrize("stochastic", ["0", "1"])
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_the_cpu_path(way: str, stochastic: str) -> None:
    env = {**WAYS[way], STOCHASTIC: stochastic}
    kernels = "reference" if way == "NCCL" else "native"  # the first goes by shapes, the other by addresses
    assert run_ranks(sums_and_gathers, 3, None, "standin", kernels, env=env) == on_cpu(3, stochastic)


@needs_triton
@pytest.mark.matrix
def test_triton_kernels_make_the_bits_of_the_cpu_path() -> None:
    expected = [found[:4] for found in on_cpu(2)]
    with nursery_started_by(["env", "TRITON_INTERPRET=1"]):
        found = run_ranks(sums_and_gathers, 2, None, "standin", "triton", timeout_s=120)
    assert [each[:4] for each in found] == expected


def in_slices(me: Rank, backend: str) -> tuple[str, str]:
    group: Any = start(me, backend)
    share, whole = torch.zeros(300_000), torch.zeros(me.world * 300_000)
    with torch_cgx.compressed(4), watched():
        dist.reduce_scatter_tensor(share, noise(me.rank, me.world * 300_000))
        if backend == "standin":
            steps = [entry[0] for entry in group.device.log]
            assert steps.count("encode") == steps.count("sum") == 3
            assert steps.index("encode", steps.index("encode") + 1) < steps.index("sum"), "slices do not overlap"
        dist.all_gather_into_tensor(whole, noise(me.rank, 300_000))
    return digest(share), digest(whole)


@pytest.mark.parametrize("way", WAYS)
def test_several_slices_have_the_bits_of_the_cpu_path(way: str) -> None:
    env = {"CGX_FUSION_BUFFER_SIZE_MB": "1"}
    assert run_ranks(in_slices, 2, None, "standin", env={**env, **WAYS[way]}) == cpu_slices()


@functools.cache
def cpu_slices() -> list[tuple[str, str]]:
    return run_ranks(in_slices, 2, None, "cgx")


def works(me: Rank, staged: bool) -> None:
    group = start(me, "standin")
    log = group.device.log
    with torch_cgx.compressed(4):
        share, x = torch.zeros(100), noise(me.rank, me.world * 100)
        log.clear()
        work = dist.reduce_scatter_tensor(share, x, async_op=True)
        assert work is not None
        kept = [entry for entry in log if entry[0] == "keep"]
        assert kept == [("keep", me.world * 100, "side 1"), ("keep", 100, "side 1")]
        if not staged:
            assert not any(entry[0] == "synchronize" for entry in log), "the host waited"
        with watched():
            work.wait()
            share.add(1)
        whole = torch.zeros(me.world * 100)
        gather = dist.all_gather_into_tensor(whole, share, async_op=True)
        assert gather is not None
        with watched():
            assert gather.get_future().wait()[0] is whole
            whole.add(1)
        # Nobody holds these, and nobody waits for what is made of them: the side stream does.
        for _ in range(3):
            dist.reduce_scatter_tensor(torch.zeros(100), noise(me.rank, me.world * 100), async_op=True)
            dist.all_gather_into_tensor(torch.zeros(me.world * 100), noise(me.rank, 100), async_op=True)
        if not staged:
            group.device.order.check()
        dist.all_gather_into_tensor(whole, share)


@pytest.mark.parametrize("way", WAYS)
def test_the_host_does_not_wait_and_the_side_stream_keeps_the_share(way: str) -> None:
    run_ranks(works, 2, None, way != "NCCL", env=WAYS[way])


def carried_or_refused(me: Rank) -> None:
    """Lists, what NCCL coalesces, small and odd ones are NCCL's; layers of one's own are not."""
    group = start(me, "standin")
    total = exact_sum(me.world, me.world * 100).view(me.world, -1)[me.rank]

    def exchanged() -> bool:
        found = any(entry[0] == "exchange" for entry in group.device.log)
        group.device.log.clear()
        return found

    with torch_cgx.compressed(4):
        share, x = torch.zeros(100), noise(me.rank, me.world * 100)
        dist.reduce_scatter(share, list(x.view(me.world, -1).unbind()))
        torch.testing.assert_close(share.double(), total, rtol=0, atol=1e-5)
        gathered = [torch.zeros(100) for _ in range(me.world)]
        dist.all_gather(gathered, noise(me.rank, 100))
        assert all(torch.equal(each, noise(rank, 100)) for rank, each in enumerate(gathered))
        group._start_coalescing(torch.device("cpu"))
        handles = [group._reduce_scatter_base(share, x), group._allgather_base(x.clone(), share.clone())]
        group._end_coalescing(torch.device("cpu"))
        for handle in handles:
            handle.wait()
        torch.testing.assert_close(share.double(), total, rtol=0, atol=1e-5)
        few, wide = torch.zeros(15), torch.zeros(100, dtype=torch.float64)
        dist.reduce_scatter_tensor(few, noise(me.rank, me.world * 15))
        dist.all_gather_into_tensor(torch.zeros(me.world * 100, dtype=torch.float64), wide)
        with torch_cgx.uncompressed():
            dist.reduce_scatter_tensor(share, x)
        torch.testing.assert_close(share.double(), total, rtol=0, atol=1e-5)
        assert not exchanged()
        for share, whole in ((torch.zeros(200)[::2], x), (torch.zeros(100), torch.zeros(100, me.world).t())):
            with pytest.raises(ValueError, match=r"expected contiguous CUDA tensors: call \.contiguous"):
                group._reduce_scatter_base(share, whole)
            with pytest.raises(ValueError, match=r"expected contiguous CUDA tensors: call \.contiguous"):
                group._allgather_base(whole, share)
        assert not exchanged()
        group.reduce_scatter_tensor_coalesced([torch.zeros(100)], [x]).wait()
        assert exchanged()
        group.allgather_into_tensor_coalesced([x], [torch.zeros(100)]).wait()
        assert exchanged()
    exactly, out = (LAYERS[1],), torch.zeros(40)
    group.reduce_scatter_layers(torch.zeros(NUMEL), noise(me.rank, me.world * NUMEL), LAYERS).wait()
    group.all_gather_layers(torch.zeros(me.world * NUMEL), noise(me.rank, NUMEL), LAYERS, stochastic=True).wait()
    assert exchanged()
    group.all_gather_layers(torch.zeros(me.world * 40), out, exactly).wait()
    assert not exchanged()
    group.reduce_scatter_layers(out, noise(me.rank, me.world * 40), exactly, op=quarter()).wait()
    expected = exact_sum(me.world, me.world * 40).view(me.world, -1)[me.rank] / 4
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert exchanged(), "a factor is ours to multiply by, also where layers are exact"


def test_lists_and_what_nccl_coalesces_are_carried_and_gaps_are_refused() -> None:
    run_ranks(carried_or_refused, 2, None)


def fails(me: Rank) -> None:
    group = start(me, "standin")
    share, x = torch.zeros(100), noise(me.rank, me.world * 100)
    with torch_cgx.compressed(4):
        dist.reduce_scatter_tensor(share, x)
        if me.rank == 1:
            group.kernels.fails_at = "sum"
        for _ in range(3):
            dist.reduce_scatter_tensor(share, x)


def test_a_sum_that_fails_is_an_error_on_its_rank_and_on_the_others() -> None:
    outcomes = observe_ranks(fails, 2, None, destroy=False, group_timeout_s=6.0)
    assert not any(outcome.ok for outcome in outcomes)
    assert "an illegal memory access was encountered" in outcomes[1].message
