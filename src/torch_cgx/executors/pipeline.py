"""One allreduce over transports, slice overlapping slice: see `schedule` for the order of steps.

Before the first payloads, all ranks that talk to each other tell what they are about to do, so that ranks that have
lost step find out instead of adding up each other's bytes. Nobody waits for that: payloads are tagged by the call that
they belong to, so that those of another call meet no receive (but for a coincidence, which makes an error too).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torch_cgx.algorithms import Topology
from torch_cgx.errors import MismatchError
from torch_cgx.executors.combining import combine
from torch_cgx.executors.schedule import Schedule, schedule_for
from torch_cgx.executors.staging import Staging
from torch_cgx.kernels import Kernels, Rounding
from torch_cgx.layout import Chunk, Layout, Slice
from torch_cgx.program import Add, Combine, Decode, Encode, Receive, Reduce, Send, Step
from torch_cgx.transports import TAGS, Pending, Transport

__all__ = ["AHEAD", "Pipeline", "Reduction"]

_PHASES = ("encode", "wait", "reduce", "decode")
_LATE_S = 2.0  # for a rank that comes later to a call that differs; one that never comes shall not hold up the error
_POLL_S = 0.002
_AGREEMENT_TAG = 0

# A receive is posted so many ticks before its time. A payload for which none is posted yet waits at its sender, and the
# word that one is there now waits behind all other payloads on the link.
AHEAD = 3


@dataclass(slots=True)
class _Underway:
    """A slice between its first and its last step."""

    part: Slice
    schedule: Schedule
    first_tag: int
    tags: int  # how many there are
    slots: dict[str, Tensor] = field(default_factory=dict)
    arriving: dict[str, Pending] = field(default_factory=dict)
    leaving: list[Pending] = field(default_factory=list)

    def tag(self, slot: str) -> int:
        return _AGREEMENT_TAG + 1 + (self.first_tag + self.schedule.slots[slot].index) % (self.tags - 1)

    def coded(self, slot: str) -> Chunk:
        """What the slot's payload encodes, and how."""
        shared = self.schedule.slots[slot]
        return self.part.chunks[shared.chunk].coded(shared.exact)


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is to be done: a flat tensor reduced in place."""

    values: Tensor
    layout: Layout
    topology: Topology
    scale: float
    rounding: Rounding
    agreed: int  # a hash of the call, which must be the same on all ranks
    residual: Tensor | None = None  # float32, as long: gets what this rank's encoding loses, see `Kernels`


class Pipeline:
    """`transports` has one for each peer, by rank; a rank's own place holds None."""

    def __init__(
        self,
        transports: Sequence[Transport | None],
        kernels: Kernels,
        rank: int,
        global_ranks: Sequence[int],
        staging_nbytes: int,
    ) -> None:
        self._transports = tuple(transports)
        self._tags = min((transport.tags for transport in transports if transport is not None), default=TAGS)
        self._kernels = kernels
        self._rank = rank
        self._global_ranks = tuple(global_ranks)
        self._staging = Staging(staging_nbytes)
        self.reset_figures()

    def reset_figures(self) -> None:
        self.figures: dict[str, float] = dict.fromkeys(("bytes_sent", *(f"{phase}_s" for phase in _PHASES)), 0)

    def run(self, operation: Reduction) -> None:
        if not operation.layout.slices:
            return
        facts = (operation.rounding.op, operation.agreed)
        operation = replace(operation, rounding=replace(operation.rounding, rank=self._rank))
        slices = self._prepare(operation, zlib.crc32(b"%d %d" % facts))
        depth = max(len(each.schedule.levels) for each in slices)
        peers = sorted(frozenset[int]().union(*(each.schedule.peers for each in slices)))
        agreement = _Agreement(self, torch.tensor(facts, dtype=torch.int64), peers)
        for tick in range(AHEAD):
            self._post_receives(slices, tick, depth)
        for tick in range(len(slices) + depth):
            self._post_receives(slices, tick + AHEAD, depth)
            for level in range(depth):
                number = tick - level
                if 0 <= number < len(slices):
                    if level == 1 and number == 0:
                        agreement.finish()
                    self._make_steps(slices[number], level, operation)
            if tick >= depth:
                self._close(slices[tick - depth])

    def transport(self, peer: int) -> Transport:
        transport = self._transports[peer]
        assert transport is not None
        return transport

    def name(self, rank: int | None = None) -> str:
        return f"rank {self._global_ranks[self._rank if rank is None else rank]}"

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.figures[phase] += time.perf_counter() - start

    def _prepare(self, operation: Reduction, tag: int) -> list[_Underway]:
        """Its slices, with tags that follow each other from some number on."""
        slices = []
        for part in operation.layout.slices:
            nonempty = tuple(chunk.nbytes > 0 for chunk in part.chunks)
            schedule = schedule_for(operation.topology, nonempty, self._rank)
            slices.append(_Underway(part, schedule, tag, self._tags))
            tag += len(schedule.slots)
        return slices

    def _post_receives(self, slices: Sequence[_Underway], tick: int, depth: int) -> None:
        """Those that are waited for at this tick."""
        for number in range(max(0, tick - depth + 1), min(tick + 1, len(slices))):
            each = slices[number]
            for step in each.schedule.level(tick - number):
                if isinstance(step, Receive):
                    payload = each.slots[step.slot] = self._staging.take(each.coded(step.slot).nbytes)
                    message = self.transport(step.peer).receive(payload, step.peer, each.tag(step.slot))
                    each.arriving[step.slot] = message

    def _close(self, each: _Underway) -> None:
        with self.timed("wait_s"):
            for message in each.leaving:
                message.wait()
        each.leaving.clear()
        for payload in each.slots.values():
            self._staging.give(payload)
        each.slots.clear()

    def _make_steps(self, each: _Underway, level: int, operation: Reduction) -> None:
        for step in each.schedule.level(level):
            if isinstance(step, Send):
                payload = each.slots[step.slot]
                each.leaving.append(self.transport(step.peer).send(payload, step.peer, each.tag(step.slot)))
                self.figures["bytes_sent"] += payload.numel()
            elif isinstance(step, Receive):
                with self.timed("wait_s"):
                    each.arriving.pop(step.slot).wait()
            else:
                with torch.inference_mode():  # the values may be a tensor of that mode
                    self._compute(each, step, operation)
        for slots in each.schedule.spent[level : level + 1]:
            for slot in slots:
                self._staging.give(each.slots.pop(slot))

    def _compute(self, each: _Underway, step: Step, operation: Reduction) -> None:
        values, rounding, residual = operation.values, operation.rounding, operation.residual
        if isinstance(step, Encode):
            out = each.slots[step.slot] = self._staging.take(each.coded(step.slot).nbytes)
            with self.timed("encode_s"):
                self._kernels.encode(each.coded(step.slot).pieces, values, out, replace(rounding, stage=0), residual)
        elif isinstance(step, Reduce):
            inputs = [each.slots[slot] for slot in step.inputs]
            out = each.slots[step.slot] = self._staging.take(each.coded(step.slot).nbytes)
            scale = operation.scale if step.final else 1.0
            with self.timed("reduce_s"):
                self._kernels.reduce(
                    each.coded(step.slot).pieces, values, inputs, out, scale, replace(rounding, stage=1), residual
                )
        elif isinstance(step, Decode | Add):
            with self.timed("decode_s"):
                self._kernels.decode(
                    each.coded(step.slot).pieces, each.slots[step.slot], values, add=isinstance(step, Add)
                )
        elif isinstance(step, Combine):
            inputs = [each.slots[slot] for slot in step.inputs]
            with self.timed("decode_s"):
                combine(self._kernels, each.coded(step.inputs[0]).pieces, values, inputs, operation.scale)


