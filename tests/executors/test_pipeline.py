"""The pipeline of all ranks, on threads of one process: the bits of the executor in memory, whatever overlaps."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_cgx.codecs import Identity, MaxMin
from torch_cgx.engines import memory
from torch_cgx.engines.computing import Reduction
from torch_cgx.errors import MismatchError
from torch_cgx.executors.pipeline import Pipeline
from torch_cgx.executors.slicing import message_slice_nbytes
from torch_cgx.executors.staging import Staging
from torch_cgx.kernels import NEAREST, Rounding
from torch_cgx.kernels.native import default_kernels
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.checker import check
from torch_cgx.plan.layout import Layer, Layout, make_layout
from torch_cgx.transports import TAGS

WAIT_S = 20.0
KERNELS = default_kernels(threads=1)
STOCHASTIC = Rounding(stochastic=True, seed=5, op=3)
AGREED_NBYTES = 16
STAGING_NBYTES = 1 << 20

TOPOLOGIES = [
    *(Topology.flat(algorithm, world) for algorithm in ("SRA", "RING", "ALL_TO_ALL") for world in (2, 3, 5)),
    *(Topology("SRA", (0, 0, 1, 1), shares, inside) for shares in (1, 2) for inside in (True, False)),
    *(Topology("RING", (0, 1, 1, 0, 2, 2), shares, inside) for shares in (1, 2) for inside in (True, False)),
    Topology("SRA", (5, 2, 5, 5), 1, False),
    Topology("RING", (0, 0, 0, 1, 2, 2), 1, True),
    Topology("SRA", (0, 0, 0), 3, False),
]
LAYERS = [Layer(700, MaxMin(4, 64)), Layer(33, Identity()), Layer(17, MaxMin(2, 8)), Layer(501, MaxMin(8, 100, True))]


@dataclass
class Message:
    """Meets its other half: a send has left once its receive is posted, for no memory lies between them."""

    payload: Tensor
    met: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        assert self.met.wait(WAIT_S), "nobody came for a message"

    def done(self) -> bool:
        return self.met.is_set()


class Post:
    """What all ranks' transports share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sends: defaultdict[tuple[int, int, int], list[Message]] = defaultdict(list)
        self.receives: defaultdict[tuple[int, int, int], list[Message]] = defaultdict(list)

    def is_empty(self) -> bool:
        return not any(self.sends.values()) and not any(self.receives.values())


class InMemory:
    """One rank's transport; implements `torch_cgx.transports.Transport`."""

    timeout = timedelta(seconds=WAIT_S)
    tags = TAGS

    def __init__(self, rank: int, post: Post) -> None:
        self.rank = rank
        self.post = post
        self.sent: list[int] = []
        self.posted: list[int] = []

    def send(self, payload: Tensor, peer: int, tag: int) -> Message:
        self.sent.append(payload.numel())
        return self._meet((self.rank, peer, tag), payload, self.post.sends, self.post.receives)

    def receive(self, payload: Tensor, peer: int, tag: int) -> Message:
        self.posted.append(payload.numel())
        return self._meet((peer, self.rank, tag), payload, self.post.receives, self.post.sends)

    def close(self) -> None:
        raise AssertionError("nobody closes a transport here")

    def _meet(self, key: tuple[int, int, int], payload: Tensor, mine: Any, theirs: Any) -> Message:
        assert payload.dtype == torch.uint8 and payload.is_contiguous() and 0 <= key[2] < TAGS
        message = Message(payload)
        with self.post.lock:
            if not theirs[key]:
                mine[key].append(message)
                return message
            other = theirs[key].pop(0)
            target, source = (payload, other.payload) if theirs is self.post.sends else (other.payload, payload)
            assert target.numel() == source.numel(), f"{source.numel()} bytes were sent for {target.numel()}"
            target.copy_(source)
        message.met.set()
        other.met.set()
        return message


class Group:
    """The pipelines of all ranks."""

    def __init__(self, topology: Topology, staging_nbytes: int = STAGING_NBYTES) -> None:
        self.topology = topology
        self.post = Post()
        self.transports = [InMemory(rank, self.post) for rank in range(topology.world)]
        self.pipelines = [self._pipeline(rank, staging_nbytes) for rank in range(topology.world)]

    def _pipeline(self, rank: int, staging_nbytes: int) -> Pipeline:
        mine = self.transports[rank]
        transports = [None if peer == rank else mine for peer in range(self.topology.world)]
        names = [10 + peer for peer in range(self.topology.world)]
        return Pipeline(transports, KERNELS, rank, names, staging_nbytes)

    def on_all_ranks(self, function: Callable[[int], object]) -> list[BaseException | None]:
        """What each rank raised."""
        with ThreadPoolExecutor(self.topology.world) as pool:
            return [done.exception() for done in [pool.submit(function, r) for r in range(self.topology.world)]]

    def reduced(self, values: Sequence[Tensor], layout: Layout, scale: float, rounding: Rounding) -> list[Tensor]:
        out = [x.clone() for x in values]
        errors = self.on_all_ranks(
            lambda r: self.pipelines[r].run(Reduction(out[r], layout, self.topology, scale, rounding, agreed=7))
        )
        assert errors == [None] * self.topology.world
        assert self.post.is_empty()
        return out


