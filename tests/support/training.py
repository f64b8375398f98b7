"""A small model, its data, and how one process alone would train it: what the training tests compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 5
BATCH = 8
LEARNING_RATE = 0.1


class Net(nn.Module):
    """Two layers that always run and a branch a batch of odd steps leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.branch = nn.Linear(64, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor, with_branch: bool = True) -> Tensor:
        x = torch.relu(self.first(x))
        if with_branch:
            x = x + torch.relu(self.branch(x))
        y: Tensor = self.last(x)
        return y


def make_net() -> Net:
    torch.manual_seed(7)
    return Net()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH, 32, generator=generator)
    return x, x[:, :10].argmax(1)


def loss_of(net: Callable[..., Tensor], step: int, rank: int, with_branch: bool = True) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(net(x, with_branch), y)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train(net: nn.Module, rank: int, steps: int = STEPS) -> list[float]:
    """The plain loop of any data-parallel script; returns the losses of this rank."""
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, step, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_alone(
    world: int,
    steps: int = STEPS,
    with_branch: Callable[[int, int], bool] = lambda step, rank: True,
    accumulate: int = 1,
) -> Net:
    """What `world` ranks must end with: one process that averages the gradients of all their batches."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    with _one_thread():
        for step in range(steps):
            for rank in range(world):
                (loss_of(net, step, rank, with_branch(step, rank)) / world).backward()
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return net


@contextmanager
def _one_thread() -> Iterator[None]:
    """As ranks have it. On a busy machine, threads that wait for each other make a small model take seconds."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def same_on_all_ranks(results: list[Any]) -> Any:
    """All ranks must hold the same bits; returns them."""
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    return results[0]
