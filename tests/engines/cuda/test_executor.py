"""The CUDA executor on a stand-in device, ranks as threads: the bits of the in-memory executor, in the right order.

That the order does not depend on luck is held by happens_before.py: what it would find is in test_happens_before.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.standin import Meeting, NotedKernels, StandInDevice, Stream
from torch_cgx.codecs import RAW, MaxMin
from torch_cgx.engines import memory
from torch_cgx.engines.computing import Reduction
from torch_cgx.engines.cuda.exchange import Arrival
from torch_cgx.engines.cuda.executor import CudaExecutor
from torch_cgx.kernels import Rounding
from torch_cgx.kernels.native import default_kernels
from torch_cgx.plan.algorithms import IN_SHARES, Topology
from torch_cgx.plan.layout import Layer, Layout, make_layout, make_shares_layout
from torch_cgx.plan.rounds import rounds_for

TOPOLOGIES = {
    "SRA": Topology.flat("SRA", 3),
    "RING": Topology.flat("RING", 4),
    "GRID": Topology.flat("GRID", 4),
    "two nodes": Topology("SRA", (0, 0, 1, 1, 1)),
    "two nodes, two shares": Topology("SRA", (0, 1, 0, 1), shares=2),
    "two nodes, a ring, exact inside": Topology("RING", (0, 0, 1), compress_inside=False),
}


class Hall:
    """Where all ranks exchange payloads at once; one exchange a rank."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=20)
        self.boards: list[dict[int, Sequence[Tensor]]] = []
        self.lock = threading.Lock()

    def board(self, number: int) -> dict[int, Sequence[Tensor]]:
        with self.lock:
            while len(self.boards) <= number:
                self.boards.append({})
            return self.boards[number]


class HallExchange:
    waits = False
    most_nbytes = None

    def __init__(self, hall: Hall, device: StandInDevice, rank: int) -> None:
        self._hall, self._device, self._rank = hall, device, rank
        self._stream = Stream("exchanges")
        self._number = -1

    def begin(self, agreed: int) -> None:
        self._device.say("begin", agreed)

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], room_nbytes: int) -> Arrival:
        self._device.say("exchange", self._device.here.name)
        assert all(payload.numel() <= room_nbytes for payload in (*outgoing, *incoming))
        self._number += 1
        meeting = self._device.meet(self._stream, outgoing, incoming)
        with self._device.order.unseen():
            self._hall.board(self._number)[self._rank] = [payload.clone() for payload in outgoing]
        return _HallArrival(self._hall, meeting, self._number, self._rank, incoming)

    def set_timeout(self, timeout: timedelta) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class _HallArrival:
    def __init__(self, hall: Hall, meeting: Meeting, number: int, rank: int, incoming: Sequence[Tensor]) -> None:
        self._hall, self._meeting, self._number, self._rank, self._incoming = hall, meeting, number, rank, incoming

    def wait(self) -> None:
        self._meeting.wait()
        self._hall.barrier.wait()  # all have put down what they send
        with self._meeting.device.order.unseen():
            for sender, payloads in self._hall.board(self._number).items():
                assert payloads[self._rank].numel() == self._incoming[sender].numel()
                self._incoming[sender].copy_(payloads[self._rank])
        self._hall.barrier.wait()


def run_all(
    values: Sequence[Tensor], residuals: Sequence[Tensor | None], shares: Sequence[Tensor] | None = None, **fields: Any
) -> list[StandInDevice]:
    """One thread a rank; what each one's device was asked."""
    world = len(values)
    hall, devices = Hall(world), [StandInDevice() for _ in values]
    widened = fields.pop("widened", False)

    def run(rank: int) -> None:
        device = devices[rank]
        kernels = NotedKernels(default_kernels(), device)
        executor = CudaExecutor(device, lambda: kernels, HallExchange(hall, device, rank), rank)
        share = None if shares is None else shares[rank]
        operation = Reduction(values=values[rank], residual=residuals[rank], share=share, **fields)
        with device.watching():
            values[rank].mul_(1)  # the caller's stream has made the values
            if share is not None:
                share.mul_(1)
            enqueued = executor.take(operation)
            executor.enqueue(operation, enqueued, widened=widened)
            assert enqueued.done is not None
            device.hold_back(device.here, enqueued.done)
            (values[rank] if share is None else share).add(1)  # and reads what came of them
            if residuals[rank] is not None:
                residuals[rank].add(1)
        device.order.check()

    with ThreadPoolExecutor(world) as pool:
        for done in [pool.submit(run, rank) for rank in range(world)]:
            done.result()
    return devices


