"""Exchanges over torch's NCCL group: one grouped call of sends and receives, on streams, the host waiting for nothing.

`alltoall` of lists takes payloads of any lengths from where kernels left them, so nothing is padded or copied together,
and a sum is sent to all peers from one place. (`all_to_all_single` wants all payloads in one tensor, and
`all_gather_into_tensor` equal ones.) On ROCm the same group speaks to RCCL.
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
    """End a group of torch's: when all that it was given is done, or at once, whatever is under way."""
    # A torch without `abort` ends everything in `shutdown`.
    (getattr(group, "abort", group.shutdown) if at_once else group.shutdown)()


def limit(group: Any, timeout: timedelta) -> None:
    """Give a group of torch's another timeout, for what it is given from now on."""
    # Every torch that we support has the first for NCCL; the second is its public successor.
    (getattr(group, "_set_default_timeout", None) or group.set_timeout)(timeout)


class NcclExchange:
    """Implement `torch_cgx.engines.cuda.exchange.Exchange` over a ProcessGroupNCCL, or a group that has its `alltoall`.

    The group may carry other collectives too, from the same thread. Where ranks lose step, NCCL's watchdog ends the
    process after the group's timeout, as it does with every collective of torch's own.
    """

    waits = False
    most_nbytes = None

    def __init__(self, group: Any) -> None:
        self._group = group

    def begin(self, agreed: int) -> None:
        """NCCL compares nothing."""

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], room_nbytes: int) -> Arrival:
        arrival: Arrival = self._group.alltoall(list(incoming), list(outgoing), c10d.AllToAllOptions())
        return arrival  # whose wait makes the current stream wait, not the host

    def set_timeout(self, timeout: timedelta) -> None:
        limit(self._group, timeout)

    def close(self) -> None:
        """Do nothing: the owner of the group closes it."""

    def abort(self) -> None:
        """Do nothing: the owner of the group closes it."""