class _Agreement:
    """What this rank is about to do, told to each peer that it will talk to, and compared with what they tell."""

    def __init__(self, pipeline: Pipeline, mine: Tensor, peers: Sequence[int]) -> None:
        self._pipeline = pipeline
        self._mine = mine
        self._theirs = {peer: torch.empty_like(mine) for peer in peers}
        self._arriving = {
            peer: pipeline.transport(peer).receive(theirs.view(torch.uint8), peer, _AGREEMENT_TAG)
            for peer, theirs in self._theirs.items()
        }
        self._leaving = [pipeline.transport(peer).send(mine.view(torch.uint8), peer, _AGREEMENT_TAG) for peer in peers]

    def finish(self) -> None:
        with self._pipeline.timed("wait_s"):
            for peer, message in self._arriving.items():
                message.wait()
                self._compare(peer)
            for sent in self._leaving:
                sent.wait()

    def _let_leave(self) -> None:
        """Tell all peers before this rank fails and hangs up: they would take it for dead."""
        deadline = time.monotonic() + _LATE_S
        while not all(sent.done() for sent in self._leaving) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _compare(self, peer: int) -> None:
        theirs = self._theirs[peer]
        if not torch.equal(theirs, self._mine):
            self._let_leave()
            raise MismatchError(
                f"{self._pipeline.name()} and {self._pipeline.name(peer)} have lost step: their compressed all_reduces "
                f"number {int(self._mine[0])} and {int(theirs[0])} differ in shape, type, reduction, bits, bucket size "
                "or layers. All ranks must make the same calls, in one order."
            )
