"""The order in which one rank runs the steps of many slices, so that computing and sending overlap.

A step's *level* is the number of messages on the longest path to it. A step that needs no message has level 0, a step
that needs one has level 1, and so on. Receives state their level, as if no chunk were empty. Any other step has the
level of the step before it. At tick t a rank runs the steps of level 0 of slice t, level 1 of slice t - 1, and so on:
it encodes one slice while the slice before is being sent. On all ranks every message leads from one tick to a later
one, so there is never a circular wait.
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

    levels: tuple[Program, ...]  # the same number for every rank and pattern of chunks; some may be empty
    slots: dict[Slot, SharedSlot]  # of all ranks


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
