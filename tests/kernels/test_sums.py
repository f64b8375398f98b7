"""Sums of shares by every kernel set against the plain-torch oracle; whole reduce-scatters and all-gathers in memory.

Which NaN a sum has is not fixed (docs/wire_format.md); all other values are held to the byte.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.families import each_once
from tests.support.kernel_cases import DTYPES, Guarded, payload_nbytes, piece_for, random_values, same_bits, table_of
from torch_cgx.codecs import RAW, MaxMin
from torch_cgx.engines import memory
from torch_cgx.kernels import NEAREST, Kernels, Piece, Rounding
from torch_cgx.kernels.native import NativeKernels, available, simd_levels
from torch_cgx.kernels.reference import ReferenceKernels
from torch_cgx.plan.layout import Layer, Layout, make_shares_layout

ORACLE = ReferenceKernels()
STOCHASTIC = Rounding(stochastic=True, seed=5, op=3)
WIDTHS = (*range(1, 9), 32)
Rows = list[tuple[int, int, int, bool]]

needs_native = pytest.mark.skipif(not available(), reason="installed without the native library")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's in Triton's interpreter, about NaN


def one_nan(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.tensor(math.nan, dtype=x.dtype), x)


def contributions(pieces: Sequence[Piece], x: Tensor, nbytes: int, count: int, rounding: Rounding) -> list[Tensor]:
    """Payloads of so many other tensors."""
    payloads = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]
    for number, payload in enumerate(payloads, start=1):
        ORACLE.encode(pieces, x.roll(number), payload, rounding)
    return payloads


def summed(kernels: Kernels, pieces: Sequence[Piece], x: Tensor, payloads: Sequence[Tensor], scale: float) -> Tensor:
    """By these kernels, out of payloads that lie close to what they must not read, and must not write."""
    slots = [Guarded(payload.numel()) for payload in payloads]
    for slot, payload in zip(slots, payloads, strict=True):
        slot.payload.copy_(payload)
    mine = x.clone()
    kernels.sum(pieces, mine, [slot.payload for slot in slots], scale)
    for slot, payload in zip(slots, payloads, strict=True):
        assert slot.untouched() and torch.equal(slot.payload, payload)
    return mine


def check_sum(
    kernel_sets: Sequence[Kernels],
    pieces: Sequence[Piece],
    x: Tensor,
    nbytes: int,
    count: int = 2,
    scale: float = 1 / 3,
    rounding: Rounding = NEAREST,
) -> Tensor:
    payloads = contributions(pieces, x, nbytes, count, rounding)
    expected = summed(ORACLE, pieces, x, payloads, scale)
    for kernels in kernel_sets:
        mine = summed(kernels, pieces, x, payloads, scale)
        assert same_bits(one_nan(mine), one_nan(expected)), kernels.name
    return expected


def native(threads: int = 1) -> list[Kernels]:
    """Of every SIMD level."""
    return [NativeKernels(level, threads) for level in simd_levels()]


# ---- the oracle ----


def plain_sum(piece: Piece, x: Tensor, payloads: Sequence[Tensor], scale: float) -> Tensor:
    """Own values first, then each payload as it decodes to float32, one rounding each; then the scale and the dtype."""
    levels = piece.numel - piece.raw_tail
    span, quantized = slice(piece.offset, piece.offset + piece.numel), piece.offset + levels
    total = x[span].double() if x.dtype == torch.float64 else x[span].float()
    for payload in payloads:
        raw = x.clone()
        wide = torch.zeros(x.numel(), dtype=total.dtype)
        if levels:
            ORACLE.decode([replace(piece, numel=levels, raw_tail=0)], payload, wide)
        ORACLE.decode([piece], payload, raw)
        wide[quantized : span.stop] = raw[quantized : span.stop].to(wide.dtype)
        total = total + wide[span]
    return (total * torch.tensor(scale, dtype=total.dtype)).to(x.dtype)


@pytest.mark.parametrize(
    ("bits", "dtype"), [*each_once(WIDTHS, DTYPES), pytest.param(32, torch.float64, id="32-torch.float64")]
)
def test_a_sum_is_own_values_and_then_each_payload_in_order_scaled_and_rounded_once(
    bits: int, dtype: torch.dtype
) -> None:
    for numel, block, skip in ((1, 1, False), (100, 32, True), (333, 100, False), (70, 512, True)):
        pieces, end, nbytes = table_of([(numel, bits, block, skip)], dtype, offset=3)
        x = random_values(end + 5, dtype, seed=numel)
        for count in (1, 2, 4):
            payloads = contributions(pieces, x, nbytes, count, STOCHASTIC)
            for scale in (1.0, 0.25, 1 / 3):
                mine = summed(ORACLE, pieces, x, payloads, scale)
                assert same_bits(mine[3:end], plain_sum(pieces[0], x, payloads, scale))
                assert same_bits(mine[:3], x[:3]) and same_bits(mine[end:], x[end:])


def test_a_sum_in_16_bits_is_rounded_once_and_does_not_overflow_on_the_way() -> None:
    """One ulp a time would be lost, and the sum before its scale is not representable."""
    piece = piece_for(16, 32, 1)
    ones = torch.zeros(payload_nbytes(piece, torch.float16), dtype=torch.uint8)
    ORACLE.encode([piece], torch.ones(16, dtype=torch.float16), ones, NEAREST)
    for kernels in (ORACLE, *(native() if available() else ())):
        x = torch.full((16,), 2048.0, dtype=torch.float16)
        kernels.sum([piece], x, [ones] * 4, 1.0)
        assert x.tolist() == [2052.0] * 16
        large = torch.full((16,), 60000.0, dtype=torch.float16)
        payload = torch.zeros_like(ones)
        ORACLE.encode([piece], large, payload, NEAREST)
        kernels.sum([piece], large, [payload] * 3, 0.25)
        assert large.tolist() == [60000.0] * 16


# ---- the native library ----


@needs_native
@pytest.mark.parametrize(
    ("bits", "dtype"), [*each_once(WIDTHS, DTYPES), pytest.param(32, torch.float64, id="32-torch.float64")]
)
def test_native_sums_of_every_width_and_type_match_the_oracle_to_the_byte(bits: int, dtype: torch.dtype) -> None:
    kernels, lengths = native(), (1, 7, 9, 33, 64, 1000, 1024, 2049, 4100)
    for turn, block in enumerate((1, 7, 33, 64, 100, 1024, 4099)):
        for numel in lengths[(turn + bits) % 3 :: 3]:  # over the widths all meet all
            for skip in (False, True):
                pieces, end, nbytes = table_of([(numel, bits, block, skip)], dtype, offset=turn)
                x = random_values(end + 3, dtype, seed=numel + block)
                check_sum(kernels, pieces, x, nbytes, count=(turn + numel + skip) % 4 + 1)


@needs_native
@settings(max_examples=100)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 700), st.sampled_from(WIDTHS), st.integers(1, 300), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 4),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, -2.5, 0.0]),
    seed=st.integers(0, 1000),
)
def test_native_sums_of_mixed_layers_match_the_oracle(
    rows: Rows, dtype: torch.dtype, count: int, scale: float, seed: int
) -> None:
    pieces, end, nbytes = table_of(rows, dtype, offset=seed % 9)
    check_sum(native(), pieces, random_values(end + seed % 5, dtype, seed), nbytes, count, scale)


@needs_native
@pytest.mark.parametrize("block", [100, 65535, 65536])
def test_native_sums_do_not_depend_on_the_number_of_threads(block: int) -> None:
    """Long enough for several parts; one piece is cut in the middle, others lie whole in one."""
    rows = [(200_011, block % 7 + 1, block, True), (17, 8, block, True), (70_003, 32, block, True)]
    pieces, end, nbytes = table_of(rows, torch.float32)
    x = random_values(end, torch.float32, block)
    check_sum([*native(1), *native(2)], pieces, x, nbytes, 2)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_bad_contribution_spoils_its_block_and_a_bad_value_of_one_s_own_no_other(
    bad: float, dtype: torch.dtype
) -> None:
    piece = piece_for(96, 4, 32)
    nbytes = payload_nbytes(piece, dtype)
    for kernels in (ORACLE, *native()):
        x = random_values(96, dtype, 1)
        theirs = x.clone()
        theirs[40] = bad
        payload = torch.zeros(nbytes, dtype=torch.uint8)
        ORACLE.encode([piece], theirs, payload, NEAREST)
        mine = summed(kernels, [piece], x, [payload], 1.0)
        assert mine.isnan().nonzero().flatten().tolist() == list(range(32, 64))
        good = torch.zeros(nbytes, dtype=torch.uint8)
        ORACLE.encode([piece], x, good, NEAREST)
        x[40] = bad
        mine = summed(kernels, [piece], x, [good, good], 1.0)
        assert (~mine.isfinite()).nonzero().flatten().tolist() == [40]
        assert mine[40].isnan() if math.isnan(bad) else mine[40] == bad


@needs_native
def test_awkward_blocks_have_native_sums_like_the_oracle_s() -> None:
    """Constant, subnormal, of both zeros, not finite in the middle, too wide, and raw values that cancel to NaN."""
    tiny = torch.tensor([0.0, 1e-45, 3e-45, 1e-42] * 8)
    special = [
        torch.tensor([math.nan] + [1.0] * 31),
        torch.tensor([1.0] * 30 + [math.inf, -math.inf]),
        torch.tensor([-3e38, 3e38] * 16),
        torch.full((32,), 0.1),
        torch.tensor([0.0, -0.0] * 16),
        tiny,
        -tiny,
    ]
    x = torch.cat([*special, random_values(101, torch.float32, 1)])
    for bits in WIDTHS:
        piece = piece_for(x.numel(), bits, 32, skip=True)
        check_sum(native(), [piece], x, payload_nbytes(piece, x.dtype), 3)


@needs_native
def test_a_native_sum_of_nothing_or_outside_of_its_tensors_is_refused() -> None:
    piece, kernels = piece_for(64, 4, 32), NativeKernels()
    slot = torch.zeros(48, dtype=torch.uint8)
    with pytest.raises(ValueError, match="the native library refused"):
        kernels.sum([piece], torch.zeros(64), [], 1.0)
    with pytest.raises(ValueError, match="values: expected at least 64 of them for these pieces, got 63"):
        kernels.sum([piece], torch.zeros(63), [slot], 1.0)
    with pytest.raises(ValueError, match="payload: expected at least 48 bytes, got 47"):
        kernels.sum([piece], torch.zeros(64), [slot, slot[:47]], 1.0)
    with pytest.raises(TypeError, match="contiguous"):
        kernels.sum([piece], torch.zeros(128)[::2], [slot], 1.0)
    with pytest.raises(ValueError, match=r"expected 1 to 8 bits \(float64: 32\)"):
        kernels.sum([piece], torch.zeros(64, dtype=torch.float64), [slot], 1.0)
    with pytest.raises(TypeError, match="values at 4 bits: expected one of"):
        ORACLE.sum([piece], torch.zeros(64, dtype=torch.float64), [slot], 1.0)


# ---- Triton, in its interpreter ----


def check_triton(rows: Rows, dtype: torch.dtype, count: int = 2, rounding: Rounding = NEAREST) -> None:
    """The first piece starts at value 8, the tensor ends 5 values after the last one: neither may be written."""
    from torch_cgx.kernels.triton import TritonKernels

    pieces, end, nbytes = table_of(rows, dtype, offset=8)
    check_sum([TritonKernels()], pieces, random_values(end + 5, dtype, seed=end), nbytes, count, rounding=rounding)


@needs_triton
@quiet
@pytest.mark.parametrize("bits", WIDTHS)
def test_triton_sums_of_every_width_match_the_oracle_to_the_byte(bits: int) -> None:
    check_triton([(300, bits, 32, bits % 2 == 0)], DTYPES[bits % 3], count=bits % 4 + 1)


@needs_triton
@quiet
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_sums_of_mixed_layers_with_raw_tails_match_the_oracle(dtype: torch.dtype) -> None:
    rows = [(130, 4, 32, True), (5, 32, 1, False), (50, 8, 9, True), (20, 2, 64, True), (64, 1, 32, False)]
    check_triton(rows, dtype, rounding=STOCHASTIC)


@needs_triton
@quiet
@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", WIDTHS)
def test_triton_sums_of_every_width_type_and_number_of_payloads_match_the_oracle(bits: int, dtype: torch.dtype) -> None:
    for count, block in enumerate((1, 7, 32, 1024), start=1):
        check_triton([(2 * block + 41, bits, block, count % 2 == 0)], dtype, count)


@needs_triton
@quiet
def test_triton_sums_of_raw_float64_and_of_blocks_that_are_not_finite_match_the_oracle() -> None:
    from torch_cgx.kernels.triton import TritonKernels

    piece = piece_for(11, 32, 1)
    check_sum([TritonKernels()], [piece], torch.linspace(-1, 1, 11, dtype=torch.float64) / 3, 88)
    x = random_values(160, torch.float32, 2)
    x[3], x[40], x[70:72] = math.nan, math.inf, torch.tensor([3e38, -3e38])
    piece = piece_for(160, 3, 32)
    found = check_sum([TritonKernels()], [piece], x, payload_nbytes(piece, x.dtype))
    assert found.isnan().sum() > 3 * 30  # three blocks of the payloads are bad, though rolled by one and two
    kernels = TritonKernels()
    kernels.sum((), x, [], 1.0)
    with pytest.raises(ValueError, match="expected at least"):
        kernels.sum((piece,), torch.zeros(160), [torch.zeros(8, dtype=torch.uint8)], 1.0)


# ---- whole reduce-scatters and all-gathers in memory ----

quantizers = st.one_of(
    st.just(RAW),
    st.builds(MaxMin, st.integers(1, 8), st.sampled_from([1, 3, 8, 20, 64]), st.booleans()),
)
layers_lists = st.lists(st.builds(Layer, st.integers(0, 200), quantizers), min_size=1, max_size=4)


def random_tensors(numel: int, world: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(world)]


def scattered(
    values: Sequence[Tensor],
    layout: Layout,
    scale: float = 1.0,
    rounding: Rounding = NEAREST,
    order: int | None = None,
    kernels: Sequence[Kernels] | None = None,
) -> list[Tensor]:
    """Each rank's share of the sum. What they were given must stay."""
    world, before = len(values), [x.clone() for x in values]
    shares = [x.view(world, -1)[rank].clone() for rank, x in enumerate(values)]
    turn = None if order is None else Random(order)
    kernels = kernels or [ORACLE] * world
    memory.reduce_scatter(values, shares, layout, kernels, scale=scale, rounding=rounding, order=turn)
    assert all(map(same_bits, values, before))
    return shares


