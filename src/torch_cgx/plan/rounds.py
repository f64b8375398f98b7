"""Messages by meetings: what a program's sends and receives are where all ranks exchange payloads at once.

After the steps of one level (see `schedule`) every rank sends what it sends at that level, and receives what is sent to
it there. Where two ranks have several messages for each other, the first goes in the first round, the second in the
second, and so on: in a round there is at most one from each rank to each other. All ranks have the same rounds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.program import Send, Slot
from torch_cgx.plan.programs import programs_for
from torch_cgx.plan.schedule import levels_of

__all__ = ["Round", "rounds_for"]


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's part: slots by peer."""

    sends: dict[int, Slot]
    receives: dict[int, Slot]


@lru_cache(maxsize=256)
def rounds_for(topology: Topology, nonempty: tuple[bool, ...], rank: int) -> tuple[tuple[Round, ...], ...]:
    """By level; nothing is sent at the last."""
    programs, _ = programs_for(topology, nonempty)
    messages: dict[int, dict[tuple[int, int], list[Slot]]] = defaultdict(lambda: defaultdict(list))
    for sender, program in enumerate(programs):
        for step, level in zip(program, levels_of(program), strict=True):
            if isinstance(step, Send):
                messages[level][sender, step.peer].append(step.slot)
    rounds = []
    for level in range(topology.depth + 1):
        pairs = messages[level]
        count = max(map(len, pairs.values()), default=0)
        rounds.append(tuple(_round(pairs, number, rank) for number in range(count)))
    return tuple(rounds)


def _round(pairs: dict[tuple[int, int], list[Slot]], number: int, rank: int) -> Round:
    here = {pair: slots[number] for pair, slots in pairs.items() if number < len(slots)}
    return Round(
        sends={receiver: slot for (sender, receiver), slot in here.items() if sender == rank},
        receives={sender: slot for (sender, receiver), slot in here.items() if receiver == rank},
    )
