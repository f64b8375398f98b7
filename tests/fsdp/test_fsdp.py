"""FSDP2 with `torch_cgx.fsdp.compress`: what travels is small, what ranks gather is the same, and training works."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import torch_cgx
from tests.support.harness import OVER_GLOO, Rank, run_ranks
from tests.support.sharded import (
    STEPS,
    WEIGHTS,
    WIDTH,
    Block,
    Net,
    compressed,
    flat,
    gradients,
    loss_of,
    make_net,
    masters,
    same_everywhere,
    shard,
    share,
    train,
    units,
    unpadded,
    whole,
)

pytestmark = pytest.mark.ranks

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp.FSDPModule, "set_custom_all_gather"):
    pytest.skip("FSDP2 of this torch takes no communication of one's own", allow_module_level=True)

from torch_cgx.fsdp import comms, internals  # noqa: E402

# ---- what is gathered ----


def gathers(me: Rank) -> None:
    net = shard(make_net())
    compressed(net, weight_bits=8)
    before = masters(net)
    exact = {name: whole(p) for name, p in net.named_parameters()}
    net(torch.ones(1, WIDTH))
    for block in net.blocks:
        block.reshard()  # type: ignore[operator]
    net.reshard()  # type: ignore[operator]
    after = masters(net)
    assert all(torch.equal(before[name], after[name]) for name in before), "a forward changed the master weights"

    rounds = 64
    sums = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in exact.items()}
    for number in range(rounds):
        for unit in (net, *net.blocks):
            handle = unit.unshard(async_op=number % 2 == 1)  # type: ignore[operator]
            if handle is not None:
                handle.wait()
        gathered = {name: p.detach().clone() for name, p in net.named_parameters()}
        same_everywhere(*gathered.values()) if number < 2 else None
        for name, x in gathered.items():
            sums[name] += x.double()
            if name not in WEIGHTS:
                assert torch.equal(x, exact[name]), name
        for unit in (net, *net.blocks):
            unit.reshard()  # type: ignore[operator]
        for name in WEIGHTS:
            for rank in range(me.world):
                owned, got = share(exact[name], rank, me.world), share(gathered[name], rank, me.world)
                step = units(owned, 8)
                real = share(torch.ones_like(exact[name]), rank, me.world) > 0  # what is decoded of padding is dropped
                off = (got.double() - owned.double()).abs()[real]
                assert bool((off <= step[real]).all()), (name, float((off / step[real]).max()))
                assert number or float(off.max()) > 0, f"{name} was not quantized"
    for name in WEIGHTS:
        for rank in range(me.world):
            owned, mean = share(exact[name], rank, me.world), share(sums[name], rank, me.world) / rounds
            step = units(owned, 8)
            # Rounding at random has a deviation of half a step at most; to the nearest would be half a step off.
            real = share(torch.ones_like(exact[name]), rank, me.world) > 0
            assert bool(((mean - owned).abs() / step)[real].max() <= 6 * 0.5 / rounds**0.5), name


@pytest.mark.parametrize(
    ("world", "env"),
    [(3, {}), pytest.param(2, {}, marks=pytest.mark.matrix), pytest.param(3, OVER_GLOO, marks=pytest.mark.matrix)],
)
def test_all_ranks_gather_the_same_weights_a_step_from_the_masters_at_most_and_right_on_average(
    world: int, env: dict[str, str]
) -> None:
    run_ranks(gathers, world, "cgx", env=env)


def gathers_exactly(me: Rank) -> None:
    net = shard(make_net())
    exact = {name: whole(p) for name, p in net.named_parameters()}
    handle = compressed(net, weight_bits=2)

    def off() -> float:
        for unit in (net, *net.blocks):
            unit.unshard()  # type: ignore[operator]
        largest = max(float((p.detach() - exact[name]).abs().max()) for name, p in net.named_parameters())
        for unit in (net, *net.blocks):
            unit.reshard()  # type: ignore[operator]
        return largest

    assert off() > 0.01
    with torch_cgx.uncompressed():
        assert off() == 0
    second = compressed(net, weight_bits=8)
    assert 0 < off() < 0.01
    handle.remove()  # is not installed any more
    assert 0 < off() < 0.01
    second.remove()
    assert off() == 0
    train(net, me.rank, 1)


def test_uncompressed_and_remove_make_it_exact_and_a_second_compress_replaces_the_first() -> None:
    run_ranks(gathers_exactly, 2, "cgx")


# ---- what is reduced ----


def check_gradients(net: nn.Module, each: list[dict[str, Tensor]], me: Rank, bits: int, factor: float = 0.0) -> None:
    """Every share is the mean of all ranks' gradients: exact or within half a step of each contribution."""
    for name, p in net.named_parameters():
        assert (p.grad is not None) == p.requires_grad, name
        if p.grad is None:
            continue
        got = p.grad.to_local()  # type: ignore[attr-defined]
        inputs = [share(found[name], me.rank, me.world) for found in each]
        scale = 1 / (factor or me.world)
        expected = torch.stack([x.double() for x in inputs]).sum(0) * scale
        largest = max(float(x.abs().max()) for x in inputs)
        allowed = torch.full_like(expected, 1e-5 * largest + 1e-12)
        if name in WEIGHTS and bits != 32:
            allowed = allowed + sum(0.5 * units(x, bits) for x in inputs) * scale
        excess = (got.double() - unpadded(expected, got.shape)).abs() / unpadded(allowed, got.shape)
        if excess.numel():
            assert float(excess.max()) <= 1.0, (name, float(excess.max()))
        if name in WEIGHTS and bits != 32 and excess.numel():
            assert float((got.double() - unpadded(expected, got.shape)).abs().max()) > 1e-5 * largest, "not quantized"


