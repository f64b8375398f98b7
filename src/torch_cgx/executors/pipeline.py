"""One allreduce over transports, slice overlapping slice: see `schedule` for the order of steps.

Before the first payloads, all ranks that talk to each other tell what they are about to do, so that ranks that have
lost step find out instead of adding up each other's bytes. Nobody waits for that: payloads are tagged by the call that
they belong to, so that those of another call meet no receive (but for a coincidence, which makes an error too).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torch_cgx.engines.computing import PHASES, Reduction, compute
from torch_cgx.engines.recorder import Trail
from torch_cgx.executors.agreement import AGREEMENT_TAG, Agreement
from torch_cgx.executors.staging import Staging
from torch_cgx.kernels import Kernels
from torch_cgx.plan.layout import Chunk, Slice
from torch_cgx.plan.program import Receive, Send
from torch_cgx.plan.schedule import AHEAD, Schedule, schedule_for
from torch_cgx.transports import TAGS, Pending, Transport

__all__ = ["Pipeline"]

_PHASES = ("encode", "wait", "reduce", "decode")


@dataclass(slots=True)
class _Underway:
    """A slice between its first and its last step."""

    part: Slice
    schedule: Schedule
    first_tag: int
    tags: int  # how many there are
    slots: dict[str, Tensor] = field(default_factory=dict)
    arriving: dict[str, Pending] = field(default_factory=dict)
    leaving: list[tuple[int, Pending]] = field(default_factory=list)  # to which peer

    def tag(self, slot: str) -> int:
        return AGREEMENT_TAG + 1 + (self.first_tag + self.schedule.slots[slot].index) % (self.tags - 1)

    def coded(self, slot: str) -> Chunk:
        """What the slot's payload encodes, and how."""
        shared = self.schedule.slots[slot]
        return self.part.chunks[shared.chunk].coded(shared.exact)


class _Timed:
    """Counts how long a block takes, if it ends well. A class, which costs a third of a generator."""

    __slots__ = ("_figures", "_phase", "_start", "_trail")

    def __init__(self, figures: dict[str, float], phase: str, trail: Trail | None) -> None:
        self._figures, self._phase, self._trail = figures, phase, trail

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            elapsed_s = time.perf_counter() - self._start
            self._figures[self._phase] += elapsed_s
            if self._trail is not None:
                self._trail.add(self._phase.removesuffix("_s"), elapsed_s)


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
        self._trail: Trail | None = None  # of the operation that runs
        self.reset_figures()

    def reset_figures(self) -> None:
        self.figures: dict[str, float] = dict.fromkeys(("bytes_sent", *(f"{phase}_s" for phase in _PHASES)), 0)

    def run(self, operation: Reduction, trail: Trail | None = None) -> None:
        if not operation.layout.slices:
            return
        self._trail = trail
        facts = (operation.rounding.op, operation.agreed)
        operation = replace(operation, rounding=replace(operation.rounding, rank=self._rank))
        slices = self._prepare(operation, zlib.crc32(b"%d %d" % facts))
        depth = max(len(each.schedule.levels) for each in slices)
        peers = sorted(frozenset[int]().union(*(each.schedule.peers for each in slices)))
        agreement = Agreement(self._transport, peers, facts, self._rank, self._global_ranks)
        with torch.inference_mode():  # the values may be a tensor of that mode
            for tick in range(AHEAD):
                self._post_receives(slices, tick, depth)
            for tick in range(len(slices) + depth):
                self._post_receives(slices, tick + AHEAD, depth)
                for level in range(depth):
                    number = tick - level
                    if 0 <= number < len(slices):
                        if level == 1 and number == 0:
                            with self.timed("wait_s"):
                                agreement.finish(self._waiting_for)
                        self._make_steps(slices[number], level, operation)
                if tick >= depth:
                    self._close(slices[tick - depth])

    def _transport(self, peer: int) -> Transport:
        transport = self._transports[peer]
        assert transport is not None
        return transport

    def timed(self, phase: str) -> _Timed:
        return _Timed(self.figures, phase, self._trail)

    def _waiting_for(self, peer: int) -> AbstractContextManager[None]:
        return nullcontext() if self._trail is None else self._trail.waiting_for(peer)

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
                    message = self._transport(step.peer).receive(payload, step.peer, each.tag(step.slot))
                    each.arriving[step.slot] = message

    def _close(self, each: _Underway) -> None:
        with self.timed("wait_s"):
            for peer, message in each.leaving:
                with self._waiting_for(peer):
                    message.wait()
        each.leaving.clear()
        for payload in each.slots.values():
            self._staging.give(payload)
        each.slots.clear()

    def _make_steps(self, each: _Underway, level: int, operation: Reduction) -> None:
        for step in each.schedule.level(level):
            if isinstance(step, Send):
                payload = each.slots[step.slot]
                message = self._transport(step.peer).send(payload, step.peer, each.tag(step.slot))
                each.leaving.append((step.peer, message))
                self.figures["bytes_sent"] += payload.numel()
                if self._trail is not None:
                    self._trail.sent_nbytes += payload.numel()
            elif isinstance(step, Receive):
                with self.timed("wait_s"), self._waiting_for(step.peer):
                    each.arriving.pop(step.slot).wait()
            else:
                with self.timed(PHASES[type(step)]):
                    compute(step, operation, self._kernels, each.slots, each.coded, self._staging.take)
        for slots in each.schedule.spent[level : level + 1]:
            for slot in slots:
                self._staging.give(each.slots.pop(slot))
