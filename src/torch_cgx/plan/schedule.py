"""In which order one rank makes the steps of many slices, so that computing and sending overlap.

A step's *level* is the number of messages on the longest way to it: what a rank can do without waiting is level 0,
what needs one message is level 1, and so on. At tick t a rank makes the steps of level 0 of slice t, level 1 of slice
t - 1, and so on: it encodes one slice while the one before is on its way. Every message leads from one tick to a later
one, on all ranks alike, so nobody ever waits in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.program import Program, Receive, Send, Step
from torch_cgx.plan.programs import SharedSlot, programs_for

__all__ = ["Levels", "Schedule", "levels_for", "levels_of", "schedule_for"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's program, by levels."""

    levels: tuple[Program, ...]  # as many on every rank; those of a rank may be empty
    slots: dict[str, SharedSlot]  # all ranks'

    def level(self, level: int) -> Program:
        """Its steps; none beyond the last."""
        return self.levels[level] if level < len(self.levels) else ()


@dataclass(frozen=True, slots=True)
class Levels:
    """The level of each step of all ranks' programs, and the greatest of them."""

    by_rank: tuple[tuple[int, ...], ...]
    depth: int


@lru_cache(maxsize=256)
def levels_for(topology: Topology, nonempty: tuple[bool, ...]) -> Levels:
    """Return the levels of the programs of a topology."""
    by_rank = tuple(tuple(levels) for levels in levels_of(programs_for(topology, nonempty)[0]))
    return Levels(by_rank, max((level for levels in by_rank for level in levels), default=0))


@lru_cache(maxsize=256)
def schedule_for(topology: Topology, nonempty: tuple[bool, ...], rank: int) -> Schedule:
    programs, slots = programs_for(topology, nonempty)
    by_rank = levels_of(programs)
    depth = max((level for levels in by_rank for level in levels), default=0)
    mine = list(zip(programs[rank], by_rank[rank], strict=True))
    return Schedule(
        levels=tuple(tuple(step for step, of_step in mine if of_step == level) for level in range(depth + 1)),
        slots=slots,
    )


def levels_of(programs: Sequence[Program]) -> list[list[int]]:
    """The level of each step, by rank."""
    levels: list[list[int]] = [[] for _ in programs]
    sent: dict[tuple[int, int, str], int] = {}
    waiting: dict[tuple[int, int, str], int] = {}
    runnable = list(range(len(programs)))
    while runnable:
        rank = runnable.pop()
        mine = levels[rank]
        while len(mine) < len(programs[rank]):
            step: Step = programs[rank][len(mine)]
            level = mine[-1] if mine else 0
            if isinstance(step, Receive):
                message = (step.peer, rank, step.slot)
                if message not in sent:
                    waiting[message] = rank
                    break
                level = max(level, sent[message] + 1)
            elif isinstance(step, Send):
                message = (rank, step.peer, step.slot)
                sent[message] = level
                if message in waiting:
                    runnable.append(waiting.pop(message))
            mine.append(level)
    return levels
