"""The DDP hook over real ranks: which layers are compressed and how far off they are, in every way that DDP is used."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from distributed.gradients import BITS
from distributed.harness import Rank, run_ranks
from distributed.hooked import checked_step, descend
from distributed.test_training import same_on_all_ranks
from distributed.training import flat, loss_of, make_net
from torch_cgx import CGXState, cgx_hook

OVER_MESSAGES = {"CGX_INNER_COMMUNICATOR_TYPE": "GLOO"}
COMPRESSED = ("first.weight", "branch.weight")  # of make_net; the others are one-dimensional or small


def hooked_net(**options: object) -> tuple[DistributedDataParallel, CGXState]:
    ddp = DistributedDataParallel(make_net(), **options)  # type: ignore[arg-type]
    state = CGXState.from_model(ddp)
    ddp.register_comm_hook(state, cgx_hook)
    return ddp, state


def as_scripts_write_it(me: Rank) -> Tensor:
    ddp = DistributedDataParallel(make_net())
    state = CGXState(None, 1024, {"bits": 4, "bucket_size": 1024})
    state.attach(ddp)
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


@pytest.mark.parametrize("variables", [{}, OVER_MESSAGES], ids=["shared memory", "messages"])
def test_the_hook_compresses_large_layers_whatever_the_backend(backend: str, variables: dict[str, str]) -> None:
    # The state's bits take the place of the variable's.
    same_on_all_ranks(run_ranks(as_scripts_write_it, 2, backend, env={**variables, BITS: "2"}))
