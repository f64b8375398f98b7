"""What the tests of the DDP hook share: a training step whose every average is compared with the exact one.

All ranks hold the same parameters, so each of them can work out the gradients of all others, and from them the exact
average and how far off compression may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.error_bound import error_bound, rotated_bound
from tests.support.gradients import SLACK
from torch_cgx import CGXState, cgx_hook
from torch_cgx.ddp.report import LayerReport

BLOCK = 1024  # of a state that is told nothing else

Loss = Callable[[nn.Module, int, int], Tensor]  # of a model at a step on a rank


def hook(ddp: DistributedDataParallel, **options: Any) -> CGXState:
    """Register a hook whose state knows the model's names."""
    state = CGXState.from_model(ddp, **options)
    ddp.register_comm_hook(state, cgx_hook)
    return state


def gradients_of(module: nn.Module, loss: Loss, step: int, rank: int) -> list[Tensor]:
    """What this rank's backward pass finds, without touching .grad or DDP."""
    parameters = list(module.parameters())
    found = torch.autograd.grad(loss(module, step, rank), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def in_memory_order(x: Tensor) -> Tensor:
    """Flat as a grad bucket holds it, whatever the strides."""
    return torch.as_strided(x.detach(), (x.numel(),), (1,))


def check_average(
    got: Tensor, inputs: Sequence[Tensor], bits: int, block: int, quantizer: str | None = "maxmin"
) -> None:
    """`got` is the average of `inputs`: exact but for rounding with 32 bits, else within the bound, and not exact."""
    wide = torch.stack([x.double() for x in inputs]).mean(0)
    off = (got.double() - wide).abs()
    if bits == 32:
        largest = max(float(x.abs().max()) for x in inputs)
        assert float(off.max()) <= 4 * len(inputs) * torch.finfo(got.dtype).eps * largest
        return
    if quantizer == "rotated":
        expected, all_allowed = rotated_bound(inputs, bits, 1 / len(inputs))
        assert float((got.double() - expected).norm()) <= all_allowed
    else:
        expected, allowed = error_bound(inputs, bits, block, 1 / len(inputs))
        excess = float(((got.double() - expected).abs() / (allowed * SLACK)).max())
        assert excess <= 1.0, f"error {excess:.3f} times the bound"
    assert float(off.max()) > torch.finfo(got.dtype).eps * float(wide.abs().max()), "nothing was quantized"


def checked_step(
    ddp: DistributedDataParallel, state: CGXState, loss: Loss, rank: int, world: int, step: int, bits: int | None = None
) -> dict[str, LayerReport]:
    """One backward pass, each averaged gradient compared with what the report says of it (or with `bits`)."""
    module = ddp.module
    others = [gradients_of(module, loss, step, r) for r in range(world)]
    ddp.zero_grad()
    loss(ddp, step, rank).backward()
    layers = {layer.name: layer for layer in state.report().layers}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        assert parameter.grad is not None
        inputs = [in_memory_order(gradients[number]) for gradients in others]
        try:
            chosen = layers[name].bits if bits is None else bits
            check_average(in_memory_order(parameter.grad), inputs, chosen, BLOCK, layers[name].quantizer)
        except AssertionError as error:
            raise AssertionError(f"{name} at step {step}: {error}") from None
    return layers


def descend(module: nn.Module, rate: float = 0.1) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
