"""A simulator of one node instead of all: for groups of thousands of ranks, in milliseconds.

In a cluster of identical nodes, all nodes do the same at the same time: if numbering starts at another node, the
programs stay the same. So a message from node 0 to node d leaves and arrives at the same time as one from node -d to
node 0. It is enough to run the programs of node 0, and to return each message that it sends to other nodes to it, under
the name that it has there. In a grid, d and -d are counted by rows and columns. The result is exact if all chunks have
the same length. That is assumed: they get the mean length of the real ones. (Real chunks are cut at whole blocks: of a
small slice on many ranks some would be empty.)

Beyond `most` nodes the program is not the whole one: it is made for `most` nodes, and each other node stands for
several. Work on the chunks of other nodes, and messages to other nodes, count that many times: values, bytes and
messages, so that their sums over a program are those of the large group. In a ring, where each message waits for the
one before, latencies and messages' fixed times count that many times as well. In SRA, where messages do not wait for
each other, they count once (the other fixed times keep the processor busy while bytes pass). In a grid of more than 7
rows or columns, each other row and each other column stands for several. The overlap between nodes that are lumped
together is lost. Tests compare both shortcuts with all ranks, and with more nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from torch_cgx.plan.algorithms import ALGORITHMS, Topology, grid
from torch_cgx.plan.algorithms.hierarchical import CROSS
from torch_cgx.plan.algorithms.slots import PART, ROW, SUMS
from torch_cgx.plan.costs import Costs
from torch_cgx.plan.program import Compute, Encode, Join, Receive, Reduce, Send, Slot, Step, Sum
from torch_cgx.plan.programs import program_for
from torch_cgx.plan.simulate import (
    Length,
    Operation,
    Script,
    Size,
    Timing,
    is_exact,
    kernel_s,
    ordered,
    play,
    together,
)

__all__ = ["MOST_NODES", "Cluster", "simulate_cluster"]

MOST_NODES = 8
_MOST_LINES = 7  # rows or columns. Up to 7 by 7, rows and columns are the most square grid of their number, as required


@dataclass(frozen=True, slots=True)
class Cluster:
    """Identical nodes, and the way their ranks reduce."""

    nodes: int
    ranks: int  # per node
    algorithm: str = "SRA"
    flat: bool = False  # ignore nodes; else one or more ranks of each node speak for it
    shares: int = 1  # the number of ranks that speak for a node
    compress_inside: bool = True

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks < 1:
            raise ValueError(f"expected at least one node and one rank on each, got {self.nodes} and {self.ranks}")
        if self.algorithm == "GRID" and self.flat and self.ranks > 1:
            raise ValueError("flat: expected one rank per node in a GRID, whose rows and columns are of nodes")

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    @property
    def is_flat(self) -> bool:
        return self.flat or self.ranks == 1 or self.nodes == 1

    @property
    def n_chunks(self) -> int:
        return self.world if self.is_flat else self.nodes * self.shares

    @property
    def is_grid(self) -> bool:
        """Return whether there is more than one column. A prime number of nodes has no grid."""
        return self.column < self.nodes

    @property
    def column(self) -> int:
        """Return how many nodes a column of the grid has; without a grid, all of them."""
        rows = grid.n_rows(self.nodes) if self.algorithm == "GRID" else 1
        return rows if rows > 1 else self.nodes

    @property
    def depth(self) -> int:
        """Return the greatest level of any step, see `schedule`."""
        if self.is_flat:
            return ALGORITHMS[self.algorithm].depth(self.world)
        return CROSS[self.algorithm].depth(self.nodes) + 2

    def topology(self) -> Topology:
        """Return the topology of the whole cluster. If it is flat, it does not tell which rank is on which node."""
        if self.is_flat:
            return Topology.flat(self.algorithm, self.world)
        nodes = tuple(rank // self.ranks for rank in range(self.world))
        return Topology(self.algorithm, nodes, shares=self.shares, compress_inside=self.compress_inside)


def simulate_cluster(
    cluster: Cluster,
    size: Size,
    slices: int,
    costs: Costs,
    *,
    most: int = MOST_NODES,
    rounds: bool = False,
    lag: int = 1,
) -> Timing:
    """Time one allreduce of `slices` slices, whose chunks all have the same size."""
    if cluster.world == 1:
        return Timing(0.0, 0.0, 0.0, (0.0,), 0.0)
    small, lumps = _lumped(cluster, most)
    scripts, kinds, sends = _scripts(small, slices, rounds, lag)

    def chunks(number: int) -> int:
        """Return the number of chunks in a payload of the whole cluster: one, or those of a column."""
        return number if number == 1 else cluster.column

    durations = [
        kernel_s(
            kind.step,
            together([size] * chunks(len(kind.step.chunks))),
            costs.speeds,
            kind.exact,
            lumps[1] if kind.lumped_inputs else 1.0,
        )
        * lumps[kind.lump]
        for kind in kinds
    ]
    lengths = []
    for sending in sends:
        nbytes = chunks(sending.chunks) * (size.exact_nbytes if sending.exact else size.nbytes)
        lengths.append(Length(nbytes * lumps[sending.lump], lumps[sending.lump]))
    return play(scripts, durations, lengths, costs, serial=cluster.algorithm == "RING")


# Indices of how many a step or a message stands for, by the chunks and nodes it concerns. The last two are for grids.
_OWN, _FOREIGN, _ACROSS, _CHUNK_ACROSS = range(4)


def _lumped(cluster: Cluster, most: int) -> tuple[Cluster, tuple[float, ...]]:
    """Return the cluster whose programs are run, and how many each kind of step or message stands for."""
    if not cluster.is_grid:
        small = replace(cluster, nodes=min(cluster.nodes, most))
        others = max(1, small.n_chunks - _own(small))
        return small, (1.0, (cluster.n_chunks - _own(cluster)) / others if small != cluster else 1.0)
    rows, columns = cluster.column, cluster.nodes // cluster.column
    few_rows, few_columns = min(rows, _MOST_LINES), min(columns, _MOST_LINES)
    small = replace(cluster, nodes=few_rows * few_columns)
    assert small.column == few_rows
    down, across = (rows - 1) / (few_rows - 1), (columns - 1) / (few_columns - 1)
    return small, (1.0, down, across, across * rows / few_rows)


def _own(cluster: Cluster) -> int:
    """Return the number of chunks that are never lumped together: a rank's own, or those of its node."""
    return 1 if cluster.is_flat else cluster.shares


