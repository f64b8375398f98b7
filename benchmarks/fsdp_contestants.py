"""Who takes part in the benchmarks of sharded training: a copy of the examples' GPT each, its collectives watched.

    ideal       none: shards are repeated and gradients cut, without any message; the step with communication left out
    gloo        exactly, as FSDP2 does on torch's own backend
    cgx exact   exactly, over the cgx backend
    cgx W/G     weights gathered at W bits, gradients reduced at G bits, over the cgx backend: `torch_cgx.fsdp.compress`

On CPU tensors FSDP2 waits within each all-gather and reduce-scatter, so the time inside of these calls is all that
communication takes; the encoding of values is inside too. Nothing is printed here, and no process started.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from fsdp_train import shard
from gpt import GPT
from gpt_train import loss_of

__all__ = ["IDEAL", "VOCABULARY", "Contestant", "Size", "check", "enter", "widths_of"]

IDEAL = "ideal"
VOCABULARY = 65
EXACT = 32
TIMEOUT_S = 300.0
EXACT_ERROR, ROUGH_ERROR = 1e-4, 0.5
"""How far gradients may be from gloo's, in Euclidean norms: added in another order, and rounded to few bits."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of a GPT and of what it reads in a step."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int  # a rank

    def build(self) -> GPT:
        torch.manual_seed(0)
        return GPT(VOCABULARY, self.context, self.layers, self.width, self.heads)

    def text(self, step: int, rank: int) -> Tensor:
        """The same for whoever asks; random, since nobody learns here."""
        chance = torch.Generator().manual_seed(1_000_003 * step + rank)
        return torch.randint(VOCABULARY, (self.batch, self.context + 1), generator=chance)


@dataclass(slots=True)
class Clock:
    """Seconds inside of collectives since it was last read."""

    gather_s: float = 0.0
    scatter_s: float = 0.0

    def read(self) -> tuple[float, float]:
        seconds = (self.gather_s, self.scatter_s)
        self.gather_s = self.scatter_s = 0.0
        return seconds


@dataclass(frozen=True, slots=True)
class Watched:
    """One of FSDP2's communication objects, timed."""

    inner: Any
    clock: Clock
    name: str  # of the clock's field

    def allocate(self, *size: Any, **how: Any) -> Tensor:
        buffer: Tensor = self.inner.allocate(*size, **how)
        return buffer

    def __call__(self, *tensors: Any, **how: Any) -> Any:
        start = time.perf_counter()
        work = self.inner(*tensors, **how)
        setattr(self.clock, self.name, getattr(self.clock, self.name) + time.perf_counter() - start)
        if work is not None and how.get("async_op"):
            raise RuntimeError("expected collectives that are over when they return, got one that is not")
        return work


class Absent:
    """In the place of a communication object, without any communication: `move` fills the output from the input."""

    def __init__(self, move: Callable[[Tensor, Tensor, int, int], None]) -> None:
        self.move = move

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> None:
        self.move(output_tensor, input_tensor, group.rank(), group.size())


def repeat_shard(output: Tensor, mine: Tensor, rank: int, world: int) -> None:
    """The input is a part of the output: FSDP2 gathers in place."""
    for index, share in enumerate(output.view(world, -1)):
        if index != rank:
            share.copy_(mine)


def cut_share(output: Tensor, everything: Tensor, rank: int, world: int) -> None:
    output.copy_(everything.view(world, -1)[rank])


@dataclass(slots=True)
class Contestant:
    name: str
    size: Size
    model: nn.Module
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup
    clock: Clock
    steps: int = 0
    losses: list[float] = field(default_factory=list)

    def gradients(self) -> float:
        """Forward and backward of the next batch, without a step of the optimizer; the loss."""
        loss = loss_of(self.model, self.size.text(self.steps, dist.get_rank()))
        loss.backward()
        return loss.item()

    def step(self) -> None:
        self.losses.append(self.gradients())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def whole_gradients(self) -> Tensor:
        """All in one, on every rank."""
        return torch.cat([p.grad.full_tensor().flatten() for p in self.model.parameters()])  # type: ignore[union-attr]


def widths_of(name: str) -> tuple[int, int]:
    """`cgx 8/4` -> bits of weights and of gradients."""
    match = re.fullmatch(r"cgx (\d+)/(\d+)", name)
    if match:
        return int(match[1]), int(match[2])
    if name in (IDEAL, "gloo", "cgx exact"):
        return EXACT, EXACT
    raise ValueError(f"expected ideal, gloo, cgx exact, or bits of weights and gradients as in cgx 8/4, got {name!r}")


def enter(name: str, size: Size, bucket_size: int) -> Contestant:
    """A copy of the model, the same for all; called on all ranks in the same order."""
    weight_bits, grad_bits = widths_of(name)
    backend = "cgx" if name.startswith("cgx") else "gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=TIMEOUT_S))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = size.build()
    shard(model, weight_bits=weight_bits, grad_bits=grad_bits, bucket_size=bucket_size, mesh=mesh)
    clock = Clock()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            watch(module, clock, absent=name == IDEAL)
    return Contestant(name, size, model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True), group, clock)


def watch(module: FSDPModule, clock: Clock, absent: bool) -> None:
    parameters = (
        module._get_fsdp_state()._fsdp_param_group
    )  # torch has a way to set these objects, but none to ask for them
    assert parameters is not None, "a module that was given to fully_shard, but has no parameters of its own"
    gather = Absent(repeat_shard) if absent else parameters._all_gather_comm
    scatter = Absent(cut_share) if absent else parameters._reduce_scatter_comm
    module.set_custom_all_gather(Watched(gather, clock, "gather_s"))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(Watched(scatter, clock, "scatter_s"))  # type: ignore[arg-type]


def check(contestants: Mapping[str, Contestant]) -> dict[str, float]:
    """How far each one's first gradients are from gloo's, relative to these; an error where it is too far."""
    losses, errors, expected = {}, {}, torch.empty(0)
    for name in sorted((name for name in contestants if name != IDEAL), key=lambda name: name != "gloo"):
        losses[name] = contestants[name].gradients()
        found = contestants[name].whole_gradients()
        contestants[name].optimizer.zero_grad()
        expected = found if name == "gloo" else expected
        errors[name] = float((found - expected).norm() / expected.norm())
        allowed = ROUGH_ERROR if min(widths_of(name)) < EXACT else EXACT_ERROR
        if not errors[name] <= allowed or not abs(losses[name] - losses["gloo"]) <= allowed * losses["gloo"]:
            raise RuntimeError(
                f"{name} computes something else than gloo: expected loss {losses['gloo']:.4f} and gradients within "
                f"{allowed:g} of gloo's, got loss {losses[name]:.4f} and an error of {errors[name]:.3g}"
            )
    return errors
