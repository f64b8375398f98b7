"""The DDP hook over real ranks: which layers are compressed and how far off they are, in every way that DDP is used."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from tests.support.dying import die_after
from tests.support.gradients import BITS, noise
from tests.support.harness import OVER_GLOO, Rank, names, observe_ranks, raised, run_ranks
from tests.support.hooked import check_average, checked_step, descend, gradients_of, hook
from tests.support.training import flat, loss_of, make_net, same_on_all_ranks
from torch_cgx import CGXState, cgx_hook

pytestmark = pytest.mark.ranks

OVER_LINKS = {"CGX_INNER_COMMUNICATOR_TYPE": "TCP"}
each_way = pytest.mark.parametrize(
    "variables",
    [{}, pytest.param(OVER_GLOO, marks=pytest.mark.matrix), OVER_LINKS],
    ids=["shared memory", "Gloo", "links"],
)
COMPRESSED = ("first.weight", "branch.weight")  # of make_net; the others are one-dimensional or small


def as_scripts_write_it(me: Rank) -> Tensor:
    ddp = DistributedDataParallel(make_net())
    state = CGXState(None, 1024, {"bits": 4, "bucket_size": 1024})
    state.attach(ddp)  # for names in the report
    ddp.register_comm_hook(state, cgx_hook)
    for step in range(3):
        layers = checked_step(ddp, state, loss_of, me.rank, me.world, step)
        assert {name for name, layer in layers.items() if layer.bits == 4} == set(COMPRESSED)
        assert all(layer.bits == 32 for name, layer in layers.items() if name not in COMPRESSED)
        descend(ddp)
    assert dist.get_backend() == me.backend
    stats = torch_cgx.stats(state.group)
    assert stats["compressed_operations"] == stats["operations"] > 0
    assert stats["bytes_before"] == 3 * 4 * flat(ddp).numel()
    assert stats["bytes_after"] < stats["bytes_before"] / 2
    return flat(ddp)


@each_way
def test_the_hook_compresses_large_layers_whatever_the_backend(backend: str, variables: dict[str, str]) -> None:
    # The state's bits take the place of the variable's.
    same_on_all_ranks(run_ranks(as_scripts_write_it, 2, backend, env={**variables, BITS: "2"}))


def rotated(me: Rank) -> Tensor:
    ddp = DistributedDataParallel(make_net())
    overrides = {"branch.*": {"quantizer": "maxmin", "bits": 8}}
    state = hook(ddp, compression_params={"bits": 3, "quantizer": "rotated"}, overrides=overrides)
    for step in range(3):
        layers = checked_step(ddp, state, loss_of, me.rank, me.world, step)
        descend(ddp)
    chosen = {name: (layers[name].bits, layers[name].quantizer) for name in COMPRESSED}
    assert chosen == {"first.weight": (3, "rotated"), "branch.weight": (8, "maxmin")}
    assert layers["first.weight"].bytes_sent == 8 + 2 * 4 + 2048 * 3 // 8
    measured = layers["first.weight"].relative_error
    assert measured is not None and 0.15 < measured < 0.25
    assert str(state.report()).splitlines()[1].split()[:4] == ["first.weight", "2,048", "3", "rotated"]
    return flat(ddp)


@each_way
def test_layers_of_both_quantizers_lie_in_one_grad_bucket(variables: dict[str, str]) -> None:
    same_on_all_ranks(run_ranks(rotated, 3, "cgx", env=variables))


def compressed_layers(state: CGXState) -> set[str]:
    return {layer.name for layer in state.report().layers if layer.bits != 32}


def ways_of_ddp(me: Rank) -> list[Tensor]:
    ends = []
    for options in (
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.001},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
    ):
        ddp = DistributedDataParallel(make_net(), **options)  # type: ignore[arg-type]
        state = hook(ddp, error_feedback=False)
        for step in range(3):
            checked_step(ddp, state, loss_of, me.rank, me.world, step)
            assert compressed_layers(state) == set(COMPRESSED)
            descend(ddp)
        assert state.report().step == 3
        assert all((layer.relative_error is None) == (layer.bits == 32) for layer in state.report().layers)
        ends.append(flat(ddp))
    return ends


def test_every_way_of_ddp() -> None:
    same_on_all_ranks(run_ranks(ways_of_ddp, 2, "cgx", timeout_s=60))


def with_a_sparse_embedding(me: Rank) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 40, sparse=True), nn.Flatten(), nn.Linear(120, 20))
    ddp = DistributedDataParallel(net)
    hook(ddp)
    words = torch.tensor([[3, 5, 7 + me.rank], [3, 9, 9]])
    others = [torch.tensor([[3, 5, 7 + rank], [3, 9, 9]]) for rank in range(me.world)]
    exact = sum(torch.autograd.grad(net(x).square().sum(), net[0].weight)[0].to_dense() for x in others) / me.world
    ddp(words).square().sum().backward()
    found = net[0].weight.grad
    assert found is not None and found.is_sparse
    assert torch.allclose(found.to_dense(), exact, rtol=1e-5, atol=1e-6)


def test_sparse_gradients_are_averaged_exactly(backend: str) -> None:
    run_ranks(with_a_sparse_embedding, 2, backend)


def unused_loss(net: nn.Module, step: int, rank: int) -> Tensor:
    return loss_of(net, step, rank, with_branch=(step + rank) % 2 == 0)


def other_ways(me: Rank) -> list[Tensor]:
    ends = []
    # A branch that one rank leaves out.
    ddp = DistributedDataParallel(make_net(), find_unused_parameters=True)
    state = hook(ddp)
    for step in range(3):
        checked_step(ddp, state, unused_loss, me.rank, me.world, step)
        descend(ddp)
    ends.append(flat(ddp))

    # Gradients that are added up over two backward passes, and sent with the second.
    ddp = DistributedDataParallel(make_net())
    state = hook(ddp)
    for step in range(0, 4, 2):
        sums = []
        for rank in range(me.world):
            parts = (gradients_of(ddp.module, loss_of, part, rank) for part in (step, step + 1))
            sums.append([first + second for first, second in zip(*parts, strict=True)])
        ddp.zero_grad()
        for part in (step, step + 1):
            with ddp.no_sync() if part == step else contextlib.nullcontext():
                loss_of(ddp, part, me.rank).backward()
        for number, (name, parameter) in enumerate(ddp.module.named_parameters()):
            assert parameter.grad is not None
            inputs = [gradients[number].flatten() for gradients in sums]
            check_average(parameter.grad.flatten(), inputs, 4 if name in COMPRESSED else 32, 1024)
        descend(ddp)
    assert state.report().step == 2
    ends.append(flat(ddp))

    # Exact until start_step, and in blocks that ask for it.
    ddp = DistributedDataParallel(make_net())
    state = hook(ddp, start_step=1)
    checked_step(ddp, state, loss_of, me.rank, me.world, 0, bits=32)
    with torch_cgx.uncompressed():
        checked_step(ddp, state, loss_of, me.rank, me.world, 1, bits=32)
    assert torch_cgx.stats()["operations"] > 0
    checked_step(ddp, state, loss_of, me.rank, me.world, 2)
    assert state.report().measured_step == 2

    # At random, one gradient has another average each time.
    for stochastic in (False, True):
        ddp = DistributedDataParallel(make_net())
        hook(ddp, stochastic=stochastic)
        averages = []
        for _ in range(3):
            ddp.zero_grad()
            loss_of(ddp, 0, me.rank).backward()
            averages.append(torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None]))
        assert torch.equal(averages[1], averages[2]) != stochastic  # the first was made in other grad buckets
        ends += averages

    # Uneven inputs: who is through takes part with zeros.
    ddp = DistributedDataParallel(make_net())
    hook(ddp, error_feedback=True)
    with ddp.join():
        for step in range(2 + me.rank):
            ddp.zero_grad()
            loss_of(ddp, step, me.rank).backward()
            descend(ddp)
    return [*ends, flat(ddp)]


def test_unused_parameters_accumulation_and_exact_steps() -> None:
    same_on_all_ranks(run_ranks(other_ways, 2, "cgx", timeout_s=60))


class Mixed(nn.Module):
    """Layers of several types, one of them in channels_last order, and a parameter that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(8, 32, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.wide = nn.Linear(32, 64).double()
        self.narrow = nn.Linear(64, 64).bfloat16()
        self.short = nn.Linear(64, 64).half()
        self.tied = nn.Linear(64, 64)
        self.tied_too = nn.Linear(64, 64)
        self.tied_too.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))
        x = torch.tanh(self.wide(x.double()))
        x = torch.tanh(self.narrow(x.bfloat16()))
        x = torch.tanh(self.short(x.half()))
        y: Tensor = self.tied_too(torch.tanh(self.tied(x.float())))
        return y


