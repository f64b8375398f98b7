"""Exchanges through the host whose messages are held to the order, too: the device must be done with what it sends.

They take the places of the exchanges that they are made of. A device is one with an `order` (standin.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.support.happens_before import Order
from torch_cgx.engines.cuda.shared_exchange import SharedExchange
from torch_cgx.engines.cuda.staged import StagedExchange
from torch_cgx.engines.host.native import Prepared, SharedGroup
from torch_cgx.transports import Pending, Transport


@dataclass(frozen=True, slots=True)
class _OrderedMessage:
    message: Pending
    arrived: Callable[[], None]

    def wait(self) -> None:
        self.message.wait()
        self.arrived()

    def done(self) -> bool:
        done = self.message.done()
        if done:
            self.arrived()
        return done


class OrderedTransport:
    """A transport of the host's: what it sends must be there, and nobody may change it meanwhile."""

    def __init__(self, transport: Transport, device: Any) -> None:
        self._transport, self._order = transport, device.order

    def send(self, payload: Tensor, peer: int, tag: int) -> Pending:
        if self._order.is_unseen:
            return self._transport.send(payload, peer, tag)
        arrived = self._order.on_host(f"a message to {peer}", reads=[payload])
        return _OrderedMessage(self._transport.send(payload, peer, tag), arrived)

    def receive(self, payload: Tensor, peer: int, tag: int) -> Pending:
        if self._order.is_unseen:
            return self._transport.receive(payload, peer, tag)
        arrived = self._order.on_host(f"a message from {peer}", writes=[payload])
        return _OrderedMessage(self._transport.receive(payload, peer, tag), arrived)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "timeout":
            self._transport.timeout = value
        else:
            super().__setattr__(name, value)


class OrderedStagedExchange(StagedExchange):
    """What the ranks tell each other of the call is in tensors of the host, which look like the device's here."""

    def __init__(self, device: Any, transports: Sequence[Transport | None], *more: Any) -> None:
        ordered = {each: OrderedTransport(each, device) for each in transports if each is not None}
        super().__init__(device, [None if each is None else ordered[each] for each in transports], *more)
        self._order: Order = device.order

    def begin(self, number: int, agreed: int, peers: Sequence[int]) -> None:
        with self._order.unseen():
            super().begin(number, agreed, peers)

    def finish_agreement(self) -> None:
        with self._order.unseen():
            super().finish_agreement()


class OrderedSharedGroup:
    """The native executor, which works on pinned memory from `submit` on until it has been waited for."""

    def __init__(self, shared: SharedGroup, device: Any) -> None:
        self._shared, self._order = shared, device.order
        self._under_way: dict[int, Callable[[], None]] = {}

    def submit(self, prepared: Prepared, address: int, *more: Any, **options: Any) -> tuple[int, int]:
        arrived = self._order.on_host("the native executor", writes=[self._order.memory_at(address)])
        number, sequence = self._shared.submit(prepared, address, *more, **options)
        self._under_way[number] = arrived
        return number, sequence

    def wait(self, number: int, slice_ms: int) -> bool:
        done = self._shared.wait(number, slice_ms)
        if done:
            self._under_way.pop(number)()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)


class OrderedSharedExchange(SharedExchange):
    def __init__(self, device: Any, shared: SharedGroup, *more: Any) -> None:
        super().__init__(device, OrderedSharedGroup(shared, device), *more)  # type: ignore[arg-type]
