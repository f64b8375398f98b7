"""CUDA tensors on the stand-in device: coalesced calls, calls without a handle, ranks without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_cgx
from tests.support.gradients import BITS, is_exact, noise, within_bound
from tests.support.harness import Rank, describe, observe_ranks, run_ranks
from tests.support.on_device import start
from tests.support.standin import GlooForNccl, StandInGroup
from torch_cgx.group.bootstrap.handshake import Joining

pytestmark = pytest.mark.ranks


def start_with(me: Rank, kind: type[StandInGroup], name: str = "group") -> Any:
    """A group of this class."""

    def create(options: Any, backend_options: Any = None) -> StandInGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        return kind(options.store, options.group_rank, options.group_size, options.timeout, ranks)

    dist.Backend.register_backend(kind.__name__.lower(), create, extended_api=True, devices=["cpu"])
    me.start_group(kind.__name__.lower(), name=name)
    return dist.group.WORLD


# ---- coalesced calls ----


def filled(rank: int, *numels: int) -> list[Tensor]:
    return [torch.full((numel,), float(rank + 1)) for numel in numels]


def coalesced(me: Rank) -> None:
    group = start(me, "standin")
    inputs = filled(me.rank, 3, 5)
    outputs = [torch.zeros(me.world * 3), torch.zeros(me.world * 5)]
    with dist._coalescing_manager():
        for output, each in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, each)
    expected = [torch.cat([filled(rank, numel)[0] for rank in range(me.world)]) for numel in (3, 5)]
    assert all(map(torch.equal, outputs, expected))

    work = group.allgather_into_tensor_coalesced([torch.zeros_like(each) for each in outputs], inputs)
    assert all(map(torch.equal, work.get_future().wait(), expected))
    assert work.wait() and work.is_completed() and work.is_success()

    total = float(sum(range(1, me.world + 1)))
    inputs = filled(me.rank, me.world * 3, me.world * 5)
    outputs = [torch.zeros(3), torch.zeros(5)]
    with dist._coalescing_manager(async_ops=True) as works:
        for output, each in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, each)
    works.wait()
    assert [output.tolist() for output in outputs] == [[total] * 3, [total] * 5]

    opts = dist.ReduceScatterOptions()
    opts.reduceOp = dist.ReduceOp.MAX
    work = group.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
    assert work.get_future().wait() is not None
    assert [output.tolist() for output in outputs] == [[float(me.world)] * 3, [float(me.world)] * 5]


def test_coalesced_all_gathers_and_reduce_scatters_are_carried() -> None:
    run_ranks(coalesced, 2, None)


def coalesced_by_nccl(me: Rank) -> None:
    """Within NCCL's own coalescing nothing has happened before its end: no program can wait for an exchange there."""
    group = start(me, "standin")
    group.device.log.clear()
    tensors, alone = [noise(me.rank, 5000), noise(me.rank, 600)], noise(me.rank, 5000)
    group._start_coalescing(torch.device("cpu"))  # as dist._coalescing_manager(device=...) does
    works = [group.allreduce_coalesced(tensors), group.allreduce([alone])]
    group._end_coalescing(torch.device("cpu"))
    for work in works:
        work.wait()
    assert all(is_exact(each, me.world) for each in (*tensors, alone))
    named = [entry[0] for entry in group.device.log if entry[0] in ("coalesce", "coalesced", "exchange")]
    assert named == ["coalesce", "coalesced"]
    dist.all_reduce(alone)
    assert any(entry[0] == "exchange" for entry in group.device.log)
    for call in (group._start_coalescing, group._end_coalescing):
        with pytest.raises((RuntimeError, ValueError)):  # torch's, of a device that nobody serves
            call(torch.device("meta"))


def test_what_nccl_coalesces_is_exact() -> None:
    run_ranks(coalesced_by_nccl, 2, None, env={BITS: "4"})


# ---- what the caller waits for at once ----


class AtOnce(GlooForNccl):
    """As NCCL's group: what the caller waits for at once runs on the caller's stream, and has no handle."""

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        work = super().broadcast(tensors, opts)
        assert work.wait()
        return work if opts.asyncOp else None


class WithoutHandles(StandInGroup):
    def _new_group(self, joining: Joining) -> GlooForNccl:
        return AtOnce(self.device, joining.prefixed("nccl"), joining.rank, joining.world, joining.timeout)


def wait_at_once(me: Rank) -> None:
    group = start_with(me, WithoutHandles)
    opts, x = dist.BroadcastOptions(), torch.ones(3)
    opts.asyncOp = False
    work = group.broadcast([x], opts)
    assert work.wait() and work.is_completed() and work.get_future().wait() == [x]
    dist.broadcast(x, 0)


def test_what_nccl_has_no_handle_for_gets_one() -> None:
    run_ranks(wait_at_once, 1, None)


# ---- ranks without a GPU ----


class Mixed(StandInGroup):
    """Rank 1 has no GPU."""

    def _cuda_problem(self) -> str:
        return "torch finds no GPU" if self._rank == 1 else ""


def without_a_gpu(me: Rank) -> None:
    group = start_with(me, Mixed)
    x = noise(me.rank, 5000)
    dist.all_reduce(x)
    within_bound(x, me.world, 4)
    gathered = [torch.zeros(2) for _ in range(me.world)]
    dist.all_gather(gathered, torch.full((2,), float(me.rank)))
    assert [float(each[0]) for each in gathered] == list(map(float, range(me.world)))
    assert not hasattr(group, "device"), "the CUDA side was opened"
    with FakeTensorMode():
        on_gpu = torch.empty(100, device="cuda")
    for call in (
        partial(dist.all_reduce, on_gpu),
        partial(group.broadcast, [on_gpu]),
        partial(group._reduce_scatter_base, on_gpu, on_gpu),
        partial(group.send, [on_gpu], 0, 1),
    ):
        with pytest.raises(torch_cgx.MismatchError, match=r"CPU tensors alone.*rank 1 \(torch finds no GPU\)$"):
            call()
    dist.barrier()


def test_a_group_with_a_rank_that_has_no_gpu_serves_cpu_tensors_and_names_it_for_others() -> None:
    outcomes = observe_ranks(without_a_gpu, 3, None, env={BITS: "4"})
    assert all(outcome.ok for outcome in outcomes), describe(outcomes)
    assert "serves CPU tensors alone on this group; without CUDA: rank 1 (torch finds no GPU)" in outcomes[0].log


def nobody_has(me: Rank) -> None:
    me.start_group("cgx")
    with FakeTensorMode():
        on_gpu = torch.empty(100, device="cuda")
    with pytest.raises(torch_cgx.MismatchError, match=r"rank 0 \(torch finds no GPU\), rank 1 \(torch finds no GPU\)"):
        dist.all_reduce(on_gpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_group_without_any_gpu_says_so() -> None:
    for outcome in observe_ranks(nobody_has, 2, None):
        assert outcome.ok, outcome.trace
        assert "CPU tensors alone" not in outcome.log
