"""The algorithms: pure functions from (chunks, rank, world) to a program.

They know neither values nor bytes nor who carries them. A new one is one file here and one line in each of the two
tables, but for the hierarchy and the broadcast, which look at nodes. A `Topology` names an algorithm and where ranks
are: all that decides about programs but for the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch_cgx.plan.algorithms import (
    all_gather,
    broadcast,
    exchange,
    hierarchical,
    reduce_scatter,
    ring,
    scatter_reduce_allgather,
)
from torch_cgx.plan.program import Program

__all__ = ["ALGORITHMS", "IN_SHARES", "N_CHUNKS", "Algorithm", "Topology"]

# (which chunks are not empty, rank, world) -> the rank's program
Algorithm = Callable[[Sequence[bool], int, int], Program]

# By the names that CGX_INNER_REDUCTION_TYPE and CGX_CROSS_REDUCTION_TYPE have. The last three are no allreduces.
ALGORITHMS: Mapping[str, Algorithm] = {
    "SRA": scatter_reduce_allgather.program,
    "RING": ring.program,
    "REDUCE_SCATTER": reduce_scatter.program,
    "ALL_GATHER": all_gather.program,
    "EXCHANGE": exchange.program,
}

# world -> into how many chunks a slice is cut
N_CHUNKS: Mapping[str, Callable[[int], int]] = {
    "SRA": scatter_reduce_allgather.n_chunks,
    "RING": ring.n_chunks,
    "REDUCE_SCATTER": reduce_scatter.n_chunks,
    "ALL_GATHER": all_gather.n_chunks,
    "EXCHANGE": exchange.n_chunks,
}

# Those that may be compressed and whose chunks are of the ranks' shares: see `layout.make_shares_layout`.
IN_SHARES = ("REDUCE_SCATTER", "ALL_GATHER")


@dataclass(frozen=True, slots=True)
class Topology:
    """Which ranks are together on a node, and how they reduce; hashable, because programs are cached by it."""

    algorithm: str  # between nodes; where every rank is a node of its own, between ranks
    nodes: tuple[int, ...]  # by rank; any numbers
    shares: int = 1  # how many ranks of each node speak for it
    compress_inside: bool = True  # False: exact within a node
    root: int | None = None  # of a broadcast, which goes over nodes as they are; None: of all else

    def __post_init__(self) -> None:
        if self.root is not None:
            return
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm: expected {', '.join(ALGORITHMS)}, got {self.algorithm}")
        if not self.is_flat:
            hierarchical.check_nodes(self.nodes, self.shares, self.algorithm)
        elif self.shares != 1:
            raise ValueError(f"shares: expected 1 where every rank is a node of its own, got {self.shares}")

    @classmethod
    def flat(cls, algorithm: str, world: int) -> Topology:
        """Every rank is a node of its own."""
        return cls(algorithm, tuple(range(world)))

    @classmethod
    def broadcast(cls, nodes: tuple[int, ...], root: int) -> Topology:
        """From one rank to all others."""
        return cls("BROADCAST", nodes, root=root)

    @property
    def world(self) -> int:
        return len(self.nodes)

    @property
    def n_nodes(self) -> int:
        return len(set(self.nodes))

    @property
    def is_flat(self) -> bool:
        return 0 < self.world == self.n_nodes

    @property
    def n_chunks(self) -> int:
        """Into how many chunks a slice is cut."""
        if self.root is not None:
            return broadcast.n_chunks(self.nodes)
        if self.is_flat:
            return N_CHUNKS[self.algorithm](self.world)
        return hierarchical.n_chunks(self.nodes, self.shares)

    def program(self, nonempty: Sequence[bool], rank: int) -> Program:
        """The steps of one rank."""
        if self.root is not None:
            return broadcast.program(nonempty, rank, self.nodes, self.root)
        if self.is_flat:
            return ALGORITHMS[self.algorithm](nonempty, rank, self.world)
        return hierarchical.program(
            nonempty,
            rank,
            self.nodes,
            shares=self.shares,
            cross=self.algorithm,
            compress_inside=self.compress_inside,
        )
