"""Groups of several nodes: who speaks for a node, and by which algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch_cgx.config import Settings
from torch_cgx.plan.algorithms import Topology, hierarchical

__all__ = ["topology_of"]


def topology_of(nodes: Sequence[str], settings: Settings) -> Topology:
    """Ranks of one node that do not share memory are nodes of their own: there is nothing to gain from one speaking."""
    world, sizes = len(nodes), Counter(nodes)
    if len(sizes) in (1, world):
        return Topology.flat(settings.inner_reduction if len(sizes) == 1 else settings.cross_reduction, world)
    numbers = {node: number for number, node in enumerate(sizes)}
    numbered = tuple(numbers[node] for node in nodes)
    return Topology(
        settings.cross_reduction,
        numbered,
        shares=1 if settings.intra_broadcast else hierarchical.most_shares(numbered),
        compress_inside=settings.intra_compress,
    )
