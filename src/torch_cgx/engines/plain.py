"""Execution of programs over collectives of a torch group, for groups in which a rank has no native engine.

It runs one slice at a time: compute, exchange the payloads of all ranks, compute again. Nothing overlaps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from torch_cgx.engines.computing import PHASES, Reduction, compute
from torch_cgx.engines.recorder import Trail
from torch_cgx.errors import CGXTimeoutError
from torch_cgx.kernels import Kernels
from torch_cgx.plan.layout import Chunk, Slice
from torch_cgx.plan.program import Receive, Send, Slot
from torch_cgx.plan.rounds import Round, rounds_for
from torch_cgx.plan.schedule import schedule_for

__all__ = ["PlainEngine"]

_SLICE = timedelta(milliseconds=20)  # of a wait, between two checks of the clock
_SLICE_ENDED = "Operation timed out!"  # torch's words for a wait that ended before its operation did


class PlainEngine:
    """Runs programs on `group`, a torch group with `alltoall_base`. Meanwhile the caller starts nothing else on it."""

    def __init__(self, group: Any, kernels: Kernels, rank: int) -> None:
        self._group = group
        self._kernels = kernels
        self._rank = rank
        self.reset_figures()

    def reset_figures(self) -> None:
        names = ("bytes_sent", "encode_s", "wait_s", "reduce_s", "decode_s")
        self.figures: dict[str, float] = dict.fromkeys(names, 0)

    def run(self, operation: Reduction, timeout: timedelta, trail: Trail) -> None:
        """Run an operation to its end. After an error the ranks are out of step, and the group has failed."""
        operation = replace(operation, rounding=replace(operation.rounding, rank=self._rank))
        deadline_s = time.monotonic() + timeout.total_seconds()
        with torch.inference_mode():  # the values may be a tensor of that mode
            for part in operation.layout.slices:
                self._run_slice(part, operation, deadline_s, trail)

    def _run_slice(self, part: Slice, operation: Reduction, deadline_s: float, trail: Trail) -> None:
        key = (operation.topology, tuple(chunk.nbytes > 0 for chunk in part.chunks), self._rank)
        schedule, rounds = schedule_for(*key), rounds_for(*key)
        slots: dict[Slot, Tensor] = {}

        def coded(slot: Slot) -> Chunk:
            shared = schedule.slots[slot]
            return part.joined(shared.chunks).coded(shared.exact)

        for level, steps in enumerate(schedule.levels):
            for step in steps:
                if not isinstance(step, Send | Receive):
                    with self._timed(PHASES[type(step)], trail):
                        compute(step, operation, self._kernels, slots, coded, _bytes)
            for turn in rounds[level]:
                incoming = {peer: coded(slot).nbytes for peer, slot in turn.receives.items()}
                with self._timed("wait_s", trail):
                    arrived = self._exchange(turn, slots, incoming, operation.topology.world, deadline_s)
                slots.update(zip(turn.receives.values(), arrived, strict=True))
                sent_nbytes = sum(slots[slot].numel() for slot in turn.sends.values())
                self.figures["bytes_sent"] += sent_nbytes
                trail.sent_nbytes += sent_nbytes

    def _exchange(
        self, turn: Round, slots: dict[Slot, Tensor], incoming: dict[int, int], world: int, deadline_s: float
    ) -> list[Tensor]:
        """Send this turn's payloads and return those that arrive, in the order of `turn.receives`."""
        lengths = [incoming.get(peer, 0) for peer in range(world)]
        payloads = [slots[turn.sends[peer]] for peer in sorted(turn.sends)]
        sent = torch.cat(payloads) if payloads else _bytes(0)
        received = _bytes(sum(lengths))
        leaving = [slots[turn.sends[peer]].numel() if peer in turn.sends else 0 for peer in range(world)]
        options = c10d.AllToAllOptions()
        options.timeout = timedelta(seconds=max(0.001, deadline_s - time.monotonic()))
        work = self._group.alltoall_base(received, sent, lengths, leaving, options)
        while not _has_ended(work):
            if time.monotonic() > deadline_s:  # not every torch respects the option
                raise CGXTimeoutError("Timed out waiting for the payloads of other ranks")
        parts = torch.split(received, lengths)
        return [parts[peer] for peer in turn.receives]

    @contextmanager
    def _timed(self, phase: str, trail: Trail) -> Iterator[None]:
        start = time.perf_counter()
        yield
        elapsed_s = time.perf_counter() - start
        self.figures[phase] += elapsed_s
        trail.add(phase.removesuffix("_s"), elapsed_s)


def _has_ended(work: Any) -> bool:
    """Wait a moment. Return whether the work has ended, or raise its error."""
    try:
        work.wait(_SLICE)
    except RuntimeError as error:
        if _SLICE_ENDED in str(error):
            return False
        raise
    return True


def _bytes(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