def reduces(me: Rank, bits: int) -> None:
    net = make_net()
    each = gradients(net, [0], me.world)
    shard(net)
    group = compressed(net, grad_bits=bits, weight_bits=32).groups[0]
    loss_of(net, 0, me.rank).backward()
    check_gradients(net, each, me, bits)

    net.zero_grad()
    for unit in (net, *net.blocks):
        unit.set_gradient_divide_factor(3.0)  # type: ignore[operator]
    loss_of(net, 0, me.rank).backward()  # PREMUL_SUM
    check_gradients(net, each, me, bits, 3.0)

    net.zero_grad()
    for unit in (net, *net.blocks):
        unit.set_gradient_divide_factor(float(me.world))  # type: ignore[operator]
    torch_cgx.reset_stats(group)
    net.set_requires_gradient_sync(False)  # type: ignore[operator]
    loss_of(net, 0, me.rank).backward()
    assert torch_cgx.stats(group)["compressed_operations"] == 0  # weights are exact here
    net.set_requires_gradient_sync(True)  # type: ignore[operator]
    loss_of(net, 1, me.rank).backward()
    assert torch_cgx.stats(group)["compressed_operations"] == (3 if bits != 32 else 0)
    check_gradients(net, gradients(make_net(), [0, 1], me.world), me, bits)


@pytest.mark.parametrize(
    ("world", "bits", "env"),
    [
        (2, 32, {}),
        (3, 4, OVER_GLOO),
        pytest.param(2, 4, {}, marks=pytest.mark.matrix),
        pytest.param(3, 4, {}, marks=pytest.mark.matrix),
    ],
)
def test_gradients_are_the_mean_within_the_bound_also_times_a_factor_and_accumulated(
    world: int, bits: int, env: dict[str, str]
) -> None:
    run_ranks(reduces, world, "cgx", bits, env=env)


def reduces_some(me: Rank) -> list[str]:
    """Of frozen parameters nothing is reduced; of unused ones nobody is told."""
    warned: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())

    logging.getLogger("torch_cgx.fsdp").addHandler(Listener())
    net = make_net()
    for name in ("blocks.0.up.weight", "blocks.1.norm.weight", "first.bias"):
        net.get_parameter(name).requires_grad_(False)
    each = gradients(net, [0], me.world)
    shard(net)
    compressed(net, weight_bits=32)
    loss_of(net, 0, me.rank).backward()
    check_gradients(net, each, me, 4)
    assert not warned

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.used(x)
            return y

    half = fsdp.fully_shard(Half())
    compressed(half)
    for _ in range(2):
        loss_of(half, 0, me.rank).backward()
    assert half.unused.weight.grad is None
    assert half.used.weight.grad is not None
    return warned


def test_frozen_parameters_are_left_out_and_unused_ones_told_of_once() -> None:
    for warned in run_ranks(reduces_some, 2, "cgx"):
        assert len(warned) == 1
        assert "counts as one layer" in warned[0]


