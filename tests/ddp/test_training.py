"""Training as users write it, on gloo and on cgx: what it ends with is what one process alone ends with.

Everything here is exact (32 bits); training on compressed gradients is in test_compressed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.support.harness import Rank, run_ranks
from tests.support.training import LEARNING_RATE, STEPS, flat, loss_of, make_net, same_on_all_ranks, train, train_alone

pytestmark = pytest.mark.ranks

RTOL, ATOL = 1e-4, 1e-6  # float32 sums in another order, over a few steps


def like_one_process(results: list[Any], net: nn.Module, rtol: float = RTOL, atol: float = ATOL) -> None:
    torch.testing.assert_close(same_on_all_ranks(results), flat(net), rtol=rtol, atol=atol)


def ddp(me: Rank, options: dict[str, Any]) -> Tensor:
    net = DistributedDataParallel(make_net(), **options)
    train(net, me.rank)
    return flat(net)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.005},  # several grad buckets
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.005},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_ddp_trains_like_one_process(backend: str, options: dict[str, Any]) -> None:
    like_one_process(run_ranks(ddp, 2, backend, options), train_alone(2))


def test_ddp_on_three_ranks_leaves_a_real_interpreter_cleanly(backend: str) -> None:
    like_one_process(run_ranks(ddp, 3, backend, {}, real_exit=True), train_alone(3))


def branch_is_used(step: int, rank: int) -> bool:
    return (step + rank) % 3 != 0  # by both ranks, by one, by the other


def ddp_with_unused_parameters(me: Rank) -> Tensor:
    net = DistributedDataParallel(make_net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, me.rank, branch_is_used(step, me.rank)).backward()
        optimizer.step()
    return flat(net)


def test_ddp_finds_parameters_that_a_rank_does_not_use(backend: str) -> None:
    like_one_process(run_ranks(ddp_with_unused_parameters, 2, backend), train_alone(2, STEPS, branch_is_used))


def ddp_that_accumulates(me: Rank) -> Tensor:
    net = DistributedDataParallel(make_net())
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    for step in range(6):
        last = (step + 1) % 3 == 0
        with contextlib.nullcontext() if last else net.no_sync():
            loss_of(net, step, me.rank).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return flat(net)


def test_no_sync_accumulates_gradients(backend: str) -> None:
    like_one_process(run_ranks(ddp_that_accumulates, 2, backend), train_alone(2, 6, accumulate=3))


def ddp_beside_other_collectives(me: Rank) -> Tensor:
    """Two models and a metric, as a GAN's script has them."""
    nets = [DistributedDataParallel(make_net()) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), LEARNING_RATE) for net in nets]
    for step in range(STEPS):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(net, step, me.rank)
            loss.backward()
            metric = loss.detach()
            dist.all_reduce(metric)
            optimizer.step()
    torch.testing.assert_close(flat(nets[0]), flat(nets[1]), rtol=0, atol=0)
    return flat(nets[0])


def test_two_models_and_a_metric_beside_them(backend: str) -> None:
    like_one_process(run_ranks(ddp_beside_other_collectives, 2, backend), train_alone(2))


def ddp_on_a_subgroup(me: Rank) -> Tensor:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = DistributedDataParallel(make_net(), process_group=pairs[me.rank // 2])
    train(net, me.rank % 2)
    return flat(net)


def test_two_subgroups_each_train_a_model(backend: str) -> None:
    like_one_process(run_ranks(ddp_on_a_subgroup, 4, backend), train_alone(2))


def ddp_with_batch_norm(me: Rank) -> tuple[Tensor, Tensor]:
    """Buffers are broadcast before every forward pass; uneven inputs end with `join`."""
    torch.manual_seed(3)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    generator = torch.Generator().manual_seed(me.rank)
    with net.join():
        for _ in range(3 + me.rank):
            optimizer.zero_grad()
            net(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
    net.eval()
    return flat(net), torch.zeros(0)


def test_buffers_and_uneven_inputs(backend: str) -> None:
    same_on_all_ranks(run_ranks(ddp_with_batch_norm, 2, backend))


_kept: list[Any] = []


def keep_gloo_alive(group: Any) -> None:
    """A hook's last callback may hold the last reference to a gloo group, whose destructor then joins the
    very thread that it runs on and aborts the process. Ours must not need this."""
    if dist.get_backend(group) == "gloo":
        _kept.append(group)


def ddp_with_hook(me: Rank, name: str) -> tuple[Tensor, float, float]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    net = DistributedDataParallel(make_net())
    if name == "powerSGD":
        # Rank 32 of 64 leaves little out: what differs from exact training stays small enough to compare.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=32, start_powerSGD_iter=2, min_compression_rate=1
        )
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        keep_gloo_alive(dist.group.WORLD)
    else:
        net.register_comm_hook(None, getattr(default_hooks, name))
    before = torch.stack([loss_of(net.module, step, me.rank) for step in range(12)]).mean()
    train(net, me.rank, 12)
    after = torch.stack([loss_of(net.module, step, me.rank) for step in range(12)]).mean()
    return flat(net), before.item(), after.item()


@pytest.mark.parametrize(
    ("name", "atol"),
    [("allreduce_hook", 1e-5), ("fp16_compress_hook", 2e-3), ("powerSGD", 5e-2)],
)
def test_torchs_own_hooks_train(backend: str, name: str, atol: float) -> None:
    results = run_ranks(ddp_with_hook, 2, backend, name)
    like_one_process([params for params, _, _ in results], train_alone(2, 12), rtol=0.0, atol=atol)
    for _, first, last in results:
        assert last < first - 0.05


def powersgd_on_both_backends(me: Rank) -> tuple[Tensor, Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    ends = []
    for group in (None, dist.new_group(backend="gloo")):
        net = DistributedDataParallel(make_net(), process_group=group)
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
        )
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(net, me.rank, 12)
        ends.append(flat(net))
        keep_gloo_alive(group)
    return ends[0], ends[1]


def test_powersgd_ends_where_it_ends_on_gloo() -> None:
    ours, theirs = same_on_all_ranks(run_ranks(powersgd_on_both_backends, 2, "cgx"))
    # Orthogonalisation amplifies the last bits of a sum in another order.
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-3)


def fsdp(me: Rank, reshard: bool) -> Tensor:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (me.world,))
    net = make_net()
    for layer in (net.first, net.branch):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh, reshard_after_forward=reshard)
    train(net, me.rank)
    return torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()])  # type: ignore[attr-defined]


