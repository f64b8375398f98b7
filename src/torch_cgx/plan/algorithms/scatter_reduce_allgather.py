"""Scatter-reduce-allgather (SRA): every rank reduces one chunk and sends the sum to all others.

Rank c owns chunk c. With N ranks each sends 2 (N - 1) messages, in all 2 (N - 1) / N of the whole payload, as
little as an allreduce can. Every contribution is quantized at most twice, whatever N is.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cgx.plan.algorithms.slots import part, total
from torch_cgx.plan.program import Decode, Encode, Receive, Reduce, Send, Step

__all__ = ["among", "depth"]


def depth(world: int) -> int:
    return 2 if world > 1 else 0


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

    1. Scatter: for each peer, encode my values of its chunk and send them to it.
    2. Reduce: receive all peers' values of my chunk, add them to mine in the order of the ranks, encode the sum.
    3. Allgather: send that payload to every peer; receive and decode every other chunk's sum.

    Peers are served in turn from the next rank on, so that not all ranks wait for, or write to, the same one. This
    rank also forwards every sum to the listeners, none of which is in `ranks`.
    """
    me = ranks.index(rank)
    places = [(me + distance) % len(ranks) for distance in range(1, len(ranks))]
    peers = [ranks[place] for place in places]
    others = [(ranks[place], chunk) for place in places if (chunk := chunks[place]) is not None]
    mine = chunks[me]
    steps: list[Step] = []

    for owner, chunk in others:
        slot = part(rank, chunk)
        steps.append(Encode(chunk, slot, exact))
        steps.append(Send(slot, owner))

    if mine is not None:
        # The rank before me starts with my chunk, so its part arrives first.
        steps.extend(Receive(part(peer, mine), peer, level + 1, exact) for peer in reversed(peers))
        parts = tuple(part(peer, mine) for peer in ranks if peer != rank)
        slot = total(mine)
        steps.append(Reduce(parts, mine, slot, exact=exact))
        steps.extend(Send(slot, peer) for peer in (*peers, *listeners))

    for owner, chunk in others:
        slot = total(chunk)
        steps.append(Receive(slot, owner, level + 2, exact))
        steps.extend(Send(slot, listener) for listener in listeners)
        steps.append(Decode(slot, chunk))

    return steps
