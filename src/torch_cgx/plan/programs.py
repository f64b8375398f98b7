"""All ranks' programs for one pattern of chunks, the slots in them, numbered alike on every rank, and their layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch_cgx.plan.algorithms import IN_SHARES, Topology
from torch_cgx.plan.layout import Layer, Layout, make_layout, make_shares_layout
from torch_cgx.plan.program import Encode, Program, Reduce

__all__ = ["SharedSlot", "layout_for", "programs_for"]


def layout_for(topology: Topology, layers: Sequence[Layer], itemsize: int, slice_nbytes: int) -> Layout:
    """How a tensor is cut for the programs of a topology. Where ranks have shares, the layers are those of one."""
    make = make_shares_layout if topology.algorithm in IN_SHARES else make_layout
    return make(layers, topology.n_chunks, itemsize, slice_nbytes)


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