@pytest.mark.parametrize("world", [2, 3])
def test_fsdp2_trains_like_one_process(backend: str, world: int) -> None:
    like_one_process(run_ranks(fsdp, world, backend, world == 2), train_alone(world))


def device_mesh(me: Rank) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for dimension, members in (
        ("replicate", (me.rank % 2, me.rank % 2 + 2)),
        ("shard", (me.rank // 2 * 2, me.rank // 2 * 2 + 1)),
    ):
        group = mesh.get_group(dimension)
        assert tuple(dist.get_process_group_ranks(group)) == members
        x = torch.full((1000,), float(me.rank))
        dist.all_reduce(x, group=group)
        torch.testing.assert_close(x, torch.full((1000,), float(sum(members))))
    whole = torch.arange(64.0).reshape(8, 8)
    sharded = distribute_tensor(whole, mesh["shard"], [Shard(0)])
    torch.testing.assert_close(sharded.full_tensor(), whole)
    turned = sharded.redistribute(mesh["shard"], [Shard(1)])  # an all-to-all
    torch.testing.assert_close(turned.full_tensor(), whole)
    partial = type(sharded).from_local(whole, mesh["shard"], [Partial()])
    torch.testing.assert_close(partial.redistribute(mesh["shard"], [Replicate()]).to_local(), 2 * whole)
    torch.testing.assert_close(partial.redistribute(mesh["shard"], [Shard(0)]).full_tensor(), 2 * whole)


def test_a_device_mesh_of_two_dimensions(backend: str) -> None:
    run_ranks(device_mesh, 4, backend)


def functional(me: Rank) -> None:
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    assert group is not None
    world, rank = me.world, me.rank
    mine = torch.arange(6.0 * world) + rank
    total = torch.arange(6.0 * world) * world + sum(range(world))
    torch.testing.assert_close(_done(funcol.all_reduce(mine, "sum", group)), total)
    torch.testing.assert_close(_done(funcol.all_reduce(mine, "avg", group)), total / world)
    gathered = torch.cat([torch.arange(6.0 * world) + r for r in range(world)])
    torch.testing.assert_close(_done(funcol.all_gather_tensor(mine, 0, group)), gathered)
    scattered = _done(funcol.reduce_scatter_tensor(mine, "sum", 0, group))
    torch.testing.assert_close(scattered, total[6 * rank : 6 * rank + 6])
    exchanged = _done(funcol.all_to_all_single(mine, None, None, group))
    torch.testing.assert_close(exchanged, torch.cat([torch.arange(6.0) + 6 * rank + r for r in range(world)]))
    torch.testing.assert_close(_done(funcol.broadcast(mine, 1, group)), torch.arange(6.0 * world) + 1)
    several = funcol.all_reduce_coalesced([mine, 2 * mine], "sum", group)
    torch.testing.assert_close([_done(x) for x in several], [total, 2 * total])


def _done(x: Tensor) -> Tensor:
    wait: Callable[[], Tensor] | None = getattr(x, "wait", None)
    return wait() if wait is not None else x


def test_functional_collectives(backend: str) -> None:
    run_ranks(functional, 3, backend)


def compiled_ddp(me: Rank, compiler: str) -> Tensor:
    net = DistributedDataParallel(make_net())
    train(torch.compile(net, backend=compiler), me.rank)  # type: ignore[arg-type]
    return flat(net)


@pytest.mark.matrix  # `make test` compiles models with a hook (test_hook.py), and a collective
def test_a_compiled_ddp_model_trains_like_one_process(backend: str) -> None:
    like_one_process(run_ranks(compiled_ddp, 2, backend, "aot_eager", timeout_s=90), train_alone(2))


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_ddp_model_compiled_to_machine_code_trains_like_one_process() -> None:
    like_one_process(run_ranks(compiled_ddp, 2, "cgx", "inductor", timeout_s=180), train_alone(2))


def compiled_collective(me: Rank) -> Tensor:
    def step(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    return torch.compile(step, backend="aot_eager", fullgraph=True)(torch.full((1000,), float(me.rank)))


def test_a_compiled_function_may_hold_a_collective(backend: str) -> None:
    got = same_on_all_ranks(run_ranks(compiled_collective, 2, backend, timeout_s=90))
    torch.testing.assert_close(got, torch.full((1000,), 3.0))
