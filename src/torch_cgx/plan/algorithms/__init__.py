"""The algorithms: pure functions from (chunks, rank, world) to a program.

They know nothing about values, bytes or transports. A new algorithm is one file here and one line in a table: an
allreduce in `hierarchical.CROSS`, any other in `ALGORITHMS`. A `Topology` names an algorithm and the nodes of the
ranks. Together with the chunks it determines the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_cgx.plan.algorithms import (
    all_gather,
    broadcast,
    exchange,
    grid,
    hierarchical,
    reduce_scatter,
)
from torch_cgx.plan.algorithms.flat import owned_chunks
from torch_cgx.plan.program import Program

__all__ = ["ALGORITHMS", "IN_SHARES", "Flat", "Topology"]


class Flat(NamedTuple):
    """An algorithm that ignores nodes. Its slices have one chunk per rank."""

    program: Callable[[Sequence[bool], int, int], Program]  # which chunks are not empty, rank, world
    depth: Callable[[int], int]  # for this many ranks, the greatest level of a step, see `schedule`


def _flat_program(among: hierarchical.Among) -> Callable[[Sequence[bool], int, int], Program]:
    """Return an algorithm between speakers as one between all ranks. A single rank does nothing."""

    def program(chunks_nonempty: Sequence[bool], rank: int, world: int) -> Program:
        chunks = owned_chunks(chunks_nonempty, rank, world)
        return tuple(among(range(world), chunks, rank)) if world > 1 else ()

    return program


def _one_message(world: int) -> int:
    return int(world > 1)


# Keys are the values of CGX_INNER_REDUCTION_TYPE and CGX_CROSS_REDUCTION_TYPE. The last three are not allreduces.
ALGORITHMS: Mapping[str, Flat] = {
    **{name: Flat(_flat_program(cross.among), cross.depth) for name, cross in hierarchical.CROSS.items()},
    "REDUCE_SCATTER": Flat(reduce_scatter.program, _one_message),
    "ALL_GATHER": Flat(all_gather.program, _one_message),
    "EXCHANGE": Flat(exchange.program, _one_message),
}

# Algorithms that may be compressed and whose chunks lie in the ranks' shares: see `layout.make_shares_layout`.
IN_SHARES = ("REDUCE_SCATTER", "ALL_GATHER")


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of the ranks, and the way they reduce. Hashable, because it is the key of cached programs."""

    algorithm: str  # between nodes; if every rank is a node of its own, between ranks
    nodes: tuple[int, ...]  # by rank; any numbers
    shares: int = 1  # the number of ranks of each node that speak for it
    compress_inside: bool = True  # False: exact within a node
    root: int | None = None  # of a broadcast, which always uses the nodes; None for all other algorithms

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
        """Return a topology in which every rank is a node of its own."""
        return cls(algorithm, tuple(range(world)))

    @classmethod
    def broadcast(cls, nodes: tuple[int, ...], root: int) -> Topology:
        """Return the topology of a broadcast from one rank to all others."""
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
        """Return the number of chunks in a slice."""
        if self.root is not None:
            return broadcast.n_chunks(self.nodes)
        if self.is_flat:
            return self.world
        return hierarchical.n_chunks(self.nodes, self.shares)

    @property
    def most_chunks(self) -> int:
        """Return the most chunks that one payload holds."""
        return grid.n_rows(self.n_nodes) if self.algorithm == "GRID" else 1

    @property
    def sums_in_steps(self) -> bool:
        """Return whether a rank's values hold partial sums between steps."""
        return self.algorithm in ("RING", "GRID") or not self.is_flat

    @property
    def depth(self) -> int:
        """Return the greatest level of any rank's steps, see `schedule`."""
        if self.root is not None:
            return broadcast.depth(self.nodes, self.root)
        if self.is_flat:
            return ALGORITHMS[self.algorithm].depth(self.world)
        return hierarchical.depth(self.nodes, self.algorithm)

    def program(self, nonempty: Sequence[bool], rank: int) -> Program:
        """Return the steps of one rank."""
        if self.root is not None:
            return broadcast.program(nonempty, rank, self.nodes, self.root)
        if self.is_flat:
            return ALGORITHMS[self.algorithm].program(nonempty, rank, self.world)
        return hierarchical.program(
            nonempty,
            rank,
            self.nodes,
            shares=self.shares,
            cross=self.algorithm,
            compress_inside=self.compress_inside,
        )