def layout_of(topology: Topology, dtype: torch.dtype, slice_nbytes: int = 1 << 14) -> tuple[Layout, int]:
    layers = (Layer(3001, MaxMin(4, 64)), Layer(37, RAW), Layer(9000, MaxMin(2, 512, True)))
    return make_layout(layers, topology.n_chunks, dtype.itemsize, slice_nbytes), sum(layer.numel for layer in layers)


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_bits_are_those_of_the_other_executors(name: str, stochastic: bool) -> None:
    topology = TOPOLOGIES[name]
    layout, numel = layout_of(topology, torch.float32)
    assert len(layout.slices) >= 3, "slices must overlap here"
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(numel, generator=generator) for _ in range(topology.world)]
    rounding = Rounding(stochastic, seed=5, op=9)
    expected, lost = [x.clone() for x in inputs], [torch.zeros(numel) for _ in inputs]
    scale = 1 / topology.world
    kernels = [default_kernels() for _ in inputs]
    memory.allreduce(expected, layout, kernels, topology=topology, scale=scale, rounding=rounding, residuals=lost)
    residuals = [torch.zeros(numel) for _ in inputs]
    fields = {"layout": layout, "topology": topology, "scale": scale, "rounding": rounding, "agreed": 77}
    run_all(inputs, residuals, **fields)
    for got, want in zip((*inputs, *residuals), (*expected, *lost), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "topology", [Topology("SRA", (0, 0, 1)), Topology("RING", (0, 0, 1, 2, 2))], ids=["SRA", "RING"]
)
def test_a_last_slice_with_one_chunk_has_fewer_exchanges_than_the_others(topology: Topology) -> None:
    layout = make_layout((Layer(8232, MaxMin(4, 64)),), topology.n_chunks, 4, 1 << 14)
    assert [sum(chunk.nbytes > 0 for chunk in part.chunks) for part in layout.slices][-1] == 1
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(8232, generator=generator) for _ in range(topology.world)]
    expected = [x.clone() for x in inputs]
    memory.allreduce(expected, layout, [default_kernels() for _ in inputs], topology=topology)
    fields = {"layout": layout, "topology": topology, "scale": 1.0, "rounding": Rounding(), "agreed": 0}
    run_all(inputs, [torch.zeros(8232) for _ in inputs], **fields)
    assert all(torch.equal(got, want) for got, want in zip(inputs, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bits_in_several_steps_are_made_in_32(dtype: torch.dtype) -> None:
    topology = TOPOLOGIES["two nodes"]
    layout, numel = layout_of(topology, torch.float32)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(numel, generator=generator).to(dtype) for _ in range(topology.world)]
    expected = [x.float() for x in inputs]
    memory.allreduce(expected, layout, [default_kernels() for _ in inputs], topology=topology)
    fields = {"layout": layout, "topology": topology, "scale": 1.0, "rounding": Rounding(), "agreed": 0}
    run_all(inputs, [torch.zeros(numel) for _ in inputs], widened=True, **fields)
    assert all(torch.equal(got, want.to(dtype)) for got, want in zip(inputs, expected, strict=True))


SHARE_LAYERS = (Layer(3001, MaxMin(4, 64)), Layer(37, RAW), Layer(2000, MaxMin(2, 512, True)))
SHARE_NUMEL = sum(layer.numel for layer in SHARE_LAYERS)


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3])
def test_shares_have_the_bits_of_the_in_memory_executor(world: int, dtype: torch.dtype, stochastic: bool) -> None:
    layout = make_shares_layout(SHARE_LAYERS, world, dtype.itemsize, 1 << 14)
    assert len(layout.slices) >= 2, "slices must overlap here"
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(world * SHARE_NUMEL, generator=generator).to(dtype) for _ in range(world)]
    kernels, rounding = [default_kernels()] * world, Rounding(stochastic, seed=5, op=9)
    fields = {"layout": layout, "scale": 1 / 3, "rounding": rounding, "agreed": 77}
    nothing: list[None] = [None] * world

    values = [x.clone() for x in inputs]
    shares, expected = ([x.view(world, -1)[rank].clone() for rank, x in enumerate(inputs)] for _ in range(2))
    memory.reduce_scatter(inputs, expected, layout, kernels, scale=1 / 3, rounding=rounding)
    run_all(values, nothing, shares, topology=Topology.flat("REDUCE_SCATTER", world), **fields)
    assert all(map(torch.equal, shares, expected)) and all(map(torch.equal, values, inputs))

    gathered = [x.clone() for x in inputs]
    memory.all_gather(gathered, layout, kernels, rounding=rounding)
    run_all(values, nothing, topology=Topology.flat("ALL_GATHER", world), **fields)
    assert all(torch.equal(got, gathered[0]) for got in values)


