"""The exchange (all-to-all): every rank sends one share of its values to each rank, and ends with one from each.

Before the exchange, chunk c holds the values for rank c. After it, chunk c holds the values from rank c. With N ranks
each sends N - 1 messages, in all (N - 1) / N of its values. Values are sent uncompressed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cgx.plan.algorithms.flat import in_turn, owned_chunks
from torch_cgx.plan.algorithms.slots import part
from torch_cgx.plan.program import Decode, Encode, Program, Receive, Send, Step

__all__ = ["program"]


def program(chunks_nonempty: Sequence[bool], rank: int, world: int) -> Program:
    """Return the steps of one rank. Empty chunks need none, and neither does a single rank.

    1. For each peer, from the next one on, encode its chunk and send it.
    2. Receive a chunk from each peer and decode it. The chunk of the rank before me is first, because that rank sends
       to me first. My own chunk stays in place.
    """
    owned_chunks(chunks_nonempty, rank, world)
    if not any(chunks_nonempty) or world == 1:
        return ()
    if not all(chunks_nonempty):
        raise ValueError(f"chunks: expected all of one length, got {list(chunks_nonempty)}")
    peers = in_turn(rank, world)
    steps: list[Step] = []
    for peer in peers:
        steps.append(Encode(peer, part(rank, peer), exact=True))
        steps.append(Send(part(rank, peer), peer))
    for peer in reversed(peers):
        steps.append(Receive(part(peer, rank), peer, exact=True))
        steps.append(Decode(part(peer, rank), peer))
    return tuple(steps)