def gathered(
    shares: Sequence[Tensor],
    layout: Layout,
    rounding: Rounding = NEAREST,
    order: int | None = None,
    kernels: Sequence[Kernels] | None = None,
) -> list[Tensor]:
    """What each rank ends with; of others' shares it knows nothing at first."""
    world = len(shares)
    values = [torch.full((world, shares[0].numel()), math.nan, dtype=shares[0].dtype) for _ in shares]
    for rank, share in enumerate(shares):
        values[rank][rank] = share
    turn = None if order is None else Random(order)
    flat = [x.view(-1) for x in values]
    memory.all_gather(flat, layout, kernels or [ORACLE] * world, rounding=rounding, order=turn)
    return flat


def units_of(x: Tensor, bits: int, block: int) -> Tensor:
    """For each value of a share the distance of two levels of its block."""
    rows = torch.nn.functional.pad(x.double(), (0, -x.numel() % block), value=math.nan).view(-1, block)
    highest = rows.nan_to_num(nan=-math.inf).amax(1)
    lowest = rows.nan_to_num(nan=math.inf).amin(1)
    return ((highest - lowest) / (2**bits - 1)).repeat_interleave(block)[: x.numel()]


@pytest.mark.parametrize(("bits", "world"), each_once(WIDTHS, (2, 3, 5)))
def test_a_reduce_scatter_is_the_mean_but_for_half_a_unit_of_each_contribution_of_others(bits: int, world: int) -> None:
    """One's own is not quantized, and neither is the sum; so a block of which others are constant is exact."""
    for dtype, numel in zip(DTYPES, (17, 333, 1003), strict=True):
        quantizer = RAW if bits == 32 else MaxMin(bits, 64)
        layout = make_shares_layout([Layer(numel, quantizer)], world, dtype.itemsize, 2048)
        assert len(layout.slices) > 1 or numel < 1000
        values = random_tensors(world * numel, world, dtype, seed=numel + bits)
        for rank, share in enumerate(scattered(values, layout, 1 / world)):
            parts = [x.view(world, -1)[rank] for x in values]
            mean = torch.stack([part.double() for part in parts]).mean(0)
            error = torch.zeros(numel, dtype=torch.float64)
            for peer, part in enumerate(parts):
                if peer != rank and bits != 32:
                    error += 0.5 * units_of(part, bits, 64) * (1 + 2.0**-20) / world
            rounding = torch.finfo(dtype).eps / 2 * (mean.abs() + error) + 2.0**-20
            assert ((share.double() - mean).abs() <= error + rounding).all()


