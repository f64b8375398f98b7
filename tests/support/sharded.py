"""What the tests of FSDP2 share: a small model in shards, its data, and what its gradients and shares must be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.support.gradients import digest
from torch_cgx.fsdp import Compressed, compress

WIDTH = 64
BATCH, BATCHES = 16, 4
BLOCK = 256
STEPS = 30
WEIGHTS = [f"blocks.{b}.{part}.weight" for b in (0, 1) for part in ("up", "down")] + ["first.weight"]


class Block(nn.Module):
    """Of uneven sizes: 3 and 4 ranks have to pad the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y


def make_net() -> Net:
    torch.manual_seed(7)
    return Net()


def shard(net: Net, mesh: DeviceMesh | None = None, reshard: bool | int = True, **options: Any) -> Net:
    """As users do: every block, then all the rest."""
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def compressed(net: nn.Module, **options: Any) -> Compressed:
    return compress(net, bucket_size=BLOCK, **options)


def loss_of(net: Callable[[Tensor], Tensor], step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * (step % BATCHES) + rank)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return nn.functional.cross_entropy(net(x).float(), x[:, :10].argmax(1))


def train(net: nn.Module, rank: int, steps: int, start: int = 0, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), 0.2)
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(net, step, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(x: Any) -> Tensor:
    """The parameter or gradient of all ranks, exactly."""
    full: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return full.detach()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([whole(p).flatten() for p in net.parameters()])


def masters(net: nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's own shards."""
    return {name: p.to_local().detach().clone() for name, p in net.named_parameters()}  # type: ignore[attr-defined]


def gradients(net: Net, steps: list[int], world: int) -> list[dict[str, Tensor]]:
    """What each rank's backward pass finds of the sum of these steps' losses, on a copy that is not sharded."""
    found = []
    for rank in range(world):
        alone = copy.deepcopy(net)
        for step in steps:
            loss_of(alone, step, rank).backward()
        found.append({name: p.grad for name, p in alone.named_parameters() if p.grad is not None})
    return found


def share(x: Tensor, rank: int, world: int) -> Tensor:
    """A rank's share of a parameter or gradient, flat and padded, as FSDP2 cuts it."""
    rows = -(-x.size(0) // world)
    padded = torch.zeros(rows * world, *x.shape[1:], dtype=x.dtype)
    padded[: x.size(0)] = x
    return padded[rank * rows : (rank + 1) * rows].flatten()


def unpadded(flat_share: Tensor, shape: torch.Size) -> Tensor:
    return flat_share[: shape.numel()].view(shape)


def units(x: Tensor, bits: int, block: int = BLOCK) -> Tensor:
    """For each value of a share the step between two levels of its block."""
    padded = torch.nn.functional.pad(x.double(), (0, -x.numel() % block), value=float("nan")).view(-1, block)
    high = padded.nan_to_num(nan=-torch.inf).amax(1)
    low = padded.nan_to_num(nan=torch.inf).amin(1)
    step = (high - low) / (2**bits - 1) + 2.0**-20 * torch.maximum(high.abs(), low.abs())
    return step.repeat_interleave(block)[: x.numel()]


def same_everywhere(*tensors: Tensor, group: Any = None) -> None:
    """All ranks hold the same bits."""
    mine = [digest(x) for x in tensors]
    theirs: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(theirs, mine, group=group)
    assert all(each == mine for each in theirs), theirs
