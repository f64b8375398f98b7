"""Every algorithm on values, in one process: all ranks end with the same bits, as near to the sum as promised."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.families import each_once
from torch_cgx.codecs import RAW, Codec, MaxMin
from torch_cgx.engines.memory import allreduce
from torch_cgx.kernels import NEAREST, Kernels, Rounding
from torch_cgx.kernels.native import available, default_kernels
from torch_cgx.kernels.reference import ReferenceKernels
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.algorithms.hierarchical import most_shares
from torch_cgx.plan.checker import check
from torch_cgx.plan.layout import Layer, make_layout

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STOCHASTIC = Rounding(stochastic=True, seed=5, op=3)
KERNELS: list[Kernels] = [ReferenceKernels(), *([default_kernels()] if available() else [])]

TOPOLOGIES = [
    *(Topology.flat(algorithm, world) for algorithm in ("SRA", "RING") for world in (2, 3, 5)),
    Topology.flat("GRID", 6),
    Topology("GRID", (0, 1, 2, 3, 3, 0), 1, False),
    Topology("SRA", (0, 0, 1, 1)),
    Topology("SRA", (0, 1, 1, 0, 0), 2, False),
    Topology("SRA", (5, 2, 5, 5), 1, False),
    Topology("RING", (0, 1, 2, 0, 1, 2, 2), 2, True),
    Topology("RING", (0, 1, 1, 2), 1, False),
    Topology("SRA", (0, 0, 0)),
    Topology("RING", (3, 3, 3), 3, False),
]

quantizers = st.one_of(
    st.just(RAW),
    st.builds(MaxMin, st.integers(1, 8), st.sampled_from([1, 3, 8, 20, 64]), st.booleans()),
)
layers_lists = st.lists(st.builds(Layer, st.integers(0, 300), quantizers), min_size=1, max_size=4)


def random_values(numel: int, world: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(world)]


def whole_numbers(numel: int, world: int, most: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randint(-most, most, (numel,), generator=generator).float() for _ in range(world)]


def same_bits(tensors: list[Tensor]) -> bool:
    return all(torch.equal(x.view(torch.uint8), tensors[0].view(torch.uint8)) for x in tensors)


def reduced(
    values: list[Tensor],
    layers: list[Layer],
    topology: Topology,
    *,
    scale: float = 1.0,
    rounding: Rounding = NEAREST,
    order: int | None = None,
    slice_nbytes: int = 1024,
) -> list[Tensor]:
    out = [x.clone() for x in values]
    layout = make_layout(layers, topology.n_chunks, values[0].element_size(), slice_nbytes)
    # The two kernel sets side by side, where there are two.
    kernels = [KERNELS[(rank + len(layers)) % len(KERNELS)] for rank in range(topology.world)]
    turn = None if order is None else Random(order)
    allreduce(out, layout, kernels, topology=topology, scale=scale, rounding=rounding, order=turn)
    return out


def error_bound(values: list[Tensor], topology: Topology, bits: int, rounding: Rounding) -> float:
    """What the sum may be off by.

    An encoding of a sum of some contributions is off by half a unit (stochastic: a whole one), and its unit is at most
    the spreads of those contributions together, over the levels. A contribution is in as many encodings as it is
    quantized, so that all errors together are at most the sum of all spreads over the levels, that many times. Beside
    it, arithmetic: a few roundings of an encoding in float32, and one to the dtype for each contribution and the sum.
    """
    nonempty = [True] * topology.n_chunks
    report = check([topology.program(nonempty, rank) for rank in range(topology.world)])
    quantizations = max(report.quantizations.values())
    spreads = sum((x.float().max() - x.float().min()).item() for x in values)
    units = spreads / (2**bits - 1) * (1.0 if rounding.stochastic else 0.5)
    largest = sum(x.float().abs().max().item() for x in values)
    to_dtype = (topology.world + 1) * torch.finfo(values[0].dtype).eps
    return quantizations * (units + 2.0**-20 * largest) + to_dtype * largest


@pytest.mark.parametrize(("topology", "dtype"), each_once(TOPOLOGIES, DTYPES))
def test_all_ranks_end_with_the_same_bits_within_the_bound(topology: Topology, dtype: torch.dtype) -> None:
    world = topology.world
    for numel, bits, rounding in ((17, 4, NEAREST), (1003, 8, NEAREST), (700, 2, NEAREST), (333, 4, STOCHASTIC)):
        values = random_values(numel, world, dtype, seed=numel)
        exact = torch.stack([x.double() for x in values]).sum(0)
        bound = error_bound(values, topology, bits, rounding)
        for scale in (1.0, 1.0 / world):
            out = reduced(values, [Layer(numel, MaxMin(bits, 64))], topology, scale=scale, rounding=rounding)
            assert same_bits(out)
            assert (out[0].double() - exact * scale).abs().max().item() <= bound * scale


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    nodes = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)))
    algorithm = draw(st.sampled_from(["SRA", "RING"]))
    if draw(st.booleans()):
        return Topology.flat(algorithm, len(nodes))
    return Topology(algorithm, nodes, draw(st.integers(1, most_shares(nodes))), draw(st.booleans()))


@given(
    topology=topologies(),
    layers=layers_lists,
    dtype=st.sampled_from(DTYPES),
    slice_nbytes=st.sampled_from([64, 700, 1 << 20]),
    average=st.booleans(),
    rounding=st.sampled_from([NEAREST, STOCHASTIC]),
    order=st.integers(0, 2**32),
)
@settings(max_examples=150)
def test_mixed_layers_end_with_the_same_bits_whatever_the_order_of_events(
    topology: Topology,
    layers: list[Layer],
    dtype: torch.dtype,
    slice_nbytes: int,
    average: bool,
    rounding: Rounding,
    order: int,
) -> None:
    values = random_values(sum(layer.numel for layer in layers), topology.world, dtype, seed=order)
    scale = 1.0 / topology.world if average else 1.0
    in_turn = reduced(values, layers, topology, scale=scale, rounding=rounding, slice_nbytes=slice_nbytes)
    at_random = reduced(
        values, layers, topology, scale=scale, rounding=rounding, slice_nbytes=slice_nbytes, order=order
    )
    assert same_bits(in_turn + at_random)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_raw_layers_of_whole_numbers_are_summed_exactly(topology: Topology) -> None:
    values = whole_numbers(333, topology.world)
    layers = [Layer(200, RAW), Layer(133, RAW)]
    total = torch.stack(values).sum(0)
    assert torch.equal(reduced(values, layers, topology)[0], total)
    scale = 1.0 / topology.world
    assert torch.equal(reduced(values, layers, topology, scale=scale)[0], total * torch.tensor(scale))


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("cross", ["SRA", "RING"])
def test_one_node_alone_that_does_not_compress_inside_is_exact(cross: str, shares: int) -> None:
    values = whole_numbers(333, 3)
    out = reduced(values, [Layer(333, MaxMin(1, 64))], Topology(cross, (0, 0, 0), shares, compress_inside=False))
    assert same_bits(out) and torch.equal(out[0], torch.stack(values).sum(0))


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (1, 0, 0, 2, 1), (4, 4, 4, 1)])
@pytest.mark.parametrize("cross", ["SRA", "RING"])
def test_exact_inside_is_as_if_each_node_were_one_rank_with_its_sum(nodes: tuple[int, ...], cross: str) -> None:
    values = whole_numbers(500, len(nodes), most=1000)
    names = list(dict.fromkeys(nodes))
    sums = [sum((x for x, node in zip(values, nodes, strict=True) if node == name), torch.zeros(500)) for name in names]
    layers = [Layer(300, MaxMin(3, 20)), Layer(200, MaxMin(4, 64))]
    scale = 1.0 / len(nodes)
    out = reduced(values, layers, Topology(cross, nodes, 1, compress_inside=False), scale=scale)
    flat = reduced(sums, layers, Topology.flat(cross, len(sums)), scale=scale)
    assert same_bits([*out, *flat])


def test_compressed_inside_is_not_exact() -> None:
    """Else the tests above would show nothing about the coding."""
    values = whole_numbers(333, 3)
    for compress_inside, exact in ((True, False), (False, True)):
        out = reduced(values, [Layer(333, MaxMin(1, 64))], Topology("SRA", (0, 0, 0), 1, compress_inside))
        assert torch.equal(out[0], torch.stack(values).sum(0)) is exact


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("quantizer", [MaxMin(4, 64), RAW], ids=["4 bits", "raw"])
def test_nan_on_one_rank_reaches_all_ranks_alike(topology: Topology, quantizer: Codec) -> None:
    for dtype in DTYPES:
        values = random_values(256, topology.world, dtype)
        values[-1][70] = float("nan")
        out = reduced(values, [Layer(256, quantizer)], topology)
        assert same_bits(out)
        assert out[0][70].isnan() and not out[0][:64].isnan().any() and not out[0][128:].isnan().any()


@settings(max_examples=60, deadline=None)
@given(
    layers=layers_lists,
    topology=st.sampled_from(TOPOLOGIES),
    rounding=st.sampled_from([NEAREST, STOCHASTIC]),
    average=st.booleans(),
)
def test_nothing_is_lost_between_results_and_residuals(
    layers: list[Layer], topology: Topology, rounding: Rounding, average: bool
) -> None:
    """The law of error feedback: what all ranks put in is N averages (one sum) plus what all keep, at every step."""
    numel, world = sum(layer.numel for layer in layers), topology.world
    layout = make_layout(layers, topology.n_chunks, 4, 1024)
    residuals = [torch.zeros(numel) for _ in range(world)]
    for step in range(3):
        gradients = random_values(numel, world, torch.float32, seed=step)
        values = [gradient + residual for gradient, residual in zip(gradients, residuals, strict=True)]
        put_in = sum(value.double() for value in values)
        allreduce(
            values,
            layout,
            [KERNELS[rank % len(KERNELS)] for rank in range(world)],
            topology=topology,
            scale=1 / world if average else 1.0,
            rounding=rounding,
            residuals=residuals,
        )
        out = values[0].double() * (world if average else 1) + sum(residual.double() for residual in residuals)
        assert torch.allclose(out, put_in, rtol=1e-5, atol=1e-4 * world)
