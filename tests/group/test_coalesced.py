"""all_reduce_coalesced: the tensors of one call go together, each quantized by itself, and small ones stay exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_cgx
from tests.support import harness
from tests.support.error_bound import error_bound
from tests.support.gradients import BITS, SLACK, digest
from tests.support.harness import Rank, run_ranks
from torch_cgx import CGXError
from torch_cgx.engines.plain import PlainEngine
from torch_cgx.kernels.native import available

pytestmark = pytest.mark.ranks

needs_native = pytest.mark.skipif(not available(), reason="installed without the native library")
NODES = [pytest.param(False, marks=needs_native), True]
WORLD = 3


def placed(apart: bool, world: int = WORLD) -> dict[int, dict[str, str]]:
    return harness.apart(world) if apart else {}


def mixed(rank: int, whole_numbers: bool) -> list[Tensor]:
    """What a rank reduces in one call; any rank can make any other's."""
    generator = torch.Generator().manual_seed(rank)
    single = [torch.randn(numel, generator=generator) for numel in (3, 17, 1000, 70_000)]
    turned = torch.randn(40, 50, generator=generator).t()
    half = torch.randn(300, generator=generator).half()
    rest = [torch.arange(100) + 2**40 * rank] if whole_numbers else []
    return [single[0], *rest, *single[1:], turned, half, torch.empty(0), torch.full((2, 3), 0.5 + rank)]


def check_sum(got: Tensor, inputs: list[Tensor], scale: float) -> None:
    """Against what the ranks had; blocks start with each tensor, whatever lies before it in the call."""
    flat, inputs = got.contiguous().flatten(), [x.contiguous().flatten() for x in inputs]
    if not got.is_floating_point():
        assert torch.equal(flat, torch.stack(inputs).sum(0))
    elif got.numel() < 16:
        exact = torch.stack([x.double() for x in inputs]).sum(0) * scale
        torch.testing.assert_close(flat.double(), exact, rtol=1e-6, atol=1e-6)
    else:
        exact, allowed = error_bound(inputs, 4, 512, scale)
        error = (flat.double() - exact).abs()
        assert (error / (allowed * SLACK)).max() <= 1.0, f"{got.numel()} values"
        assert error.max() > 1e-4, f"{got.numel()} values were not compressed"


def reduce_mixed(me: Rank, apart: bool) -> list[str]:
    group: Any = dist.group.WORLD
    assert (group._parts.native is None) is apart
    digests = []
    for op, scale in ((dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1 / me.world)):
        whole_numbers = op == dist.ReduceOp.SUM  # Gloo has no average
        tensors = mixed(me.rank, whole_numbers)
        addresses = [tensor.data_ptr() for tensor in tensors]
        options = dist.distributed_c10d.AllreduceCoalescedOptions()
        options.reduceOp = op
        group.allreduce_coalesced(tensors, options).wait()
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        for index, tensor in enumerate(tensors):
            check_sum(tensor, [mixed(rank, whole_numbers)[index] for rank in range(me.world)], scale)
        digests += [digest(tensor) for tensor in tensors]
    return digests


@pytest.mark.parametrize("apart", NODES)
def test_a_mixed_list_is_reduced_right_and_to_the_same_bits(apart: bool) -> None:
    """torch's own function takes tensors of one type; its other callers do not ask."""
    first, *others = run_ranks(reduce_mixed, WORLD, "cgx", apart, env={BITS: "4"}, rank_env=placed(apart))
    assert all(other == first for other in others)


def small(rank: int, sizes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(numel, generator=generator) for numel in sizes]


