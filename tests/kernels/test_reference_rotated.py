"""The rotated quantizer on the plain-torch kernels: its definition to the byte, and the laws that follow from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support import rotated_definition as definition
from tests.support.kernel_cases import KINDS, blocks_of_kinds, same_bits, values_of_kind
from tests.support.rotated_definition import Block, Floats, Key
from torch_cgx.codecs import RAW, MaxMin, Rotated
from torch_cgx.codecs.rotated import BLOCKS
from torch_cgx.kernels import NEAREST, Piece, Rounding, reference
from torch_cgx.kernels.plain.rotated import MAGNITUDES, THRESHOLDS_SQUARED
from torch_cgx.kernels.reference import ReferenceKernels

KERNELS = ReferenceKernels()
STOCHASTIC = Rounding(stochastic=True, seed=3, op=1, rank=2, stage=1)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SENTINEL = 0xA5
ALL_BITS = (1, 2, 3, 4)
KEPT = 7.0  # what residuals hold before
# Squared error relative to the squared values, of normally distributed ones: that of the best levels, made unbiased.
ERROR = {1: 0.5708, 2: 0.1331, 3: 0.03578, 4: 0.009588}

all_bits = st.sampled_from(ALL_BITS)
small_blocks = st.sampled_from([64, 128])
dtypes = st.sampled_from(DTYPES)
roundings = st.sampled_from([NEAREST, STOCHASTIC])
scales = st.sampled_from([1.0, 0.5, 1 / 3])


@pytest.fixture(autouse=True)
def overflows_are_no_news() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@st.composite
def tensors(draw: st.DrawFn, numel: int, block: int, kinds: Sequence[str] = KINDS) -> Tensor:
    """Return float32 values whose blocks are of different kinds."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    chosen = st.sampled_from(kinds)
    parts = [values_of_kind(draw(chosen), min(block, numel - start), generator) for start in range(0, numel, block)]
    return torch.cat(parts)


def pieces_of(numel: int, codec: Rotated, offset: int = 0, payload: int = 0) -> tuple[Piece, ...]:
    return (Piece.of(codec, offset, numel, payload),)


def encode(x: Tensor, codec: Rotated, rounding: Rounding = NEAREST, residual: Tensor | None = None) -> Tensor:
    nbytes = codec.payload_nbytes(x.numel(), x.element_size())
    payload = torch.full((nbytes,), SENTINEL, dtype=torch.uint8)
    KERNELS.encode(pieces_of(x.numel(), codec), x, payload, rounding, residual)
    return payload


def decode(payload: Tensor, numel: int, codec: Rotated, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((numel,), KEPT, dtype=dtype)
    KERNELS.decode(pieces_of(numel, codec), payload, out)
    return out


def round_trip(x: Tensor, codec: Rotated, rounding: Rounding = NEAREST) -> Tensor:
    return decode(encode(x, codec, rounding), x.numel(), codec, x.dtype)


def scales_of(payload: Tensor, numel: int, codec: Rotated) -> Tensor:
    return payload[8 : 8 + 4 * -(-numel // codec.block)].clone().view(torch.float32)


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def relative_error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).square().sum() / x.double().square().sum())


# The definition, in numpy, for whole payloads.


def key_for(rounding: Rounding) -> Key:
    return definition.key_of(rounding.seed, rounding.op) if rounding.stochastic else definition.key_of()


def scalars(x: Tensor) -> Floats:
    return list(x.float().numpy())


def defined_blocks(x: Tensor, codec: Rotated, key: Key) -> list[Block]:
    return [definition.encode_block(block, codec.bits, key) for block in definition.blocks_of(scalars(x), codec.block)]


def rounded_as(values: Floats, dtype: torch.dtype) -> Tensor:
    """Return float32 numbers rounded to the dtype; any NaN becomes the quiet one."""
    x = torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)
    return torch.where(x.isnan(), torch.tensor(math.nan, dtype=dtype), x)


def with_kept(values: Floats) -> Tensor:
    """Return what is lost, or what was there before where that is NaN."""
    lost = rounded_as(values, torch.float32)
    return torch.where(lost.isnan(), KEPT, lost)


