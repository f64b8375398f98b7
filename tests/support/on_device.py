"""Ranks with tensors on a stand-in device: how their group starts, and what several test files let them do."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from tests.support import standin
from tests.support.gradients import DTYPES, digest, noise, within_bound
from tests.support.harness import Rank
from tests.support.hooked import descend, hook
from tests.support.standin import StandInGroup
from tests.support.training import flat, loss_of, make_net

INNER, CROSS = "CGX_INNER_COMMUNICATOR_TYPE", "CGX_CROSS_COMMUNICATOR_TYPE"
STAGED = {INNER: "SHM"}
WAYS = {"NCCL": {}, "shared memory": STAGED}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def start(me: Rank, backend: str) -> Any:
    if backend == "standin":
        standin.register()
    me.meet(f"all can start {backend}")
    me.start_group(backend)
    return dist.group.WORLD


def the_group() -> StandInGroup:
    group = dist.group.WORLD
    assert isinstance(group, StandInGroup)
    return group


def watched() -> AbstractContextManager[None]:
    """On a stand-in, what this thread does with tensors on the caller's stream is held to the order, too."""
    group = dist.group.WORLD
    return group.device.watching() if isinstance(group, StandInGroup) else nullcontext()


def sums(me: Rank, backend: str) -> list[str]:
    start(me, backend)
    digests = []
    for numel in (17, 5001, 70_000):
        for dtype in DTYPES:
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                x = noise(me.rank, numel, dtype)
                with watched():
                    x.mul_(1)
                    dist.all_reduce(x, op=op)
                    x.add(1)
                if not dist.group.WORLD.settings.stochastic:
                    within_bound(x, me.world, 4, average=op == dist.ReduceOp.AVG)
                digests.append(digest(x))
    counts = torch_cgx.stats()
    assert counts["compressed_operations"] == counts["operations"] == len(digests)
    assert 0 < counts["bytes_after"] < counts["bytes_before"] / 3
    assert counts["bytes_sent"] > 0
    return digests


def large_sum(me: Rank, backend: str) -> str:
    start(me, backend).set_timeout(timedelta(seconds=60))
    x = noise(me.rank, 100_000, torch.bfloat16 if me.world == 5 else torch.float32)
    with watched():
        x.mul_(1)
        dist.all_reduce(x)
        x.add(1)
    return digest(x)


def trained(me: Rank, backend: str, options: dict[str, Any]) -> Tensor:
    start(me, backend)
    ddp = DistributedDataParallel(make_net(), bucket_cap_mb=0.01)
    state = hook(ddp, compression_params={"bits": 3, "bucket_size": 64}, **options)
    for step in range(4):
        ddp.zero_grad()
        loss_of(ddp, step, me.rank).backward()
        descend(ddp)
    assert {layer.bits for layer in state.report().layers} == {3, 32}
    if backend == "standin":
        log = the_group().device.log
        assert sum(entry[0] == "reduce" for entry in log) >= 4 and sum(entry[0] == "future" for entry in log) >= 4
    return flat(ddp)
