"""Groups whose ranks do not all share memory: who speaks for a node, by which algorithm, over which transports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from torch_cgx.algorithms import Topology, hierarchical
from torch_cgx.config import Settings
from torch_cgx.executors.messages import MessageExecutor
from torch_cgx.kernels.cpu import default_kernels, thread_count
from torch_cgx.membership import Membership
from torch_cgx.transports import Transport
from torch_cgx.transports.factory import open_transport

__all__ = ["open_executor", "topology_of"]


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


def open_executor(
    prefixed: Callable[[str], Store],
    rank: int,
    world: int,
    timeout: timedelta,
    global_ranks: Sequence[int],
    members: Membership,
    settings: Settings,
) -> tuple[MessageExecutor, Topology]:
    """All ranks of the group call it, each with its own end of the store."""
    topology = topology_of(members.nodes, settings)
    name = settings.message_transport(members.one_host)
    between = open_transport(name, prefixed("messages"), rank, world, timeout, global_ranks)
    within = between
    inner = settings.inner_communicator
    if not topology.is_flat and inner not in ("SHM", name):
        within = open_transport(inner, prefixed("messages within"), rank, world, timeout, global_ranks)
    transports: list[Transport | None] = [
        within if node == topology.nodes[rank] else between for node in topology.nodes
    ]
    transports[rank] = None
    kernels = default_kernels(settings.simd, thread_count(settings.num_threads, members.ranks_here(rank)))
    return MessageExecutor(transports, kernels, rank, global_ranks, settings.fusion_nbytes // 4), topology