def test_contributions_that_are_constant_make_an_exact_sum() -> None:
    world, numel = 4, 777
    layout = make_shares_layout([Layer(numel, MaxMin(1, 100))], world, 4, 1 << 20)
    values = [torch.full((world * numel,), float(2**rank)) for rank in range(world)]
    for share in scattered(values, layout):
        assert (share == 15.0).all()


def test_layers_that_travel_raw_are_exact_beside_compressed_ones() -> None:
    """Small integers, whose sums have no rounding: raw layers and raw tails come out as the true sum."""
    world = 3
    layers = [Layer(50, MaxMin(2, 16)), Layer(33, RAW), Layer(45, MaxMin(4, 64, skip_incomplete=True))]
    layout = make_shares_layout(layers, world, 4, 300)
    generator = torch.Generator().manual_seed(1)
    values = [torch.randint(-9, 9, (world * 128,), generator=generator).float() for _ in range(world)]
    total = torch.stack(values).sum(0).view(world, -1)
    for rank, share in enumerate(scattered(values, layout)):
        assert torch.equal(share[50:], total[rank][50:])
        assert not torch.equal(share[:50], total[rank][:50])


@given(layers=layers_lists, world=st.integers(2, 5), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_a_share_is_its_owner_s_values_then_the_others_by_rank(
    layers: list[Layer], world: int, dtype: torch.dtype, seed: int
) -> None:
    """The executor against kernel calls, chunk by chunk, without programs; every rank draws numbers of its own."""
    numel = sum(layer.numel for layer in layers)
    values = random_tensors(world * numel, world, dtype, seed)
    layout = make_shares_layout(layers, world, dtype.itemsize, 1000)
    shares = scattered(values, layout, 0.5, STOCHASTIC)
    for rank in range(world):
        expected = values[rank].view(world, -1)[rank].clone() if numel else torch.empty(0, dtype=dtype)
        for part in layout.slices:
            chunk, payloads = part.chunks[rank], []
            for peer in range(world):
                if peer != rank:
                    payloads.append(torch.empty(chunk.nbytes, dtype=torch.uint8))
                    rounding = Rounding(True, STOCHASTIC.seed, STOCHASTIC.op, peer, 0)
                    ORACLE.encode(chunk.pieces, values[peer], payloads[-1], rounding)
            ORACLE.sum(chunk.in_share, expected, payloads, 0.5)
        assert same_bits(shares[rank], expected)


@given(layers=layers_lists, world=st.integers(1, 5), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_all_ranks_gather_the_bits_that_each_share_decodes_to(
    layers: list[Layer], world: int, dtype: torch.dtype, seed: int
) -> None:
    """The share's own rank, too."""
    numel = sum(layer.numel for layer in layers)
    shares = random_tensors(numel, world, dtype, seed)
    layout = make_shares_layout(layers, world, dtype.itemsize, 1000)
    found = gathered(shares, layout, STOCHASTIC)
    if world == 1:
        assert same_bits(found[0], shares[0])
        return
    expected = torch.empty(world * numel, dtype=dtype)
    for part in layout.slices:
        for rank, chunk in enumerate(part.chunks):
            whole = torch.zeros(world * numel, dtype=dtype)
            whole.view(world, -1)[rank] = shares[rank]
            payload = torch.empty(chunk.nbytes, dtype=torch.uint8)
            ORACLE.encode(chunk.pieces, whole, payload, Rounding(True, STOCHASTIC.seed, STOCHASTIC.op, rank, 0))
            ORACLE.decode(chunk.pieces, payload, expected)
    for each in found:
        assert same_bits(each, expected)


@given(
    layers=layers_lists,
    world=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    slice_nbytes=st.sampled_from([64, 700, 1 << 20]),
    rounding=st.sampled_from([NEAREST, STOCHASTIC]),
    order=st.integers(0, 2**32),
)
@settings(max_examples=40)
def test_the_order_of_events_and_the_kernels_do_not_matter(
    layers: list[Layer], world: int, dtype: torch.dtype, slice_nbytes: int, rounding: Rounding, order: int
) -> None:
    values = random_tensors(world * sum(layer.numel for layer in layers), world, dtype, seed=order)
    layout = make_shares_layout(layers, world, dtype.itemsize, slice_nbytes)
    others = [*(native() if available() else ()), ORACLE]
    mixed = [others[rank % len(others)] for rank in range(world)]
    in_turn = scattered(values, layout, 1 / 3, rounding)
    at_random = scattered(values, layout, 1 / 3, rounding, order, mixed)
    assert all(map(same_bits, in_turn, at_random))
    found, again = gathered(in_turn, layout, rounding), gathered(in_turn, layout, rounding, order, mixed)
    assert all(same_bits(each, found[0]) for each in (*found, *again))


def test_stochastic_sums_of_shares_are_right_on_average() -> None:
    """Ranks draw numbers of their own, and each operation draws anew."""
    world, numel = 3, 64
    layout = make_shares_layout([Layer(numel, MaxMin(2, 64))], world, 4, 1 << 20)
    values = random_tensors(world * numel, world, torch.float32)
    mean, turns = torch.zeros(world * numel, dtype=torch.float64), 300
    for op in range(turns):
        mean += torch.cat(scattered(values, layout, rounding=Rounding(True, 1, op))).double() / turns
    unit = max((x.max() - x.min()).item() for x in values) / 3
    exact = torch.stack(values).double().sum(0)
    # One error is below two units of others; the mean of 300 is 17 times closer, and hardly one value in all off by 5.
    assert (mean - exact).abs().max() < 2 * unit / math.sqrt(turns) * 5
    assert (mean - exact).mean().abs() < 0.05 * unit