def as_bytes(payload: Tensor) -> bytes:
    return bytes(payload.tolist())


sizes = st.tuples(st.integers(1, 270), small_blocks)


@given(data=st.data(), size=sizes, bits=all_bits, skip=st.booleans(), dtype=dtypes, rounding=roundings)
def test_payloads_values_and_residuals_are_those_of_the_definition(
    data: st.DataObject, size: tuple[int, int], bits: int, skip: bool, dtype: torch.dtype, rounding: Rounding
) -> None:
    numel, block = size
    x, codec, key = data.draw(tensors(numel, block)).to(dtype), Rotated(bits, block, skip), key_for(rounding)
    coded = numel - codec.raw_tail(numel)
    blocks, raw = defined_blocks(x[:coded], codec, key), bytes(x[coded:].view(torch.uint8).tolist())
    residual = torch.full((numel,), KEPT)
    payload = encode(x, codec, rounding, residual)
    assert as_bytes(payload) == definition.payload_of(blocks, bits, key, raw)

    reals = definition.blocks_of(scalars(x[:coded]), block)
    decoded = [v for b, real in zip(blocks, reals, strict=True) for v in b.decoded(key)[: len(real)]]
    got = decode(payload, numel, codec, dtype)
    assert same_bits(got[:coded], rounded_as(decoded, dtype))
    assert same_bits(got[coded:], x[coded:])
    lost = [v - w for v, w in zip(scalars(x[:coded]), decoded, strict=True)]
    assert same_bits(residual, torch.cat((with_kept(lost), torch.zeros(numel - coded))))


def arrived(
    data: st.DataObject, count: int, numel: int, codec: Rotated, rounding: Rounding
) -> tuple[list[Tensor], list[list[Block]]]:
    """Return payloads of other ranks, and for each block what they say of it."""
    payloads = [encode(data.draw(tensors(numel, codec.block)), codec, rounding) for _ in range(count)]
    read = [definition.blocks_in(as_bytes(payload), numel, codec.block, codec.bits)[1] for payload in payloads]
    return payloads, [list(blocks) for blocks in zip(*read, strict=True)]


def check_sums(
    x: Tensor, payloads: Sequence[Tensor], codec: Rotated, key: Key, scale: float, rounding: Rounding
) -> None:
    """reduce and sum give what the definition makes of the same payloads."""
    numel, pieces = x.numel(), pieces_of(x.numel(), codec)
    read = [definition.blocks_in(as_bytes(payload), numel, codec.block, codec.bits)[1] for payload in payloads]
    own, of_blocks = definition.blocks_of(scalars(x), codec.block), list(zip(*read, strict=True))

    reduced, residual = x.clone(), torch.full((numel,), KEPT)
    out = torch.full_like(payloads[0], SENTINEL)
    KERNELS.reduce(pieces, reduced, payloads, out, scale, rounding, residual)
    new = [definition.reduce_block(real, b, scale, codec.bits, key) for real, b in zip(own, of_blocks, strict=True)]
    assert as_bytes(out) == definition.payload_of([b for b, _, _ in new], codec.bits, key)
    assert same_bits(reduced, rounded_as([v for _, values, _ in new for v in values], x.dtype))
    assert same_bits(residual, with_kept([v for _, _, lost in new for v in lost]))

    summed = x.clone()
    KERNELS.sum(pieces, summed, payloads, scale)
    total = [v for real, b in zip(own, of_blocks, strict=True) for v in definition.sum_block(real, b, scale, key)]
    assert same_bits(summed, rounded_as(total, x.dtype))


@given(
    data=st.data(),
    size=sizes,
    bits=all_bits,
    dtype=dtypes,
    rounding=roundings,
    count=st.integers(1, 4),
    scale=scales,
)
def test_reductions_and_sums_are_those_of_the_definition(
    data: st.DataObject,
    size: tuple[int, int],
    bits: int,
    dtype: torch.dtype,
    rounding: Rounding,
    count: int,
    scale: float,
) -> None:
    numel, block = size
    codec = Rotated(bits, block)
    payloads = [encode(data.draw(tensors(numel, block)), codec, rounding) for _ in range(count)]
    check_sums(data.draw(tensors(numel, block)).to(dtype), payloads, codec, key_for(rounding), scale, rounding)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("rest", [0, 9], ids=["whole", "incomplete"])