def mixed_loss(net: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = net(x.to(memory_format=torch.channels_last)).square().mean()
    return loss


def mixed_types(me: Rank) -> list[Tensor]:
    ddp = DistributedDataParallel(Mixed())
    state = hook(ddp, overrides={"tied_too.weight": {"bits": 8}})
    for step in range(3):
        layers = checked_step(ddp, state, mixed_loss, me.rank, me.world, step)
        bits = {name: layer.bits for name, layer in layers.items() if layer.bits != 32}
        assert bits == {"conv.weight": 4, "narrow.weight": 4, "short.weight": 4, "tied.weight": 8}
        descend(ddp)
    assert ddp.module.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
    return [p.detach() for p in ddp.module.parameters()]


def test_mixed_types_strides_and_shared_parameters() -> None:
    same_on_all_ranks(run_ranks(mixed_types, 2, "cgx"))


def settings_hold(me: Rank) -> None:
    ddp = DistributedDataParallel(make_net())
    state = hook(ddp, layer_min_size=16)
    checked_step(ddp, state, loss_of, me.rank, me.world, 0)
    assert compressed_layers(state) == {"branch.weight"}  # 4096 values; "first.weight" has 2048
    # 5000 values: four blocks and a raw tail.
    tailed = DistributedDataParallel(nn.Linear(50, 50 * 2, bias=False))
    state = hook(tailed)
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(me.rank))
    tailed(x).square().sum().backward()
    got = tailed.module.weight.grad.flatten()
    inputs: list[Tensor] = []
    for rank in range(me.world):
        x = torch.randn(3, 50, generator=torch.Generator().manual_seed(rank))
        inputs.append(torch.autograd.grad(tailed.module(x).square().sum(), tailed.module.weight)[0].flatten())
    check_average(got[:4096], [x[:4096] for x in inputs], 4, 1024)
    check_average(got[4096:], [x[4096:] for x in inputs], 32, 1024)


