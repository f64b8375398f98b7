"""The interface of exchanges: all ranks send each other the payloads of device tensors in one step."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch import Tensor

from torch_cgx.engines.cuda.device import Device

__all__ = ["Arrival", "Exchange", "to_host"]


class Arrival(Protocol):
    """An exchange in progress. The caller must wait for it, and must not touch its payloads before."""

    def wait(self) -> None:
        """Make the calling thread's current stream wait for the payloads."""


class Exchange(Protocol):
    """Sends one message from each rank to each other rank in one step. All ranks make the same calls in one order."""

    @property
    def waits(self) -> bool:
        """Return whether an exchange blocks the host, which then runs it on a thread."""

    @property
    def most_nbytes(self) -> int | None:
        """Return the most bytes of values that a slice may have; None: any number."""

    def begin(self, agreed: int) -> None:
        """Announce that a call with this hash comes next."""

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], room_nbytes: int) -> Arrival:
        """Start an exchange of uint8 payloads, by rank. Empty ones are not sent, and none exceeds `room_nbytes`."""

    def set_timeout(self, timeout: timedelta) -> None: ...

    def close(self) -> None:
        """Leave the exchange. Peers that wait for this rank raise. May be called twice."""

    def abort(self) -> None:
        """Leave without waiting for the device. May be called before or after `close`."""


def to_host(device: Device, payloads: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
    """Copy payloads into pinned memory, and wait until they are there."""
    if not payloads:
        return
    for payload, host in zip(payloads, hosts, strict=True):
        host.copy_(payload, non_blocking=True)
    device.synchronize(device.record(device.current_stream(payloads[0].device)))
