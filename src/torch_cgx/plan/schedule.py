"""In which order one rank makes the steps of many slices, so that computing and sending overlap.

A step's *level* is the number of messages on the longest way to it: what a rank can do without waiting is level 0,
what needs one message is level 1, and so on. Receives say theirs, as if no chunk were empty; a step without one is of
the level of the step before it. At tick t a rank makes the steps of level 0 of slice t, level 1 of slice
t - 1, and so on: it encodes one slice while the one before is on its way. Every message leads from one tick to a later
one, on all ranks alike, so nobody ever waits in a circle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.program import Program, Receive, Slot, Step
from torch_cgx.plan.programs import SharedSlot, program_for, programs_for

__all__ = ["Schedule", "levels_of", "schedule_for"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's program, by levels."""

    levels: tuple[Program, ...]  # as many for every rank and pattern of chunks; some may be empty
    slots: dict[Slot, SharedSlot]  # all ranks'


@lru_cache(maxsize=256)
def schedule_for(topology: Topology, nonempty: tuple[bool, ...], rank: int) -> Schedule:
    program = program_for(topology, nonempty, rank)
    levels: list[list[Step]] = [[] for _ in range(topology.depth + 1)]
    for step, level in zip(program, levels_of(program), strict=True):
        levels[level].append(step)
    return Schedule(tuple(map(tuple, levels)), programs_for(topology, nonempty)[1])


def levels_of(program: Program) -> list[int]:
    """Return the level of each step."""
    levels: list[int] = []
    level = 0
    for step in program:
        if isinstance(step, Receive):
            level = max(level, step.level)
        levels.append(level)
    return levels