def test_sums_of_every_pair_of_kinds_of_blocks_are_those_of_the_definition(rest: int, bits: int) -> None:
    """A block of each kind meets one of each kind; with `rest`, they meet in the incomplete block, one at a time."""
    pairs = list(itertools.product(KINDS, KINDS))
    length, codec = rest or 64, Rotated(bits, 64)
    own, first, second = (
        blocks_of_kinds([pair[which] for pair in pairs], length, seed) for which, seed in ((0, 1), (1, 2), (0, 3))
    )
    for start in range(0, own.numel(), rest or own.numel()):
        span = slice(start, start + (rest or own.numel()))
        payloads = [encode(values[span], codec) for values in (first, second)]
        check_sums(own[span], payloads, codec, definition.key_of(), 1 / 3, NEAREST)


@pytest.mark.parametrize(("bits", "steps", "least"), [(3, -215336, 1), (4, 1808234, 1)])
def test_a_value_on_a_threshold_gets_the_lower_level(bits: int, steps: int, least: int) -> None:
    """Two values v and 1 make rotated values of two sizes, half of which lie on a threshold, to the bit."""
    x = torch.zeros(64)
    x[0], x[1] = 1.0, steps * 2.0**-22
    key, codec = definition.key_of(), Rotated(bits, 64)
    y = definition.rotate(scalars(x), key)
    _, exponent = math.frexp(max(abs(v) for v in y))
    zz = [v * v * definition.F(4.0 ** (1 - exponent)) for v in y]
    threshold = definition.T[bits][least] * (definition.tree(zz) * definition.F(1 / 64))
    on_it = [v == threshold for v in zz]
    assert sum(on_it) == 32
    payload = encode(x, codec)
    (block,) = definition.blocks_in(as_bytes(payload), 64, 64, bits)[1]
    got = {level % 2 ** (bits - 1) for level, on in zip(block.levels, on_it, strict=True) if on}
    assert got == {least}
    assert as_bytes(payload) == definition.payload_of(defined_blocks(x, codec, key), bits, key)


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_every_length_are_those_of_the_definition(block: int) -> None:
    """One whole block, and an incomplete one of each length that it may be rotated as."""
    for rest in (0, 1, 64, *(n + 1 for n in BLOCKS if n < block)):
        x, codec = normal(block + rest), Rotated(3, block)
        expected = definition.payload_of(defined_blocks(x, codec, definition.key_of()), 3, definition.key_of())
        assert as_bytes(encode(x, codec)) == expected


