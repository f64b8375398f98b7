"""One rank's part of a group, as far as CUDA tensors go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_cgx import _native
from torch_cgx.cuda.engine import Engine
from torch_cgx.cuda.exchanges import open_exchange
from torch_cgx.cuda.reducer import CudaReducer
from torch_cgx.executors.shm import SharedGroup
from torch_cgx.membership import Joining
from torch_cgx.nodes import topology_of
from torch_cgx.reducers import Place
from torch_cgx.stream_work import CoalescedWork
from torch_cgx.work import Completions

__all__ = ["CudaSide", "open_side"]


class CudaSide:
    """`carrier` is the group of torch's that carries what is exact. Without a `reducer` (one rank) that is all."""

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

    def close(self) -> None:
        if self.reducer is not None:
            self.reducer.close()
        self.carrier.shutdown()


def open_side(
    engine: Engine,
    joining: Joining,
    place: Place,
    board: SharedGroup | None,
    lock: threading.Lock,
    number: Callable[[_native.Call], int] | None = None,
) -> CudaSide:
    """All ranks of the group call it, each with its own end of the store. `number`s calls where there is no board."""
    carrier = engine.new_group("nccl")
    if joining.world == 1:
        return CudaSide(engine, carrier, None)
    topology = topology_of(joining.members.nodes, joining.settings)
    exchange = open_exchange(engine, joining, topology, carrier)
    return CudaSide(engine, carrier, CudaReducer(engine, exchange, topology, place, board, lock, number))
