"""The hierarchy of nodes: each node sums its own values first, so that it sends its sum once.

Some ranks of each node speak for it: its first, second, ... rank for share 0, 1, ... of the values. The link of a
node carries 2 (M - 1) / M of the whole payload for M nodes, however many ranks a node has.

Nodes are numbered from 0 in the order of their first ranks, whatever their names are. Chunk share * M + node belongs
to that share, and that node's speaker sums it across nodes. If every rank is a node of its own, this is the flat
algorithm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple, Protocol, TypeVar

from torch_cgx.plan.algorithms import grid, ring, scatter_reduce_allgather
from torch_cgx.plan.algorithms.flat import check_rank
from torch_cgx.plan.algorithms.slots import inside
from torch_cgx.plan.program import Add, Decode, Encode, Join, Program, Receive, Reduce, Send, Step

__all__ = ["CROSS", "Among", "Cross", "check_nodes", "depth", "members_of", "most_shares", "n_chunks", "program"]

_T = TypeVar("_T")


class Among(Protocol):
    """A flat algorithm on some ranks and some chunks."""

    def __call__(
        self,
        ranks: Sequence[int],
        chunks: Sequence[int | None],
        rank: int,
        listeners: Sequence[int] = (),
        *,
        exact: bool = False,
        level: int = 0,
    ) -> list[Step]: ...


class Cross(NamedTuple):
    """An algorithm between the speakers of one share."""

    among: Among
    depth: Callable[[int], int]  # for this many speakers, the greatest level of a step, see `schedule`


# Keys are the values of CGX_CROSS_REDUCTION_TYPE.
CROSS: Mapping[str, Cross] = {
    "SRA": Cross(scatter_reduce_allgather.among, scatter_reduce_allgather.depth),
    "RING": Cross(ring.among, ring.depth),
    "GRID": Cross(grid.among, grid.depth),
}


def most_shares(nodes: Sequence[int]) -> int:
    """Return how many ranks can speak on every node: the ranks of the smallest node."""
    return min(Counter(nodes).values())


def n_chunks(nodes: Sequence[int], shares: int) -> int:
    return shares * len(set(nodes))


def depth(nodes: Sequence[int], cross: str) -> int:
    """Return the greatest level: a message to a speaker, those between speakers, and one from a speaker to its node."""
    n_nodes = len(set(nodes))
    return CROSS[cross].depth(n_nodes) + 2 * (len(nodes) > n_nodes)


def check_nodes(nodes: Sequence[int], shares: int, cross: str) -> None:
    if not nodes:
        raise ValueError("nodes: expected one for each rank, got none")
    if not 1 <= shares <= most_shares(nodes):
        raise ValueError(f"shares: expected 1 to {most_shares(nodes)}, the ranks of the smallest node, got {shares}")
    if cross not in CROSS:
        raise ValueError(f"the algorithm between nodes: expected {', '.join(CROSS)}, got {cross}")


def program(
    chunks_nonempty: Sequence[bool],
    rank: int,
    nodes: Sequence[int],
    *,
    shares: int,
    cross: str,
    compress_inside: bool,
) -> Program:
    """Return the steps of one rank. `nodes` holds each rank's node.

    1. For each share but my own, encode my values for the rank of my node that speaks for it, and send them to it.
    2. A speaker adds its node's values to its own, in the order of ranks, chunk by chunk as it needs them.
    3. It reduces its share together with that share's speakers on other nodes.
    4. It sends every sum unchanged to the other ranks of its node.
    5. Receive and decode the sums of the other shares.

    If `compress_inside` is False, contributions are exact within a node, and on a single node the sums are too.
    """
    check_nodes(nodes, shares, cross)
    check_rank(rank, len(nodes))
    if len(chunks_nonempty) != n_chunks(nodes, shares):
        raise ValueError(f"chunks: expected {n_chunks(nodes, shares)}, got {len(chunks_nonempty)}")
    if len(nodes) == 1:
        return ()
    members = members_of(tuple(nodes))
    home = next(ranks for ranks in members if rank in ranks)
    place = home.index(rank)
    exact_sums = not compress_inside and len(members) == 1
    spoken = _spoken(members, home, tuple(chunks_nonempty), shares, cross, exact_sums)

    # Start with the share after mine, so that not all ranks write to the same speaker.
    others = [share % shares for share in range(place + 1, place + 1 + shares) if share % shares != place]
    steps: list[Step] = []
    for chunk in _in_turn([_needed(spoken[share]) for share in others]):
        steps.append(Encode(chunk, inside(rank, chunk), not compress_inside))
        steps.append(Send(inside(rank, chunk), home[chunk // len(members)]))
    if place < shares:
        steps.extend(_gathering(spoken[place], [peer for peer in home if peer != rank], not compress_inside))
    for decode, level in _in_turn([_handed_on(spoken[share], rank) for share in others]):
        speaker = home[decode.chunk // len(members)]
        steps.append(Receive(decode.slot, speaker, level, exact_sums))
        steps.append(decode)
    return tuple(steps)


@lru_cache(maxsize=64)
def members_of(nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node."""
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    return tuple(map(tuple, members.values()))


