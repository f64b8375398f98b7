"""Compressed reduce-scatters and all-gathers, however they are called and with whatever tensors: the same bits.

On which ways they go, and what is compressed at all, is in test_shares.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import torch_cgx
from tests.support.gradients import exact_sum, noise
from tests.support.harness import Rank, run_ranks
from tests.support.in_shares import expected_gather, expected_scatter, gathered_shares, one_layer, same, sum_of_shares
from tests.support.tensor_kinds import COLLECTIVES, KINDS, outcome

pytestmark = pytest.mark.ranks


def list_forms(me: Rank) -> None:
    mine = list(noise(me.rank, me.world * 100).view(me.world, 100).unbind())
    share = torch.zeros(10, 10)
    work = dist.reduce_scatter(share, mine, op=dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    work.wait()
    same(share, expected_scatter(me, 100, 4, scale=1 / me.world))
    gathered = [torch.zeros(10, 10) for _ in range(me.world)]
    dist.all_gather(gathered, noise(me.rank, 100).view(10, 10))
    same(torch.stack(gathered), expected_gather(me, 100, 4))
    group: Any = dist.group.WORLD
    group.reduce_scatter(share, mine).wait()  # as C++ has them, without lists of lists
    same(share, expected_scatter(me, 100, 4))
    group.allgather(gathered, noise(me.rank, 100)).wait()
    same(torch.stack(gathered), expected_gather(me, 100, 4))
    dist.all_gather(gathered, gathered[0])  # its own output: of what was there before
    once = expected_gather(me, 100, 4).view(me.world, -1)[0]
    same(torch.stack(gathered), gathered_shares([once] * me.world, one_layer(100, 4)))
    for wrong in ([], [torch.zeros(100)] * 2):
        with pytest.raises((ValueError, RuntimeError), match=r"expected (at least one|length|\d+ outputs)"):
            group.allgather([gathered] * len(wrong), wrong).wait()


def uneven_lists(me: Rank) -> None:
    """Of a list whose tensors are not all as long, there are no shares: it is exact."""
    parts = [noise(me.rank, 50 + peer) for peer in range(me.world)]
    out = torch.zeros(50 + me.rank)
    dist.reduce_scatter(out, parts)
    torch.testing.assert_close(out.double(), exact_sum(me.world, 50 + me.rank), rtol=0, atol=1e-5)


def coalesced_forms(me: Rank) -> None:
    sizes, group = (100, 17, 5), dist.group.WORLD
    assert group is not None
    inputs = [noise(me.rank, me.world * numel) for numel in sizes]
    outputs = [torch.zeros(numel) for numel in sizes]
    group.reduce_scatter_tensor_coalesced(outputs, inputs).wait()
    for numel, got in zip(sizes[:2], outputs, strict=False):
        same(got, expected_scatter(me, numel, 4))
    exact = exact_sum(me.world, me.world * 5).view(me.world, -1)[me.rank]
    torch.testing.assert_close(outputs[2].double(), exact, rtol=0, atol=1e-5)  # less than 16 values
    gathered = [torch.zeros(me.world * numel) for numel in sizes]
    group.allgather_into_tensor_coalesced(gathered, [noise(me.rank, numel) for numel in sizes]).wait()
    for numel, got in zip(sizes[:2], gathered, strict=False):
        same(got, expected_gather(me, numel, 4))
    same(gathered[2], torch.cat([noise(rank, 5) for rank in range(me.world)]))


def functional_forms(me: Rank) -> None:
    assert dist.group.WORLD is not None
    got = funcol.reduce_scatter_tensor(noise(me.rank, me.world * 100), "avg", 0, dist.group.WORLD)
    same(torch.as_tensor(got) + 0, expected_scatter(me, 100, 4, scale=1 / me.world))
    got = funcol.all_gather_tensor(noise(me.rank, 100), 0, dist.group.WORLD)
    same(torch.as_tensor(got) + 0, expected_gather(me, 100, 4))


def works_and_futures(me: Rank) -> None:
    """Many at once, waited for in the reverse order."""
    pending = []
    for turn in range(6):
        share, whole = torch.zeros(100), torch.zeros(me.world * 100)
        scatter = dist.reduce_scatter_tensor(share, noise(me.rank, me.world * 100), async_op=True)
        gather = dist.all_gather_into_tensor(whole, noise(me.rank, 100), async_op=True)
        pending.append((turn, scatter, gather, share, whole))
    for turn, scatter, gather, share, whole in reversed(pending):
        assert scatter is not None and gather is not None
        if turn % 2:
            scatter.wait()
            gather.wait()
        else:
            assert scatter.get_future().wait()[0] is share or torch.equal(scatter.get_future().wait()[0], share)
            assert torch.equal(gather.get_future().wait()[0], whole)
        assert scatter.is_completed() and gather.is_completed()
        same(share, expected_scatter(me, 100, 4))
        same(whole, expected_gather(me, 100, 4))


def single_forms(me: Rank) -> None:
    """The names that newer torch has for the same."""
    if not hasattr(dist, "reduce_scatter_single"):
        return
    share, whole = torch.zeros(100), torch.zeros(me.world * 100)
    dist.reduce_scatter_single(share, noise(me.rank, me.world * 100))
    same(share, expected_scatter(me, 100, 4))
    dist.all_gather_single(whole, noise(me.rank, 100))
    same(whole, expected_gather(me, 100, 4))


def shapes_and_strides(me: Rank) -> None:
    """Several dimensions, gaps, transposed ones; what lies between stays."""
    x = noise(me.rank, me.world * 240)
    for view in (lambda t: t.view(-1, 12), lambda t: t.view(12, -1).t(), lambda t: torch.stack([t, t], 1)[:, 0]):
        source = view(x)
        inputs = [view(noise(rank, me.world * 240)) for rank in range(me.world)]
        expected = sum_of_shares(inputs, me.rank, one_layer(240, 4), 1.0)
        for target in (torch.zeros(240), torch.zeros(20, 12), torch.zeros(12, 20).t()):
            dist.reduce_scatter_tensor(target, source)
            same(target, expected.view(target.shape))
        gaps = torch.full((240, 2), 7.0)
        dist.reduce_scatter_tensor(gaps[:, 1], source)
        same(gaps[:, 1], expected)
        assert (gaps[:, 0] == 7.0).all()
    row = noise(me.rank, 240)
    expected = expected_gather(me, 240, 4)
    whole = torch.zeros(me.world, 12, 20)
    dist.all_gather_into_tensor(whole, row.view(12, 20))
    same(whole, expected)
    gaps = torch.full((me.world * 240, 2), 7.0)
    dist.all_gather_into_tensor(gaps[:, 0], torch.stack([row, row], 1)[:, 1])
    same(gaps[:, 0], expected)
    assert (gaps[:, 1] == 7.0).all()


def within_each_other(me: Rank) -> None:
    """An output that is the input's own share, another's, or lies across: always of what was there before."""
    expected = expected_scatter(me, 200, 4)
    for begin in (me.rank * 200, ((me.rank + 1) % me.world) * 200, (me.world - 1) * 150 + 1, 1):
        x = noise(me.rank, me.world * 200)
        dist.reduce_scatter_tensor(x[begin : begin + 200], x)
        same(x[begin : begin + 200], expected)
        same(x[:begin], noise(me.rank, me.world * 200)[:begin])
        same(x[begin + 200 :], noise(me.rank, me.world * 200)[begin + 200 :])
    expected = expected_gather(me, 200, 4)
    for begin in (me.rank * 200, ((me.rank + 1) % me.world) * 200, (me.world - 1) * 150 + 1, 1):
        whole = torch.zeros(me.world * 200)
        whole[begin : begin + 200] = noise(me.rank, 200)
        dist.all_gather_into_tensor(whole, whole[begin : begin + 200])
        same(whole, expected)


def autograd_and_inference(me: Rank) -> None:
    x = noise(me.rank, me.world * 100).requires_grad_()
    share, whole = torch.zeros(100), torch.zeros(me.world * 100)
    before = x._version, share._version, whole._version
    dist.reduce_scatter_tensor(share, x * 1.0)
    dist.reduce_scatter_tensor(share, x)
    same(share, expected_scatter(me, 100, 4))
    dist.all_gather_into_tensor(whole, noise(me.rank, 100).requires_grad_())
    same(whole, expected_gather(me, 100, 4))
    # What is written is noticed by autograd, what is only read is not.
    assert x._version == before[0] and share._version > before[1] and whole._version > before[2]
    assert not share.requires_grad and not whole.requires_grad
    leaf = torch.zeros(100, requires_grad=True)
    dist.reduce_scatter_tensor(leaf, x.detach())
    same(leaf, expected_scatter(me, 100, 4))
    with torch.inference_mode():
        share, whole = torch.zeros(100), torch.zeros(me.world * 100)
        dist.reduce_scatter_tensor(share, noise(me.rank, me.world * 100))
        dist.all_gather_into_tensor(whole, noise(me.rank, 100))
    same(share.clone(), expected_scatter(me, 100, 4))
    same(whole.clone(), expected_gather(me, 100, 4))


def negative_views(me: Rank) -> None:
    """Whose memory does not hold their values."""
    x = torch._neg_view(-noise(me.rank, me.world * 100))
    share, whole = torch.zeros(100), torch.zeros(me.world * 100)
    dist.reduce_scatter_tensor(share, x)
    same(share, expected_scatter(me, 100, 4))
    dist.all_gather_into_tensor(whole, torch._neg_view(-noise(me.rank, 100)))
    same(whole, expected_gather(me, 100, 4))
    share, whole = torch._neg_view(torch.zeros(100)), torch._neg_view(torch.zeros(me.world * 100))
    dist.reduce_scatter_tensor(share, noise(me.rank, me.world * 100))
    same(share.resolve_neg(), expected_scatter(me, 100, 4))
    dist.all_gather_into_tensor(whole, noise(me.rank, 100))
    same(whole.resolve_neg(), expected_gather(me, 100, 4))


def not_finite(me: Rank) -> None:
    """A contribution that is not finite spoils its block, in the share that it is of."""
    x = noise(me.rank, me.world * 2000)
    if me.rank == 1:
        x[600] = torch.inf
    share = torch.zeros(2000)
    dist.reduce_scatter_tensor(share, x)
    assert share.isnan().nonzero().flatten().tolist() == (list(range(512, 1024)) if me.rank == 0 else [])


FORMS = (
    list_forms,
    uneven_lists,
    coalesced_forms,
    functional_forms,
    works_and_futures,
    single_forms,
    shapes_and_strides,
    within_each_other,
    autograd_and_inference,
    negative_views,
    not_finite,
)


def every_form(me: Rank) -> None:
    for form in FORMS:
        torch_cgx.reset_stats()
        with torch_cgx.compressed(4):
            form(me)
        assert (torch_cgx.stats()["compressed_operations"] > 0) == (form is not uneven_lists), form.__name__


@pytest.mark.parametrize("transport", ["SHM", "TCP"])
def test_every_form_of_call_and_kind_of_tensor_has_the_bits_of_the_in_memory_executor(transport: str) -> None:
    run_ranks(every_form, 3, "cgx", env={"CGX_INNER_COMMUNICATOR_TYPE": transport})


IN_SHARES = [name for name in COLLECTIVES if name.startswith(("reduce_scatter", "all_gather"))]


def every_kind(me: Rank) -> dict[tuple[str, str], tuple[Any, Any]]:
    group: Any = dist.group.WORLD
    found = {}
    for kind in KINDS:
        for collective in IN_SHARES:
            plainly = outcome(kind, collective, me.rank, group)
            with torch_cgx.compressed(8):
                found[kind, collective] = plainly, outcome(kind, collective, me.rank, group)
    return found


def flat_values(nested: Any) -> list[Any]:
    return [x for each in nested for x in flat_values(each)] if isinstance(nested, list) else [nested]


def test_tensors_of_every_kind_that_are_taken_exactly_are_taken_compressed_and_are_near() -> None:
    compressed = 0
    for found in run_ranks(every_kind, 2, "cgx"):
        for case, (plainly, got) in found.items():
            if plainly[0] != "values":
                continue  # what Gloo refuses, programs may take
            assert got[0] == "values", (case, got)
            compressed += got != plainly
            for a, b in zip(flat_values(plainly[1]), flat_values(got[1]), strict=True):
                assert a == b or abs(a - b) <= 2 * 0.5 * 10 / 255 * 1.001 or (a != a and b != b), (case, a, b)
    assert compressed > 40
