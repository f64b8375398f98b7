"""Scatter-reduce-allgather (SRA): every rank reduces one chunk and hands the sum to all.

Rank c owns chunk c. With N ranks each sends 2 (N - 1) messages, in all 2 (N - 1) / N of the whole payload, as
little as an allreduce can. Every contribution is quantized at most twice, whatever N is.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cgx.program import Decode, Encode, Program, Receive, Reduce, Send, Step


def program(chunks_nonempty: Sequence[bool], rank: int, world: int) -> Program:
    """The steps of one rank. Nothing is done for an empty chunk, nor by the only rank of a world.

    1. Scatter: for each peer, encode my values of its chunk and send them to it.
    2. Reduce: receive all peers' values of my chunk, add them to mine in the order of ranks, encode the sum.
    3. Allgather: send that payload to every peer; receive and decode every other chunk's sum.

    Peers are taken in turn from the next rank on, so that not all ranks wait for, or write to, the same one.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank: expected 0 to {world - 1}, got {rank}")
    if len(chunks_nonempty) != world:
        raise ValueError(f"chunks: expected one for each of {world} ranks, got {len(chunks_nonempty)}")
    if world == 1:
        return ()
    peers = [(rank + distance) % world for distance in range(1, world)]
    owners = [peer for peer in peers if chunks_nonempty[peer]]
    steps: list[Step] = []

    for owner in owners:
        steps.append(Encode(owner, _part(rank, owner)))
        steps.append(Send(_part(rank, owner), owner))

    if chunks_nonempty[rank]:
        # The rank before me starts with my chunk, so that its part comes first.
        steps.extend(Receive(_part(peer, rank), peer) for peer in reversed(peers))
        steps.append(Reduce(tuple(_part(peer, rank) for peer in sorted(peers)), rank, _sum(rank)))
        steps.extend(Send(_sum(rank), peer) for peer in peers)

    for owner in owners:
        steps.append(Receive(_sum(owner), owner))
        steps.append(Decode(_sum(owner), owner))

    return tuple(steps)


def _part(source: int, chunk: int) -> str:
    """The slot of one rank's values of a chunk, for the chunk's owner."""
    return f"part:{source}>{chunk}"


def _sum(chunk: int) -> str:
    """The slot of a chunk's encoded sum."""
    return f"sum:{chunk}"