def test_a_groups_settings_hold_for_the_hook() -> None:
    variables = {"CGX_COMPRESSION_MINIMAL_SIZE": "2049", "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS": "1"}
    run_ranks(settings_hold, 2, "cgx", env=variables)


def gan(me: Rank) -> list[Tensor]:
    """Two models with a hook each, whose backward passes take turns and go through each other."""
    generator, critic = DistributedDataParallel(make_net()), DistributedDataParallel(nn.Linear(10, 300))
    ours = {"bits": 4, "bucket_size": 1024}
    theirs = {"bits": 2, "bucket_size": 64}
    states = hook(generator, compression_params=ours), hook(critic, compression_params=theirs, error_feedback=True)
    for step in range(3):
        checked_step(generator, states[0], loss_of, me.rank, me.world, step)
        descend(generator)
        critic.zero_grad()
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(me.rank + 10 * step))
        critic(generator(x).detach()).square().mean().backward()
        descend(critic)
        generator.zero_grad()
        critic.zero_grad()
        critic(generator(x)).mean().backward()  # both at once
        descend(generator)
    assert [state.report().step for state in states] == [6, 6]
    bits = [{layer.name: layer.bits for layer in state.report().layers if layer.bits != 32} for state in states]
    assert bits == [{"first.weight": 4, "branch.weight": 4}, {"weight": 2}]
    assert states[0].state_dict()["residuals"] == {}
    assert states[1].state_dict()["residuals"]["weight"].any()
    return [flat(generator), flat(critic)]


def test_a_second_model_with_its_own_hook() -> None:
    same_on_all_ranks(run_ranks(gan, 2, "cgx"))


