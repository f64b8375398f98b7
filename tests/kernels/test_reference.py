"""The laws of quantization, on the plain-torch kernels."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_cgx.codecs import RAW, Codec, MaxMin
from torch_cgx.kernels import NEAREST, Piece, Rounding, reference
from torch_cgx.kernels.random import random16
from torch_cgx.kernels.reference import ReferenceKernels

KERNELS = ReferenceKernels()
STOCHASTIC = Rounding(stochastic=True, seed=3, op=1, rank=2)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
QUIET_NAN = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
INTEGER = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
SENTINEL = 0xA5

all_bits = st.integers(1, 8)
dtypes = st.sampled_from(DTYPES)
roundings = st.sampled_from([NEAREST, STOCHASTIC])
# Below 2^126, so that neither a difference nor a sum of a few overflows.
ordinary = st.floats(-(2.0**126), 2.0**126, width=32)
anything = st.floats(width=32)


@st.composite
def tensors(draw: st.DrawFn, elements: st.SearchStrategy[float] = ordinary, max_numel: int = 70) -> Tensor:
    dtype = draw(dtypes)
    if dtype == torch.float16:
        elements = elements.filter(lambda x: not abs(x) > 60000 or not math.isfinite(x))
    # Lists of one magnitude as well: among arbitrary floats the largest would make all others alike.
    near = st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=max_numel)
    values = draw(st.one_of(st.lists(elements, min_size=1, max_size=max_numel), near))
    return torch.tensor(values, dtype=dtype)


def quantizer_of(bits: int, block: int, skip: bool = False) -> Codec:
    return RAW if bits == 32 else MaxMin(bits, block, skip)


def pieces_of(numel: int, quantizer: Codec, offset: int = 0, payload: int = 0) -> list[Piece]:
    return [Piece.of(quantizer, offset, numel, payload)]


def encode(x: Tensor, quantizer: Codec, rounding: Rounding = NEAREST) -> Tensor:
    nbytes = quantizer.payload_nbytes(x.numel(), x.element_size())
    payload = torch.full((nbytes,), SENTINEL, dtype=torch.uint8)
    KERNELS.encode(pieces_of(x.numel(), quantizer), x, payload, rounding)
    return payload


def decode(payload: Tensor, like: Tensor, quantizer: Codec) -> Tensor:
    out = torch.empty_like(like)
    KERNELS.decode(pieces_of(like.numel(), quantizer), payload, out)
    return out


def decode_wide(payload: Tensor, like: Tensor, quantizer: Codec) -> Tensor:
    """What a payload without both levels and raw values stands for, before it is rounded to the dtype."""
    dtype = like.dtype if quantizer.bits == 32 else torch.float32
    return decode(payload, torch.empty(like.numel(), dtype=dtype), quantizer).float()


def headers(payload: Tensor, numel: int, block: int) -> tuple[Tensor, Tensor]:
    """unit and lo of every block."""
    unit, lo = payload[: 8 * -(-numel // block)].clone().view(torch.float32).view(-1, 2).unbind(1)
    return unit, lo


def per_value(of_block: Tensor, numel: int, block: int) -> Tensor:
    return of_block.repeat_interleave(block)[:numel]


def half_ulp(y: Tensor) -> Tensor:
    fraction_bits, least_exponent = {
        torch.float32: (23, -126),
        torch.float16: (10, -14),
        torch.bfloat16: (7, -126),
    }[y.dtype]
    exponent = torch.frexp(y.double()).exponent - 1
    return torch.exp2(exponent.clamp(min=least_exponent).double() - fraction_bits - 1)


def bits_of(x: Tensor) -> Tensor:
    return x.view(INTEGER[x.dtype])


def by_definition(x: Tensor, quantizer: MaxMin, rounding: Rounding) -> bytes:
    """docs/wire_format.md, one value at a time in numpy's float32, the levels as one long integer."""
    numel = x.numel()
    quantized = numel - quantizer.raw_tail(numel)
    wide = x.float().numpy()
    random = random16(rounding, 0, numel).tolist()
    top = 2**quantizer.bits - 1
    head, stream = b"", 0
    with np.errstate(all="ignore"):
        for start in range(0, quantized, quantizer.block):
            block = wide[start : min(start + quantizer.block, quantized)]
            lo, hi = block.min() + np.float32(0), block.max() + np.float32(0)
            if not np.isfinite(block).all() or not np.isfinite(hi - lo):
                head += struct.pack("<II", 0x7FC00000, 0x7FC00000)
                continue
            if lo == hi:
                head += struct.pack("<ff", 0.0, lo)
                continue
            unit = max((hi - lo) / np.float32(top), np.float32(2.0**-126))
            inv = np.float32(1) / unit
            head += struct.pack("<ff", unit, lo)
            for i, value in enumerate(block, start):
                scaled = (value - lo) * inv
                level = int(scaled + np.float32(0.5))
                if rounding.stochastic:
                    level = min(top, int(np.rint(scaled * np.float32(65536))) + random[i] >> 16)
                stream |= level << i * quantizer.bits
    coded = head + stream.to_bytes(-(-quantized * quantizer.bits // 8), "little")
    coded += bytes(x[quantized:].view(torch.uint8).tolist())
    return coded + bytes(-len(coded) % 8)


@given(
    x=tensors(anything),
    bits=all_bits,
    block=st.sampled_from([1, 2, 3, 7, 8, 12, 64]),
    skip=st.booleans(),
    rounding=roundings,
)
def test_payloads_are_those_of_the_definition(x: Tensor, bits: int, block: int, skip: bool, rounding: Rounding) -> None:
    quantizer = MaxMin(bits, block, skip)
    assert bytes(encode(x, quantizer, rounding).tolist()) == by_definition(x, quantizer, rounding)


@given(x=tensors(), bits=all_bits, block=st.sampled_from([1, 2, 5, 8, 64]), rounding=roundings)
@settings(max_examples=300)
def test_the_error_stays_within_its_bound(x: Tensor, bits: int, block: int, rounding: Rounding) -> None:
    check_error_bound(x, bits, block, rounding)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("low", [-1.0, -0.999, 0.0, 0.7])
def test_the_error_stays_within_its_bound_between_two_levels(bits: int, low: float) -> None:
    """Values next to the middle of two levels, where every rounding error on the way counts."""
    generator = torch.Generator().manual_seed(bits)
    top = 2**bits - 1
    scale = torch.rand(200, 1, generator=generator).double() + 0.5
    lo, hi = (scale * low).float(), scale.float()
    level = torch.randint(0, top, (200, 64), generator=generator).double()
    noise = 1 + torch.randn(200, 64, generator=generator).double() * 2**-23
    x = (lo + (level + 0.5) * (hi.double() - lo.double()) / top * noise).float()
    x = torch.minimum(torch.maximum(x, lo), hi)
    x[:, :1], x[:, 1:2] = lo, hi
    check_error_bound(x.flatten(), bits, 64, NEAREST)


def check_error_bound(x: Tensor, bits: int, block: int, rounding: Rounding) -> None:
    quantizer = MaxMin(bits, block)
    payload = encode(x, quantizer, rounding)
    y = decode(payload, x, quantizer)
    unit = per_value(headers(payload, x.numel(), block)[0], x.numel(), block).double()
    largest = torch.stack([part.abs().max() for part in torch.split(x.double(), block)])
    share = 1.0 if rounding.stochastic else 0.5
    bound = unit * share * (1 + 2**-20) + per_value(largest, x.numel(), block) * 3 * 2**-22 + half_ulp(y)
    error = (x.double() - y.double()).abs()
    assert (error <= bound).all(), (error - bound).max()


@given(x=tensors(), bits=all_bits, block=st.sampled_from([1, 3, 8, 64]))
def test_a_block_s_unit_and_minimum_span_its_values(x: Tensor, bits: int, block: int) -> None:
    unit, lo = headers(encode(x, MaxMin(bits, block)), x.numel(), block)
    for part, u, low in zip(torch.split(x.float(), block), unit, lo, strict=True):
        spread = part.max() - part.min()
        assert low == part.min()
        assert u == (0.0 if spread == 0 else max(spread / (2**bits - 1), torch.tensor(2.0**-126)))


@given(value=ordinary, dtype=dtypes, numel=st.integers(1, 40), bits=all_bits, rounding=roundings)
def test_constant_blocks_are_exact(value: float, dtype: torch.dtype, numel: int, bits: int, rounding: Rounding) -> None:
    x = torch.full((numel,), value).to(dtype)
    if not torch.isfinite(x).all():
        return
    quantizer = MaxMin(bits, 16)
    assert torch.equal(decode(encode(x, quantizer, rounding), x, quantizer), x)


@given(x=tensors(), bits=all_bits, rounding=roundings)
def test_blocks_of_one_value_are_exact(x: Tensor, bits: int, rounding: Rounding) -> None:
    quantizer = MaxMin(bits, 1)
    assert torch.equal(decode(encode(x, quantizer, rounding), x, quantizer), x)


@given(x=tensors(), bits=all_bits)
def test_a_block_s_minimum_is_exact(x: Tensor, bits: int) -> None:
    quantizer = MaxMin(bits, 64)
    assert decode(encode(x, quantizer), x, quantizer)[x[:64].argmin()] == x[:64].min()


@given(
    x=tensors(max_numel=60),
    bits=all_bits,
    block=st.sampled_from([4, 8, 10]),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
    where=st.integers(0, 59),
    rounding=roundings,
)
def test_a_value_that_is_not_finite_makes_its_block_nan_and_no_other(
    x: Tensor, bits: int, block: int, bad: float, where: int, rounding: Rounding
) -> None:
    quantizer = MaxMin(bits, block)
    untouched = decode(encode(x, quantizer, rounding), x, quantizer)
    where %= x.numel()
    x[where] = bad
    payload = encode(x, quantizer, rounding)
    y = decode(payload, x, quantizer)
    hurt = torch.arange(x.numel()) // block == where // block
    assert (bits_of(y)[hurt] == QUIET_NAN[x.dtype]).all()
    assert torch.equal(y[~hurt], untouched[~hurt])
    for header in headers(payload, x.numel(), block):
        assert header.view(torch.int32)[where // block] == 0x7FC00000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", range(1, 9))
def test_a_spread_that_overflows_makes_its_block_nan(bits: int, dtype: torch.dtype) -> None:
    x = torch.tensor([3e38, -3e38, 1.0], dtype=dtype)
    quantizer = MaxMin(bits, 8)
    assert decode(encode(x, quantizer), x, quantizer).isnan().all()


@given(values=st.lists(st.integers(-(2**22), 2**22), min_size=2, max_size=40), bits=all_bits, rounding=roundings)
def test_subnormals_are_kept_to_the_smallest_unit(values: list[int], bits: int, rounding: Rounding) -> None:
    """Integers times the smallest subnormal: nothing is flushed to zero."""
    x = torch.tensor(values, dtype=torch.float64).mul(2.0**-149).to(torch.float32)
    quantizer = MaxMin(bits, 64)
    payload = encode(x, quantizer, rounding)
    unit, lo = headers(payload, x.numel(), 64)
    error = (decode(payload, x, quantizer).double() - x.double()).abs().max()
    assert lo[0] == x.min()
    assert unit[0] == (0.0 if x.min() == x.max() else 2.0**-126)
    assert error <= 2.0**-126 * (1.0 if rounding.stochastic else 0.5) * (1 + 2**-20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [[-0.0, -0.0], [-0.0, 0.0], [0.0, -0.0], [-0.0, 1.0], [-1.0, -0.0]])
def test_no_header_holds_a_negative_zero(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=dtype)
    quantizer = MaxMin(4, 8)
    payload = encode(x, quantizer)
    unit, lo = headers(payload, 2, 8)
    assert not torch.signbit(unit).any() and not torch.signbit(lo[lo == 0]).any()
    y = decode(payload, x, quantizer)
    assert torch.equal(y, x) and not torch.signbit(y[y == 0]).any()


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_stochastic_mean_is_unbiased_and_converges(bits: int) -> None:
    """The mean of N roundings is within five standard deviations, which shrink with the root of N."""
    x = torch.tensor([0.0, 1.0, 0.1, 0.25, 0.5, 0.77, 0.999, 0.003])
    quantizer = MaxMin(bits, 8)
    position = x.double() * (2**bits - 1)
    fraction = position - position.floor()
    for rounds in (64, 2048):
        tiled = x.repeat(rounds)  # each round draws at other indices
        y = decode(encode(tiled, quantizer, STOCHASTIC), tiled, quantizer).double().view(rounds, 8)
        deviation = (fraction * (1 - fraction) / rounds).sqrt() / (2**bits - 1)
        assert ((y.mean(0) - x.double()).abs() <= 5 * deviation + 1e-6).all()


def test_stochastic_errors_of_different_ranks_operations_and_stages_cancel() -> None:
    x = torch.linspace(-1, 1, 1000)
    quantizer = MaxMin(2, 1000)
    roundings = [Rounding(True, 9, op, rank, stage) for op in range(8) for rank in range(8) for stage in (0, 1)]
    mean = torch.stack([decode(encode(x, quantizer, r), x, quantizer) for r in roundings]).mean(0)
    one = decode(encode(x, quantizer, roundings[0]), x, quantizer)
    assert (mean - x).square().mean() < (one - x).square().mean() / len(roundings) * 1.5


@given(x=tensors(anything), bits=st.sampled_from([1, 4, 7, 32]))
def test_raw_values_travel_unchanged_to_the_bit(x: Tensor, bits: int) -> None:
    quantizer = quantizer_of(bits, 128, skip=True)
    payload = encode(x, quantizer)
    assert bytes(payload.tolist()[: x.numel() * x.element_size()]) == bytes(x.view(torch.uint8).tolist())
    assert torch.equal(bits_of(decode(payload, x, quantizer)), bits_of(x))


def test_float64_travels_raw_and_is_summed_in_float64() -> None:
    x = torch.tensor([1.0, 1e-17, 3.0], dtype=torch.float64)
    peer = torch.tensor([1e-15, 1.0, 2.0], dtype=torch.float64)
    payload, out = encode(peer, RAW), encode(peer, RAW)
    expected = (x + peer) * (1 / 3)
    KERNELS.reduce(pieces_of(3, RAW), x, [payload], out, 1 / 3, NEAREST)
    assert torch.equal(x, expected) and torch.equal(decode(out, x, RAW), expected)


@given(x=tensors(max_numel=50), bits=st.sampled_from([1, 3, 4, 8, 32]), seed=st.integers(0, 2**32))
def test_decoding_with_add_adds_in_float32_and_rounds_once(x: Tensor, bits: int, seed: int) -> None:
    quantizer = quantizer_of(bits, 8)
    y = torch.randn(x.numel(), generator=torch.Generator().manual_seed(seed)).to(x.dtype)
    payload = encode(x, quantizer)
    expected = (y.float() + decode_wide(payload, x, quantizer)).to(x.dtype)
    KERNELS.decode(pieces_of(x.numel(), quantizer), payload, y, add=True)
    assert torch.equal(y, expected)


@given(
    numel=st.integers(1, 90),
    bits=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 32]),
    block=st.sampled_from([1, 8, 20]),
    dtype=dtypes,
    peers=st.integers(0, 4),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    rounding=roundings,
    seed=st.integers(0, 2**32),
)
def test_reduce_is_decode_add_in_order_scale_encode_and_decode_back(
    numel: int,
    bits: int,
    block: int,
    dtype: torch.dtype,
    peers: int,
    scale: float,
    rounding: Rounding,
    seed: int,
) -> None:
    quantizer = quantizer_of(bits, block)
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(numel, generator=generator).to(dtype)
    payloads = [encode(torch.randn(numel, generator=generator).to(dtype), quantizer) for _ in range(peers)]
    total = own.float()
    for payload in payloads:
        total = total + decode_wide(payload, own, quantizer)
    total = total * torch.tensor(scale)
    expected = encode(total.to(dtype) if bits == 32 else total, quantizer, rounding)
    out = torch.full_like(expected, SENTINEL)
    KERNELS.reduce(pieces_of(numel, quantizer), own, payloads, out, scale, rounding)
    assert torch.equal(out, expected)
    assert torch.equal(own, decode(out, own, quantizer))


@given(
    layers=st.lists(
        st.tuples(st.integers(1, 50), st.sampled_from([1, 3, 5, 8, 32]), st.sampled_from([1, 8, 12]), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    dtype=dtypes,
    rounding=roundings,
)
def test_a_table_of_pieces_is_each_piece_for_itself_and_touches_nothing_else(
    layers: list[tuple[int, int, int, bool]], dtype: torch.dtype, rounding: Rounding
) -> None:
    pieces: list[Piece] = []
    offset, payload_end = 3, 16
    for numel, bits, block, skip in layers:
        quantizer = quantizer_of(bits, block, skip)
        pieces += pieces_of(numel, quantizer, offset, payload_end)
        offset += numel + 2
        payload_end += quantizer.payload_nbytes(numel, dtype.itemsize) + 8
    x = torch.randn(offset, generator=torch.Generator().manual_seed(offset)).to(dtype)
    together = torch.full((payload_end,), SENTINEL, dtype=torch.uint8)
    apart = together.clone()
    KERNELS.encode(pieces, x, together, rounding)
    y, z = torch.full_like(x, 7.0), torch.full_like(x, 7.0)
    KERNELS.decode(pieces, together, y)
    inside = torch.zeros(offset, dtype=torch.bool)
    for piece in reversed(pieces):
        KERNELS.encode([piece], x, apart, rounding)
        KERNELS.decode([piece], together, z)
        inside[piece.offset : piece.offset + piece.numel] = True
    assert torch.equal(together, apart) and torch.equal(y, z)
    assert (y[~inside] == 7.0).all()
    for piece in pieces:  # the 8 bytes before each piece lie in no piece
        assert (together[piece.payload - 8 : piece.payload] == SENTINEL).all()


@pytest.mark.parametrize("rounding", [NEAREST, STOCHASTIC], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("block", [8, 12, 64])
@pytest.mark.parametrize("bits", [1, 3, 4, 7])
def test_the_length_of_the_kernel_s_runs_changes_nothing(
    bits: int, block: int, rounding: Rounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1003, generator=torch.Generator().manual_seed(0))
    quantizer = MaxMin(bits, block)
    at_once = encode(x, quantizer, rounding)
    decoded = decode(at_once, x, quantizer)
    monkeypatch.setattr(reference, "_RUN_NUMEL", 100)
    in_runs = encode(x, quantizer, rounding)
    assert torch.equal(at_once, in_runs) and torch.equal(decode(in_runs, x, quantizer), decoded)


def test_random_numbers_follow_a_value_s_place_in_the_tensor() -> None:
    """A tensor encoded in two pieces rounds as in one."""
    x = torch.rand(64, generator=torch.Generator().manual_seed(1))
    quantizer = MaxMin(2, 32)
    whole = decode(encode(x, quantizer, STOCHASTIC), x, quantizer)
    y = torch.empty_like(x)
    for offset in (0, 32):
        pieces = pieces_of(32, quantizer, offset)
        payload = torch.empty(quantizer.payload_nbytes(32, 4), dtype=torch.uint8)
        KERNELS.encode(pieces, x, payload, STOCHASTIC)
        KERNELS.decode(pieces, payload, y)
    assert torch.equal(y, whole)


@pytest.mark.parametrize(("dtype", "quantizer"), [(torch.float64, MaxMin(4, 8)), (torch.int32, RAW)])
def test_a_dtype_that_cannot_be_encoded_is_refused_by_name(dtype: torch.dtype, quantizer: Codec) -> None:
    with pytest.raises(TypeError, match=f"expected one of .*got {dtype}"):
        encode(torch.zeros(8, dtype=dtype), quantizer)
