"""Which exchange carries the payloads of CUDA tensors, by the settings and by where the ranks are."""

from __future__ import annotations

from typing import Any

from torch_cgx import _native
from torch_cgx.engines.cuda.direct_exchange import DirectExchange
from torch_cgx.engines.cuda.shared_exchange import SharedExchange
from torch_cgx.engines.cuda.staged import DividedExchange, StagedExchange
from torch_cgx.group.bootstrap.handshake import Joining, open_shared_group
from torch_cgx.group.bootstrap.topology import open_transports
from torch_cgx.group.calls import collective_call
from torch_cgx.group.cuda.engine import Engine
from torch_cgx.group.cuda.sharing import processes_that_share
from torch_cgx.plan.algorithms import Topology
from torch_cgx.transports import Exchange
from torch_cgx.transports.nccl import NcclExchange

__all__ = ["open_exchange"]


def open_exchange(engine: Engine, joining: Joining, topology: Topology, carrier: Any) -> Exchange:
    """All ranks of the group call it. `carrier` is the NCCL group that carries everything else.

    Within a node and between nodes NCCL alone needs no thread and no host memory. Where it serves within nodes alone,
    it is called from the thread that stages the rest, and each node has a group of its own: NCCL need not reach others.
    """
    settings, members = joining.settings, joining.members
    inner, cross = settings.cuda_inner_communicator, settings.cuda_cross_communicator
    if members.one_host:
        cross = inner
    elif topology.is_flat:
        inner = cross or "GLOO"
    if inner != "NCCL" and cross == "NCCL":
        raise ValueError(
            f"CGX_INNER_COMMUNICATOR_TYPE={inner} with CGX_CROSS_COMMUNICATOR_TYPE=NCCL: for CUDA tensors on several "
            "nodes allowed is NCCL within nodes with NCCL, GLOO or MPI between them, or SHM, GLOO or MPI within with "
            "GLOO or MPI between"
        )
    if cross == "NCCL":
        return NcclExchange(carrier, range(joining.world))
    if cross == "SHM":
        shared = open_shared_group(joining, "cuda") if all(members.native) else None
        if shared is not None:
            given = (engine.device, shared, _exchange_call, joining.rank)
            pids = processes_that_share(joining)
            if pids is not None:
                return DirectExchange(*given, pids, joining.timeout)
            return SharedExchange(*given, joining.world, joining.timeout)
        cross = None if settings.cross_communicator == "TCP" else settings.cross_communicator
    within = "SHM" if inner == "NCCL" else inner
    transports = open_transports(joining, "cuda messages", topology, within, cross)
    staged = StagedExchange(engine.device, transports, joining.rank, joining.global_ranks)
    home = topology.nodes[joining.rank]
    near = [node == home for node in topology.nodes]
    if inner != "NCCL" or sum(near) == 1:
        return staged
    ranks = [rank for rank, is_near in enumerate(near) if is_near]
    return DividedExchange(
        NcclExchange(engine.new_group(f"nccl within {home}", ranks), ranks, owned=True), staged, near
    )


def _exchange_call(agreed: int) -> _native.Call:
    return collective_call("all_to_all_single", layout=agreed)
