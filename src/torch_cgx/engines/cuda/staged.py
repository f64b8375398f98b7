"""Exchanges of a device's payloads through pinned host memory, over a transport of the host's, or between two others.

The host waits: for the device before it sends, and for the peers before it copies back. So whoever uses these runs on a
thread of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from torch_cgx.engines.cuda.device import Device
from torch_cgx.executors.agreement import AGREEMENT_TAG, Agreement
from torch_cgx.transports import TAGS, Arrival, Exchange, Pending, Transport

__all__ = ["DividedExchange", "StagedExchange", "to_host"]


def to_host(device: Device, payloads: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
    """Copy payloads into pinned memory; it holds them when this returns."""
    if not payloads:
        return
    for payload, host in zip(payloads, hosts, strict=True):
        host.copy_(payload, non_blocking=True)
    device.synchronize(device.record(device.current_stream(payloads[0].device)))


@dataclass(slots=True)
class _Arrival:
    exchange: StagedExchange
    arriving: list[tuple[Pending, Tensor, Tensor]]  # the message, where it arrives on the host, and on the device
    leaving: list[Pending]

    def wait(self) -> None:
        self.exchange.finish_agreement()
        for message, host, payload in self.arriving:
            message.wait()
            payload.copy_(host, non_blocking=True)  # torch gives pinned memory to nobody else before that is done
        for message in self.leaving:
            message.wait()


class StagedExchange:
    """Implements `torch_cgx.transports.Exchange` over transports, one for each peer, by rank; its own place: None."""

    waits = True
    most_nbytes = None

    def __init__(
        self, device: Device, transports: Sequence[Transport | None], rank: int, global_ranks: Sequence[int]
    ) -> None:
        self._device = device
        self._transports = tuple(transports)
        self._tags = min((transport.tags for transport in transports if transport is not None), default=TAGS)
        self._rank = rank
        self._global_ranks = tuple(global_ranks)
        self._agreement: Agreement | None = None
        self._tag = 0

    def begin(self, number: int, agreed: int, peers: Sequence[int]) -> None:
        # Tags depend on the call, so that payloads of ranks that have lost step meet no receive.
        self._tag = zlib.crc32(b"%d %d" % (number, agreed))
        mine = [peer for peer in peers if self._transports[peer] is not None]
        self._agreement = Agreement(self._transport, mine, (number, agreed), self._rank, self._global_ranks)

    def finish_agreement(self) -> None:
        """Before the first payload of a call is taken."""
        if self._agreement is not None:
            self._agreement.finish()
            self._agreement = None

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], room_nbytes: int) -> Arrival:
        self._tag += 1
        tag = AGREEMENT_TAG + 1 + self._tag % (self._tags - 1)
        arriving = []
        for peer, payload in enumerate(incoming):
            if payload.numel():
                host = self._device.pinned(payload.numel())
                arriving.append((self._transport(peer).receive(host, peer, tag), host, payload))
        peers = [peer for peer, payload in enumerate(outgoing) if payload.numel()]
        hosts = [self._device.pinned(outgoing[peer].numel()) for peer in peers]
        to_host(self._device, [outgoing[peer] for peer in peers], hosts)
        leaving = [self._transport(peer).send(host, peer, tag) for peer, host in zip(peers, hosts, strict=True)]
        return _Arrival(self, arriving, leaving)

    def set_timeout(self, timeout: timedelta) -> None:
        for transport in self._transports:
            if transport is not None:
                transport.timeout = timeout

    def close(self) -> None:
        for transport in set(self._transports):
            if transport is not None:
                with suppress(Exception):  # it is in ruins already, and whoever waits must still be told
                    transport.close()

    abort = close

    def _transport(self, peer: int) -> Transport:
        transport = self._transports[peer]
        assert transport is not None
        return transport


@dataclass(slots=True)
class _Both:
    arrivals: tuple[Arrival, Arrival]

    def wait(self) -> None:
        for arrival in self.arrivals:
            arrival.wait()


class DividedExchange:
    """One exchange for peers on this rank's node, another for all others. `near` says by rank who is near."""

    waits = True
    most_nbytes = None

    def __init__(self, within: Exchange, between: Exchange, near: Sequence[bool]) -> None:
        self._within, self._between = within, between
        self._near = tuple(near)

    def begin(self, number: int, agreed: int, peers: Sequence[int]) -> None:
        self._within.begin(number, agreed, [peer for peer in peers if self._near[peer]])
        self._between.begin(number, agreed, [peer for peer in peers if not self._near[peer]])

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], room_nbytes: int) -> Arrival:
        return _Both(
            (
                self._within.start(self._part(outgoing, True), self._part(incoming, True), room_nbytes),
                self._between.start(self._part(outgoing, False), self._part(incoming, False), room_nbytes),
            )
        )

    def _part(self, payloads: Sequence[Tensor], near: bool) -> list[Tensor]:
        return [payload if self._near[peer] == near else payload[:0] for peer, payload in enumerate(payloads)]

    def set_timeout(self, timeout: timedelta) -> None:
        self._within.set_timeout(timeout)
        self._between.set_timeout(timeout)

    def close(self) -> None:
        self._within.close()
        self._between.close()

    def abort(self) -> None:
        self._within.abort()
        self._between.abort()
