"""The grid: each rank exchanges payloads only with the ranks of its own row and column.

Rank c owns chunk c. The ranks of a column are consecutive, and so are their chunks. With R rows and C columns each rank
sends 2 (R - 1) + 2 (C - 1) messages, where SRA sends 2 (N - 1). It sends the same bytes, because a message along a row
holds the chunks of a whole column. Every contribution is quantized up to three times, once more than by SRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from torch_cgx.plan.algorithms import scatter_reduce_allgather
from torch_cgx.plan.algorithms.slots import row, sums, total
from torch_cgx.plan.program import Add, Decode, Encode, Join, Receive, Send, Step

__all__ = ["among", "depth", "n_rows"]


def n_rows(world: int) -> int:
    """Return the number of rows of the most square grid; 1 if the number of ranks is prime."""
    return next(rows for rows in range(isqrt(world), 0, -1) if world % rows == 0)


def depth(world: int) -> int:
    return 4 if n_rows(world) > 1 else scatter_reduce_allgather.depth(world)


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

    1. For each other rank of my row, encode my values of its column's chunks and send them to it.
    2. Receive my column's chunks from the other ranks of my row, and add them to my values.
    3. Run SRA within my column.
    4. Send my column's sums to the other ranks of my row as one payload. Receive and decode their columns' sums.

    This rank also forwards the sums of every column to the listeners, none of which is in `ranks`.
    """
    rows = n_rows(len(ranks))
    if rows == 1:
        return scatter_reduce_allgather.among(ranks, chunks, rank, listeners, exact=exact, level=level)
    assert not exact, "sums are exact on one node alone, which has no grid"
    columns = len(ranks) // rows
    column, place = divmod(ranks.index(rank), rows)
    of_column = [[c for c in chunks[at * rows : (at + 1) * rows] if c is not None] for at in range(columns)]
    others = [(column + distance) % columns for distance in range(1, columns)]
    peers = {at: ranks[at * rows + place] for at in others}  # of my row, by column
    mine = of_column[column]
    steps: list[Step] = []

    for at in others:
        if group := of_column[at]:
            slot = row(rank, group[0])
            steps.append(Encode(group[0], slot, exact, tuple(group[1:])))
            steps.append(Send(slot, peers[at]))

    if mine:
        for at in reversed(others):
            slot = row(peers[at], mine[0])
            steps.append(Receive(slot, peers[at], level + 1, exact))
            steps.append(Add(slot, mine[0], tuple(mine[1:])))
        here = slice(column * rows, (column + 1) * rows)
        steps.extend(scatter_reduce_allgather.among(ranks[here], chunks[here], rank, exact=exact, level=level + 1))
        slot = sums(rank, mine[0])
        steps.append(Join(tuple(total(chunk) for chunk in mine), tuple(mine), slot))
        steps.extend(Send(slot, peer) for peer in (*peers.values(), *listeners))

    for at in others:
        if group := of_column[at]:
            slot = sums(peers[at], group[0])
            steps.append(Receive(slot, peers[at], level + 4, exact))
            steps.extend(Send(slot, listener) for listener in listeners)
            steps.append(Decode(slot, group[0], tuple(group[1:])))

    return steps