class _Kind(NamedTuple):
    """A kind of compute step. All steps of a kind take the same time."""

    step: Compute  # one of them
    exact: bool
    lump: int  # how many it stands for, see `_lumped`
    lumped_inputs: bool  # each input stands for as many as there are nodes, or rows, lumped together


class _Sending(NamedTuple):
    """A kind of message. All messages of a kind have the same length."""

    exact: bool
    lump: int  # how many it stands for
    chunks: int


@lru_cache(maxsize=64)
def _scripts(cluster: Cluster, slices: int, rounds: bool, lag: int) -> tuple[list[Script], list[_Kind], list[_Sending]]:
    """Return the scripts of node 0's ranks, and the kinds of steps and messages that their tables are made from."""
    topology = cluster.topology()
    nonempty = (True,) * topology.n_chunks
    slots = _slots(cluster)
    messages = _messages(cluster)
    kinds: dict[tuple[type[Step], int, int, bool, int, bool], tuple[int, _Kind]] = {}
    sends: dict[_Sending, int] = {}

    def operation(rank: int, number: int, step: Step) -> Operation:
        first = number * len(messages)
        if isinstance(step, Receive):
            return (first + messages[step.peer, rank, step.slot],)
        if isinstance(step, Send):
            chunks, exact = slots[step.slot]
            node, peer = divmod(step.peer, cluster.ranks)
            lump = _lump(cluster, rank, step.slot.what, chunks[0], cluster.is_flat or node > 0)
            sending = _Sending(exact, lump, len(chunks))
            message = first + messages[_received(cluster, rank, step.peer, step.slot)]
            return message, peer, sends.setdefault(sending, len(sends)), node > 0
        assert not isinstance(step, Join)
        # A sum of my own chunk has an input from each other node. In a ring it has only one.
        inputs = step.inputs if isinstance(step, Reduce) else ()
        whole = cluster.algorithm != "RING" and any(slot.what == PART for slot in inputs)
        what = "" if isinstance(step, Sum) else step.slot.what
        kind = _Kind(step, is_exact(step, slots), _lump(cluster, rank, what, step.chunk), whole)
        return kinds.setdefault((type(step), len(inputs), len(step.chunks), *kind[1:]), (len(kinds), kind))[0]

    scripts = [
        Script(
            rank,
            0,
            [
                operation(rank, number, step)
                for number, step in ordered(topology, [nonempty] * slices, rank, rounds, lag)
                if not isinstance(step, Join)
            ],
        )
        for rank in range(cluster.ranks)
    ]
    return scripts, [kind for _, kind in kinds.values()], list(sends)