def metric_between(me: Rank) -> Tensor:
    ddp = DistributedDataParallel(make_net())
    state = hook(ddp)
    exact = torch.stack([noise(r, 5000).double() for r in range(me.world)]).sum(0)

    def check_metric() -> None:
        metric = noise(me.rank, 5000)
        dist.all_reduce(metric)
        torch.testing.assert_close(metric.double(), exact, rtol=1e-6, atol=1e-6)

    check_metric()  # before the first step, too
    for step in range(3):
        checked_step(ddp, state, loss_of, me.rank, me.world, step)
        check_metric()
        descend(ddp)
    asked = noise(me.rank, 5000)
    torch_cgx.set_default(bits=4)
    dist.all_reduce(asked)
    torch_cgx.set_default()
    assert float((asked.double() - exact).abs().max()) > 0.01, "exact unless asked"
    return flat(ddp)


@each_way
def test_an_all_reduce_of_a_metric_between_backward_passes_is_exact(variables: dict[str, str]) -> None:
    same_on_all_ranks(run_ranks(metric_between, 2, "cgx", env={**variables, BITS: "4"}))


def on_a_subgroup(me: Rank) -> Tensor | None:
    """Rank 1 is in more groups than rank 0, which names of groups must not depend on."""
    pair, other = dist.new_group([0, 1]), dist.new_group([1, 2])
    if me.rank == 2:
        return None
    ddp = DistributedDataParallel(make_net(), process_group=pair)
    state = hook(ddp)
    for step in range(2):
        checked_step(ddp, state, loss_of, me.rank, 2, step)
        descend(ddp)
    assert dist.get_backend(pair) == me.backend
    assert torch_cgx.stats(state.group)["compressed_operations"] > 0
    assert (state.group is pair) == (me.backend == "cgx")
    assert state.group.size() == 2 and other is not None
    # A second state on the same group has a group of its own.
    second = DistributedDataParallel(make_net(), process_group=pair)
    checked_step(second, hook(second), loss_of, me.rank, 2, 0)
    return flat(ddp)


def test_the_hook_on_a_subgroup(backend: str) -> None:
    ends = run_ranks(on_a_subgroup, 3, backend, group_timeout_s=10.0)
    same_on_all_ranks(ends[:2])


def group_made_again(me: Rank, backend: str) -> Tensor:
    state, before = CGXState(), None
    for turn in ("first", "second"):
        me.start_group(backend, name=turn)
        ddp = DistributedDataParallel(make_net())
        state.attach(ddp)
        ddp.register_comm_hook(state, cgx_hook)
        checked_step(ddp, state, loss_of, me.rank, me.world, 0)
        assert state.group is not before
        assert torch_cgx.stats(state.group)["operations"] == 1
        before = state.group
        descend(ddp)
        dist.destroy_process_group()
    return flat(ddp)


def test_a_state_goes_over_to_a_group_that_is_made_again(backend: str) -> None:
    same_on_all_ranks(run_ranks(group_made_again, 2, None, backend, real_exit=True))


def compiled(me: Rank) -> list[Tensor]:
    ends = []
    for inside in (False, True):
        module: Any = make_net()
        ddp = DistributedDataParallel(torch.compile(module, backend="aot_eager") if inside else module)
        hook(ddp, overrides={"first.weight": {"bits": 8}})
        model: Any = ddp if inside else torch.compile(ddp, backend="aot_eager")
        inputs = [gradients_of(module, loss_of, 0, r) for r in range(me.world)]
        for _ in range(2):
            ddp.zero_grad()
            loss_of(model, 0, me.rank).backward()
        for number, (name, parameter) in enumerate(module.named_parameters()):
            bits = {"first.weight": 8, "branch.weight": 4}.get(name, 32)
            check_average(parameter.grad.flatten(), [each[number].flatten() for each in inputs], bits, 1024)
        ends.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    return ends


def test_compiled_models() -> None:
    same_on_all_ranks(run_ranks(compiled, 2, "cgx", timeout_s=90))


def backward_until_one_dies(me: Rank) -> None:
    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)]), bucket_cap_mb=0.5)
    hook(ddp, error_feedback=True)
    if me.rank == 1:
        die_after(me, 0.4)
    x = torch.ones(4, 300)
    while True:
        ddp(x).sum().backward()


def test_a_kill_inside_a_hooked_backward_raises_there() -> None:
    outcomes = observe_ranks(backward_until_one_dies, 2, "cgx", real_exit=True)
    raised(outcomes[0], "RuntimeError")  # DDP keeps the text and not the type
    names(outcomes[0], r"rank 1\b")
