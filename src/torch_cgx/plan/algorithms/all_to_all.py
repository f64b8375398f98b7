"""All-to-all: every rank sends all its values to all others, and everyone sums up for itself.

For tiny buffers: one message after another instead of SRA's two, and every contribution is quantized only once. But
every rank sends N - 1 times the whole payload.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cgx.plan.algorithms.flat import check_rank
from torch_cgx.plan.algorithms.slots import part
from torch_cgx.plan.program import Combine, Encode, Program, Receive, Send, Step

__all__ = ["n_chunks", "program"]


def n_chunks(world: int) -> int:
    """One message a peer, however many ranks there are; programs for more chunks are right too."""
    return 1


def program(chunks_nonempty: Sequence[bool], rank: int, world: int) -> Program:
    """The steps of one rank. Nothing is done for an empty chunk, nor by the only rank of a world.

    1. Encode my values of every chunk and send them to every peer, from the next rank on.
    2. For every chunk, receive all peers' values, and combine them and mine in the order of ranks: everyone adds up
       the same payloads in the same order, so that all end with the same bits.
    """
    check_rank(rank, world)
    if world == 1:
        return ()
    peers = [(rank + distance) % world for distance in range(1, world)]
    chunks = [chunk for chunk, nonempty in enumerate(chunks_nonempty) if nonempty]
    steps: list[Step] = []
    for chunk in chunks:
        steps.append(Encode(chunk, part(rank, chunk)))
        steps.extend(Send(part(rank, chunk), peer) for peer in peers)
    for chunk in chunks:
        steps.extend(Receive(part(peer, chunk), peer) for peer in reversed(peers))
        steps.append(Combine(tuple(part(source, chunk) for source in range(world)), chunk))
    return tuple(steps)
