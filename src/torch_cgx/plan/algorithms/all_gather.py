"""All-gather: every rank ends with the shares of all.

Chunk c lies in rank c's share. With N ranks each sends its own payload N - 1 times. A share is quantized once, by its
owner. The owner then decodes it like every other rank, so all ranks gather the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cgx.plan.algorithms.flat import in_turn, owned_chunks
from torch_cgx.plan.algorithms.slots import total
from torch_cgx.plan.program import Decode, Encode, Program, Receive, Send, Step

__all__ = ["program"]


def program(chunks_nonempty: Sequence[bool], rank: int, world: int) -> Program:
    """Return the steps of one rank. Empty chunks need none, and neither does a single rank.

    1. Encode my chunk and send that payload to all peers, from the next one on.
    2. Decode it over my own values.
    3. Receive and decode every other chunk. The chunk of the rank before me is first, because that rank sends to me
       first.
    """
    chunks = owned_chunks(chunks_nonempty, rank, world)
    if world == 1:
        return ()
    peers = in_turn(rank, world)
    steps: list[Step] = []
    if (mine := chunks[rank]) is not None:
        steps.append(Encode(mine, total(mine)))
        steps.extend(Send(total(mine), peer) for peer in peers)
        steps.append(Decode(total(mine), mine))
    for peer in reversed(peers):
        if (chunk := chunks[peer]) is not None:
            steps.append(Receive(total(chunk), peer))
            steps.append(Decode(total(chunk), chunk))
    return tuple(steps)