@given(data=st.data(), numel=st.integers(1, 200), bits=all_bits)
def test_payloads_that_no_encoder_writes_decode_as_defined(data: st.DataObject, numel: int, bits: int) -> None:
    """Any key and levels; any scale but NaN: a negative zero, a constant with mixed levels, infinities."""
    codec = Rotated(bits, 64)
    nbytes = codec.payload_nbytes(numel, 4)
    payload = torch.tensor(list(data.draw(st.binary(min_size=nbytes, max_size=nbytes))), dtype=torch.uint8)
    blocks = -(-numel // 64)
    chosen = [data.draw(st.sampled_from([-0.0, 0.0, -1.5, 2.0, math.inf, -math.inf])) for _ in range(blocks)]
    payload[8 : 8 + 4 * blocks] = torch.tensor(chosen).view(torch.uint8)
    key, read = definition.blocks_in(as_bytes(payload), numel, 64, bits)
    expected = [v for block in read for v in block.decoded(key)][:numel]
    assert same_bits(decode(payload, numel, codec), rounded_as(expected, torch.float32))


@pytest.mark.parametrize("scale", [-0.0, 2.0**-149])
def test_the_sign_of_a_zero_is_that_of_the_definition(scale: float) -> None:
    """A scale of -0.0 contributes nothing, and rotated values that underflow to -0.0 begin a sum as they are."""
    codec, x = Rotated(2, 64), torch.full((64,), -0.0)
    payload = encode(normal(64), codec)
    payload[8:12] = torch.tensor([scale]).view(torch.uint8)
    payload[12:] = 0xAA  # all levels are those of the smallest negative value
    check_sums(x, [payload], codec, definition.key_of(), 1.0, NEAREST)
    summed = x.clone()
    KERNELS.sum(pieces_of(64, codec), summed, [payload], 1.0)
    assert not summed.any() and summed[0].signbit()


@given(numel=st.integers(1, 20_000), bits=all_bits, block=st.sampled_from(BLOCKS), skip=st.booleans(), dtype=dtypes)
def test_kernels_and_codec_agree_on_lengths(numel: int, bits: int, block: int, skip: bool, dtype: torch.dtype) -> None:
    """Every byte that the codec counts is written, and none beyond: there would be no room for it."""
    codec = Rotated(bits, block, skip)
    x = normal(numel).to(dtype)
    payload = encode(x, codec)
    other = torch.full_like(payload, 0xFF - SENTINEL)
    KERNELS.encode(pieces_of(numel, codec), x, other, NEAREST)
    assert torch.equal(payload, other)
    rest = 0 if skip else numel % block
    coded = numel // block * block + (max(64, 2 ** math.ceil(math.log2(rest))) if rest else 0)
    blocks = numel // block + (rest > 0)
    raw = numel % block if skip else 0
    content = (8 + 4 * blocks if blocks else 0) + coded * bits // 8 + raw * x.element_size()
    assert payload.numel() == -(-content // 8) * 8
    assert not payload[content:].any()


def test_the_tables_are_the_levels_that_suit_the_normal_distribution_best() -> None:
    """Lloyd-Max: each threshold lies midway between two levels, each level is the mean of what is rounded to it."""

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def below(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    for bits in ALL_BITS:
        levels = list(MAGNITUDES[bits])
        for _ in range(5000):
            ends = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
            spans = list(itertools.pairwise(ends))
            levels = [(density(a) - density(b)) / (below(b) - below(a)) for a, b in spans]
        assert [float(np.float32(level)) for level in levels] == list(MAGNITUDES[bits])
        assert [float(np.float32(end * end)) for end in ends[1:-1]] == list(THRESHOLDS_SQUARED[bits])
        kept = sum(2 * (below(b) - below(a)) * m * m for (a, b), m in zip(spans, levels, strict=True))
        assert pytest.approx(1 / kept - 1, rel=1e-3) == ERROR[bits]


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("block", [256, 1024, 4096])
def test_the_error_of_normally_distributed_values_is_that_of_the_best_levels(bits: int, block: int) -> None:
    x = normal(1 << 16)
    assert relative_error(x, round_trip(x, Rotated(bits, block))) == pytest.approx(ERROR[bits], rel=0.03)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("kind", ["student", "log-normal", "sparse", "of different size", "uniform"])
def test_the_error_of_other_values_is_no_larger(kind: str, bits: int) -> None:
    x, y = normal(1 << 16), normal(1 << 16, seed=1)
    generator = torch.Generator().manual_seed(2)
    x = {
        "student": x / torch.empty_like(x).exponential_(generator=generator).sqrt(),
        "log-normal": x.sign() * y.mul(2).exp(),
        "sparse": torch.where(y > 2.3, x, 0.0),
        "of different size": x * torch.exp2(torch.randint(-20, 8, x.shape, generator=generator).float()),
        "uniform": torch.rand(x.shape, generator=generator),
    }[kind]
    y = round_trip(x, Rotated(bits, 1024))
    rows, errors = x.view(-1, 1024).double(), (x - y).view(-1, 1024).double()
    relative = errors.square().sum(1) / rows.square().sum(1)
    assert 0.5 * ERROR[bits] < relative.mean() < 1.03 * ERROR[bits]
    assert relative.max() < 2 * ERROR[bits]


@given(data=st.data(), numel=st.integers(1, 1500), bits=all_bits, rounding=roundings)
def test_a_decoded_block_is_as_long_along_its_values_as_they_are(
    data: st.DataObject, numel: int, bits: int, rounding: Rounding
) -> None:
    """The sum of x * decoded is that of x * x: what makes the error unbiased over random signs."""
    x = data.draw(tensors(numel, 1024, ["normal", "heavy", "constant", "one value"]))
    y = round_trip(x, Rotated(bits, 1024), rounding)
    for a, b in zip(x.double().split(1024), y.double().split(1024), strict=True):
        assert float((a * b).sum()) == pytest.approx(float((a * a).sum()), rel=1e-5)


@given(
    value=st.floats(width=32, allow_nan=False, allow_infinity=False),
    numel=st.integers(1, 300),
    bits=all_bits,
    block=small_blocks,
    dtype=dtypes,
    rounding=roundings,
)
def test_constant_blocks_are_exact(
    value: float, numel: int, bits: int, block: int, dtype: torch.dtype, rounding: Rounding
) -> None:
    x = torch.full((numel,), value).to(dtype)
    if not torch.isfinite(x).all():
        return
    codec = Rotated(bits, block)
    payload = encode(x, codec, rounding)
    assert same_bits(decode(payload, numel, codec, dtype), x + 0.0)
    expected = torch.where(x[:1].float() == 0, 0.0, -x[:1].float().abs()).expand(-(-numel // block))
    assert same_bits(scales_of(payload, numel, codec), expected.contiguous())


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_block_with_one_value_beside_zeros_keeps_it_and_loses_no_more_than_a_rounding(bits: int) -> None:
    """All rotated values are of one size then, and so are the decoded ones."""
    x = torch.zeros(1024)
    x[777] = 3.7
    y = round_trip(x, Rotated(bits, 1024))
    assert float(y[777]) == pytest.approx(3.7, rel=2**-22)
    assert not y[torch.arange(1024) != 777].any()


@given(
    data=st.data(),
    numel=st.integers(1, 200),
    bits=all_bits,
    exponent=st.integers(-80, 80),
    rounding=roundings,
    scale=scales,
)
def test_scaling_by_a_power_of_two_scales_all_that_comes_of_it(
    data: st.DataObject, numel: int, bits: int, exponent: int, rounding: Rounding, scale: float
) -> None:
    kinds = ["normal", "heavy", "constant", "zeros", "one value"]
    codec, factor = Rotated(bits, 64), 2.0**exponent
    own, other = (data.draw(tensors(numel, 64, kinds)) for _ in range(2))
    pieces = pieces_of(numel, codec)

    def reduced(factor: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        payload = encode(other * factor, codec, rounding)
        values, out, residual = own * factor, torch.empty_like(payload), torch.full((numel,), KEPT)
        KERNELS.reduce(pieces, values, [payload], out, scale, rounding, residual)
        summed = own * factor
        KERNELS.sum(pieces, summed, [payload], scale)
        scales = scales_of(out, numel, codec)
        levels = out[8 + 4 * scales.numel() :]
        return scales, levels, values, residual, summed

    for plain, scaled in zip(reduced(1.0), reduced(factor), strict=True):
        assert torch.equal(plain * factor if plain.is_floating_point() else plain, scaled)


@given(
    data=st.data(),
    numel=st.integers(1, 200),
    bits=all_bits,
    dtype=dtypes,
    rounding=roundings,
    count=st.integers(0, 4),
    scale=scales,
)
def test_reduced_values_are_what_the_new_payload_decodes_to(
    data: st.DataObject, numel: int, bits: int, dtype: torch.dtype, rounding: Rounding, count: int, scale: float
) -> None:
    codec = Rotated(bits, 64)
    x = data.draw(tensors(numel, 64)).to(dtype)
    payloads = [encode(data.draw(tensors(numel, 64)), codec, rounding) for _ in range(count)]
    out = torch.full((codec.payload_nbytes(numel, dtype.itemsize),), SENTINEL, dtype=torch.uint8)
    KERNELS.reduce(pieces_of(numel, codec), x, payloads, out, scale, rounding)
    assert same_bits(x, decode(out, numel, codec, dtype))


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_sums_of_constants_are_exact_and_so_are_their_reductions(bits: int, scale: float) -> None:
    """Whole numbers, whose sums are exact in float32; zeros among them."""
    codec, numel = Rotated(bits, 64), 150
    constants = [3.0, -1.0, 0.0, 5.0, 4.0]
    payloads = [encode(torch.full((numel,), constant), codec) for constant in constants]
    x = torch.arange(numel).float()
    KERNELS.sum(pieces_of(numel, codec), x, payloads, scale)
    assert torch.equal(x, (torch.arange(numel) + 11.0) * scale)

    x, out, residual = torch.full((numel,), -3.0), torch.empty_like(payloads[0]), torch.full((numel,), KEPT)
    KERNELS.reduce(pieces_of(numel, codec), x, payloads, out, scale, NEAREST, residual)
    assert torch.equal(x, torch.full((numel,), 8.0 * scale)) and torch.equal(residual, torch.zeros(numel))
    assert torch.equal(out, encode(x, codec))


@pytest.mark.parametrize("bits", ALL_BITS)
def test_constants_among_the_payloads_are_added_exactly_to_what_the_others_sum_up_to(bits: int) -> None:
    codec = Rotated(bits, 64)
    rotated, constant, zero = (
        encode(normal(64), codec),
        encode(torch.full((64,), 4.0), codec),
        encode(torch.zeros(64), codec),
    )
    alone, beside = torch.full((64,), 0.25), torch.full((64,), -3.75)
    KERNELS.sum(pieces_of(64, codec), alone, [rotated], 1.0)
    KERNELS.sum(pieces_of(64, codec), beside, [zero, rotated, constant, zero], 1.0)
    assert same_bits(alone, beside)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_reduction_loses_what_it_says(bits: int) -> None:
    """The exact sum of what was sent, less what is lost, is what all ranks get."""
    codec, numel, scale = Rotated(bits, 1024), 2048 + 300, 1 / 4
    payloads = [encode(normal(numel, seed), codec) for seed in (1, 2, 3)]
    exact = normal(numel).double() + sum(decode(payload, numel, codec).double() for payload in payloads)
    x, out, residual = normal(numel), torch.empty_like(payloads[0]), torch.full((numel,), KEPT)
    KERNELS.reduce(pieces_of(numel, codec), x, payloads, out, scale, NEAREST, residual)
    torch.testing.assert_close((exact - residual.double()) * scale, x.double(), rtol=1e-5, atol=1e-5)
    summed = normal(numel)
    KERNELS.sum(pieces_of(numel, codec), summed, payloads, scale)
    torch.testing.assert_close(summed.double(), exact * scale, rtol=1e-5, atol=1e-5)


def test_blocks_that_are_not_finite_become_nan_and_no_others_and_keep_their_residual() -> None:
    codec = Rotated(2, 64)
    x = normal(4 * 64)
    x[70], x[130] = math.nan, math.inf
    residual = torch.full((256,), KEPT)
    payload = encode(x, codec, residual=residual)
    assert scales_of(payload, 256, codec).view(torch.int32).tolist()[1:3] == [0x7FC00000] * 2
    y = decode(payload, 256, codec)
    assert y[64:192].isnan().all() and y[:64].isfinite().all() and y[192:].isfinite().all()
    assert (residual[64:192] == KEPT).all() and (residual[:64] != KEPT).all() and (residual[192:] != KEPT).all()
    total, out = normal(256, 1), torch.empty_like(payload)
    residual = torch.full((256,), KEPT)
    KERNELS.reduce(pieces_of(256, codec), total, [payload], out, 0.5, NEAREST, residual)
    assert total[64:192].isnan().all() and total[:64].isfinite().all() and total[192:].isfinite().all()
    assert (residual[64:192] == KEPT).all() and (residual[:64] != KEPT).all()


@pytest.mark.parametrize("block", [64, 128, 2048, 4096])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_values_up_to_the_page_s_limit_do_not_overflow_and_beyond_they_do(bits: int, block: int) -> None:
    """The worst case: signs that make all values of a block add up to one rotated value."""
    worst = torch.tensor(definition.signs(definition.key_of(), block))
    worst[1] *= 0.99  # else not all rotated values but one are zeros
    codec = Rotated(bits, block)
    limit = float(np.nextafter(np.float32(2.0**121), np.float32(0)))
    assert scales_of(encode(worst * limit, codec), block, codec).isfinite().all()
    assert round_trip(worst * 2.0**127, codec).isnan().all()


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_mean_over_seeds_is_the_value_itself(bits: int) -> None:
    """The error of the mean of S roundings shrinks as 1/S: nothing is left that is the same for all seeds."""
    x, codec = normal(512), Rotated(bits, 256)
    total = torch.zeros(512, dtype=torch.float64)
    for seed in range(600):
        total += round_trip(x, codec, Rounding(stochastic=True, seed=seed, op=seed % 5))
        if seed + 1 in (60, 600):
            of_one = relative_error(x, total / (seed + 1)) * (seed + 1)
            assert of_one == pytest.approx(ERROR[bits], rel=0.25)


def test_in_the_random_mode_all_ranks_and_both_stages_have_the_same_key_and_each_operation_its_own() -> None:
    x, codec = normal(300), Rotated(2, 128)
    payloads = [
        as_bytes(encode(x, codec, Rounding(stochastic=True, seed=8, op=4, rank=rank, stage=stage)))
        for rank in (0, 1, 77)
        for stage in (0, 1)
    ]
    assert len(set(payloads)) == 1
    seeds = [(8, 4), (8, 5), (9, 4), (0, 0), (2**64 - 1, 2**40)]
    keys = {as_bytes(encode(x, codec, Rounding(True, seed, op)))[:8] for seed, op in seeds}
    assert len(keys) == len(seeds)
    # The nearest mode's key is that of seed 0 and op 0, whatever the rounding says beside.
    nearest = as_bytes(encode(x, codec, Rounding(False, seed=8, op=4, rank=1)))
    assert nearest == as_bytes(encode(x, codec, Rounding(True, 0, 0))) == as_bytes(encode(x, codec))


@given(
    numel=st.integers(65, 600),
    bits=all_bits,
    skip=st.booleans(),
    dtype=dtypes,
    rounding=roundings,
    cut=st.integers(1, 9),
)
def test_a_tensor_cut_at_a_multiple_of_the_block_has_the_same_bytes_but_for_keys(
    numel: int, bits: int, skip: bool, dtype: torch.dtype, rounding: Rounding, cut: int
) -> None:
    codec = Rotated(bits, 64, skip)
    cut = min(cut, (numel - 1) // 64) * 64
    x = normal(numel).to(dtype)

    def parts(start: int, end: int) -> tuple[bytes, bytes, bytes]:
        """Return the key, the scales and the rest of a piece's bytes, without its padding."""
        (piece,) = pieces_of(end - start, codec, offset=start)
        payload = torch.empty(codec.payload_nbytes(piece.numel, dtype.itemsize), dtype=torch.uint8)
        KERNELS.encode([piece], x, payload, rounding)
        coded = piece.numel - piece.raw_tail
        levels = 8 + 4 * -(-coded // 64) if coded else 0
        end_of_raw = levels + -(-coded // 64) * 64 * bits // 8 + piece.raw_tail * dtype.itemsize
        whole = as_bytes(payload)
        return whole[: min(8, levels)], whole[8:levels], whole[levels:end_of_raw]

    key, scales, levels = parts(0, numel)
    first, second = parts(0, cut), parts(cut, numel)
    assert first[0] == key and second[0] in (key, b"")
    assert scales == first[1] + second[1] and levels == first[2] + second[2]


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("operation", ["encode", "reduce", "sum"])
def test_the_length_of_the_kernel_s_runs_changes_nothing(
    operation: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, numel = Rotated(bits, 64), 700
    pieces, other = pieces_of(numel, codec), encode(normal(numel, 1), codec)

    def done() -> tuple[Tensor, Tensor, Tensor]:
        x, out, residual = normal(numel), torch.zeros_like(other), torch.full((numel,), KEPT)
        if operation == "encode":
            KERNELS.encode(pieces, x, out, NEAREST, residual)
            KERNELS.decode(pieces, out, x)
        elif operation == "reduce":
            KERNELS.reduce(pieces, x, [other, other], out, 0.5, NEAREST, residual)
        else:
            KERNELS.sum(pieces, x, [other, other], 0.5)
        return x, out, residual

    at_once = done()
    monkeypatch.setattr(reference, "_RUN_NUMEL", 200)
    for whole, in_runs in zip(at_once, done(), strict=True):
        assert same_bits(whole, in_runs)


@given(data=st.data(), numel=st.integers(1, 200), bits=all_bits, dtype=dtypes, skip=st.booleans())
def test_decoding_with_add_adds_in_float32_and_rounds_once(
    data: st.DataObject, numel: int, bits: int, dtype: torch.dtype, skip: bool
) -> None:
    codec = Rotated(bits, 64, skip)
    x = data.draw(tensors(numel, 64, ["normal", "heavy", "constant", "zeros"])).to(dtype)
    payload = encode(x, codec)
    coded = numel - codec.raw_tail(numel)
    wide = torch.cat((round_trip(x[:coded].float(), Rotated(bits, 64)) if coded else x.float()[:0], x[coded:].float()))
    y = normal(numel).to(dtype)
    expected = (y.float() + wide).to(dtype)
    KERNELS.decode(pieces_of(numel, codec), payload, y, add=True)
    assert same_bits(y, expected)


def test_a_table_of_pieces_of_both_codecs_touches_nothing_else() -> None:
    """Rotated, raw and max-min pieces side by side, each with room around it, end as each does for itself."""
    codecs = [Rotated(2, 64), RAW, Rotated(4, 128, skip_incomplete=True), MaxMin(3, 10), Rotated(1, 64, True)]
    numels = [100, 5, 300, 33, 40]  # the last is all raw
    x = normal(1000)
    pieces, offset, end = [], 3, 16
    for codec, numel in zip(codecs, numels, strict=True):
        pieces.append(Piece.of(codec, offset, numel, end))
        offset, end = offset + numel + 2, end + codec.payload_nbytes(numel, 4) + 8
    together = torch.full((end,), SENTINEL, dtype=torch.uint8)
    apart = together.clone()
    KERNELS.encode(pieces, x, together, STOCHASTIC)
    y, z = torch.full_like(x, KEPT), torch.full_like(x, KEPT)
    KERNELS.decode(pieces, together, y)
    inside = torch.zeros(1000, dtype=torch.bool)
    for piece in reversed(pieces):
        KERNELS.encode([piece], x, apart, STOCHASTIC)
        KERNELS.decode([piece], together, z)
        inside[piece.offset : piece.offset + piece.numel] = True
        assert (together[piece.payload - 8 : piece.payload] == SENTINEL).all()
    assert torch.equal(together, apart) and same_bits(y, z) and (y[~inside] == KEPT).all()
    assert torch.equal(y[-(1000 - pieces[-1].offset) :][:40], x[pieces[-1].offset :][:40])


def test_float64_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"expected one of .*got torch\.float64"):
        encode(torch.zeros(64, dtype=torch.float64), Rotated(2, 64))


def test_nothing_depends_on_the_default_dtype_and_device() -> None:
    codec, numel, rounding = Rotated(3, 64), 300, Rounding(stochastic=True, seed=3, op=4)
    x = blocks_of_kinds(["normal", "constant", "zeros", "infinite", "normal"], 60, seed=1)
    like = encode(x, codec)

    def done() -> list[Tensor]:
        payload, out = torch.empty_like(like), torch.empty_like(like)
        lost, reduced, summed = torch.zeros_like(x), x.clone(), x.clone()
        KERNELS.encode(pieces_of(numel, codec), x, payload, rounding, lost)
        KERNELS.reduce(pieces_of(numel, codec), reduced, [payload], out, 0.3, rounding, lost)
        KERNELS.sum(pieces_of(numel, codec), summed, [payload, out], 0.3)
        return [payload, out, lost, reduced, summed]

    expected = done()
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float16):
            torch.set_default_dtype(dtype)
            with torch.device("meta"):
                got = done()
            assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))
    finally:
        torch.set_default_dtype(before)
