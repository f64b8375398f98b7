"""Groups whose ranks do not all share memory: who speaks for a node, by which algorithm, over which transports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch_cgx.config import Settings
from torch_cgx.executors.messages import MessageExecutor
from torch_cgx.group.bootstrap.handshake import Joining
from torch_cgx.kernels.native import default_kernels, thread_count
from torch_cgx.plan.algorithms import Topology, hierarchical
from torch_cgx.transports import Transport
from torch_cgx.transports.factory import open_transport

__all__ = ["open_executor", "open_transports", "topology_of"]


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


def open_executor(joining: Joining) -> tuple[MessageExecutor, Topology]:
    """All ranks of the group call it, each with its own end of the store."""
    settings, members, rank = joining.settings, joining.members, joining.rank
    topology = topology_of(members.nodes, settings)
    name = settings.message_transport(members.one_host)
    transports = open_transports(joining, "messages", topology, settings.inner_communicator, name)
    kernels = default_kernels(settings.simd, thread_count(settings.num_threads, members.ranks_here(rank)))
    return MessageExecutor(transports, kernels, rank, joining.global_ranks, settings.fusion_nbytes // 4), topology


def open_transports(
    joining: Joining, prefix: str, topology: Topology, inner: str, cross: str | None
) -> list[Transport | None]:
    """One for each peer, by rank. SHM within a node: the loopback of what goes between nodes."""

    def opened(name: str | None, prefix: str) -> Transport:
        store = joining.prefixed(prefix)
        return open_transport(name, store, joining.rank, joining.world, joining.timeout, joining.global_ranks)

    between = within = opened(cross, prefix)
    if not topology.is_flat and inner not in ("SHM", cross):
        within = opened(inner, f"{prefix} within")
    home = topology.nodes[joining.rank]
    transports: list[Transport | None] = [within if node == home else between for node in topology.nodes]
    transports[joining.rank] = None
    return transports
