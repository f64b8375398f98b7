"""Exchanges over torch's NCCL group: one grouped call of sends and receives, on streams, without blocking the host.

`alltoall` of lists takes payloads of any lengths directly from the kernels' outputs. So nothing is padded or
concatenated, and a sum is sent to all peers from one tensor. (`all_to_all_single` needs all payloads in one tensor, and
`all_gather_into_tensor` needs equal lengths.) On ROCm the same group uses RCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as c10d
from torch import Tensor

from torch_cgx.engines.cuda.exchange import Arrival

__all__ = ["NcclExchange", "leave", "limit"]


def leave(group: Any, *, at_once: bool) -> None:
    """End a torch group when all its work is done or, with `at_once`, immediately."""
    # A torch without `abort` ends everything in `shutdown`.
    (getattr(group, "abort", group.shutdown) if at_once else group.shutdown)()


def limit(group: Any, timeout: timedelta) -> None:
    """Set the timeout of a torch group's later operations."""
    # Every torch that we support has the first method for NCCL. The second is its public successor.
    (getattr(group, "_set_default_timeout", None) or group.set_timeout)(timeout)


class NcclExchange:
    """An `Exchange` over a ProcessGroupNCCL, or another group with its `alltoall`.

    The group may also carry other collectives, from the same thread. If ranks are out of step, NCCL's watchdog ends the
    process after the group's timeout, as it does for all of torch's own collectives.
    """

    waits = False
    most_nbytes = None

    def __init__(self, group: Any) -> None:
        self._group = group

    def begin(self, agreed: int) -> None:
        """Do nothing: NCCL does not compare calls."""

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], room_nbytes: int) -> Arrival:
        arrival: Arrival = self._group.alltoall(list(incoming), list(outgoing), c10d.AllToAllOptions())
        return arrival  # its wait makes the current stream wait, not the host

    def set_timeout(self, timeout: timedelta) -> None:
        limit(self._group, timeout)

    def close(self) -> None:
        """Do nothing: the owner of the group closes it."""

    def abort(self) -> None:
        """Do nothing: the owner of the group closes it."""
