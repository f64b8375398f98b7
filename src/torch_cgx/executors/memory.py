"""Runs the programs of all ranks in one process, in memory: for tests, and to try algorithms.

Deterministic, with no threads: one rank after the other makes a step, in turn or in an order drawn from
`random`, for the result must not depend on it. Not for training: nothing runs in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor

from torch_cgx.algorithms import ALGORITHMS
from torch_cgx.errors import ProgramError
from torch_cgx.kernels import NEAREST, Kernels, Rounding
from torch_cgx.layout import Layout, Slice
from torch_cgx.program import Decode, Encode, Program, Receive, Reduce, Send, Step

__all__ = ["allreduce", "run"]

# What a fresh slot holds. A kernel that leaves a byte of its payload unwritten shows it by this.
_UNWRITTEN = 0xA5


def allreduce(
    values: Sequence[Tensor],
    layout: Layout,
    kernels: Sequence[Kernels],
    *,
    algorithm: str = "SRA",
    scale: float = 1.0,
    rounding: Rounding = NEAREST,
    order: Random | None = None,
) -> None:
    """Reduce one flat tensor a rank, in place, slice by slice."""
    world = len(values)
    for part in layout.slices:
        nonempty = [chunk.nbytes > 0 for chunk in part.chunks]
        programs = [ALGORITHMS[algorithm](nonempty, rank, world) for rank in range(world)]
        run(programs, part, values, kernels, scale=scale, rounding=rounding, order=order)


def run(
    programs: Sequence[Program],
    part: Slice,
    values: Sequence[Tensor],
    kernels: Sequence[Kernels],
    *,
    scale: float = 1.0,
    rounding: Rounding = NEAREST,
    order: Random | None = None,
) -> None:
    """Run programs[r] on values[r] with kernels[r], in place. The rounding gets its rank and stage here."""
    if not len(programs) == len(values) == len(kernels):
        raise ValueError(
            f"expected as many programs as tensors and kernels, got {len(programs)}, {len(values)} and {len(kernels)}"
        )
    mail: dict[tuple[int, int, str], Tensor] = {}
    ranks = [
        _Rank(rank, programs[rank], part, values[rank], kernels[rank], scale, rounding, mail)
        for rank in range(len(programs))
    ]
    while unfinished := [rank for rank in ranks if not rank.finished]:
        ready = [rank for rank in unfinished if rank.ready]
        if not ready:
            waiting = "; ".join(f"rank {rank.rank} at {rank.next_step}" for rank in unfinished)
            raise ProgramError(f"all unfinished ranks wait for a message that nobody sends: {waiting}")
        for rank in [order.choice(ready)] if order else ready:
            rank.make_step()


@dataclass(slots=True)
class _Rank:
    """One rank: its program, its slots, and the mail that all ranks share."""

    rank: int
    program: Program
    part: Slice
    values: Tensor
    kernels: Kernels
    scale: float
    rounding: Rounding
    mail: dict[tuple[int, int, str], Tensor]
    position: int = 0
    slots: dict[str, Tensor] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.position == len(self.program)

    @property
    def next_step(self) -> Step:
        return self.program[self.position]

    @property
    def ready(self) -> bool:
        step = self.next_step
        return not isinstance(step, Receive) or (step.peer, self.rank, step.slot) in self.mail

    def make_step(self) -> None:
        step = self.next_step
        self.position += 1
        if isinstance(step, Encode):
            pieces = self.part.chunks[step.chunk].pieces
            self.kernels.encode(pieces, self.values, self._new_slot(step.slot, step.chunk), self._rounding(0))
        elif isinstance(step, Send):
            self.mail[self.rank, step.peer, step.slot] = self.slots[step.slot].clone()
        elif isinstance(step, Receive):
            self.slots[step.slot] = self.mail.pop((step.peer, self.rank, step.slot))
        elif isinstance(step, Reduce):
            pieces = self.part.chunks[step.chunk].pieces
            inputs = [self.slots[slot] for slot in step.inputs]
            out = self._new_slot(step.slot, step.chunk)
            self.kernels.reduce(pieces, self.values, inputs, out, self.scale, self._rounding(1))
        else:
            assert isinstance(step, Decode)
            self.kernels.decode(self.part.chunks[step.chunk].pieces, self.slots[step.slot], self.values)

    def _rounding(self, stage: int) -> Rounding:
        return replace(self.rounding, rank=self.rank, stage=stage)

    def _new_slot(self, slot: str, chunk: int) -> Tensor:
        self.slots[slot] = torch.full((self.part.chunks[chunk].nbytes,), _UNWRITTEN, dtype=torch.uint8)
        return self.slots[slot]
