"""Exchanges of a device's payloads through shared memory that the device copies from and to directly.

Each rank has a ring of blocks, one per exchange, that its peers read. The steps of an exchange:

1. Wait for the exchange `_LAG` before this one, and until the device has copied its payloads.
2. Now every peer is past the exchange 2 `_LAG` before this one, and has copied from the block that is next in the ring.
3. Let the device copy the sent payloads into that block, and wait for it.
4. Tell each peer where its payload is: a message of the native executor, with its waits and errors.
5. When the peers' messages have arrived, let the device copy from their blocks.

Between step 1 and the peers' step 2 is this rank's message, which they have waited for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from torch_cgx import _native
from torch_cgx.engines.cuda.device import Device
from torch_cgx.engines.cuda.exchange import Arrival
from torch_cgx.engines.cuda.shared_exchange import exchange_plan, wait_for
from torch_cgx.engines.host.native import Prepared, SharedGroup
from torch_cgx.errors import SharedMemoryError

__all__ = ["Block", "DirectExchange", "make_block", "open_block"]

_LAG = 3  # exchanges in progress at once before the first is waited for; slices of SRA need no more
_BLOCKS = 2 * _LAG
_ALIGNMENT = 64
_LEAST_NBYTES = 1 << 16  # of a block; larger ones double
_Message = ctypes.c_int64 * 3  # the number of the block's file, its length, and where the payload starts


@dataclass(slots=True)
class Block:
    """Memory of one rank that others map. `file`: its file number in the rank that made it."""

    file: int
    memory: Tensor
    owned: bool
    registered: bool = False

    def drop(self, device: Device) -> None:
        """Release the block. Called when no copies use it. Its memory is freed with the last mapping."""
        if self.registered:
            device.unregister(self.memory)
        if self.owned:
            os.close(self.file)


def make_block(nbytes: int) -> Block:
    """Make a block. It has no name, so that nothing can be left behind.

    It is allocated immediately, so that a lack of memory is an error here.
    """
    file = os.memfd_create("cgx", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, nbytes)
        return Block(file, _mapped(file, nbytes), owned=True)
    except OSError as error:
        os.close(file)
        raise SharedMemoryError(f"{nbytes} bytes of memory to share for CUDA payloads cannot be had: {error}") from None


def open_block(pid: int, file: int, nbytes: int) -> Block:
    """Map a block that another process has made."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return Block(file, _mapped(opened, nbytes), owned=False)
        finally:
            os.close(opened)
    except (OSError, ValueError) as error:
        raise SharedMemoryError(f"memory that process {pid} shares cannot be mapped: {error}") from None


