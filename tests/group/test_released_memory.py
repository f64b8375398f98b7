"""A group lets go of the caller's tensors once their operation is over, whatever carried it."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.gradients import BITS
from tests.support.harness import Rank, apart, needs_native, run_ranks

pytestmark = [pytest.mark.ranks, needs_native]

NUMEL = 20_000
RELEASED_S = 5.0  # a thread that completed the operation may still be about to drop it


def make(kind: str, world: int, asynchronous: bool) -> tuple[Any, list[torch.Tensor]]:
    values = torch.ones(world * NUMEL)
    part = torch.ones(NUMEL)
    match kind:
        case "all_reduce":
            return dist.all_reduce(values, async_op=asynchronous), [values]
        case "reduce_scatter":
            return dist.reduce_scatter_tensor(part, values, async_op=asynchronous), [values, part]
        case "all_gather":
            return dist.all_gather_into_tensor(values, part, async_op=asynchronous), [values, part]
        case "gather":
            parts = list(values.chunk(world)) if dist.get_rank() == 0 else None
            return dist.gather(part, parts, async_op=asynchronous), [values, part]
        case _:
            return dist.broadcast(values, 0, async_op=asynchronous), [values]


def what_is_kept(me: Rank) -> list[str]:
    """Name the operations whose tensors live on after the caller has dropped them and the handle."""
    kept = []
    for bits in ("32", "4"):
        os.environ[BITS] = bits
        for kind in ("all_reduce", "reduce_scatter", "all_gather", "gather", "broadcast"):
            for asynchronous in (False, True):
                work, tensors = make(kind, me.world, asynchronous)
                if asynchronous:
                    work.wait()
                storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
                del work, tensors
                deadline = time.monotonic() + RELEASED_S
                while not (gone := all(storage.expired() for storage in storages)) and time.monotonic() < deadline:
                    gc.collect()
                    time.sleep(0.01)
                if not gone:
                    kept.append(f"{kind}, {bits} bits, {'asynchronous' if asynchronous else 'synchronous'}")
    return kept


@pytest.mark.parametrize(
    "rank_env",
    [{}, apart(4, "TCP"), {rank: {"CGX_NODE_ID": f"host-{rank // 2}"} for rank in range(4)}],
    ids=["shared memory", "links", "nodes of two"],
)
def test_no_tensor_outlives_its_operation(rank_env: dict[int, dict[str, str]]) -> None:
    assert run_ranks(what_is_kept, 4, "cgx", rank_env=rank_env, timeout_s=180.0) == [[]] * 4