def random_values(numel: int, world: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(world)]


def in_memory(
    values: Sequence[Tensor], layout: Layout, topology: Topology, scale: float, rounding: Rounding
) -> list[Tensor]:
    out = [x.clone() for x in values]
    memory.allreduce(out, layout, [KERNELS] * len(out), topology=topology, scale=scale, rounding=rounding)
    return out


def same_bits(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(x.view(torch.uint8), tensors[0].view(torch.uint8)) for x in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_the_bits_are_those_of_the_executor_in_memory(topology: Topology, dtype: torch.dtype) -> None:
    group, world = Group(topology), topology.world
    values = random_values(sum(layer.numel for layer in LAYERS), world, dtype)
    counts = []
    for slice_nbytes, scale, rounding in (
        (1 << 20, 1.0, NEAREST),
        (700 * dtype.itemsize, 1 / world, NEAREST),
        (150 * dtype.itemsize, 1 / world, STOCHASTIC),  # slices of few blocks: many chunks of them are empty
    ):
        layout = make_layout(LAYERS, topology.n_chunks, dtype.itemsize, slice_nbytes)
        counts.append(len(layout.slices))
        expected = in_memory(values, layout, topology, scale, rounding)
        assert same_bits([*group.reduced(values, layout, scale, rounding), *expected])
    assert counts[0] == 1 and counts[2] > counts[1] > 1


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_figures_count_the_payloads_that_were_sent(topology: Topology) -> None:
    group = Group(topology)
    values = random_values(sum(layer.numel for layer in LAYERS), topology.world)
    layout = make_layout(LAYERS, topology.n_chunks, 4, 1500)
    group.reduced(values, layout, 1.0, NEAREST)
    expected: Counter[int] = Counter()
    for part in layout.slices:
        nonempty = [chunk.nbytes > 0 for chunk in part.chunks]
        report = check(
            [topology.program(nonempty, rank) for rank in range(topology.world)],
            [chunk.nbytes for chunk in part.chunks],
            [chunk.exact.nbytes for chunk in part.chunks],
        )
        expected.update(dict(enumerate(report.sent_nbytes or ())))
    for rank, (pipeline, transport) in enumerate(zip(group.pipelines, group.transports, strict=True)):
        told = pipeline.figures["bytes_sent"]
        n_agreements = transport.sent.count(AGREED_NBYTES)
        assert told == expected[rank] > 0
        assert 0 <= sum(transport.sent) - told <= n_agreements * AGREED_NBYTES
        assert pipeline.figures["decode_s"] > 0
        pipeline.reset_figures()
        assert set(pipeline.figures.values()) == {0}


def test_a_layout_without_slices_is_no_work() -> None:
    group = Group(Topology.flat("SRA", 2))
    group.reduced([torch.empty(0)] * 2, Layout(()), 1.0, NEAREST)
    assert group.transports[0].sent == []


def test_tags_start_anew_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_cgx.executors.pipeline.zlib.crc32", lambda _: TAGS - 5)
    group = Group(Topology.flat("RING", 3))
    values = random_values(1000, 3)
    layout = make_layout([Layer(1000, MaxMin(4, 64))], 3, 4, 1000)
    expected = in_memory(values, layout, group.topology, 1.0, NEAREST)
    assert same_bits([*group.reduced(values, layout, 1.0, NEAREST), *expected])


@pytest.mark.parametrize("topology", [Topology.flat("SRA", 2), Topology("SRA", (0, 0, 1, 1))], ids=str)
def test_after_operations_of_many_sizes_no_more_is_kept_than_allowed(topology: Topology) -> None:
    most_nbytes = 128 << 10
    group = Group(topology, staging_nbytes=most_nbytes)
    for turn in range(30):
        numel = (16, 3000, 40_000, 200_000, 700)[turn % 5] + 64 * turn
        layout = make_layout([Layer(numel, MaxMin(8, 64))], topology.n_chunks, 4, 64 << 10)
        group.reduced(random_values(numel, topology.world), layout, 1.0, NEAREST)
        for pipeline in group.pipelines:
            assert 0 < kept_nbytes(pipeline._staging) <= most_nbytes


@pytest.mark.matrix
@pytest.mark.parametrize(
    "topology",
    [
        *(Topology.flat("SRA", world) for world in (2, 4)),
        *(Topology.flat("RING", world) for world in (4, 8)),
        *(Topology("SRA", (0, 0, 1, 1), shares) for shares in (1, 2)),
        Topology("SRA", (0,) * 6 + (1,)),
    ],
    ids=str,
)
def test_a_large_tensor_has_two_fusion_buffers_of_payloads_in_memory_at_most(topology: Topology) -> None:
    fusion_nbytes = 8 << 20
    group = Group(topology, staging_nbytes=fusion_nbytes)
    measured = [Measured(fusion_nbytes) for _ in group.pipelines]
    for pipeline, staging in zip(group.pipelines, measured, strict=True):
        pipeline._staging = staging
    nbytes = 4 * fusion_nbytes
    quantizer = MaxMin(4, 512)
    slice_nbytes = message_slice_nbytes(nbytes, fusion_nbytes, topology)
    layout = make_layout([Layer(nbytes // 4, quantizer)], topology.n_chunks, 4, slice_nbytes)
    group.reduced([torch.zeros(nbytes // 4)] * topology.world, layout, 1.0, NEAREST)
    payload_nbytes = quantizer.payload_nbytes(fusion_nbytes // 4, 4)
    used = [staging.most_nbytes / payload_nbytes for staging in measured]
    assert all(0.2 < share < 2 for share in used), used


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_are_about_to_do_something_else_raise_and_no_payload_is_taken(world: int) -> None:
    topology = Topology.flat("SRA", world)
    group = Group(topology)
    values = random_values(1000, world)
    layouts = [make_layout([Layer(1000, MaxMin(8 if r == 1 else 4, 64))], world, 4, 1500) for r in range(world)]
    before = [x.clone() for x in values]
    errors = group.on_all_ranks(
        lambda r: group.pipelines[r].run(
            Reduction(values[r], layouts[r], group.topology, 1.0, NEAREST, agreed=5 if r == 1 else 4)
        )
    )
    for rank, error in enumerate(errors):
        assert isinstance(error, MismatchError)
        assert f"rank {10 + rank} and rank {11 if rank != 1 else 10}" in str(error)
        assert torch.equal(values[rank], before[rank])


def test_ranks_at_different_operations_raise_with_both_numbers() -> None:
    group = Group(Topology.flat("SRA", 2))
    values = random_values(1000, 2)
    layout = make_layout([Layer(1000, MaxMin(4, 64))], 2, 4, 1500)
    errors = group.on_all_ranks(
        lambda r: group.pipelines[r].run(
            Reduction(values[r], layout, group.topology, 1.0, Rounding(op=3 + r), agreed=4)
        )
    )
    for (mine, theirs), error in zip(((3, 4), (4, 3)), errors, strict=True):
        assert isinstance(error, MismatchError) and f"number {mine} and {theirs}" in str(error)


class Measured(Staging):
    """Knows how much was under way or kept at most."""

    under_way_nbytes = most_nbytes = 0

    def take(self, nbytes: int) -> Tensor:
        payload = super().take(nbytes)
        self.under_way_nbytes += payload.untyped_storage().nbytes()
        self.most_nbytes = max(self.most_nbytes, self.under_way_nbytes + kept_nbytes(self))
        return payload

    def give(self, payload: Tensor) -> None:
        self.under_way_nbytes -= payload.untyped_storage().nbytes()
        super().give(payload)


def kept_nbytes(staging: Staging) -> int:
    """Counted, not as it says itself."""
    return sum(tensor.untyped_storage().nbytes() for tensors in staging._free.values() for tensor in tensors)


def test_staging_gives_the_same_memory_again() -> None:
    staging = Staging(1 << 20)
    first = staging.take(5000)
    assert first.numel() == 5000 and first.dtype == torch.uint8 and first.is_contiguous()
    address = first.data_ptr()
    second = staging.take(5000)
    assert second.data_ptr() != address
    staging.give(first)
    again = staging.take(6000)  # of the same number of pages
    assert again.numel() == 6000 and again.data_ptr() == address
    assert kept_nbytes(staging) == 0
    assert staging.take(0).numel() == 0


def test_staging_never_keeps_more_than_its_bound() -> None:
    most_nbytes = 100_000
    staging = Staging(most_nbytes)
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        sizes = torch.randint(0, 120_000, (6,), generator=generator).tolist()
        taken = [staging.take(nbytes) for nbytes in sizes]
        places = sorted((tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in taken)
        assert all(place + nbytes <= after for (place, nbytes), (after, _) in pairwise(places))
        for tensor in taken:
            staging.give(tensor)
            assert kept_nbytes(staging) <= most_nbytes


def test_staging_lets_go_of_sizes_of_another_time() -> None:
    staging = Staging(64 << 10)
    for nbytes in (16 << 10, 24 << 10, 40 << 10):
        taken = [staging.take(nbytes), staging.take(nbytes)]
        for tensor in taken:
            staging.give(tensor)
    assert kept_nbytes(staging) == 40 << 10
    staging.give(staging.take(100 << 10))
    assert kept_nbytes(staging) <= 64 << 10