def _mapped(file: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


class DirectExchange:
    """An `Exchange` over shared memory. It owns the shared group. `call` makes the entries of its board.

    `pids` are the ranks' processes, whose blocks this rank can open. If the device does not register a block, its
    payloads go through pinned memory.
    """

    waits = True

    def __init__(
        self,
        device: Device,
        shared: SharedGroup,
        call: Callable[[int], _native.Call],
        rank: int,
        pids: Sequence[int],
        timeout: timedelta,
    ) -> None:
        self._device = device
        self._shared = shared
        self._call = call
        self._rank = rank
        self._pids = tuple(pids)
        self._peers = [peer for peer in range(len(pids)) if peer != rank]
        self._agreed = self._number = 0
        self._mine: list[Block | None] = [None] * _BLOCKS
        self._theirs: dict[tuple[int, int], Block] = {}  # by rank and place in the ring
        self._recent: deque[_Arrival] = deque()
        self.most_nbytes = shared.limit_nbytes // (4 * len(pids))  # like `SharedExchange`, to cut tensors identically
        self.set_timeout(timeout)

    def begin(self, agreed: int) -> None:
        self._agreed = agreed

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], room_nbytes: int) -> Arrival:
        if len(self._recent) == _LAG:
            self._recent.popleft().finish()
        told = self._put(outgoing)
        # These numbers stay on the host. They are not a tensor, whose operations could be taken for the device's.
        mail = (_Message * (2 * len(self._pids) - 2))()
        for place, peer in enumerate(self._peers):
            mail[place][:] = list(told[peer])
        message_nbytes = ctypes.sizeof(_Message)
        lengths = tuple(0 if peer == self._rank else message_nbytes for peer in range(len(self._pids)))
        prepared = Prepared(
            *(exchange_plan(self._rank, lengths, lengths, message_nbytes), self._call(self._agreed)),
            scale=1.0,
            nbytes=ctypes.sizeof(mail),
            compressed=False,
            stochastic=False,
            seed=0,
        )
        number, _ = self._shared.submit(prepared, ctypes.addressof(mail), None, self._timeout_ms, wake=True)
        arrival = _Arrival(self, self._number % _BLOCKS, number, prepared, mail, list(incoming))
        self._recent.append(arrival)
        self._number += 1
        return arrival

    def _put(self, outgoing: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Copy each payload once into the next block. Return where each peer's payload is."""
        starts: dict[int, int] = {}  # by address, because a sum goes to all peers
        nbytes = 0
        for payload in outgoing:
            if payload.numel() and payload.data_ptr() not in starts:
                starts[payload.data_ptr()] = nbytes
                nbytes += -(-payload.numel() // _ALIGNMENT) * _ALIGNMENT
        if not starts:
            return [(-1, 0, 0)] * len(outgoing)
        first = next(payload for payload in outgoing if payload.numel())
        block = self._block(nbytes, first.device)
        target = block.memory if block.registered else self._device.pinned(nbytes)
        for payload in {payload.data_ptr(): payload for payload in outgoing if payload.numel()}.values():
            start = starts[payload.data_ptr()]
            target[start : start + payload.numel()].copy_(payload, non_blocking=True)
        self._device.synchronize(self._device.record(self._device.current_stream(first.device)))
        if target is not block.memory:
            block.memory[:nbytes].copy_(target)
        return [(block.file, block.memory.numel(), starts.get(payload.data_ptr(), 0)) for payload in outgoing]

    def _block(self, nbytes: int, where: torch.device) -> Block:
        place = self._number % _BLOCKS
        block = self._mine[place]
        if block is None or block.memory.numel() < nbytes:
            if nbytes > self._shared.limit_nbytes:  # anonymous memory has no limit of its own
                raise SharedMemoryError(
                    f"payloads of {nbytes} bytes for one exchange, and a rank may share {self._shared.limit_nbytes}: "
                    "make /dev/shm larger or CGX_FUSION_BUFFER_SIZE_MB smaller"
                )
            if block is not None:
                block.drop(self._device)
            block = self._mine[place] = make_block(max(_LEAST_NBYTES, 1 << (nbytes - 1).bit_length()))
            self._register(block, where)
        return block

    def _register(self, block: Block, where: torch.device) -> None:
        block.registered = self._device.register(block.memory)
        if not block.registered:
            with suppress(RuntimeError):  # torch reports the failure at the next launch, so make one here
                self._device.empty(8, where).zero_()

    def fetch(self, place: int, mail: Sequence[Sequence[int]], incoming: Sequence[Tensor]) -> Any:
        """Let the device copy the payloads that the mail announces. Return an event for their end, if any."""
        event = None
        for peer, (file, nbytes, start) in zip(self._peers, mail, strict=True):
            payload = incoming[peer]
            if not payload.numel():
                continue
            block = self._their_block(peer, place, file, nbytes, payload.device)
            source = block.memory[start : start + payload.numel()]
            if not block.registered:
                source = self._device.pinned(payload.numel()).copy_(source)
            payload.copy_(source, non_blocking=True)
            event = self._device.current_stream(payload.device)
        return None if event is None else self._device.record(event)

    def _their_block(self, peer: int, place: int, file: int, nbytes: int, where: torch.device) -> Block:
        block = self._theirs.get((peer, place))
        if block is None or (block.file, block.memory.numel()) != (file, nbytes):
            if block is not None:
                block.drop(self._device)
            block = self._theirs[peer, place] = open_block(self._pids[peer], file, nbytes)
            self._register(block, where)
        return block

    def wait_for_mail(self, number: int) -> None:
        wait_for(self._shared, number)

    def synchronize(self, event: Any) -> None:
        self._device.synchronize(event)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_ms = max(1, int(timeout.total_seconds() * 1000))

    def close(self) -> None:
        self._shared.close()
        for arrival in self._recent:
            arrival.finish_copies()
        for block in (*self._mine, *self._theirs.values()):
            if block is not None:
                block.drop(self._device)
        self._mine, self._theirs = [None] * _BLOCKS, {}
        self._recent.clear()

    def abort(self) -> None:
        """Leave without waiting for the device. Blocks are kept, because it may still be copying."""
        self._shared.close()
        _abandoned.extend(block for block in (*self._mine, *self._theirs.values()) if block is not None)
        self._mine, self._theirs = [None] * _BLOCKS, {}
        self._recent.clear()


_abandoned: list[Block] = []  # kept as long as the process lives


@dataclass(slots=True)
class _Arrival:
    exchange: DirectExchange
    place: int
    number: int
    prepared: Prepared
    mail: Any  # messages that go out, then those that come in
    incoming: list[Tensor]
    copied: Any = None
    waited: bool = field(default=False)

    def wait(self) -> None:
        if not self.waited:
            self.exchange.wait_for_mail(self.number)
            self.copied = self.exchange.fetch(self.place, self.mail[len(self.mail) // 2 :], self.incoming)
            self.waited = True
            self.incoming.clear()

    def finish(self) -> None:
        """Wait for the arrival, and let the host wait until the device has copied it."""
        self.wait()
        self.finish_copies()

    def finish_copies(self) -> None:
        if self.copied is not None:
            self.exchange.synchronize(self.copied)
            self.copied = None
