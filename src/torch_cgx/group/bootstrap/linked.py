"""Groups whose ranks are linked by TCP connections and run their programs natively."""

from __future__ import annotations

from torch_cgx.config import Settings
from torch_cgx.engines.host.native import SharedGroup
from torch_cgx.errors import TransportError
from torch_cgx.group.bootstrap.handshake import SEGMENT_LIMIT_NBYTES, Joining, Membership
from torch_cgx.group.bootstrap.links import open_links
from torch_cgx.group.calls import NAMES
from torch_cgx.kernels.native import means, thread_count

__all__ = ["open_linked_group", "wants_links"]


def wants_links(settings: Settings, members: Membership) -> bool:
    """Return whether a group that does not share memory goes over links: chosen, or the default of its topology.

    By default MPI goes first, where it started the ranks. Nodes of several ranks still send messages, by which one rank
    of each speaks for its node.
    """
    chosen = settings.message_transport(members.one_host)
    if chosen is not None:
        return chosen == "TCP"
    has_one_rank_per_node = len(set(members.nodes)) == len(members.nodes)
    return has_one_rank_per_node and all(members.native) and not members.all_have_mpi


def open_linked_group(joining: Joining) -> SharedGroup:
    """Connect this rank to all others of the group. All ranks call it, each with its own end of the store."""
    rank, members, settings = joining.rank, joining.members, joining.settings
    without = [str(joining.global_ranks[peer]) for peer, has in enumerate(members.native) if not has]
    if without:
        raise TransportError(
            "TCP needs the native library on all ranks, which these lack: rank "
            f"{', '.join(without)}. Install a C++ compiler there and reinstall torch_cgx, or choose GLOO."
        )
    sockets = open_links(joining)
    how = means(settings.simd, thread_count(settings.num_threads, members.ranks_here(rank)))
    group = SharedGroup(None, rank, joining.world, joining.global_ranks, NAMES, how, SEGMENT_LIMIT_NBYTES)
    for peer, peer_sockets in sockets.items():
        group.link(peer, peer_sockets.control.detach(), [stream.detach() for stream in peer_sockets.streams])
    return group
