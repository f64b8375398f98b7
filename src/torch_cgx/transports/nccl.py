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

from torch_cgx.transports import Arrival

__all__ = ["NcclExchange"]


class NcclExchange:
    """Implements `torch_cgx.transports.Exchange`; `group` is a ProcessGroupNCCL, or has its `alltoall`.

    `ranks` are those that the group consists of, as the exchange numbers them; nobody has payloads for others.
    The group may carry other collectives too, from the same thread. Where ranks lose step, NCCL's watchdog ends the
    process after the group's timeout, as it does with every collective of torch's own.
    """

    waits = False
    most_nbytes = None

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = tuple(ranks)

    def begin(self, number: int, agreed: int, peers: Sequence[int]) -> None:
        """NCCL compares nothing."""

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], room_nbytes: int) -> Arrival:
        arriving, leaving = ([payloads[rank] for rank in self._ranks] for payloads in (incoming, outgoing))
        arrival: Arrival = self._group.alltoall(arriving, leaving, c10d.AllToAllOptions())
        return arrival  # whose wait makes the current stream wait, not the host

    def set_timeout(self, timeout: timedelta) -> None:
        """The group has it from its creation."""

    def close(self) -> None:
        """Whoever made the group ends it."""
