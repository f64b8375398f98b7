"""How much shared memory an operation takes: little, whatever the tensor, the ranks and the fusion buffer."""

from __future__ import annotations

import pytest
import torch

from torch_cgx.codecs import RAW, Codec, MaxMin
from torch_cgx.config import Settings
from torch_cgx.engines.host.plans import Plan, make_plan
from torch_cgx.errors import SharedMemoryError
from torch_cgx.group.bootstrap.handshake import SEGMENT_FLOOR_NBYTES, SEGMENT_LIMIT_NBYTES
from torch_cgx.kernels.native import available
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.layout import Layer

pytestmark = pytest.mark.skipif(not available(), reason="installed without the native library")

MB = 1 << 20
FOURS = tuple(rank // 4 for rank in range(64))  # 16 nodes
UNEQUAL = (0, 1, 2, *(3,) * 8)
FUSION_NBYTES = Settings().fusion_nbytes
QUANTIZERS = [MaxMin(1, 512), MaxMin(4, 512), MaxMin(8, 64), MaxMin(8, 1), RAW]


def plan_for(
    numel: int,
    quantizer: Codec,
    world: int,
    dtype: torch.dtype = torch.float32,
    limit_nbytes: int = SEGMENT_LIMIT_NBYTES,
    fusion_nbytes: int = FUSION_NBYTES,
    rank: int = 0,
    algorithm: str = "SRA",
) -> Plan:
    layers = (Layer(numel, quantizer),)
    topology, nodes = Topology.flat(algorithm, world), [0] * world
    return make_plan(layers, rank, topology, dtype, nodes=nodes, slice_nbytes=fusion_nbytes, limit_nbytes=limit_nbytes)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: f"{q.bits} bits, {q.block}")
@pytest.mark.parametrize("world", [2, 8, 16])
def test_64_mb_of_values_take_less_than_200_mb(world: int, quantizer: Codec) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        plan = plan_for(64 * MB // dtype.itemsize, quantizer, world, dtype)
        assert plan.memory_nbytes < 200 * MB
        assert plan.memory_nbytes <= SEGMENT_LIMIT_NBYTES


def test_the_need_does_not_grow_with_the_tensor_or_the_fusion_buffer() -> None:
    for quantizer in (MaxMin(4, 512), RAW):
        once = plan_for(16 * MB, quantizer, 8).memory_nbytes
        assert plan_for(64 * MB, quantizer, 8).memory_nbytes <= 1.01 * once
        assert plan_for(16 * MB, quantizer, 8, fusion_nbytes=1024 * MB).memory_nbytes == once


def test_a_small_tensor_takes_little() -> None:
    assert plan_for(1000, MaxMin(4, 512), 8).memory_nbytes < 64 * 1024


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: f"{q.bits} bits, {q.block}")
@pytest.mark.parametrize("world", [2, 4, 8])
def test_slices_shrink_to_whatever_a_group_may_take(world: int, quantizer: Codec) -> None:
    numel = 2_000_003
    for limit_nbytes in (64 * MB, 4 * MB, SEGMENT_FLOOR_NBYTES):
        plan = plan_for(numel, quantizer, world, limit_nbytes=limit_nbytes)
        assert 0 < plan.memory_nbytes <= limit_nbytes
        # More slices cost a few bytes of padding, no more.
        assert plan.payload_nbytes <= 1.02 * quantizer.payload_nbytes(numel, 4) + 8 * world


def test_all_ranks_need_the_same() -> None:
    sizes = {plan_for(1_000_003, MaxMin(3, 100), 5, rank=rank).memory_nbytes for rank in range(5)}
    assert len(sizes) == 1


def test_a_block_that_does_not_fit_is_an_error_with_both_sizes() -> None:
    with pytest.raises(SharedMemoryError, match=r"65536 values.*\b65536\b.*/dev/shm"):
        plan_for(1_000_000, MaxMin(8, 65536), 8, limit_nbytes=65536)


def test_a_ring_takes_no_more_than_the_slots_of_its_hops_and_sums() -> None:
    sizes = set()
    for rank in range(4):
        plan = plan_for(100_003, MaxMin(4, 64), 4, rank=rank, algorithm="RING")
        sizes.add((plan.memory_nbytes, plan.payload_nbytes))
    ((memory_nbytes, payload_nbytes),) = sizes
    # Each of 4 chunks is written by 3 hops and as a sum, and every slot is rounded up to a cache line.
    assert 8 * payload_nbytes <= memory_nbytes <= 8 * payload_nbytes + 32 * 64


@pytest.mark.parametrize(
    ("topology", "nodes", "numel", "quantizer", "limit_nbytes"),
    [
        (Topology("SRA", FOURS, 4), FOURS, 20 * 16384, MaxMin(8, 16384), 16 * MB),
        (Topology("GRID", FOURS, 4), FOURS, 20 * 16384, MaxMin(8, 16384), 16 * MB),
        (Topology.flat("SRA", 64), tuple(range(64)), MB, MaxMin(4, 65535), 165 * MB),
        (Topology("GRID", UNEQUAL, compress_inside=False), tuple(range(11)), 16 * MB, MaxMin(4, 512), 32 * MB),
    ],
    ids=["16 nodes of 4", "a grid of 16 nodes of 4", "64 nodes of 1", "nodes that share no memory"],
)
def test_no_node_needs_more_than_allowed(
    topology: Topology, nodes: tuple[int, ...], numel: int, quantizer: Codec, limit_nbytes: int
) -> None:
    """A node that owns an empty chunk needs less than the others, and so does a rank that adds nothing up."""
    for rank in range(len(nodes)):
        plan = make_plan(
            *([Layer(numel, quantizer)], rank, topology, torch.float32),
            nodes=nodes,
            slice_nbytes=FUSION_NBYTES,
            limit_nbytes=limit_nbytes,
        )
        assert plan.memory_nbytes <= limit_nbytes
