"""Whole allreduces in one process: all ranks end with the same bits, near the true sum."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.families import each_once
from torch_cgx.codecs import RAW, Codec, MaxMin
from torch_cgx.engines.memory import allreduce, run
from torch_cgx.errors import ProgramError
from torch_cgx.kernels import NEAREST, Kernels, Piece, Rounding
from torch_cgx.kernels.reference import ReferenceKernels
from torch_cgx.plan.layout import Layer, Layout, make_layout
from torch_cgx.plan.program import Program, Receive, Send

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STOCHASTIC = Rounding(stochastic=True, seed=5, op=3)
KERNELS = ReferenceKernels()

quantizers = st.one_of(
    st.just(RAW),
    st.builds(MaxMin, st.integers(1, 8), st.sampled_from([1, 3, 8, 20, 64]), st.booleans()),
)
layers_lists = st.lists(st.builds(Layer, st.integers(0, 300), quantizers), min_size=1, max_size=5)


def random_values(numel: int, world: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(world)]


def same_bits(tensors: list[Tensor]) -> bool:
    return all(torch.equal(x.view(torch.uint8), tensors[0].view(torch.uint8)) for x in tensors)


def reduced(
    values: list[Tensor],
    layout: Layout,
    scale: float = 1.0,
    rounding: Rounding = NEAREST,
    order: int | None = None,
) -> list[Tensor]:
    out = [x.clone() for x in values]
    turn = None if order is None else Random(order)
    allreduce(out, layout, [KERNELS] * len(out), scale=scale, rounding=rounding, order=turn)
    return out


@pytest.mark.parametrize(("bits", "world", "dtype"), each_once((*range(1, 9), 32), (2, 3, 4, 5), DTYPES))
def test_all_ranks_end_with_the_same_bits_near_the_sum(bits: int, world: int, dtype: torch.dtype) -> None:
    quantizer: Codec = RAW if bits == 32 else MaxMin(bits, 64)
    for numel in (1, 7, 17, 333, 1003):
        values = random_values(numel, world, dtype, seed=numel)
        layout = make_layout([Layer(numel, quantizer)], world, dtype.itemsize, 1024)
        for rounding in (NEAREST, STOCHASTIC):
            out = reduced(values, layout, rounding=rounding)
            assert same_bits(out)
            # A contribution is off by its unit at most, and the sum by its own, which is at most all theirs.
            spread = sum((x.float().max() - x.float().min()).item() for x in values)
            unit = 0.0 if bits == 32 else spread / (2**bits - 1)
            exact = torch.stack([x.double() for x in values]).sum(0)
            rounding_of_dtype = torch.finfo(dtype).eps * exact.abs().max().item()
            assert (out[0].double() - exact).abs().max().item() <= 2.2 * unit + 2 * rounding_of_dtype + 1e-5


@given(
    layers=layers_lists,
    world=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    slice_nbytes=st.sampled_from([64, 700, 1 << 20]),
    scale=st.sampled_from([1.0, 0.25, 1 / 3]),
    rounding=st.sampled_from([NEAREST, STOCHASTIC]),
    order=st.integers(0, 2**32),
)
@settings(max_examples=80)
def test_mixed_layers_end_with_the_same_bits_whatever_the_order_of_events(
    layers: list[Layer],
    world: int,
    dtype: torch.dtype,
    slice_nbytes: int,
    scale: float,
    rounding: Rounding,
    order: int,
) -> None:
    values = random_values(sum(layer.numel for layer in layers), world, dtype, seed=order)
    layout = make_layout(layers, world, dtype.itemsize, slice_nbytes)
    in_turn = reduced(values, layout, scale, rounding)
    at_random = reduced(values, layout, scale, rounding, order)
    assert same_bits(in_turn + at_random)


@given(layers=layers_lists, world=st.integers(2, 5), seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_every_chunk_is_the_owner_s_values_then_the_others_by_rank(layers: list[Layer], world: int, seed: int) -> None:
    """The executor against three kernel calls a chunk, without programs."""
    numel = sum(layer.numel for layer in layers)
    values = random_values(numel, world, torch.float32, seed)
    layout = make_layout(layers, world, 4, 512)
    expected = torch.empty(numel)
    for part in layout.slices:
        for owner, chunk in enumerate(part.chunks):
            payloads = []
            for peer in range(world):
                if peer != owner:
                    payloads.append(torch.empty(chunk.nbytes, dtype=torch.uint8))
                    KERNELS.encode(chunk.pieces, values[peer], payloads[-1], NEAREST)
            out = torch.empty(chunk.nbytes, dtype=torch.uint8)
            KERNELS.reduce(chunk.pieces, values[owner].clone(), payloads, out, 0.5, NEAREST)
            KERNELS.decode(chunk.pieces, out, expected)
    assert torch.equal(reduced(values, layout, scale=0.5)[0], expected)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_exact_layers_beside_compressed_ones_are_exact(world: int) -> None:
    """Small integers, whose sums have no rounding: raw layers and raw tails come out as the true sum."""
    generator = torch.Generator().manual_seed(world)
    layers = [
        Layer(50, MaxMin(2, 16)),
        Layer(33, RAW),
        Layer(45, MaxMin(4, 64, skip_incomplete=True)),
        Layer(1, RAW),
    ]
    values = [torch.randint(-9, 9, (129,), generator=generator).float() for _ in range(world)]
    out = reduced(values, make_layout(layers, world, 4, 200))
    assert torch.equal(out[0][50:], torch.stack(values).sum(0)[50:])


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_constants_are_summed_and_averaged_exactly(bits: int) -> None:
    world, numel = 4, 777
    values = [torch.full((numel,), float(2**rank)) for rank in range(world)]
    layout = make_layout([Layer(numel, MaxMin(bits, 100))], world, 4, 1 << 20)
    assert torch.equal(reduced(values, layout)[3], torch.full((numel,), 15.0))
    assert torch.equal(reduced(values, layout, scale=0.25)[0], torch.full((numel,), 3.75))


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_nan_on_one_rank_reaches_all_ranks_in_its_block_only(bad_rank: int) -> None:
    values = random_values(256, 3, torch.float16)
    values[bad_rank][70] = float("inf")
    out = reduced(values, make_layout([Layer(256, MaxMin(4, 64))], 3, 2, 1 << 20))
    assert same_bits(out)
    assert out[0][64:128].isnan().all() and not out[0][:64].isnan().any() and not out[0][128:].isnan().any()


def test_stochastic_sums_are_unbiased() -> None:
    world, numel, rounds = 3, 64, 400
    values = random_values(numel, world, torch.float32)
    layout = make_layout([Layer(numel, MaxMin(2, 32))], world, 4, 1 << 20)
    mean = torch.zeros(numel, dtype=torch.float64)
    for op in range(rounds):
        mean += reduced(values, layout, rounding=Rounding(True, seed=1, op=op))[0].double() / rounds
    # Four roundings of at most half a unit's deviation each, the sum's unit below twice a contribution's.
    unit = max((x.max() - x.min()).item() for x in values) / 3
    deviation = unit * 0.5 * (2 + 4) ** 0.5 / rounds**0.5
    assert (mean - torch.stack(values).double().sum(0)).abs().max() < 4.5 * deviation


def test_ranks_round_with_their_own_rank_and_the_sum_with_stage_one() -> None:
    seen: list[tuple[str, int, int, int]] = []

    class Recording(ReferenceKernels):
        def encode(
            self,
            pieces: Sequence[Piece],
            values: Tensor,
            payload: Tensor,
            rounding: Rounding,
            residual: Tensor | None = None,
        ) -> None:
            seen.append(("encode", rounding.op, rounding.rank, rounding.stage))
            super().encode(pieces, values, payload, rounding)

        def reduce(
            self,
            pieces: Sequence[Piece],
            values: Tensor,
            payloads: Sequence[Tensor],
            out: Tensor,
            scale: float,
            rounding: Rounding,
            residual: Tensor | None = None,
        ) -> None:
            seen.append(("reduce", rounding.op, rounding.rank, rounding.stage))
            super().reduce(pieces, values, payloads, out, scale, rounding)

    kernels: list[Kernels] = [Recording(), Recording()]
    layout = make_layout([Layer(64, MaxMin(4, 8))], 2, 4, 1 << 20)
    allreduce(random_values(64, 2, torch.float32), layout, kernels, rounding=STOCHASTIC)
    assert sorted(seen) == [
        ("encode", 3, 0, 0),
        ("encode", 3, 1, 0),
        ("reduce", 3, 0, 1),
        ("reduce", 3, 1, 1),
    ]


def test_the_only_rank_of_a_world_keeps_its_values() -> None:
    values = random_values(100, 1, torch.float32)
    assert torch.equal(reduced(values, make_layout([Layer(100, MaxMin(1, 8))], 1, 4, 64))[0], values[0])


def test_ranks_that_wait_for_ever_are_an_error() -> None:
    (part,) = make_layout([Layer(64, MaxMin(4, 8))], 2, 4, 1 << 20).slices
    programs: list[Program] = [(Receive("a", 1), Send("a", 1)), (Receive("a", 0), Send("a", 0))]
    with pytest.raises(ProgramError, match="rank 0 at receive a from 1; rank 1 at receive a from 0"):
        run(programs, part, random_values(64, 2, torch.float32), [KERNELS] * 2)


def test_lists_of_different_lengths_are_refused() -> None:
    (part,) = make_layout([Layer(64, MaxMin(4, 8))], 2, 4, 1 << 20).slices
    with pytest.raises(ValueError, match="got 2, 1 and 2"):
        run([(), ()], part, random_values(64, 1, torch.float32), [KERNELS] * 2)


def test_kernels_that_leave_bytes_unwritten_show() -> None:
    """A payload starts as something that no test mistakes for zeros."""
    found: list[int] = []

    class Lazy(ReferenceKernels):
        def encode(
            self,
            pieces: Sequence[Piece],
            values: Tensor,
            payload: Tensor,
            rounding: Rounding,
            residual: Tensor | None = None,
        ) -> None:
            found.extend(payload.tolist())
            super().encode(pieces, values, payload, rounding)

    layout = make_layout([Layer(64, MaxMin(4, 8))], 2, 4, 1 << 20)
    allreduce(random_values(64, 2, torch.float32), layout, [Lazy(), Lazy()])
    assert found and 0 not in found
