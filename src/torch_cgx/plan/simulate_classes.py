"""Simulates one node instead of all: for groups of thousands of ranks, in milliseconds.

Nodes of a cluster whose nodes are all alike do the same at the same time: number nodes from another one on, and the
programs stay what they are. So a message from node 0 to node d leaves and arrives when one from node -d to node 0
does, and it is enough to run the programs of node 0 and to hand each message that it sends to other nodes back to it
under the name that it has there. That is exact where all chunks have the same length, which it takes for granted: the
mean of the real ones. (Real chunks are cut at whole blocks: of a small slice on many ranks some would be empty.)

Beyond `most` nodes that is not the whole program any more: it is made for `most` nodes, and each other node stands for
several. What concerns the chunks of other nodes, or goes to other nodes, counts that many times: values, bytes and
messages, so that their sums over a program are those of the large group. In a ring, where message waits for message,
latencies and messages' fixed times count that many times as well; in SRA, where they do not wait for each other, once
(the other fixed times keep the processor busy while bytes pass). What is lost is the overlap between those that are
lumped together. Tests compare both shortcuts with all ranks, and with more nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.algorithms.slots import moved
from torch_cgx.plan.program import Join, Receive, Reduce, Send, Step
from torch_cgx.plan.programs import programs_for
from torch_cgx.plan.simulate import Costs, Length, Operation, Script, Size, Timing, is_exact, kernel_s, ordered, play

__all__ = ["MOST_NODES", "Cluster", "simulate_cluster"]

MOST_NODES = 8


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that are all alike, and how their ranks reduce."""

    nodes: int
    ranks: int  # of each node
    algorithm: str = "SRA"
    flat: bool = False  # all ranks alike, wherever they are; else one or more of each node speak for it
    shares: int = 1  # how many
    compress_inside: bool = True

    def __post_init__(self) -> None:
        if self.algorithm == "GRID":
            raise ValueError("algorithm: expected SRA or RING, got GRID, whose nodes do not all do the same in turn")
        if self.nodes < 1 or self.ranks < 1:
            raise ValueError(f"expected at least one node and one rank on each, got {self.nodes} and {self.ranks}")

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    @property
    def is_flat(self) -> bool:
        return self.flat or self.ranks == 1 or self.nodes == 1

    @property
    def n_chunks(self) -> int:
        return self.world if self.is_flat else self.nodes * self.shares

    def topology(self) -> Topology:
        """The whole one. Where it is flat, it does not tell who is on which node."""
        if self.is_flat:
            return Topology.flat(self.algorithm, self.world)
        nodes = tuple(rank // self.ranks for rank in range(self.world))
        return Topology(self.algorithm, nodes, shares=self.shares, compress_inside=self.compress_inside)


def simulate_cluster(
    cluster: Cluster, size: Size, slices: int, costs: Costs, *, most: int = MOST_NODES, rounds: bool = False
) -> Timing:
    """One allreduce of so many slices, whose chunks are all of one size."""
    if cluster.world == 1:
        return Timing(0.0, 0.0, 0.0, (0.0,), 0.0)
    small = Cluster(min(cluster.nodes, most), *_rest(cluster))
    lumped = (cluster.n_chunks - _own(cluster)) / max(1, small.n_chunks - _own(small)) if small != cluster else 1.0
    scripts, kinds, sends = _scripts(small, slices, rounds)
    durations = [
        kernel_s(step, size, costs.speeds, exact, lumped if lumped_inputs else 1.0) * (lumped if foreign else 1.0)
        for step, exact, foreign, lumped_inputs in kinds
    ]
    lengths = [
        Length((size.exact_nbytes if exact else size.nbytes) * (lumped if foreign else 1.0), lumped if foreign else 1.0)
        for exact, foreign in sends
    ]
    return play(scripts, durations, lengths, costs, serial=cluster.algorithm == "RING")


def _rest(cluster: Cluster) -> tuple[int, str, bool, int, bool]:
    return cluster.ranks, cluster.algorithm, cluster.flat, cluster.shares, cluster.compress_inside


def _own(cluster: Cluster) -> int:
    """Chunks that are never lumped together: a rank's own, or those of its node."""
    return 1 if cluster.is_flat else cluster.shares


class _Kind(NamedTuple):
    """A kind of steps that compute, all as long."""

    step: Step  # one of them
    exact: bool
    foreign: bool  # counts as often as other nodes are lumped together
    lumped_inputs: bool  # its inputs do


class _Sending(NamedTuple):
    """A kind of messages, all as long."""

    exact: bool
    foreign: bool


@lru_cache(maxsize=64)
def _scripts(cluster: Cluster, slices: int, rounds: bool) -> tuple[list[Script], list[_Kind], list[_Sending]]:
    """What the ranks of node 0 do, and what the tables of durations and lengths are made from."""
    topology = cluster.topology()
    nonempty = (True,) * topology.n_chunks
    slots = {slot: (shared.chunks[0], shared.exact) for slot, shared in programs_for(topology, nonempty)[1].items()}
    messages = _messages(cluster)
    kinds: dict[tuple[type[Step], int, bool, bool, bool], tuple[int, _Kind]] = {}
    sends: dict[_Sending, int] = {}

    def operation(rank: int, number: int, step: Step) -> Operation:
        first = number * len(messages)
        if isinstance(step, Receive):
            return (first + messages[step.peer, rank, step.slot],)
        if isinstance(step, Send):
            chunk, exact = slots[step.slot]
            node, peer = divmod(step.peer, cluster.ranks)
            sending = _Sending(exact, cluster.is_flat or node > 0 or _foreign(cluster, rank, chunk))
            message = first + messages[_received(cluster, rank, step.peer, step.slot)]
            return message, peer, sends.setdefault(sending, len(sends)), node > 0
        assert not isinstance(step, Join)
        # A sum of my own chunk has an input from each other node; in a ring, one in all.
        inputs = step.inputs if isinstance(step, Reduce) else ()
        whole = cluster.algorithm != "RING" and any(slot.startswith("part:") for slot in inputs)
        kind = _Kind(step, is_exact(step, slots), _foreign(cluster, rank, step.chunk), whole)
        return kinds.setdefault((type(step), len(inputs), *kind[1:]), (len(kinds), kind))[0]

    scripts = [
        Script(rank, 0, [operation(rank, *each) for each in ordered(topology, [nonempty] * slices, rank, rounds)])
        for rank in range(cluster.ranks)
    ]
    return scripts, [kind for _, kind in kinds.values()], list(sends)


def _foreign(cluster: Cluster, rank: int, chunk: int) -> bool:
    return chunk != rank if cluster.is_flat else chunk % cluster.nodes != 0


def _received(cluster: Cluster, rank: int, peer: int, slot: str) -> tuple[int, int, str]:
    """What node 0 receives when each node sends what its rank sends: sender, receiver, slot."""
    distance = peer // cluster.ranks

    def rank_there(number: int) -> int:
        return (number - distance * cluster.ranks) % cluster.world

    def chunk_there(chunk: int) -> int:
        if cluster.is_flat:
            return rank_there(chunk)
        share, node = divmod(chunk, cluster.nodes)
        return share * cluster.nodes + (node - distance) % cluster.nodes

    return rank_there(rank), rank_there(peer), moved(slot, rank_there, chunk_there)


@lru_cache(maxsize=32)
def _messages(cluster: Cluster) -> dict[tuple[int, int, str], int]:
    """All that node 0 receives, numbered."""
    topology = cluster.topology()
    keys = [
        (step.peer, rank, step.slot)
        for rank in range(cluster.ranks)
        for step in topology.program((True,) * topology.n_chunks, rank)
        if isinstance(step, Receive)
    ]
    return {key: number for number, key in enumerate(keys)}
