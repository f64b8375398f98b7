"""The choice of the exchange that carries the payloads of CUDA tensors, by the settings and the ranks' hosts."""

from __future__ import annotations

import logging
from typing import Any

from torch_cgx import _native
from torch_cgx.engines.cuda.direct_exchange import DirectExchange
from torch_cgx.engines.cuda.exchange import Exchange
from torch_cgx.engines.cuda.nccl import NcclExchange
from torch_cgx.engines.cuda.shared_exchange import SharedExchange
from torch_cgx.group.bootstrap.handshake import Joining, open_shared_group
from torch_cgx.group.calls import collective_call
from torch_cgx.group.cuda.engine import Engine
from torch_cgx.group.cuda.sharing import processes_that_share

__all__ = ["open_exchange"]

_log = logging.getLogger("torch_cgx")


def open_exchange(engine: Engine, joining: Joining, carrier: Any) -> Exchange:
    """Open the exchange that the settings choose. All ranks call it. `carrier`: the NCCL group of exact operations.

    NCCL needs no thread and no host memory. Shared memory works only if all ranks are on one host.
    """
    members = joining.members
    if joining.settings.cuda_communicator == "SHM":
        shared = open_shared_group(joining, "cuda") if members.one_host and all(members.native) else None
        if shared is not None:
            given = (engine.device, shared, _exchange_call, joining.rank)
            pids = processes_that_share(joining)
            if pids is not None:
                return DirectExchange(*given, pids, joining.timeout)
            return SharedExchange(*given, joining.world, joining.timeout)
        if joining.rank == 0:
            _log.warning(
                "CGX_INNER_COMMUNICATOR_TYPE=SHM has CUDA tensors staged in shared memory, which not all ranks of this "
                "group share, or only with the native library: they go over NCCL instead"
            )
    return NcclExchange(carrier)


def _exchange_call(agreed: int) -> _native.Call:
    return collective_call("all_to_all_single", layout=agreed)
