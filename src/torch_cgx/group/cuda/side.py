"""One rank's part of a group for CUDA tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor

from torch_cgx.engines.cuda.nccl import leave, limit
from torch_cgx.group.bootstrap.handshake import Joining
from torch_cgx.group.bootstrap.topology import Chooser
from torch_cgx.group.context import GroupContext
from torch_cgx.group.cuda.engine import Engine
from torch_cgx.group.cuda.exchanges import open_exchange
from torch_cgx.group.cuda.reducer import CudaReducer
from torch_cgx.group.futures import Completions
from torch_cgx.group.ledger import Ledger
from torch_cgx.group.reducers import LoneReducer
from torch_cgx.group.stream_work import CoalescedWork
from torch_cgx.plan.costs import CUDA

__all__ = ["CudaSide", "open_side"]


class CudaSide:
    """The side for CUDA tensors. Implements `torch_cgx.group.sides.Side`."""

    carrier_name = "nccl"
    enqueues = True
    carries_exact = False

    def __init__(self, engine: Engine, carrier: Any, reducer: CudaReducer | LoneReducer) -> None:
        self.kind = engine.kind
        self.carrier = carrier
        self.reducer = reducer
        self.compresses = isinstance(reducer, CudaReducer)  # one rank uses NCCL, whose futures know the device
        self.coalescing = False
        self._device = engine.device

    def start_coalescing(self) -> None:
        """Let NCCL launch all calls until `end_coalescing` as one. They are exact, as programs cannot be part of it."""
        self.carrier._start_coalescing()
        self.coalescing = True

    def end_coalescing(self) -> Any:
        self.coalescing = False
        return self.carrier._end_coalescing()

    def together(self, parts: list[Any], result: list[Tensor], completions: Completions) -> CoalescedWork:
        return CoalescedWork(parts, self._device, result, completions)

    def record_use(self, tensor: Tensor) -> None:
        self._device.keep(tensor, self._device.current_stream(tensor.device))

    def set_timeout(self, timeout: timedelta) -> None:
        self.reducer.set_timeout(timeout)
        limit(self.carrier, timeout)

    def close(self, *, at_once: bool, at_exit: bool = False) -> None:
        """Leave the group. `at_once`: the group has failed, and operations in progress may never end.

        `at_exit`: staged operations may end, but NCCL does not wait for peers, as if torch's group were not destroyed.
        """
        if isinstance(self.reducer, CudaReducer):
            at_once = at_once or self.reducer.has_failed
            if at_once:
                self.reducer.abort()
            else:
                self.reducer.close(at_exit=at_exit)
        leave(self.carrier, at_once=at_once or at_exit)


def open_side(engine: Engine, joining: Joining, context: GroupContext, ledger: Ledger) -> CudaSide:
    """Open a group's CUDA side. All ranks call it."""
    carrier = engine.new_group()
    if joining.world == 1:
        return CudaSide(engine, carrier, LoneReducer(context))
    members = joining.members
    chooser = Chooser.of(members.nodes, joining.settings, CUDA, members.link_costs, joining.rank)
    exchange = open_exchange(engine, joining, carrier)
    return CudaSide(engine, carrier, CudaReducer(engine, exchange, chooser, context, ledger))
