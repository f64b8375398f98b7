"""Broadcast: every rank ends with the values of one, the root.

Every other node has a speaker, its first rank. The root sends chunk c only to the c-th speaker, and that speaker sends
it to all other speakers, so that no rank sends more than the whole tensor between nodes. Each speaker, and the root on
its own node, sends every chunk to all other ranks of its node. Values are sent uncompressed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch_cgx.plan.algorithms.flat import check_rank
from torch_cgx.plan.algorithms.slots import total
from torch_cgx.plan.program import Decode, Encode, Program, Receive, Send, Step

__all__ = ["depth", "n_chunks", "program"]


def n_chunks(nodes: Sequence[int]) -> int:
    return max(1, len(set(nodes)) - 1)


def depth(nodes: Sequence[int], root: int) -> int:
    """Return the longest path of a chunk in messages: to its speaker, to another, and to a rank of that node."""
    listens = max(Counter(node for node in nodes if node != nodes[root]).values(), default=1) > 1
    near = int(nodes.count(nodes[root]) > 1)
    return max(near, min(len(set(nodes)) - 1, 2) + listens)


def program(chunks_nonempty: Sequence[bool], rank: int, nodes: Sequence[int], root: int) -> Program:
    """Return the steps of one rank. Empty chunks need none, and neither does a single rank.

    1. The root encodes chunk after chunk, and sends each to its speaker and to all ranks of its own node.
    2. A speaker receives its own chunk from the root, and sends it to all other speakers.
    3. It receives each other chunk from that chunk's speaker. It sends every chunk to all ranks of its node, and
       decodes it.
    4. All other ranks receive every chunk from the speaker of their node, or the root, and decode it.
    """
    check_rank(rank, len(nodes))
    check_rank(root, len(nodes))
    if len(chunks_nonempty) != n_chunks(nodes):
        raise ValueError(f"chunks: expected {n_chunks(nodes)}, got {len(chunks_nonempty)}")
    speakers = [nodes.index(node) for node in dict.fromkeys(nodes) if node != nodes[root]]
    chunks = [chunk for chunk, nonempty in enumerate(chunks_nonempty) if nonempty]
    home = [peer for peer, node in enumerate(nodes) if node == nodes[rank] and peer != rank]
    steps: list[Step] = []
    if rank == root:
        for chunk in chunks:
            steps.append(Encode(chunk, total(chunk), exact=True))
            steps.extend(Send(total(chunk), peer) for peer in (*speakers[chunk : chunk + 1], *home))
        return tuple(steps) if len(nodes) > 1 else ()
    is_speaker = rank in speakers
    here = root if nodes[rank] == nodes[root] else nodes.index(nodes[rank])
    if here != root:  # first the chunk that the other speakers wait for
        chunks.sort(key=lambda chunk: (chunk - speakers.index(here)) % len(speakers))
    for chunk in chunks:
        mine = is_speaker and speakers[chunk] == rank
        source = (root if mine else speakers[chunk]) if is_speaker else here
        listeners = [peer for peer in speakers if mine and peer != rank] + (home if is_speaker else [])
        # A node's speaker gets its own chunk directly from the root, and the other chunks one message later.
        level = 1 if here == root else 2 - (speakers[chunk] == here) + (not is_speaker)
        steps.append(Receive(total(chunk), source, level, exact=True))
        steps.extend(Send(total(chunk), peer) for peer in listeners)
        steps.append(Decode(total(chunk), chunk))
    return tuple(steps)
