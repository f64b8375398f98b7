"""Exchanges of a device's payloads through pinned host memory and shared memory, carried by the native executor.

They serve ranks that cannot map each other's memory. Otherwise `direct_exchange` saves one copy at each end.

An exchange is an ordinary program whose values are the payloads' bytes and whose pieces are raw. It encodes each
payload into a slot for its peer, and decodes each peer's payload. So it has the native executor's waits and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import torch
from torch import Tensor

from torch_cgx import _native
from torch_cgx.codecs import RAW
from torch_cgx.engines.cuda.device import Device
from torch_cgx.engines.cuda.exchange import Arrival, to_host
from torch_cgx.engines.host.native import Prepared, SharedGroup
from torch_cgx.engines.host.plans import Plan, Tables, Template, aligned
from torch_cgx.kernels import Piece
from torch_cgx.plan.layout import Chunk, Slice
from torch_cgx.plan.program import Decode, Encode, Receive, Send, Slot, Step
from torch_cgx.plan.programs import EXACT, NodeSlot, NodeSlots

__all__ = ["SharedExchange", "exchange_plan", "wait_for"]

_SLICE_MS = 100  # of a wait; another slice follows
_DTYPE = torch.float32  # the executor's type for payloads, whose lengths are multiples of 8


class SharedExchange:
    """An `Exchange` over shared memory. It owns the shared group. `call` makes the entries of its board."""

    waits = True

    def __init__(
        self,
        device: Device,
        shared: SharedGroup,
        call: Callable[[int], _native.Call],
        rank: int,
        world: int,
        timeout: timedelta,
    ) -> None:
        self._device = device
        self._shared = shared
        self._call = call
        self._rank, self._world = rank, world
        self._agreed = 0
        # The segment has two halves, each with a chunk's payload per pair of ranks. Another factor of two allows for
        # payloads that are longer than their values because blocks are tiny.
        self.most_nbytes = shared.limit_nbytes // (4 * world)
        self.set_timeout(timeout)

    def begin(self, agreed: int) -> None:
        self._agreed = agreed

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], room_nbytes: int) -> Arrival:
        lengths = tuple(tuple(payload.numel() for payload in payloads) for payloads in (outgoing, incoming))
        plan = exchange_plan(self._rank, *lengths, room_nbytes)
        sent = [payload for payload in outgoing if payload.numel()]
        arriving = [payload for payload in incoming if payload.numel()]
        host = self._device.pinned(sum(payload.numel() for payload in (*sent, *arriving)))
        hosts = torch.split(host, [payload.numel() for payload in (*sent, *arriving)])
        to_host(self._device, sent, hosts[: len(sent)])
        prepared = Prepared(
            *(plan, self._call(self._agreed)),
            scale=1.0,
            nbytes=host.numel(),
            compressed=False,
            stochastic=False,
            seed=0,
        )
        number, _ = self._shared.submit(prepared, host.data_ptr(), None, self._timeout_ms, wake=True)
        return _Arrival(self._shared, number, (prepared, host), list(zip(hosts[len(sent) :], arriving, strict=True)))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_ms = max(1, int(timeout.total_seconds() * 1000))

    def close(self) -> None:
        self._shared.close()

    abort = close


@dataclass(slots=True)
class _Arrival:
    shared: SharedGroup
    number: int
    kept: object  # what the native executor works on
    copies: list[tuple[Tensor, Tensor]]  # from the host, to the device

    def wait(self) -> None:
        wait_for(self.shared, self.number)
        for host, payload in self.copies:
            payload.copy_(host, non_blocking=True)  # torch does not reuse the pinned memory before the copy is done


def wait_for(shared: SharedGroup, number: int) -> None:
    """Wait until the operation of this number is done. Raise its error if it failed."""
    while not shared.wait(number, _SLICE_MS):
        pass


@lru_cache(maxsize=1024)
def exchange_plan(rank: int, sent: tuple[int, ...], received: tuple[int, ...], room_nbytes: int) -> Plan:
    """Return the plan of an exchange of these numbers of bytes, by peer.

    Sent payloads come first in memory. Each pair of ranks has a slot of `room_nbytes`.
    """
    world = len(sent)
    pairs = [(writer, reader) for writer in range(world) for reader in range(world)]
    found = {_slot(*pair): NodeSlot(EXACT, place, *pair) for place, pair in enumerate(pairs)}
    steps: list[Step] = []
    chunks: list[Chunk] = []
    offset = 0
    for lengths, is_sent in ((sent, True), (received, False)):
        for peer, nbytes in enumerate(lengths):
            if not nbytes:
                continue
            numel = nbytes // _DTYPE.itemsize
            slot = _slot(rank, peer) if is_sent else _slot(peer, rank)
            steps += (
                [Encode(len(chunks), slot, exact=True), Send(slot, peer)]
                if is_sent
                else [Receive(slot, peer, exact=True), Decode(slot, len(chunks))]
            )
            piece = Piece.of(RAW, offset, numel)
            chunks.append(Chunk((piece,), nbytes, _DTYPE.itemsize))
            offset += numel
    tables = Tables(world)
    template = Template(tuple(steps), NodeSlots(found, (0, len(pairs), 0), world))
    tables.add(template, Slice(tuple(chunks)), (0, aligned(room_nbytes), 0))
    return Plan(tables, sum(sent), _DTYPE)


def _slot(writer: int, reader: int) -> Slot:
    return Slot("payload", reader, writer)
