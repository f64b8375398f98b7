"""Exchanges through blocks that ranks share: two ranks in one process, and what reaches whom, copied by whom, when."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.standin import StandInDevice
from torch_cgx.engines.cuda.direct_exchange import DirectExchange, make_block, open_block
from torch_cgx.errors import SharedMemoryError
from torch_cgx.group.calls import collective_call
from torch_cgx.kernels.native import available

pytestmark = pytest.mark.skipif(not available(), reason="needs the native library")

LAG = 3


class Post:
    """The native executor of one of two ranks: carries the messages, notes when."""

    limit_nbytes = 1 << 24

    def __init__(self, rank: int, device: StandInDevice, sent: dict[tuple[int, int], list[int]]) -> None:
        self._rank, self._device, self._sent = rank, device, sent
        self._mail: list[Any] = []

    def submit(self, prepared: Any, data_ptr: int, residual_ptr: Any, timeout_ms: int, *, wake: bool) -> Any:
        self._mail.append((ctypes.c_int64 * 6).from_address(data_ptr))
        number = len(self._mail)
        self._device.say("submit", number)
        self._sent[self._rank, number] = self._mail[-1][:3]
        return number, 0

    def wait(self, number: int, slice_ms: int) -> bool:
        self._mail[number - 1][3:] = self._sent[1 - self._rank, number]
        return True

    def close(self) -> None:
        self._device.say("closed")


@pytest.fixture(params=[True, False], ids=["registered", "not registered"])
def pair(request: pytest.FixtureRequest) -> tuple[list[DirectExchange], list[StandInDevice]]:
    return make_pair(request.param)


def make_pair(registers: bool) -> tuple[list[DirectExchange], list[StandInDevice]]:
    devices = [StandInDevice(), StandInDevice()]
    sent: dict[tuple[int, int], list[int]] = {}
    exchanges = []
    for rank, device in enumerate(devices):
        device.registers = registers
        post: Any = Post(rank, device, sent)
        pids = [os.getpid()] * 2
        call = lambda agreed: collective_call("all_to_all_single", layout=agreed)  # noqa: E731
        exchanges.append(DirectExchange(device, post, call, rank, pids, timedelta(seconds=9)))
    return exchanges, devices


def payloads_of(number: int, nbytes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8) for _ in range(2)]


def exchange(exchanges: list[DirectExchange], number: int, nbytes: int) -> tuple[list[Any], list[Tensor], list[Tensor]]:
    sent, got = payloads_of(number, nbytes), [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
    nothing = torch.empty(0, dtype=torch.uint8)
    arrivals = []
    for rank, each in enumerate(exchanges):
        outgoing, incoming = [nothing, nothing], [nothing, nothing]
        outgoing[1 - rank], incoming[1 - rank] = sent[rank], got[rank]
        arrivals.append(each.start(outgoing, incoming, nbytes))
    return arrivals, sent, got


def test_payloads_arrive_whatever_their_lengths(pair: Any) -> None:
    exchanges, devices = pair
    waiting = []
    for number in range(30):
        waiting.append(exchange(exchanges, number, (8, 70_000, 0, 300_000, 64)[number % 5] * (1 + number // 10)))
        if number % 4 == 3:  # several are under way
            for arrivals, sent, got in waiting:
                for arrival in arrivals:
                    arrival.wait()
                assert torch.equal(got[0], sent[1]) and torch.equal(got[1], sent[0])
            waiting.clear()
    for each, device in zip(exchanges, devices, strict=True):
        assert bool(device.registered) == device.registers
        each.close()
        each.close()
        assert not device.registered


def test_a_block_is_written_again_only_when_all_devices_have_read_it(pair: Any) -> None:
    exchanges, devices = pair
    for number in range(12):
        arrivals, _, _ = exchange(exchanges, number, 64)
        for arrival in arrivals:
            arrival.wait()
    for device in devices:
        log = device.log
        submits = [at for at, entry in enumerate(log) if entry[0] == "submit"]
        for number, at in enumerate(submits[: -LAG - 1]):
            (copied,) = [entry[1] for entry in log[at : submits[number + 1]] if entry[0] == "record"][:1]
            assert ("synchronize", copied) in log[: submits[number + LAG]], "peers take it that this one was copied"


def test_what_goes_to_all_is_copied_once(pair: Any) -> None:
    exchanges, _ = pair
    payload = torch.ones(128, dtype=torch.uint8)
    first, second, nothing = exchanges[0]._put([payload, payload, payload[:0]])
    assert first == second != nothing or first[2] == 0
    (block,) = [each for each in exchanges[0]._mine if each is not None]
    assert block.memory[:128].tolist() == [1] * 128 and not block.memory[128:256].any()


def test_there_is_a_limit_to_what_is_shared(pair: Any) -> None:
    with pytest.raises(SharedMemoryError, match="may share 16777216: make /dev/shm larger"):
        exchange(pair[0], 0, Post.limit_nbytes + 8)


def test_an_abort_leaves_the_blocks_to_the_device(pair: Any) -> None:
    exchanges, devices = pair
    exchange(exchanges, 0, 64)
    exchanges[0].abort()
    exchanges[0].close()
    assert bool(devices[0].registered) == devices[0].registers and ("closed",) in devices[0].log


def test_memory_that_cannot_be_had_or_mapped_is_an_error_that_says_so() -> None:
    with pytest.raises(SharedMemoryError, match="bytes of memory to share"):
        make_block(0)
    block = make_block(4096)
    with pytest.raises(SharedMemoryError, match=f"process {os.getpid()} shares cannot be mapped"):
        open_block(os.getpid(), block.file, 8192)
    os.close(block.file)
    with pytest.raises(SharedMemoryError, match="cannot be mapped"):
        open_block(os.getpid(), block.file, 4096)