def test_a_reduce_scatter_keeps_the_share_too_and_has_one_exchange_a_slice() -> None:
    layout = make_shares_layout((Layer(2048, MaxMin(4, 64)),), 2, 4, 1 << 20)
    topology = Topology.flat("REDUCE_SCATTER", 2)
    fields = {"layout": layout, "topology": topology, "scale": 1.0, "rounding": Rounding(op=3), "agreed": 7}
    values, shares = [torch.ones(4096) for _ in "ab"], [torch.ones(2048) for _ in "ab"]
    for device in run_all(values, [None, None], shares, **fields):
        assert device.log == [
            ("keep", 4096, "side 1"),
            ("keep", 2048, "side 1"),
            ("record", 1, "caller"),
            ("hold back", "side 1", 1),
            ("begin", 7),
            ("encode", "side 1"),
            ("exchange", "side 1"),
            ("arrived", "side 1"),
            ("sum", "side 1"),
            ("record", 2, "side 1"),
            ("hold back", "caller", 2),
        ]
    assert all((share == 2.0).all() for share in shares)


def test_kernels_exchanges_and_events_come_in_this_order() -> None:
    topology = Topology.flat("SRA", 2)
    layout = make_layout((Layer(4096, MaxMin(4, 64)),), 2, 4, 1 << 20)
    fields = {"layout": layout, "topology": topology, "scale": 1.0, "rounding": Rounding(op=3), "agreed": 7}
    values = [torch.ones(4096), torch.ones(4096)]
    for device in run_all(values, [torch.zeros(4096), torch.zeros(4096)], **fields):
        assert device.log == [
            ("keep", 4096, "side 1"),
            ("keep", 4096, "side 1"),
            ("record", 1, "caller"),
            ("hold back", "side 1", 1),
            ("begin", 7),
            ("encode", "side 1"),
            ("exchange", "side 1"),
            ("arrived", "side 1"),
            ("reduce", "side 1"),
            ("exchange", "side 1"),
            ("arrived", "side 1"),
            ("decode", "side 1"),
            ("record", 2, "side 1"),
            ("hold back", "caller", 2),
        ]


def test_one_slice_is_encoded_while_the_one_before_is_exchanged() -> None:
    topology = Topology.flat("SRA", 2)
    layout = make_layout((Layer(4096, MaxMin(4, 64)),), 2, 4, 4096 * 4 // 3)
    fields = {"layout": layout, "topology": topology, "scale": 1.0, "rounding": Rounding(), "agreed": 0}
    (device, _) = run_all([torch.ones(4096) for _ in "ab"], [torch.zeros(4096) for _ in "ab"], **fields)
    made = [entry[0] for entry in device.log if entry[0] in ("encode", "exchange", "arrived", "reduce", "decode")]
    first_arrival = made.index("arrived")
    assert made[:first_arrival].count("encode") == 2 and made[:first_arrival].count("exchange") == 2


def test_a_capture_is_refused_before_anything_is_done() -> None:
    device = StandInDevice()
    device.capturing = True
    executor = CudaExecutor(device, default_kernels, HallExchange(Hall(1), device, 0), 0)
    operation = Reduction(torch.ones(8), Layout(()), Topology.flat("SRA", 2), 1.0, Rounding(), 0)
    with pytest.raises(RuntimeError, match=r"CUDA graph .* leave it outside .* torch_cgx.uncompressed\(\)"):
        executor.take(operation)
    assert device.log == []


@pytest.mark.parametrize("name", [*TOPOLOGIES, *IN_SHARES])
def test_every_message_of_the_programs_is_in_one_round(name: str) -> None:
    topology = TOPOLOGIES[name] if name in TOPOLOGIES else Topology.flat(name, 4)
    nonempty = (True,) * topology.n_chunks
    by_rank = [rounds_for(topology, nonempty, rank) for rank in range(topology.world)]
    assert len({tuple(map(len, rounds)) for rounds in by_rank}) == 1, "ranks have different rounds"
    sent = [
        (level, number, rank, peer, slot)
        for rank, rounds in enumerate(by_rank)
        for level, turns in enumerate(rounds)
        for number, turn in enumerate(turns)
        for peer, slot in turn.sends.items()
    ]
    received = [
        (level, number, peer, rank, slot)
        for rank, rounds in enumerate(by_rank)
        for level, turns in enumerate(rounds)
        for number, turn in enumerate(turns)
        for peer, slot in turn.receives.items()
    ]
    assert sorted(sent) == sorted(received)
    programs = [topology.program(nonempty, rank) for rank in range(topology.world)]
    assert len(sent) == sum(str(step).startswith("send") for program in programs for step in program)
