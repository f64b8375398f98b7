"""The ring: every rank receives only from the rank before it and sends only to the rank after it.

Rank c owns chunk c. With N ranks each sends 2 (N - 1) messages, in all 2 (N - 1) / N of the whole payload, as little
as an allreduce can, and all of it to one neighbour. But sums grow hop by hop and are quantized at each hop, so a
contribution is quantized up to N times. The longest path has 2 (N - 1) messages, where SRA has two.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cgx.plan.algorithms.slots import hop, total
from torch_cgx.plan.program import Decode, Encode, Receive, Reduce, Send, Step

__all__ = ["among", "depth"]


def depth(world: int) -> int:
    return 2 * (world - 1)


def among(
    ranks: Sequence[int],
    chunks: Sequence[int | None],
    rank: int,
    listeners: Sequence[int] = (),
    *,
    exact: bool = False,
    level: int = 0,
) -> list[Step]:
    """Return one rank's steps. Each of `ranks` owns the chunk at its index in `chunks`; None marks an empty chunk.

    The first steps run at `level`.

    1. Reduce-scatter: a chunk starts at the rank after its owner. Encode my values of the chunk before mine and send
       them to the next rank. Then, chunk by chunk backwards, receive a partial sum, add my values, encode it and send
       it to the next rank. The last chunk is my own: its sum is complete.
    2. Allgather: send that payload to the next rank. Receive the sums of the chunks before mine, forward each
       unchanged unless the next rank owns it, and decode it.

    This rank also forwards every sum to the listeners, none of which is in `ranks`.
    """
    me = ranks.index(rank)
    before, after = ranks[me - 1], ranks[(me + 1) % len(ranks)]
    backwards = [chunks[me - distance] for distance in range(1, len(ranks))]
    mine = chunks[me]
    steps: list[Step] = []

    for distance, chunk in enumerate(backwards, start=1):
        if chunk is None:
            continue
        if distance == 1:
            steps.append(Encode(chunk, hop(rank, chunk), exact))
        else:
            steps.append(Receive(hop(before, chunk), before, level + distance - 1, exact))
            steps.append(Reduce((hop(before, chunk),), chunk, hop(rank, chunk), final=False, exact=exact))
        steps.append(Send(hop(rank, chunk), after))

    if mine is not None:
        alone = len(ranks) == 1
        if not alone:
            steps.append(Receive(hop(before, mine), before, level + len(ranks) - 1, exact))
        steps.append(Reduce(() if alone else (hop(before, mine),), mine, total(mine), exact=exact))
        steps.extend(Send(total(mine), peer) for peer in (*(() if alone else (after,)), *listeners))

    for distance, chunk in enumerate(backwards, start=1):
        if chunk is None:
            continue
        steps.append(Receive(total(chunk), before, level + len(ranks) - 1 + distance, exact))
        if chunk != chunks[(me + 1) % len(ranks)]:
            steps.append(Send(total(chunk), after))
        steps.extend(Send(total(chunk), listener) for listener in listeners)
        steps.append(Decode(total(chunk), chunk))

    return steps
