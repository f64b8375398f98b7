"""Rounds: a program's messages, grouped for executors in which all ranks exchange payloads at once.

After the steps of one level (see `schedule`), every rank sends the messages that it has at that level and receives the
messages that were sent to it there. If one rank has several messages for another, the first goes in the first round,
the second in the second, and so on. A round has at most one message from each rank to each other. All ranks have the
same rounds.
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
    """One rank's part of a round: slots by peer."""

    sends: dict[int, Slot]
    receives: dict[int, Slot]


@lru_cache(maxsize=256)
def rounds_for(topology: Topology, nonempty: tuple[bool, ...], rank: int) -> tuple[tuple[Round, ...], ...]:
    """Return a rank's rounds by level. The last level has none, because nothing is sent there."""
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
