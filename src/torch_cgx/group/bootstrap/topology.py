"""The topology of allreduces in groups of several nodes: which ranks cross nodes, and by which algorithm."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_cgx.codecs import RAW
from torch_cgx.config import LinkCosts, Settings
from torch_cgx.plan.algorithms import Topology, grid, hierarchical
from torch_cgx.plan.costs import ETHERNET, LEAST_BITS, Costs, choose, estimate
from torch_cgx.plan.layout import Layer

__all__ = ["Chooser", "topology_of"]

_log = logging.getLogger("torch_cgx")


def topology_of(nodes: Sequence[str], settings: Settings) -> Topology:
    """Return the topology of a group's allreduces. With `AUTO` a `Chooser` may find a faster algorithm.

    Ranks of one node that do not share memory count as nodes of their own, because a common leader would gain nothing.
    """
    world, sizes = len(nodes), Counter(nodes)
    cross = "SRA" if settings.cross_reduction == "AUTO" else settings.cross_reduction
    if len(sizes) in (1, world):
        return Topology.flat(settings.inner_reduction if len(sizes) == 1 else cross, world)
    numbers = {node: number for number, node in enumerate(sizes)}
    numbered = tuple(numbers[node] for node in nodes)
    return Topology(
        cross,
        numbered,
        shares=1 if settings.intra_broadcast else hierarchical.most_shares(numbered),
        compress_inside=settings.intra_compress,
    )


@dataclass
class Chooser:
    """Chooses the algorithm by which each allreduce of a group crosses nodes.

    The choice depends on the layers and on constants that all ranks agreed on, so it is identical on all ranks.
    """

    topology: Topology  # of allreduces for which no other algorithm is faster
    costs: Costs
    algorithms: tuple[str, ...]  # to choose from
    reported: bool = True  # a grid has been reported, or this rank does not report

    @classmethod
    def of(cls, nodes: Sequence[str], settings: Settings, costs: Costs, link: LinkCosts, rank: int) -> Chooser:
        """Return the chooser of a group. `link`: rank 0's data on the link between nodes."""
        topology = topology_of(nodes, settings)
        automatic = settings.cross_reduction == "AUTO" and topology.n_nodes > 1 and len(set(nodes)) > 1
        algorithms = tuple(LEAST_BITS) if automatic else (topology.algorithm,)
        rate = None if link.bytes_per_s is None else link.bytes_per_s * ETHERNET
        return cls(topology, costs.with_link(rate, link.message_s), algorithms, reported=rank != 0)

    @classmethod
    def fixed(cls, topology: Topology) -> Chooser:
        """Return a chooser without a choice: all allreduces have this topology."""
        return cls(topology, Costs(), (topology.algorithm,))

    @property
    def described(self) -> str:
        """Return a description of how algorithms are chosen, for the flight recorder."""
        if len(self.algorithms) == 1:
            return self.algorithms[0]
        wire = self.costs.between
        rate, message = wire.bytes_per_s / ETHERNET * 8e-9, wire.message_s * 1e6
        return f"AUTO: {rate:.4g} Gbit/s and {message:.4g} us per message"

    def topology_for(self, layers: Sequence[Layer], itemsize: int, slice_nbytes: int) -> Topology:
        """Return the topology of an allreduce of these layers. `slice_nbytes` is the most bytes of values per slice."""
        if len(self.algorithms) == 1:
            return self.topology
        if itemsize == 2 and self.topology.is_flat and all(layer.is_exact for layer in layers):
            return self.topology  # a grid would sum them in a float32 copy, and send twice the bytes
        nodes, shares = self.topology.n_nodes, self.topology.shares
        values = sum(layer.numel for layer in layers) * itemsize
        payload = sum(layer.codec.payload_nbytes(layer.numel, itemsize) for layer in layers)
        bits = min(layer.codec.bits for layer in layers)
        sizes = (nodes, values / shares, payload / shares)
        chosen = choose(*sizes, bits, slice_nbytes / shares, self.costs, self.algorithms)
        if chosen == "GRID" and bits < RAW.bits and not self.reported:
            self.reported = True
            rows = grid.n_rows(nodes)
            sra_s, grid_s = (estimate(name, *sizes, slice_nbytes / shares, self.costs) for name in ("SRA", "GRID"))
            _log.info(
                "torch_cgx sums gradients in a grid of %d x %d nodes, estimated to be %.1f times as fast as SRA for an "
                "all_reduce of %d bytes at %d bits. It quantizes every value once more, which makes the error about "
                "1.15 times as large. CGX_CROSS_REDUCTION_TYPE=SRA switches this off, and CGX_LINK_COSTS tells the "
                "rate of the network.",
                *(rows, nodes // rows, sra_s / grid_s, values, bits),
            )
        return replace(self.topology, algorithm=chosen)
