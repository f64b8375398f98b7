"""`quantize`, `dequantize` and `payload_nbytes`: the kernels as users meet them, and the mistakes they can make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_cgx import dequantize, payload_nbytes, quantize

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def noise(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def round_trip(x: Tensor, bits: int, block: int, **options: Any) -> Tensor:
    return dequantize(quantize(x, bits, block, **options), x.numel(), x.dtype, bits, block)


def bound(x: Tensor, bits: int, block: int, levels: float) -> Tensor:
    """What docs/wire_format.md allows each value; `levels`: 0.5 for nearest, 1 for stochastic rounding."""
    wide = torch.nn.functional.pad(x.double(), (0, -x.numel() % block), value=torch.nan).view(-1, block)
    lo = wide.nan_to_num(torch.inf).amin(1)
    hi = wide.nan_to_num(-torch.inf).amax(1)
    largest = torch.maximum(lo.abs(), hi.abs())
    unit = ((hi - lo) / (2**bits - 1)).clamp_min(2.0**-126)
    half_ulp = torch.maximum(largest * torch.finfo(x.dtype).eps / 2, torch.tensor(2.0**-25))
    allowed = levels * unit * (1 + 2.0**-20) + 3 * 2.0**-22 * largest + half_ulp
    return allowed.repeat_interleave(block)[: x.numel()]


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_what_comes_back_is_within_the_bound(bits: int, dtype: torch.dtype, stochastic: bool) -> None:
    for numel, block in ((1, 512), (7, 3), (512, 512), (1000, 64), (5003, 1024)):
        x = noise(numel, dtype, seed=bits)
        error = (round_trip(x, bits, block, stochastic=stochastic, seed=5).double() - x.double()).abs()
        assert (error <= bound(x, bits, block, 1.0 if stochastic else 0.5)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_a_payload_is_as_long_as_promised(bits: int, dtype: torch.dtype) -> None:
    for numel in (0, 1, 8, 511, 512, 513, 4096):
        promised = payload_nbytes(numel, dtype, bits, 512)
        payload = quantize(noise(numel, dtype), bits, 512)
        assert payload.dtype == torch.uint8
        assert payload.shape == (promised,)
        headers, levels = 8 * -(-numel // 512), -(-numel * bits // 8)
        assert promised == -(-(headers + levels) // 8) * 8


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "lost"), [(1, 0.571), (2, 0.1332), (3, 0.0358), (4, 0.0096)])
def test_rotated_values_lose_what_they_must_and_payloads_are_as_long_as_promised(
    bits: int, lost: float, dtype: torch.dtype, stochastic: bool
) -> None:
    for numel, block in ((100_000, 1024), (4096, 4096), (20_003, 64)):
        x = noise(numel, dtype, seed=bits)
        payload = quantize(x, bits, block, "rotated", stochastic=stochastic, seed=5)
        whole, rest = divmod(numel, block)
        coded = whole * block + (max(64, 1 << (rest - 1).bit_length()) if rest else 0)
        assert len(payload) == -(-(8 + 4 * -(-numel // block) + coded * bits // 8) // 8) * 8
        assert len(payload) == payload_nbytes(numel, dtype, bits, block, "rotated")
        y = dequantize(payload, numel, dtype, bits, block, "rotated")
        share = float((y.double() - x.double()).square().sum() / x.double().square().sum())
        assert share == pytest.approx(lost, rel=0.1)


def test_rotated_is_not_the_default_and_brings_its_own_bucket_size() -> None:
    x = noise(5000)
    payload = quantize(x, 2, quantizer="rotated")
    assert torch.equal(payload, quantize(x, 2, 1024, "rotated"))
    assert not torch.equal(payload, quantize(x, 2, 512, "rotated"))
    assert torch.equal(quantize(x, 2), quantize(x, 2, 512, "maxmin"))
    out = torch.ones(5000)
    dequantize(payload, 5000, torch.float32, 2, 1024, "rotated", out=out, add=True)
    assert torch.equal(out, 1 + dequantize(payload, 5000, torch.float32, 2, 1024, "rotated"))


def test_the_defaults_are_four_bits_and_512_values() -> None:
    x = noise(5000)
    assert torch.equal(quantize(x), quantize(x, 4, 512))


def test_out_is_filled_and_returned() -> None:
    x = noise(1000)
    payload = torch.full((payload_nbytes(1000, x.dtype, 4, 512),), 0xA5, dtype=torch.uint8)
    assert quantize(x, out=payload) is payload
    assert torch.equal(payload, quantize(x))
    y = torch.full((10, 100), 7.0)
    assert dequantize(payload, 1000, x.dtype, 4, 512, out=y) is y
    assert torch.equal(y.flatten(), round_trip(x, 4, 512))


def test_out_may_be_any_slice_of_a_larger_buffer() -> None:
    x = noise(1000)
    nbytes = payload_nbytes(1000, x.dtype, 3, 64)
    for shift in (1, 3, 8):
        buffer = torch.full((nbytes + 16,), 0xA5, dtype=torch.uint8)
        quantize(x, 3, 64, out=buffer[shift : shift + nbytes])
        assert torch.equal(buffer[shift : shift + nbytes], quantize(x, 3, 64))
        assert (buffer[:shift] == 0xA5).all() and (buffer[shift + nbytes :] == 0xA5).all()
        values = torch.full((1020,), 9.0)
        decoded = dequantize(buffer[shift : shift + nbytes], 1000, x.dtype, 3, 64, out=values[shift : shift + 1000])
        assert torch.equal(decoded, round_trip(x, 3, 64))
        assert (values[:shift] == 9.0).all() and (values[shift + 1000 :] == 9.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_adds_to_what_is_in_out(dtype: torch.dtype) -> None:
    x, y = noise(3000, dtype), noise(3000, dtype, seed=1)
    payload = quantize(x, 8, 512)
    decoded = dequantize(payload, 3000, dtype, 8, 512).float()
    total = y.clone()
    assert dequantize(payload, 3000, dtype, 8, 512, out=total, add=True) is total
    # Rounded to the dtype once, where adding what was already rounded rounds twice.
    atol = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(total.float(), y.float() + decoded, rtol=0, atol=atol)


def test_a_seed_gives_the_same_payload_again_and_another_one_another() -> None:
    x = noise(5000)
    first, again, other = (quantize(x, stochastic=True, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for seed in (0, 2**63, 2**64 - 1):
        quantize(x, stochastic=True, seed=seed)


def test_without_a_seed_torchs_generator_rolls_the_dice() -> None:
    x = noise(5000)
    torch.manual_seed(11)
    first, second = quantize(x, stochastic=True), quantize(x, stochastic=True)
    assert not torch.equal(first, second)
    torch.manual_seed(11)
    assert torch.equal(quantize(x, stochastic=True), first)


def test_nearest_rounding_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    quantize(noise(1000))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_nothing_becomes_nothing(shape: tuple[int, ...]) -> None:
    payload = quantize(torch.empty(shape))
    assert payload.shape == (0,)
    assert dequantize(payload, 0, torch.float32, 4, 512).shape == (0,)
    out = torch.empty(shape)
    assert dequantize(payload, 0, torch.float32, 4, 512, out=out, add=True) is out


def test_a_scalar_is_one_value() -> None:
    assert round_trip(torch.tensor(0.1), 4, 512).tolist() == [torch.tensor(0.1).item()]


def test_values_are_taken_in_their_order_whatever_the_strides() -> None:
    whole = noise(6000).view(60, 100)
    for view in (whole.t(), whole[:, ::2], whole[5:, 3:70], whole[:1].expand(7, 100), whole[0, 3]):
        assert torch.equal(quantize(view), quantize(view.contiguous()))
        assert torch.equal(quantize(view), quantize(view.reshape(-1).clone()))


def test_a_tensor_that_requires_grad_is_read_and_stays_as_it_is() -> None:
    leaf = noise(1000).requires_grad_()
    payload = quantize(leaf * 1.0)
    assert torch.equal(quantize(leaf), payload)
    assert not payload.requires_grad and not dequantize(payload, 1000, leaf.dtype, 4, 512).requires_grad
    assert leaf.grad is None and torch.equal(leaf.detach(), noise(1000))
    with torch.inference_mode():
        inside = noise(1000)
        assert torch.equal(quantize(inside), payload)
        dequantize(payload, 1000, torch.float32, 4, 512, out=inside)


def test_nan_and_infinity_spoil_their_block_alone() -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = noise(2000)
        x[600] = bad
        y = round_trip(x, 4, 512)
        assert y[512:1024].isnan().all()
        assert y[:512].isfinite().all() and y[1024:].isfinite().all()


X = noise(1000)
PAYLOAD = quantize(X)


@pytest.mark.parametrize(
    ("call", "expected", "got"),
    [
        (lambda: quantize(X, 0), "1 to 8", "0"),
        (lambda: quantize(X, 9), "1 to 8", "9"),
        (lambda: quantize(X, 9), "1 to 8", "9"),
        (lambda: quantize(X, -4), "1 to 8", "-4"),
        (lambda: quantize(X, 4, 0), "1 to 65536", "0"),
        (lambda: quantize(X, 4, 65537), "1 to 65536", "65537"),
        (lambda: quantize(X, 5, quantizer="rotated"), "1 to 4", "5"),
        (lambda: quantize(X, 2, 100, "rotated"), "one of 64, 128, 256, 512, 1024, 2048, 4096", "100"),
        (lambda: quantize(X, 2, quantizer="maxmax"), "'maxmin' or 'rotated'", "maxmax"),
        (lambda: quantize(X, 2, quantizer=None), "'maxmin' or 'rotated'", "None"),  # type: ignore[arg-type]
        (lambda: payload_nbytes(10, torch.float32, 8, 1024, "rotated"), "1 to 4", "8"),
        (lambda: quantize(X.double()), "float32", "float64"),
        (lambda: quantize(torch.arange(10)), "float32", "int64"),
        (lambda: quantize(X.to("meta")), "CPU", "meta"),
        (lambda: quantize(X.to_sparse()), "dense", "float32"),
        (lambda: quantize([1.0, 2.0]), "tensor", "list"),  # type: ignore[arg-type]
        (lambda: quantize(X, stochastic=True, seed=-1), "0 to 2", "-1"),
        (lambda: quantize(X, stochastic=True, seed=2**64), "0 to 2", str(2**64)),
        (lambda: quantize(X, out=torch.empty(3, dtype=torch.uint8)), "520", "3"),
        (lambda: quantize(X, out=torch.empty(520)), "uint8", "float32"),
        (lambda: quantize(X, out=torch.empty(1040, dtype=torch.uint8)[::2]), "contiguous", "520"),
        (lambda: quantize(X, out=torch.empty(2, 260, dtype=torch.uint8)), "520", "260"),
        (lambda: dequantize(PAYLOAD[:-1], 1000, torch.float32, 4, 512), "520", "519"),
        (lambda: dequantize(PAYLOAD, 1009, torch.float32, 4, 512), "528", "520"),
        (lambda: dequantize(PAYLOAD, -1, torch.float32, 4, 512), "0 or more", "-1"),
        (lambda: dequantize(PAYLOAD, 1000, torch.float32, 5, 512), "648", "520"),
        (lambda: dequantize(PAYLOAD, 1000, torch.float64, 4, 512), "float32", "float64"),
        (lambda: dequantize(PAYLOAD.float(), 1000, torch.float32, 4, 512), "uint8", "float32"),
        (lambda: dequantize(bytes(520), 1000, torch.float32, 4, 512), "tensor", "bytes"),  # type: ignore[arg-type]
        (lambda: dequantize(PAYLOAD, 1000, torch.float32, 4, 512, add=True), "out", "None"),
        (lambda: dequantize(PAYLOAD, 1000, torch.float32, 4, 512, out=torch.empty(999)), "1000", "999"),
        (lambda: dequantize(PAYLOAD, 1000, torch.float32, 4, 512, out=X.half()), "float32", "float16"),
        (lambda: dequantize(PAYLOAD, 1000, torch.float32, 4, 512, out=X.view(10, 100).t()), "contiguous", "100, 10"),
        (lambda: payload_nbytes(-1, torch.float32, 4, 512), "0 or more", "-1"),
        (lambda: payload_nbytes(10, torch.int32, 4, 512), "float32", "int32"),
        (lambda: payload_nbytes(10, torch.float32, 12, 512), "1 to 8", "12"),
    ],
)
def test_wrong_arguments_are_refused_with_expected_and_got(call: Any, expected: str, got: str) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        call()
    assert "expected" in str(caught.value)
    assert got in str(caught.value).split("got", 1)[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantize(X, 2.5),  # type: ignore[arg-type]
        lambda: quantize(X, 4, 512.0),  # type: ignore[arg-type]
        lambda: quantize(X, "4"),  # type: ignore[arg-type]
        lambda: quantize(X, stochastic=True, seed=1.5),  # type: ignore[arg-type]
        lambda: dequantize(PAYLOAD, 1000.0, torch.float32, 4, 512),  # type: ignore[arg-type]
        lambda: dequantize(PAYLOAD, 1000, "float32", 4, 512),  # type: ignore[arg-type]
        lambda: payload_nbytes(10.5, torch.float32, 4, 512),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_a_wrong_type_are_refused_in_words(call: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"expected .* got"):
        call()


@given(
    data=st.binary(max_size=400),
    numel=st.integers(0, 700),
    dtype=st.sampled_from(DTYPES),
    bits=st.integers(1, 8),
    block=st.sampled_from([1, 3, 8, 64, 512]),
    add=st.booleans(),
)
def test_any_bytes_decode_to_numbers_or_an_error(
    data: bytes, numel: int, dtype: torch.dtype, bits: int, block: int, add: bool
) -> None:
    given_payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    nbytes = payload_nbytes(numel, dtype, bits, block)
    if nbytes != len(data):
        with pytest.raises(ValueError, match=str(nbytes)):
            dequantize(given_payload, numel, dtype, bits, block)
    # The same bytes at the length that they must have.
    fitted = given_payload.repeat(-(-nbytes // max(1, len(data))))[:nbytes] if data else torch.zeros(nbytes).byte()
    around = torch.full((numel + 32,), 3.0, dtype=dtype)
    out = dequantize(fitted, numel, dtype, bits, block, out=around[16 : 16 + numel], add=add)
    assert out.shape == (numel,) and out.dtype == dtype
    assert (around[:16] == 3.0).all() and (around[16 + numel :] == 3.0).all()
