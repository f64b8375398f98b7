"""FSDP2 with `torch_cgx.fsdp.compress` on meshes of two dimensions, and through checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_cgx
from tests.support.families import only
from tests.support.harness import Rank, run_ranks
from tests.support.sharded import (
    STEPS,
    WEIGHTS,
    WIDTH,
    Net,
    compressed,
    flat,
    gradients,
    loss_of,
    make_net,
    same_everywhere,
    shard,
    share,
    train,
    units,
    unpadded,
)

pytestmark = pytest.mark.ranks

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp.FSDPModule, "set_custom_all_gather"):
    pytest.skip("FSDP2 of this torch takes no communication of one's own", allow_module_level=True)


def replicated(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = make_net()
    each = gradients(net, [0], me.world)
    shard(net, mesh)
    handle = compressed(net, weight_bits=32, overrides={"first.*": {"grad_bits": 8}})
    across: Any = mesh.get_group("replicate")
    assert len(handle.groups) == 2
    assert across in handle.groups
    loss_of(net, 0, me.rank).backward()
    stats = torch_cgx.stats(across)
    assert stats["compressed_operations"] == 3  # one a unit
    assert stats["bytes_after"] < 0.25 * stats["bytes_before"], stats
    column = me.rank % 2
    for name, p in net.named_parameters():
        assert p.grad is not None
        got = p.grad.to_local()  # type: ignore[attr-defined]
        same_everywhere(got, group=across)
        inputs = [share(found[name], column, 2) for found in each]
        expected = unpadded(torch.stack([x.double() for x in inputs]).mean(0), got.shape)
        off = (got.double() - expected).abs()
        if name not in WEIGHTS:
            assert float(off.max()) <= 1e-6, name
        elif off.numel():
            bits = 8 if name == "first.weight" else 4
            spread = sum(units(x, bits) for x in inputs) / 4  # each of two quantizations is half a step off at most
            assert bool((off <= unpadded(1.5 * spread, got.shape)).all()), name
            assert float(off.max()) > 0
    losses = train(net, me.rank, STEPS)
    assert losses[-1] < 0.6 * losses[0]
    same_everywhere(flat(net))
    handle.remove()
    torch_cgx.reset_stats(across)
    train(net, me.rank, 1)
    assert torch_cgx.stats(across)["compressed_operations"] == 0


def test_hsdp_compresses_what_is_averaged_across_replicas_and_keeps_norms_exact() -> None:
    run_ranks(replicated, 4, "cgx")


def replicated_alone(me: Rank) -> None:
    """Nothing is scattered on such a mesh, so no reduce-scatter tells of the layers. And two models share it."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    net, other = make_net(), make_net()
    each = gradients(net, [0], me.world)
    shard(net, mesh)
    shard(other, mesh)
    compressed(net)
    handle = compressed(other, grad_bits=32)
    handle.remove()
    loss_of(net, 0, me.rank).backward()
    assert torch_cgx.stats(mesh.get_group("replicate"))["compressed_operations"] == 3
    for name, p in net.named_parameters():
        assert p.grad is not None
        got = p.grad.to_local()  # type: ignore[attr-defined]
        off = (got.double() - torch.stack([found[name].double() for found in each]).mean(0)).abs()
        assert (float(off.max()) > 1e-5) == (name in WEIGHTS), name


def test_a_mesh_of_replicas_alone_keeps_norms_exact_and_other_models_on_it_change_nothing() -> None:
    run_ranks(replicated_alone, 2, "cgx")


def replicated_on_gloo(me: Rank) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="across replicas") as raised:
        compressed(shard(make_net(), mesh))
    compressed(shard(make_net(), mesh), grad_bits=32)  # nothing is compressed across replicas
    return str(raised.value)


def test_hsdp_on_another_backend_is_refused_with_what_to_do() -> None:
    for message in run_ranks(replicated_on_gloo, 2, "gloo"):
        assert 'got backend "gloo": call init_process_group("cgx") before init_device_mesh' in message


def tensor_parallel(me: Rank) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def prepared() -> nn.Module:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        sharded: nn.Module = fsdp.fully_shard(net, mesh=mesh["data"])
        return sharded

    exact, net = prepared(), prepared()
    handle = compressed(net)
    assert {each.name: each.numel for each in handle.parameters}["0.weight"] == 4 * WIDTH * WIDTH
    rank = mesh.get_local_rank("data")
    wanted = train(exact, rank, STEPS)
    torch_cgx.reset_stats(mesh.get_group("data"))
    losses = train(net, rank, STEPS)
    assert wanted[-1] < 0.7 * wanted[0]
    assert losses[-1] < wanted[-1] + 0.1 * wanted[0], (wanted, losses)
    stats = torch_cgx.stats(mesh.get_group("data"))
    assert stats["bytes_before"] / stats["bytes_after"] > 4
    assert torch_cgx.stats(mesh.get_group("tensor"))["compressed_operations"] == 0
    same_everywhere(flat(net))


def test_a_mesh_of_data_and_tensor_parallelism_compresses_the_data_part_alone() -> None:
    run_ranks(tensor_parallel, 4, "cgx")


def resumes(me: Rank, folder: str, weight_bits: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def prepared() -> tuple[Net, torch.optim.Optimizer]:
        net = shard(make_net())
        compressed(net, weight_bits=weight_bits)
        return net, torch.optim.AdamW(net.parameters(), 0.01)

    net, optimizer = prepared()
    train(net, me.rank, 3, optimizer=optimizer)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    saved = flat(net).clone()
    train(net, me.rank, 3, start=3, optimizer=optimizer)

    again, its_optimizer = prepared()
    train(again, me.rank, 1, start=9, optimizer=its_optimizer)  # anything: all of it is replaced
    model_state, optimizer_state = get_state_dict(again, its_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(again, its_optimizer, **parts)
    assert torch.equal(flat(again), saved)
    train(again, me.rank, 3, start=3, optimizer=its_optimizer)
    if weight_bits == 32:
        assert torch.equal(flat(again), flat(net))
    else:  # weights are rounded at random, with other numbers
        off = (flat(again) - flat(net)).norm() / (flat(net) - saved).norm()
        assert float(off) < 0.2, float(off)


@pytest.mark.parametrize("weight_bits", only([8], [8, 32]))
def test_a_checkpoint_holds_the_master_weights_and_training_goes_on_from_it(tmp_path: Path, weight_bits: int) -> None:
    run_ranks(resumes, 2, "cgx", str(tmp_path), weight_bits)
