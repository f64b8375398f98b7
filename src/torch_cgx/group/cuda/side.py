"""One rank's part of a group, as far as CUDA tensors go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor

from torch_cgx import _native
from torch_cgx.engines.cuda.nccl import leave, limit
from torch_cgx.engines.host.native import SharedGroup
from torch_cgx.group.bootstrap.handshake import Joining
from torch_cgx.group.bootstrap.topology import topology_of
from torch_cgx.group.cuda.engine import Engine
from torch_cgx.group.cuda.exchanges import open_exchange
from torch_cgx.group.cuda.reducer import CudaReducer
from torch_cgx.group.futures import Completions
from torch_cgx.group.requests import Place
from torch_cgx.group.stream_work import CoalescedWork

__all__ = ["CudaSide", "open_side"]


class CudaSide:
    """Serve CUDA tensors. `carrier`, an NCCL group, runs exact operations, and `reducer` (None: alone) the others."""

    def __init__(self, engine: Engine, carrier: Any, reducer: CudaReducer | None) -> None:
        self.kind = engine.kind
        self.carrier = carrier
        self.reducer = reducer
        self._device = engine.device

    def together(self, parts: list[Any], result: list[Tensor], completions: Completions) -> CoalescedWork:
        """One handle on the operations of a coalesced call."""
        return CoalescedWork(parts, self._device, result, completions)

    def keep(self, tensor: Tensor) -> None:
        """The calling thread's current stream uses this tensor, which may have been made on another."""
        self._device.keep(tensor, self._device.current_stream(tensor.device))

    def set_timeout(self, timeout: timedelta) -> None:
        """Of what the carrier is given from now on; the reducer has its own."""
        limit(self.carrier, timeout)

    def close(self, *, at_once: bool, at_exit: bool = False) -> None:
        """`at_once`: the group has failed, and what is under way may never end.

        `at_exit`: what is staged may end, but NCCL waits for nobody, as where torch's own group is left to itself.
        """
        reducer = self.reducer
        if reducer is not None:
            at_once = at_once or reducer.has_failed
            if at_once:
                reducer.abort()
            else:
                reducer.close(at_exit=at_exit)
        leave(self.carrier, at_once=at_once or at_exit)


def open_side(
    engine: Engine,
    joining: Joining,
    place: Place,
    board: SharedGroup | None,
    lock: threading.Lock,
    number: Callable[[_native.Call], int] | None = None,
) -> CudaSide:
    """Open a group's CUDA side. All ranks call it. `number` numbers calls if there is no `board`."""
    carrier = engine.new_group()
    if joining.world == 1:
        return CudaSide(engine, carrier, None)
    topology = topology_of(joining.members.nodes, joining.settings)
    exchange = open_exchange(engine, joining, carrier)
    reducer = CudaReducer(engine, exchange, topology, place, board, lock, joining.timeout, number)
    return CudaSide(engine, carrier, reducer)
