"""What carries the payloads of tensors on a device: an `Exchange` of all ranks' messages at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch import Tensor

from torch_cgx.engines.cuda.device import Device

__all__ = ["Arrival", "Exchange", "to_host"]


class Arrival(Protocol):
    """An exchange under way. Each must be waited for; its payloads are the exchange's until then."""

    def wait(self) -> None:
        """Until the payloads are there for whatever the calling thread's current stream is given from now on."""


class Exchange(Protocol):
    """One message from each rank to each other, all at once. All ranks call alike, in one order."""

    @property
    def waits(self) -> bool:
        """The host waits, for the device and for peers: use it on a thread of its own."""

    @property
    def most_nbytes(self) -> int | None:
        """Of values in a slice, whose payloads have to fit into its memory; None: any number."""

    def begin(self, agreed: int) -> None:
        """Say that a call of this hash comes next."""

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], room_nbytes: int) -> Arrival:
        """By rank, in uint8; empty where there is nothing. No payload of any rank is longer than the room."""

    def set_timeout(self, timeout: timedelta) -> None: ...

    def close(self) -> None:
        """Leave; peers that wait for this rank raise. May be called twice."""

    def abort(self) -> None:
        """The same, without waiting for what is under way on the device. May follow or precede `close`."""


def to_host(device: Device, payloads: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
    """Copy payloads into pinned memory; it holds them when this returns."""
    if not payloads:
        return
    for payload, host in zip(payloads, hosts, strict=True):
        host.copy_(payload, non_blocking=True)
    device.synchronize(device.record(device.current_stream(payloads[0].device)))
