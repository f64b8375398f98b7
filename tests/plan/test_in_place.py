"""Exact payloads that stay in the tensor: nothing may arrive over values that are still to be read or sent.

A payload can arrive as soon as its sender has sent it, before its receiver gets to that step. So the sender's step has
to come after every step of the receiver that reads those values, and after every other rank's receipt of what the
receiver sends from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from torch_cgx.engines.host.plans import homes_in_tensor
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.program import Decode, Encode, Program, Receive, Reduce, Send
from torch_cgx.plan.programs import program_for


def patterns(n_chunks: int) -> list[tuple[bool, ...]]:
    """Return which chunks are not empty: all patterns of few chunks; of many, none empty, and each one by itself."""
    if n_chunks <= 4:
        return [pattern for pattern in product((True, False), repeat=n_chunks) if any(pattern)]
    alone = [tuple(place == chunk for place in range(n_chunks)) for chunk in range(n_chunks)]
    return [(True,) * n_chunks, *alone]


class Order:
    """Which steps come before which, by the order of each program and by the messages between them.

    Steps are (rank, place in its program), sends and receipts are known by (slot, sender, receiver).
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.sends = {
            (step.slot, rank, step.peer): (rank, at)
            for rank, program in enumerate(programs)
            for at, step in enumerate(program)
            if isinstance(step, Send)
        }
        self.receipts = {
            (step.slot, step.peer, rank): (rank, at)
            for rank, program in enumerate(programs)
            for at, step in enumerate(program)
            if isinstance(step, Receive)
        }
        self.clocks: dict[tuple[int, int], list[int]] = {}  # by step: how many steps of each rank come before it
        now = [[0] * len(programs) for _ in programs]
        position = [0] * len(programs)
        went_on = True
        while went_on:
            went_on = False
            for rank, program in enumerate(programs):
                while position[rank] < len(program):
                    step = program[position[rank]]
                    if isinstance(step, Receive):
                        send = self.sends[step.slot, step.peer, rank]
                        if send not in self.clocks:
                            break
                        now[rank] = [max(pair) for pair in zip(now[rank], self.clocks[send], strict=True)]
                    position[rank] += 1
                    now[rank][rank] = position[rank]
                    self.clocks[rank, position[rank] - 1] = list(now[rank])
                    went_on = True
        assert position == [len(program) for program in programs], "a program waits for ever"

    def comes_before(self, first: tuple[int, int], second: tuple[int, int]) -> bool:
        rank, at = first
        return self.clocks[second][rank] > at


def hazards(programs: Sequence[Program]) -> list[str]:
    """Return what may come too early, where decoded values go to the tensor that is encoded from."""
    order = Order(programs)
    found = []
    for rank, program in enumerate(programs):
        homes = homes_in_tensor(program)
        receives = {step.slot: step.peer for step in program if isinstance(step, Receive)}
        for arrival in program:
            if not isinstance(arrival, Decode) or arrival.slot not in homes.keys() & receives.keys():
                continue  # my own is there already
            peer = receives[arrival.slot]
            sent = order.sends[arrival.slot, peer, rank]
            for at, step in enumerate(program):
                reads = isinstance(step, (Encode, Reduce)) and set(step.chunks) & set(arrival.chunks)
                if reads and not order.comes_before((rank, at), sent):
                    found.append(f"rank {rank}: {arrival} may come before: {step}")
                if not isinstance(step, Send) or step.slot == arrival.slot or step.slot not in homes:
                    continue
                is_hit = chunks_of(program, step.slot) & set(arrival.chunks)
                if is_hit and not order.comes_before(order.receipts[step.slot, rank, step.peer], sent):
                    found.append(f"rank {rank}: {arrival} may come before {step} has left")
        found += overwritten_by_own_steps(rank, program, order)
    return found


def overwritten_by_own_steps(rank: int, program: Program, order: Order) -> list[str]:
    """Return the sums that may be made over values that are still to be sent."""
    homes = homes_in_tensor(program)
    found = []
    for at, step in enumerate(program):
        if not isinstance(step, Reduce):
            continue
        for earlier in program[:at]:
            if not isinstance(earlier, Send) or earlier.slot not in homes:
                continue
            if not chunks_of(program, earlier.slot) & set(step.chunks):
                continue
            if not order.comes_before(order.receipts[earlier.slot, rank, earlier.peer], (rank, at)):
                found.append(f"rank {rank}: {step} may come before {earlier} has left")
    return found


def chunks_of(program: Program, slot: str) -> set[int]:
    return {
        chunk
        for step in program
        if isinstance(step, (Encode, Reduce, Decode)) and step.slot == slot
        for chunk in step.chunks
    }


@pytest.mark.parametrize("world", range(2, 13))
@pytest.mark.parametrize("algorithm", ["SRA", "RING", "REDUCE_SCATTER", "ALL_GATHER"])
def test_nothing_arrives_over_values_that_are_still_needed(algorithm: str, world: int) -> None:
    topology = Topology.flat(algorithm, world)
    for nonempty in patterns(topology.n_chunks):
        programs = [program_for(topology, nonempty, rank) for rank in range(world)]
        assert hazards(programs) == []


@pytest.mark.parametrize("world", range(2, 13))
def test_a_broadcast_arrives_over_values_that_nobody_needs(world: int) -> None:
    for root in range(world):
        topology = Topology.broadcast(tuple(range(world)), root)
        for nonempty in patterns(topology.n_chunks):
            programs = [program_for(topology, nonempty, rank) for rank in range(world)]
            assert hazards(programs) == []


def test_an_exchange_needs_another_tensor_for_what_it_receives() -> None:
    """Peers' values may come before this rank's have left; so the check can fail."""
    topology = Topology.flat("EXCHANGE", 3)
    programs = [program_for(topology, (True,) * 3, rank) for rank in range(3)]
    assert hazards(programs) != []
