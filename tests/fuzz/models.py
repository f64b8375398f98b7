"""Random models and how DistributedDataParallel trains them, as data and as the code that does it.

A model is a row of layers that keep the width of what they get, so that any of them may be left out of a step.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Model", "Net", "draw", "train", "widened"]

WIDTH = 6
LAYERS = (
    "nn.Linear(6, 6)",
    "nn.Linear(6, 6, bias=False)",
    "nn.LayerNorm(6)",
    "nn.BatchNorm1d(6)",
    "nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 6))",
    "nn.Sequential(nn.Linear(6, 1100), nn.Tanh(), nn.Linear(1100, 6))",
    "nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3, padding=1), nn.Conv1d(3, 1, 1), nn.Flatten())",
    "nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 6, 1).to(memory_format=torch.channels_last), nn.Flatten())",
    "nn.PReLU(6)",
    "nn.Tanh()",
)
DTYPES = ("float32", "float32", "float32", "float64", "bfloat16", "float16")
HOOKS = ("", "", "", "allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


@dataclass(frozen=True)
class Model:
    """A model, and how it is trained."""

    seed: int
    layers: tuple[str, ...]
    dtypes: tuple[str, ...]
    embedding: str = ""  # "dense", "sparse": the first layer, which takes whole numbers
    frozen: int = -1  # the layer whose parameters need no gradients
    tied: bool = False  # the last layer is the first one again
    # By step, then by micro-batch: the layers that are used, by rank modulo the number of entries.
    used: tuple[tuple[tuple[tuple[bool, ...], ...], ...], ...] = ()
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25.0
    set_to_none: bool = True
    hook: str = ""
    join: bool = False  # rank r has r steps fewer, but one at least


class Net(nn.Module):
    """The row of layers."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        torch.manual_seed(model.seed)
        self.embedding = nn.Embedding(20, WIDTH, sparse=model.embedding == "sparse") if model.embedding else None
        if self.embedding is not None:
            self.embedding.to(getattr(torch, model.dtypes[0]))
        layers = [eval(layer, {"nn": nn, "torch": torch}) for layer in model.layers]
        for number, (layer, dtype) in enumerate(zip(layers, model.dtypes, strict=True)):
            layer.to(getattr(torch, dtype)).requires_grad_(number != model.frozen)
        if model.tied:
            layers[-1] = layers[0]
        self.layers = nn.ModuleList(layers)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, numbers: torch.Tensor, used: tuple[bool, ...]) -> torch.Tensor:
        self.steps += 1
        x = (
            self.embedding(numbers)
            if self.embedding is not None
            else numbers.double().sin()[:, None] * torch.ones(WIDTH)
        )
        for layer, is_used in zip(self.layers, used, strict=True):
            if is_used:
                first = next(layer.parameters(), x)
                x = layer(x.to(first.dtype))
        return x.double().square().mean()


def train(model: Model, group: object, rank: int, size: int) -> list[tuple[str, torch.Tensor | None]]:
    """Train, and return what there is after each step: losses, gradients, parameters, buffers."""
    net = Net(model)
    ddp = DistributedDataParallel(
        net,
        process_group=group,
        find_unused_parameters=model.find_unused_parameters,
        static_graph=model.static_graph,
        gradient_as_bucket_view=model.gradient_as_bucket_view,
        broadcast_buffers=model.broadcast_buffers,
        bucket_cap_mb=model.bucket_cap_mb,
    )
    if model.hook:
        ddp.register_comm_hook(group, getattr(default_hooks, model.hook))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.125)
    seen: list[tuple[str, torch.Tensor | None]] = []
    own_steps = model.used[: max(1, len(model.used) - rank)] if model.join else model.used
    with ddp.join() if model.join else contextlib.nullcontext():
        for step, parts in enumerate(own_steps):
            optimizer.zero_grad(set_to_none=model.set_to_none)
            for number, by_rank in enumerate(parts):
                used = by_rank[rank % len(by_rank)]
                batch = torch.arange(4) * (rank + 3) + step + number
                with ddp.no_sync() if number < len(parts) - 1 else contextlib.nullcontext():
                    loss = ddp(batch % 20, used)
                    loss.backward()
                seen.append((f"loss of step {step}.{number}", loss.detach().clone()))
            grads = ((f"gradient of {name}", p.grad) for name, p in net.named_parameters())
            seen += [(f"{name} in step {step}", None if g is None else g.to_dense().clone()) for name, g in grads]
            optimizer.step()
            seen += [(f"{name} after step {step}", t.detach().clone()) for name, t in net.state_dict().items()]
    seen += [(f"{name} at the end", t.detach().clone()) for name, t in net.state_dict().items()]
    dist.barrier(group)
    return seen


def draw(seed: int) -> Model:
    """Draw a model. The same seed draws the same model on every machine."""
    dice = random.Random(f"model {seed}")
    number = dice.randint(2, 6)
    layers = tuple(dice.choice(LAYERS) for _ in range(number - 1))
    layers = (dice.choice(LAYERS[:2]), *layers)
    mixed = dice.random() < 0.5
    one = dice.choice(DTYPES)
    dtypes = tuple(dice.choice(DTYPES) if mixed else one for _ in layers)
    static = dice.random() < 0.25
    unused = dice.choice(("no", "no", "same", "any"))
    if static and unused == "any":
        unused = "same"
    join = dice.random() < 0.15 and unused == "no" and not static
    every = (True,) * number
    fixed = tuple(dice.random() < 0.6 or position == 0 for position in range(number)) if unused == "same" else every
    accumulate = dice.random() < 0.4

    def by_rank() -> tuple[tuple[bool, ...], ...]:
        if unused != "any":
            return (fixed,)
        return tuple(tuple(dice.random() < 0.6 or p == 0 for p in range(number)) for _ in range(dice.choice((1, 3))))

    steps = []
    for _ in range(dice.randint(2, 4)):
        parts = 1 if static or not accumulate else dice.randint(1, 3)
        steps.append(tuple(by_rank() for _ in range(parts)))
    view, keep = dice.random() < 0.4, dice.random() < 0.4
    embedding = dice.choice(("", "", "dense", "sparse"))
    if embedding == "sparse" and (view or keep or join or static or accumulate):
        embedding = "dense"  # torch refuses it on some ranks, and gloo aborts the others
    return Model(
        seed,
        layers,
        dtypes,
        embedding=embedding,
        frozen=dice.randrange(1, number) if dice.random() < 0.2 else -1,
        tied=dice.random() < 0.2 and unused == "no",
        used=tuple(steps),
        find_unused_parameters=unused != "no" and (unused == "any" or dice.random() < 0.8),
        static_graph=static,
        gradient_as_bucket_view=view,
        broadcast_buffers=dice.random() < 0.7,
        bucket_cap_mb=dice.choice((25.0, 0.0001, 0.01)),
        set_to_none=not keep,
        hook=dice.choice(HOOKS),
        join=join,
    )


def widened(model: Model) -> Model:
    """Return the model in float64: of gradients that are nearly zero, as before a BatchNorm, rounding makes noise."""
    dtypes = tuple("float64" for _ in model.dtypes)
    return replace(model, dtypes=dtypes, hook="allreduce_hook" if model.hook else "")