def _lump(cluster: Cluster, rank: int, what: str, chunk: int, leaves: bool = False) -> int:
    """Return the index of how many a step on this chunk, or a message, stands for.

    `what` is the kind of its slot. `leaves`: the message goes to another node.
    """
    node = chunk % cluster.nodes
    if not cluster.is_grid:
        foreign = leaves or (chunk != rank if cluster.is_flat else node != 0)
        return _FOREIGN if foreign else _OWN
    across = node >= cluster.column
    if what in (ROW, SUMS):
        return _ACROSS if leaves or across or what == ROW else _OWN
    return _CHUNK_ACROSS if across else _FOREIGN if leaves or node else _OWN


@lru_cache(maxsize=32)
def _slots(cluster: Cluster) -> dict[Slot, tuple[tuple[int, ...], bool]]:
    """Return the chunks of each slot that the ranks of node 0 touch, and whether it is exact."""
    topology = cluster.topology()
    chunks: dict[Slot, tuple[int, ...]] = {}
    exact: dict[Slot, bool] = {}
    for rank in range(cluster.ranks):
        for step in program_for(topology, (True,) * topology.n_chunks, rank):
            if isinstance(step, Receive):
                exact[step.slot] = step.exact
            elif isinstance(step, Join):
                chunks[step.slot], exact[step.slot] = step.chunks, False
            elif not isinstance(step, Send | Sum):
                chunks[step.slot] = step.chunks
                if isinstance(step, Encode | Reduce):
                    exact[step.slot] = step.exact
                if isinstance(step, Reduce):
                    chunks |= dict.fromkeys(step.inputs, step.chunks)
    return {slot: (found, exact[slot]) for slot, found in chunks.items()}


def _received(cluster: Cluster, rank: int, peer: int, slot: Slot) -> tuple[int, int, Slot]:
    """Return what node 0 receives when each node sends as node 0 does: sender, receiver, slot."""
    rows = cluster.column
    columns = cluster.nodes // rows
    right, down = divmod(peer // cluster.ranks, rows)

    def node_there(node: int) -> int:
        column, row = divmod(node, rows)
        return (column - right) % columns * rows + (row - down) % rows

    def rank_there(number: int) -> int:
        node, place = divmod(number, cluster.ranks)
        return node_there(node) * cluster.ranks + place

    def chunk_there(chunk: int) -> int:
        if cluster.is_flat:
            return rank_there(chunk)
        share, node = divmod(chunk, cluster.nodes)
        return share * cluster.nodes + node_there(node)

    source = None if slot.source is None else rank_there(slot.source)
    return rank_there(rank), rank_there(peer), Slot(slot.what, chunk_there(slot.chunk), source)


@lru_cache(maxsize=32)
def _messages(cluster: Cluster) -> dict[tuple[int, int, Slot], int]:
    """Return all messages that node 0 receives, numbered."""
    topology = cluster.topology()
    keys = [
        (step.peer, rank, step.slot)
        for rank in range(cluster.ranks)
        for step in topology.program((True,) * topology.n_chunks, rank)
        if isinstance(step, Receive)
    ]
    return {key: number for number, key in enumerate(keys)}
