"""Execution of all ranks' programs in one process, in memory: for tests, and to try algorithms.

It is deterministic and has no threads. Ranks make one step at a time, in turn or in an order drawn from `random`,
because the result must not depend on it. It is not for training: nothing runs in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torch_cgx.errors import ProgramError
from torch_cgx.kernels import NEAREST, Kernels, Piece, Rounding
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.layout import Layout, Slice
from torch_cgx.plan.program import Add, Encode, Join, Program, Receive, Reduce, Send, Step, Sum

__all__ = ["all_gather", "allreduce", "reduce_scatter", "run"]

# The content of a fresh slot. It reveals a kernel that leaves a byte of its payload unwritten.
_UNWRITTEN = 0xA5


def allreduce(
    values: Sequence[Tensor],
    layout: Layout,
    kernels: Sequence[Kernels],
    *,
    topology: Topology | None = None,
    scale: float = 1.0,
    rounding: Rounding = NEAREST,
    order: Random | None = None,
    residuals: Sequence[Tensor] | None = None,
) -> None:
    """Reduce one flat tensor per rank, in place, slice by slice. The default topology is a flat SRA."""
    topology = topology or Topology.flat("SRA", len(values))
    for part, programs in _programs(topology, layout):
        run(programs, part, values, kernels, scale=scale, rounding=rounding, order=order, residuals=residuals)


def reduce_scatter(
    values: Sequence[Tensor],
    shares: Sequence[Tensor],
    layout: Layout,
    kernels: Sequence[Kernels],
    *,
    scale: float = 1.0,
    rounding: Rounding = NEAREST,
    order: Random | None = None,
) -> None:
    """Sum up one share per rank: shares[r], which must hold rank r's own values of it, becomes the sum."""
    for part, programs in _programs(Topology.flat("REDUCE_SCATTER", len(values)), layout):
        run(programs, part, values, kernels, scale=scale, rounding=rounding, order=order, shares=shares)


def all_gather(
    values: Sequence[Tensor],
    layout: Layout,
    kernels: Sequence[Kernels],
    *,
    rounding: Rounding = NEAREST,
    order: Random | None = None,
) -> None:
    """Copy every rank's share, which values[r] holds in its place, to all other ranks, in place."""
    for part, programs in _programs(Topology.flat("ALL_GATHER", len(values)), layout):
        run(programs, part, values, kernels, rounding=rounding, order=order)


def _programs(topology: Topology, layout: Layout) -> Iterator[tuple[Slice, list[Program]]]:
    for part in layout.slices:
        nonempty = [chunk.nbytes > 0 for chunk in part.chunks]
        yield part, [topology.program(nonempty, rank) for rank in range(topology.world)]


def run(
    programs: Sequence[Program],
    part: Slice,
    values: Sequence[Tensor],
    kernels: Sequence[Kernels],
    *,
    scale: float = 1.0,
    rounding: Rounding = NEAREST,
    order: Random | None = None,
    residuals: Sequence[Tensor] | None = None,
    shares: Sequence[Tensor] | None = None,
) -> None:
    """Run programs[r] on values[r] with kernels[r], in place. The rounding gets its rank and stage here.

    residuals[r] receives what rank r's encoding loses: see `Kernels`. In shares[r] rank r sums up its share.
    """
    if not len(programs) == len(values) == len(kernels):
        raise ValueError(
            f"expected as many programs as tensors and kernels, got {len(programs)}, {len(values)} and {len(kernels)}"
        )
    mail: _Mail = {}
    ranks = [
        _Rank(
            *(rank, programs[rank], part, values[rank], kernels[rank], scale, rounding, mail),
            residual=None if residuals is None else residuals[rank],
            share=None if shares is None else shares[rank],
        )
        for rank in range(len(programs))
    ]
    while unfinished := [rank for rank in ranks if not rank.finished]:
        ready = [rank for rank in unfinished if rank.ready]
        if not ready:
            waiting = "; ".join(f"rank {rank.rank} at {rank.next_step}" for rank in unfinished)
            raise ProgramError(f"all unfinished ranks wait for a message that nobody sends: {waiting}")
        for rank in [order.choice(ready)] if order else ready:
            rank.make_step()


class _Payload(NamedTuple):
    """The content of a slot, and its coding."""

    data: Tensor
    exact: bool


# By sender, receiver and slot.
_Mail: TypeAlias = dict[tuple[int, int, str], _Payload]


@dataclass(slots=True)
class _Rank:
    """One rank's program, its slots, and the mail that all ranks share."""

    rank: int
    program: Program
    part: Slice
    values: Tensor
    kernels: Kernels
    scale: float
    rounding: Rounding
    mail: _Mail
    residual: Tensor | None = None
    share: Tensor | None = None
    position: int = 0
    slots: dict[str, _Payload] = field(default_factory=dict)

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
            out = self._new_slot(step)
            self.kernels.encode(
                self._pieces(step.chunks, step.exact), self.values, out, self._rounding(0), self.residual
            )
        elif isinstance(step, Send):
            payload = self.slots[step.slot]
            self.mail[self.rank, step.peer, step.slot] = payload._replace(data=payload.data.clone())
        elif isinstance(step, Receive):
            self.slots[step.slot] = self.mail.pop((step.peer, self.rank, step.slot))
        elif isinstance(step, Join):
            self.slots[step.slot] = _Payload(torch.cat([self.slots[slot].data for slot in step.inputs]), exact=False)
        elif isinstance(step, Reduce):
            pieces = self._pieces(step.chunks, step.exact)
            inputs = [self.slots[slot].data for slot in step.inputs]
            scale = self.scale if step.final else 1.0
            self.kernels.reduce(
                pieces, self.values, inputs, self._new_slot(step), scale, self._rounding(1), self.residual
            )
        elif isinstance(step, Sum):
            assert self.share is not None
            inputs = [self.slots[slot].data for slot in step.inputs]
            self.kernels.sum(self.part.chunks[step.chunk].in_share, self.share, inputs, self.scale)
        else:
            payload = self.slots[step.slot]
            pieces = self._pieces(step.chunks, payload.exact)
            self.kernels.decode(pieces, payload.data, self.values, add=isinstance(step, Add))

    def _pieces(self, chunks: tuple[int, ...], exact: bool) -> tuple[Piece, ...]:
        return self.part.joined(chunks).coded(exact).pieces

    def _rounding(self, stage: int) -> Rounding:
        return replace(self.rounding, rank=self.rank, stage=stage)

    def _new_slot(self, step: Encode | Reduce) -> Tensor:
        nbytes = self.part.joined(step.chunks).coded(step.exact).nbytes
        data = torch.full((nbytes,), _UNWRITTEN, dtype=torch.uint8, device="cpu")
        self.slots[step.slot] = _Payload(data, step.exact)
        return data
