"""All ranks' programs for one pattern of chunks, and the slots in them, numbered alike on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch_cgx.algorithms import Topology
from torch_cgx.program import Encode, Program, Reduce

__all__ = ["SharedSlot", "programs_for"]


@dataclass(frozen=True, slots=True)
class SharedSlot:
    """A slot as all ranks see it."""

    index: int  # among all slots of the programs
    writer: int
    flag: int  # among the slots of its writer
    chunk: int
    exact: bool


@lru_cache(maxsize=256)
def programs_for(topology: Topology, nonempty: tuple[bool, ...]) -> tuple[tuple[Program, ...], dict[str, SharedSlot]]:
    """The programs by rank, and the slots that any of them writes, by name."""
    programs = tuple(topology.program(nonempty, rank) for rank in range(topology.world))
    slots: dict[str, SharedSlot] = {}
    for rank, program in enumerate(programs):
        written = [step for step in program if isinstance(step, Encode | Reduce)]
        for flag, step in enumerate(written):
            assert step.slot not in slots, f"{step.slot} has two writers"
            slots[step.slot] = SharedSlot(len(slots), rank, flag, step.chunk, step.exact)
    return programs, slots