@lru_cache(maxsize=256)
def _spoken(
    members: tuple[tuple[int, ...], ...],
    home: tuple[int, ...],
    nonempty: tuple[bool, ...],
    shares: int,
    cross: str,
    exact: bool,
) -> tuple[tuple[Step, ...], ...]:
    """Return the steps between nodes of each speaker of a node, with its sends to listeners."""
    spoken = []
    for share, speaker in enumerate(home[:shares]):
        first = share * len(members)
        chunks = [first + node if nonempty[first + node] else None for node in range(len(members))]
        speakers = [ranks[share] for ranks in members]
        listeners = [peer for peer in home if peer != speaker]
        level = int(any(len(ranks) > 1 for ranks in members))  # speakers wait for their nodes first
        spoken.append(CROSS[cross].among(speakers, chunks, speaker, listeners, exact=exact, level=level))
    return tuple(map(tuple, spoken))


def _needed(spoken: Sequence[Step]) -> list[int]:
    """Return the chunks whose values a speaker uses, in order of use."""
    return [chunk for step in spoken if isinstance(step, Encode | Reduce) for chunk in step.chunks]


def _gathering(spoken: Sequence[Step], peers: Sequence[int], exact: bool) -> Iterator[Step]:
    """Yield a speaker's steps, with the steps that add its node's values before its waits for other nodes' sums."""
    waits: list[Step] = []
    for step in spoken:
        if isinstance(step, Receive):
            waits.append(step)
            continue
        if isinstance(step, Reduce) and not step.inputs:  # a single node: one coding for all, so sum at once
            yield from (Receive(inside(peer, step.chunk), peer, exact=exact) for peer in peers)
            step = replace(step, inputs=tuple(inside(peer, step.chunk) for peer in peers))
        elif isinstance(step, Encode | Reduce):
            for chunk, peer in product(step.chunks, peers):
                yield Receive(inside(peer, chunk), peer, exact=exact)
                yield Add(inside(peer, chunk), chunk)
        yield from waits
        yield step
        waits.clear()


def _handed_on(spoken: Sequence[Step], listener: int) -> list[tuple[Decode, int]]:
    """Return a listener's decodes in the order of the speaker's sends, each with its level."""
    chunks = {step.slot: step.chunks for step in spoken if isinstance(step, Reduce | Decode | Join)}
    handed_on = []
    level = 1  # the speaker has already waited for its node
    for step in spoken:
        if isinstance(step, Receive):
            level = max(level, step.level)
        elif isinstance(step, Send) and step.peer == listener:
            first, *more = chunks[step.slot]
            handed_on.append((Decode(step.slot, first, tuple(more)), level + 1))
    return handed_on


def _in_turn(lists: Sequence[Sequence[_T]]) -> Iterator[_T]:
    """Yield the first item of each list, then the second of each, ..."""
    for place in range(max(map(len, lists), default=0)):
        yield from (items[place] for items in lists if place < len(items))
