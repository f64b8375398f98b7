"""Groups, hooks and FSDP2 under a default device on which nothing can be computed: results are the same as without."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from tests.support.gradients import digest
from tests.support.harness import Rank, run_ranks
from tests.support.hooked import descend, hook
from tests.support.nursery import WITHOUT_ENGINE
from tests.support.on_device import STAGED, start
from torch_cgx import AdaptiveBits

pytestmark = pytest.mark.ranks

WIDTH = 64


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(dtype)


def net() -> nn.Sequential:
    with torch.device("cpu"):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def collectives(me: Rank, group: Any) -> list[Tensor]:
    dist.barrier(group)
    x = values(me.rank, 5000)
    kept = [x.clone() for _ in range(2)]
    with torch_cgx.compressed(4, 128):
        dist.all_reduce(kept[0], group=group)
        share = torch.empty(x.numel() // me.world, device="cpu")
        dist.reduce_scatter_tensor(share, x.clone(), group=group)
    dist.all_reduce(kept[1], group=group)
    whole = torch.empty(me.world * x.numel(), device="cpu")
    dist.all_gather_into_tensor(whole, x, group=group)
    counts = values(me.rank, 7).to(torch.int64)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    dist.barrier(group)
    return [*kept, share, whole, counts]


def hooked(me: Rank, group: Any) -> list[Tensor]:
    ddp = DistributedDataParallel(net(), process_group=group)
    adaptive = AdaptiveBits(period=3, warmup=3)
    state = hook(ddp, adaptive=adaptive, error_feedback=True, measure_every=2)
    for step in range(6):
        ddp.zero_grad()
        ddp(values(10 * step + me.rank, 8, WIDTH)).square().mean().backward()
        descend(ddp)
    assert state.report().choices
    return [parameter.detach() for parameter in ddp.parameters()]


def sharded(me: Rank, group: Any) -> list[Tensor]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not hasattr(FSDPModule, "set_custom_all_gather"):  # of this torch
        return []
    model = net()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    torch_cgx.fsdp.compress(model, bucket_size=128)
    for step in range(2):
        model.zero_grad()
        model(values(10 * step + me.rank, 8, WIDTH)).square().mean().backward()
        descend(model)
    return [parameter.to_local().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


def all_of_it(me: Rank, backend: str) -> list[str]:
    group = dist.new_group(backend=backend)  # made under the default device too
    return [digest(x) for part in (collectives, hooked, sharded) for x in part(me, group)]


def under_each_default(me: Rank, backend: str) -> None:
    start(me, backend)
    expected = all_of_it(me, backend)
    context: AbstractContextManager[Any]
    for context, default in ((torch.device("meta"), None), (nullcontext(), "meta")):
        torch.set_default_device(default)
        with context:
            assert torch.empty(1).device.type == "meta"
            found = all_of_it(me, backend)
        assert found == expected, [number for number, x in enumerate(found) if x != expected[number]]
    torch.set_default_device(None)


@pytest.mark.parametrize(
    ("backend", "env"),
    [("cgx", {}), ("cgx", {WITHOUT_ENGINE: "1"}), ("standin", {}), ("standin", STAGED)],
    ids=["shared memory", "no native engine", "CUDA's stand-in", "CUDA's stand-in, staged"],
)
def test_nothing_of_ours_is_made_on_the_default_device(backend: str, env: dict[str, str]) -> None:
    run_ranks(under_each_default, 2, None, backend, env=env)
