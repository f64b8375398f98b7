"""The kernel calls of steps that touch values, identical on every device and for every carrier of payloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_cgx.kernels import Kernels, Rounding
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.layout import Chunk, Layout
from torch_cgx.plan.program import Add, Compute, Decode, Encode, Join, Reduce, Slot, Sum

__all__ = ["PHASES", "Reduction", "compute"]

# The phase that the time of a step counts towards.
PHASES: dict[type[Compute | Join], str] = {
    Encode: "encode_s",
    Reduce: "reduce_s",
    Add: "decode_s",
    Sum: "reduce_s",
    Decode: "decode_s",
    Join: "reduce_s",
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """One operation: a flat tensor to be reduced in place, or its shares to be summed up or gathered."""

    values: Tensor  # in a reduce-scatter: only read
    layout: Layout
    topology: Topology
    scale: float
    rounding: Rounding
    agreed: int  # a hash of the call, which must be identical on all ranks
    residual: Tensor | None = None  # float32, same length: receives what this rank's encoding loses, see `Kernels`
    share: Tensor | None = None  # in a reduce-scatter: this rank's own values of its share, and later the sum

    def numbered(self, number: int) -> Reduction:
        """Return a copy with the operation's number in its group."""
        return replace(self, rounding=replace(self.rounding, op=number))


def compute(
    step: Compute | Join,
    operation: Reduction,
    kernels: Kernels,
    slots: dict[Slot, Tensor],
    coded: Callable[[Slot], Chunk],
    take: Callable[[int], Tensor],
) -> None:
    """Make one step. `coded` returns the chunk that a slot's payload encodes, and `take` memory for a new payload."""
    values, rounding, residual = operation.values, operation.rounding, operation.residual
    if isinstance(step, Join):
        slots[step.slot] = torch.cat([slots[slot] for slot in step.inputs])
    elif isinstance(step, Encode):
        chunk = coded(step.slot)
        out = slots[step.slot] = take(chunk.nbytes)
        kernels.encode(chunk.pieces, values, out, rounding.at_stage(0), residual)
    elif isinstance(step, Reduce):
        chunk = coded(step.slot)
        inputs = [slots[slot] for slot in step.inputs]
        out = slots[step.slot] = take(chunk.nbytes)
        scale = operation.scale if step.final else 1.0
        kernels.reduce(chunk.pieces, values, inputs, out, scale, rounding.at_stage(1), residual)
    elif isinstance(step, Sum):
        assert operation.share is not None
        inputs = [slots[slot] for slot in step.inputs]
        kernels.sum(coded(step.inputs[0]).in_share, operation.share, inputs, operation.scale)
    else:
        kernels.decode(coded(step.slot).pieces, slots[step.slot], values, add=isinstance(step, Add))