def laid_out(me: Rank) -> None:
    """Whatever way it is sharded, every flat tensor is known parameter by parameter."""
    cuts: list[tuple[int, ...]] = []
    original = comms.lay_out

    def noted(numels: tuple[int, ...], *more: Any) -> Any:
        cuts.append(numels)
        return original(numels, *more)

    comms.lay_out = noted  # type: ignore[assignment]
    net = shard(make_net(), reshard=2)
    compressed(net)
    train(net, me.rank, 1)
    block, rest, smaller = (16, 16, 2112, 33, 2064, 16), (1024, 16, 192, 3), (32, 32, 4224, 66, 4128, 32)
    assert sorted(cuts) == sorted([block] * 4 + [rest] * 2 + [smaller] * 2)

    cuts.clear()
    net = make_net()
    fsdp.fully_shard([*net.blocks])
    fsdp.fully_shard(net, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    handle = compressed(net)
    train(net, me.rank, 1)
    assert set(cuts) == {block * 2, (1024, 16, 160, 3)}
    same_everywhere(flat(net))
    handle.remove()
    train(net, me.rank, 1)


def test_every_way_of_sharding_is_laid_out_parameter_by_parameter() -> None:
    run_ranks(laid_out, 4, "cgx")


# ---- training ----


def trains(me: Rank, options: dict[str, Any]) -> None:
    """The loss falls as that of exact training does, and ranks stay together."""
    settings: dict[str, Any] = {"reshard": options.get("reshard", True)}
    if options.get("mixed"):
        settings["mp_policy"] = fsdp.MixedPrecisionPolicy(torch.bfloat16, options["mixed"])

    def prepared() -> Net:
        net = make_net()
        if options.get("checkpointing"):
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

            apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
        return shard(net, **settings)

    exact, net = prepared(), prepared()
    handle = compressed(net, **options.get("compress", {}))
    names = [each.name for each in handle.parameters]
    assert names == [name for name, _ in make_net().named_parameters()]
    wanted = train(exact, me.rank, STEPS)
    for group in handle.groups:
        torch_cgx.reset_stats(group)
    losses = train(net, me.rank, STEPS)
    total = torch.tensor([sum(wanted[:3]), sum(wanted[-3:]), sum(losses[-3:])]) / 3
    dist.all_reduce(total)
    first, end, ours = (total / me.world).tolist()
    assert end < 0.6 * first
    assert ours < end + 0.1 * first, (first, end, ours)
    for group in handle.groups:
        stats = torch_cgx.stats(group)
        assert stats["compressed_operations"] > 0
        floor = 2.0 if settings.get("mp_policy") else 3.5  # against 16 and 32 bits
        assert stats["bytes_before"] / stats["bytes_after"] > floor, stats
    same_everywhere(flat(net))


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (2, {"compress": {"grad_bits": 2, "quantizer": "rotated"}}),
        (4, {"reshard": 2}),
        (3, {"checkpointing": True, "mixed": torch.bfloat16}),
        pytest.param(4, {}, marks=pytest.mark.matrix),
        pytest.param(2, {"reshard": False}, marks=pytest.mark.matrix),
        pytest.param(2, {"mixed": torch.float32}, marks=pytest.mark.matrix),
        pytest.param(2, {"mixed": torch.bfloat16, "reshard": False}, marks=pytest.mark.matrix),
        pytest.param(2, {"checkpointing": True}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_the_loss_falls_as_with_exact_communication(world: int, options: dict[str, Any]) -> None:
    run_ranks(trains, world, "cgx", options)


def trains_exactly(me: Rank) -> None:
    exact, net = shard(make_net()), shard(make_net())
    compressed(net, grad_bits=32, weight_bits=32)
    assert train(net, me.rank, 5) == train(exact, me.rank, 5)
    assert torch.equal(flat(net), flat(exact))


def test_with_32_bits_it_trains_to_the_same_bits_as_without() -> None:
    run_ranks(trains_exactly, 2, "cgx")


def trains_beside(me: Rank) -> None:
    net = shard(make_net())
    first = compressed(net)
    handle = compressed(net, grad_bits=8)
    assert handle.groups == first.groups  # made once
    assert [torch_cgx.group.process_group.ProcessGroupCGX] == [type(group) for group in handle.groups]
    losses = train(net, me.rank, STEPS)
    assert losses[-1] < 0.6 * losses[0]
    assert torch_cgx.stats(handle.groups[0])["compressed_operations"] > 0
    same_everywhere(flat(net))
    handle.remove()
    train(net, me.rank, 1)


def test_on_a_gloo_group_a_cgx_group_beside_it_carries_the_shares() -> None:
    run_ranks(trains_beside, 2, "gloo")


def trains_unseen(me: Rank) -> None:
    internals._param_groups = lambda state: None
    net = shard(make_net())
    handle = compressed(net)
    losses = train(net, me.rank, STEPS)
    assert losses[-1] < 0.6 * losses[0]
    assert torch_cgx.stats(dist.group.WORLD)["compressed_operations"] > 0
    same_everywhere(flat(net))
    assert "first.weight" in handle.report()
    handle.remove()
    torch_cgx.reset_stats(dist.group.WORLD)
    train(net, me.rank, 1)
    assert torch_cgx.stats(dist.group.WORLD)["compressed_operations"] == 0


def test_where_torch_hides_its_parameter_groups_each_flat_tensor_is_one_layer() -> None:
    run_ranks(trains_unseen, 2, "cgx")
