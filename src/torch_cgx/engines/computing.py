"""What a step that touches values asks of the kernels: the same on every device, whoever carries the payloads."""

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

# What the time of a step is counted as.
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
    """What is to be done: a flat tensor reduced in place, or its shares summed up or gathered."""

    values: Tensor  # of a reduce-scatter: only read
    layout: Layout
    topology: Topology
    scale: float
    rounding: Rounding
    agreed: int  # a hash of the call, which must be the same on all ranks
    residual: Tensor | None = None  # float32, as long: gets what this rank's encoding loses, see `Kernels`
    share: Tensor | None = None  # of a reduce-scatter: holds this rank's own values of its share, and gets the sum

    def numbered(self, number: int) -> Reduction:
        """As the operation of this number in its group."""
        return replace(self, rounding=replace(self.rounding, op=number))


def compute(
    step: Compute | Join,
    operation: Reduction,
    kernels: Kernels,
    slots: dict[Slot, Tensor],
    coded: Callable[[Slot], Chunk],
    take: Callable[[int], Tensor],
) -> None:
    """Make one step. `coded` says what a slot's payload encodes, and `take` gives memory for a new one."""
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
