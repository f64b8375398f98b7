"""An exchange through the host that is held to the order, too: the device must be done with what is sent.

It takes the place of the exchange that it is made of. A device is one with an `order` (standin.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_cgx.engines.cuda.shared_exchange import SharedExchange
from torch_cgx.engines.host.native import Prepared, SharedGroup


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
