"""`torch_cgx.compress`: one call for DDP models and for FSDP2's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from tests.support import sharded
from tests.support.harness import Rank, run_ranks
from tests.support.hooked import checked_step, descend, hook
from tests.support.training import flat, loss_of, make_net, same_on_all_ranks, train
from torch_cgx import CGXState
from torch_cgx.fsdp import Compressed

fsdp = pytest.importorskip("torch.distributed.fsdp")
needs_fsdp2 = pytest.mark.skipif(
    not hasattr(fsdp.FSDPModule, "set_custom_all_gather"), reason="FSDP2 of this torch takes no communication"
)


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by_one_call_and_by_hand(me: Rank) -> Tensor:
    """The defaults are those of a state."""
    one, other = DistributedDataParallel(make_net()), DistributedDataParallel(make_net())
    state = torch_cgx.compress(one)
    hook(other)
    train(one, me.rank)
    train(other, me.rank)
    assert isinstance(state, CGXState)
    assert torch.equal(flat(one), flat(other))
    assert {layer.name for layer in state.report().layers if layer.bits == 4} == {"first.weight", "branch.weight"}
    assert torch_cgx.stats(state.group)["compressed_operations"] > 0
    return flat(one)


@pytest.mark.ranks
def test_on_a_ddp_model_it_registers_the_hook_and_returns_the_state(backend: str) -> None:
    same_on_all_ranks(run_ranks(by_one_call_and_by_hand, 2, backend))


def with_everything(me: Rank) -> Tensor:
    group = dist.new_group(backend="cgx")
    ddp = DistributedDataParallel(make_net())
    state = torch_cgx.compress(
        ddp,
        bits=2,
        quantizer="rotated",
        bucket_size=256,
        overrides={"branch.*": {"bits": 3}},
        layer_min_size=640,
        error_feedback=True,
        group=group,
    )
    assert isinstance(state, CGXState) and state.group is group
    ends = [flat(ddp)]
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp, step, me.rank).backward()
        descend(ddp)
        ends.append(flat(ddp))
    chosen = {layer.name: (layer.bits, layer.quantizer) for layer in state.report().layers if layer.bits != 32}
    assert chosen == {"first.weight": (2, "rotated"), "branch.weight": (3, "rotated"), "last.weight": (2, "rotated")}
    kept = state.state_dict()
    assert kept["residuals"]["first.weight"].any()
    assert kept["settings"]["compression_params"] == {"bits": 2, "bucket_size": 256, "quantizer": "rotated"}
    return torch.stack(ends)


@pytest.mark.ranks
def test_every_argument_reaches_the_state() -> None:
    same_on_all_ranks(run_ranks(with_everything, 2, "gloo"))


def compiled(me: Rank) -> Tensor:
    ddp = DistributedDataParallel(make_net())
    state = torch_cgx.compress(torch.compile(ddp, backend="eager"))
    assert isinstance(state, CGXState)
    checked_step(ddp, state, loss_of, me.rank, me.world, 0)
    return flat(ddp)


@pytest.mark.ranks
def test_a_ddp_model_within_a_compiled_one_is_found() -> None:
    run_ranks(compiled, 2, "cgx")


def on_fsdp(me: Rank) -> list[Tensor]:
    one, other = sharded.shard(sharded.make_net()), sharded.shard(sharded.make_net())
    handle = torch_cgx.compress(one, bits=2, quantizer="rotated", bucket_size=256, overrides={"first.*": {"bits": 4}})
    assert isinstance(handle, Compressed)
    by_hand = sharded.compressed(
        other, grad_bits=2, weight_bits=8, quantizer="rotated", overrides={"first.*": {"grad_bits": 4}}
    )
    assert handle.parameters == by_hand.parameters
    found = {each.name: each for each in handle.parameters}
    assert (found["first.weight"].grad.bits, found["blocks.0.up.weight"].grad.bits) == (4, 2)
    losses = sharded.train(one, me.rank, sharded.STEPS)
    assert losses[-1] < 0.6 * losses[0]
    assert torch_cgx.stats(handle.groups[0])["compressed_operations"] > 0
    return [sharded.flat(one)]


@needs_fsdp2
@pytest.mark.ranks
def test_on_a_sharded_model_it_compresses_what_fsdp_sends() -> None:
    same_on_all_ranks(run_ranks(on_fsdp, 2, "cgx"))


@pytest.mark.parametrize(
    ("model", "got"),
    [(nn.Linear(2, 2), "Linear"), (nn.DataParallel(nn.Linear(2, 2)), "DataParallel"), ({}, "dict"), (None, "NoneType")],
    ids=["plain", "DataParallel", "a dict", "None"],
)
def test_what_is_not_wrapped_is_refused_with_what_to_do(model: Any, got: str) -> None:
    words = rf"expected a DistributedDataParallel model, or one with .* fully_shard .* got {got}: wrap it first, as in"
    with pytest.raises(TypeError, match=words):
        torch_cgx.compress(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantizer": "rotated", "bits": 5}, "bits of the rotated quantizer: expected 1 to 4"),
        ({"quantizer": "rotated", "bucket_size": 100}, "bucket size of the rotated quantizer: expected one of 64, 128"),
        ({"quantizer": "maxmax"}, "quantizer: expected 'maxmin' or 'rotated', got 'maxmax'"),
        ({"quantizer": "rotated", "adaptive": "auto"}, "adaptive: expected the quantizer 'maxmin'"),
        ({"overrides": {"nothing.*": {"bits": 8}}}, "which matches none of"),
        ({"layer_min_size": -1}, "layer_min_size: expected 0 or more"),
    ],
    ids=str,
)
def test_a_ddp_model_is_as_it_was_after_a_wrong_argument(alone: None, options: dict[str, Any], words: str) -> None:
    ddp = DistributedDataParallel(make_net())
    with pytest.raises(ValueError, match=words):
        torch_cgx.compress(ddp, **options)
    assert isinstance(torch_cgx.compress(ddp), CGXState)  # DDP takes one hook only


@needs_fsdp2
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"error_feedback": True}, "error_feedback: expected none with FSDP2, got True"),
        ({"adaptive": "auto"}, "adaptive: expected none with FSDP2, got 'auto'"),
        ({"quantizer": "rotated", "bits": 5}, "grad_bits of the rotated quantizer: expected 1 to 4"),
        ({"overrides": [1]}, "overrides: expected a dict of dicts"),
        ({"overrides": {"0.*": 8}}, "expected a pattern and a dict with the keys"),
        ({"overrides": {"0.*": {"bits": 9}}}, "grad_bits: expected 1 to 8 or 32, got 9"),
    ],
    ids=str,
)
def test_a_sharded_model_takes_what_fsdp_has(alone: None, options: dict[str, Any], words: str) -> None:
    net = fsdp.fully_shard(nn.Sequential(nn.Linear(32, 64)))
    with pytest.raises(ValueError, match=words):
        torch_cgx.compress(net, **options)
    with pytest.raises(ValueError, match="group: expected none with FSDP2"):
        torch_cgx.compress(net, group=dist.group.WORLD)
