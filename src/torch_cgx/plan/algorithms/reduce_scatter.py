"""Reduce-scatter: every rank ends with the sum of one share, and of no other.

Chunk c lies in rank c's share. With N ranks each sends N - 1 messages, in all (N - 1) / N of the whole payload. It is
the first half of SRA: every contribution is quantized once, and the sum never, since no other rank needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cgx.plan.algorithms.flat import in_turn, owned_chunks
from torch_cgx.plan.algorithms.slots import part
from torch_cgx.plan.program import Encode, Program, Receive, Send, Step, Sum

__all__ = ["program"]


def program(chunks_nonempty: Sequence[bool], rank: int, world: int) -> Program:
    """Return the steps of one rank. Empty chunks need none, and neither does a single rank.

    1. For each peer, from the next one on, encode my values of its chunk and send them to it.
    2. Receive all peers' values of my chunk, first from the rank before me, because that rank sends to me first.
    3. Add them to my own in the order of the ranks.
    """
    chunks = owned_chunks(chunks_nonempty, rank, world)
    if world == 1:
        return ()
    peers = in_turn(rank, world)
    steps: list[Step] = []
    for peer in peers:
        if (chunk := chunks[peer]) is not None:
            steps.append(Encode(chunk, part(rank, chunk)))
            steps.append(Send(part(rank, chunk), peer))
    if (mine := chunks[rank]) is not None:
        steps.extend(Receive(part(peer, mine), peer) for peer in reversed(peers))
        steps.append(Sum(tuple(part(peer, mine) for peer in sorted(peers)), mine))
    return tuple(steps)