def count_exchanges(me: Rank, sizes: Sequence[int]) -> tuple[int, dict[str, float], list[str]]:
    """Return how often ranks exchange payloads over Gloo for one call, and what the figures say of it."""
    dist.all_reduce(torch.ones(100))
    torch_cgx.reset_stats()
    exchanges = 0
    exchange = PlainEngine._exchange

    def counted(*arguments: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        return exchange(*arguments)

    PlainEngine._exchange = counted  # type: ignore[method-assign]
    tensors = small(me.rank, sizes)
    dist.all_reduce_coalesced(tensors)
    for index, tensor in enumerate(tensors):
        check_sum(tensor, [small(rank, sizes)[index] for rank in range(me.world)], 1.0)
    return exchanges, torch_cgx.stats(), [digest(tensor) for tensor in tensors]


@pytest.mark.parametrize("apart", NODES)
@pytest.mark.parametrize("sizes", [(100, 5) * 25, (7,) * 50], ids=["some exact", "all exact"])
def test_fifty_small_tensors_are_one_operation(sizes: tuple[int, ...], apart: bool) -> None:
    found = run_ranks(count_exchanges, WORLD, "cgx", sizes, env={BITS: "4"}, rank_env=placed(apart))
    exact = max(sizes) < 16
    by_gloo = exact and apart  # which counts nothing
    for exchanges, figures, digests in found:
        assert figures["operations"] == (0 if by_gloo else 1)
        assert figures["compressed_operations"] == (0 if exact else 1)
        assert figures["bytes_before"] == (0 if by_gloo else 4 * sum(sizes))
        assert exchanges == (2 if apart and not by_gloo else 0)  # of contributions, and of sums
        assert digests == found[0][2]


def reduce_later(me: Rank) -> list[str]:
    """By futures, as one block of torch's, in inference mode, and of a width of their own."""
    sizes = (9, 40, 3000)
    lists = [small(me.rank, sizes) for _ in range(5)]
    futures = [dist.all_reduce_coalesced(tensors, async_op=True) for tensors in lists[:2]]
    for future in reversed(futures):
        future.wait()
    with dist._coalescing_manager() as manager:
        for tensor in lists[2]:
            dist.all_reduce(tensor)
    del manager
    with torch.inference_mode():
        dist.all_reduce_coalesced(lists[3])
        frozen = [tensor.clone() for tensor in lists[4]]
        dist.all_reduce_coalesced(frozen, async_op=True).wait()
    for tensors in (*lists[:4], frozen):
        for index, tensor in enumerate(tensors):
            check_sum(tensor, [small(rank, sizes)[index] for rank in range(me.world)], 1.0)
    torch_cgx.register_layer(0, 0, 3000, 8, 64)
    wide = small(me.rank, sizes)
    dist.all_reduce_coalesced(wide)
    exact = torch.stack([small(rank, sizes)[2].double() for rank in range(me.world)]).sum(0)
    assert (wide[2] - exact).abs().max() < 0.1 < (lists[0][2] - exact).abs().max()
    return [digest(tensor) for tensor in (*lists[0], *wide)]


@pytest.mark.parametrize("apart", NODES)
def test_they_may_be_waited_for_later_and_have_layers_of_their_own(apart: bool) -> None:
    first, *others = run_ranks(reduce_later, WORLD, "cgx", env={BITS: "4"}, rank_env=placed(apart))
    assert all(other == first for other in others)


def after_the_end(me: Rank) -> None:
    group: Any = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(CGXError, match="has been destroyed: call init_process_group again"):
        group.allreduce_coalesced([torch.ones(100), torch.ones(200)])


def named_accelerator(me: Rank) -> None:
    opts = dist.BarrierOptions()
    opts.device = torch.device("cuda", 0)
    group: Any = dist.group.WORLD
    assert group.barrier(opts).wait()


@pytest.mark.parametrize("world", [1, 2])
def test_a_barrier_of_cpu_tensors_alone_takes_any_device_that_torch_names(world: int) -> None:
    """torch names the accelerator that a rank has, though others may have none."""
    run_ranks(named_accelerator, world, "cgx")


def test_a_group_that_has_ended_refuses_small_tensors_together_too() -> None:
    run_ranks(after_the_end, 2, "cgx", env={"CGX_COMPRESSION_QUANTIZATION_BITS": "4"})
