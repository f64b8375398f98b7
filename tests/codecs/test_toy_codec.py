"""A codec from outside, in one file (tests/support/e4m3_codec.py): quantize, and DDP without the native library."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from tests.support.harness import Rank, run_ranks
from tests.support.hooked import gradients_of
from tests.support.training import loss_of, make_net, same_on_all_ranks
from torch_cgx import _native, codecs
from torch_cgx.kernels import plain

CODEC_FILE = "tests.support.e4m3_codec"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# A normal e4m3 number is off by at most 2^-4 of itself, a subnormal one by 2^-10 of a scale that is 1/448 of the
# block's largest value. float32's roundings beside that:
OF_ITSELF, OF_LARGEST = 2**-4 * (1 + 2**-20), 2**-10 / 448 * (1 + 2**-20)


def without_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_loaded", [None])


@pytest.fixture
def e4m3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the codec, on the plain kernels, for this test alone."""
    without_the_native_library(monkeypatch)
    monkeypatch.setattr(codecs, "_families", dict(codecs._families))
    monkeypatch.setattr(plain, "_codecs", dict(plain._codecs))
    importlib.import_module(CODEC_FILE)
    yield
    del sys.modules[CODEC_FILE]


def values(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values whose blocks of 64 differ in size; the second block begins with zeros, the third is all zeros."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    x *= torch.exp2((torch.arange(numel) // 64 % 9 - 4).float())
    x[64:80] = 0.0
    x[128:192] = 0.0
    return x.to(dtype)


def largest_of_blocks(x: Tensor, block: int) -> Tensor:
    largest = torch.stack([part.abs().max() for part in x.double().split(block)])
    return largest.repeat_interleave(block)[: x.numel()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 100, 1000])
def test_quantize_takes_the_codec_by_its_name(e4m3: None, numel: int, dtype: torch.dtype) -> None:
    x = values(numel, dtype)
    payload = torch_cgx.quantize(x, bits=8, bucket_size=64, quantizer="e4m3")
    assert payload.numel() == torch_cgx.payload_nbytes(numel, dtype, 8, 64, quantizer="e4m3")
    assert payload.numel() == -(-(4 * -(-numel // 64) + numel) // 8) * 8
    y = torch_cgx.dequantize(payload, numel, dtype, 8, 64, quantizer="e4m3")
    bound = x.double().abs() * (OF_ITSELF + torch.finfo(dtype).eps) + largest_of_blocks(x, 64) * OF_LARGEST
    assert ((y.double() - x.double()).abs() <= bound).all()
    assert numel == 1 or not torch.equal(y, x)
    added = torch_cgx.dequantize(payload, numel, dtype, 8, 64, quantizer="e4m3", out=x.clone(), add=True)
    wide = torch_cgx.dequantize(payload, numel, torch.float32, 8, 64, quantizer="e4m3")
    assert torch.equal(added, (x.float() + wide).to(dtype))


def test_the_bytes_are_the_codecs_own(e4m3: None) -> None:
    x = torch.tensor([1.0, -448.0, 0.0, 3.0] * 2 + [7.0 * 448])
    payload = torch_cgx.quantize(x, bits=8, bucket_size=8, quantizer="e4m3")
    assert payload[:8].view(torch.float32).tolist() == [1.0, 7.0]
    levels = torch.tensor([1.0, -448.0, 0.0, 3.0] * 2 + [448.0]).to(torch.float8_e4m3fn)
    assert torch.equal(payload[8:17], levels.view(torch.uint8)) and not payload[17:].any()


@pytest.mark.usefixtures("e4m3")
def test_what_the_codec_does_not_take_is_refused_in_its_own_words() -> None:
    with pytest.raises(ValueError, match="bits of the quantizer 'e4m3': expected 8, got 4"):
        torch_cgx.quantize(torch.zeros(8), bits=4, quantizer="e4m3")
    with pytest.raises(ValueError, match="bucket size of the quantizer 'e4m3': expected a multiple of 8, got 12"):
        torch_cgx.quantize(torch.zeros(8), bits=8, bucket_size=12, quantizer="e4m3")


def test_a_codec_is_unknown_until_its_file_is_imported() -> None:
    assert "e4m3" not in codecs.names()
    with pytest.raises(ValueError, match="quantizer: expected 'maxmin' or 'rotated', got 'e4m3'"):
        torch_cgx.quantize(torch.zeros(8), bits=8, quantizer="e4m3")
    with pytest.raises(ValueError, match=r"a piece's kind: expected one of \[1, 2\], or 0 for raw values, got 100"):
        plain.plain_codec(100)


def test_a_second_codec_of_the_same_kind_is_refused(e4m3: None) -> None:
    with pytest.raises(ValueError, match="plain kernels of kind 100: expected one codec, got a second one"):
        plain.register(100, plain.plain_codec(1))


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


def train_step(me: Rank) -> Tensor:
    """Average one step's gradients at 8 bits, compare them with the exact average, and return them."""
    _native._loaded[:] = [None]
    importlib.import_module(CODEC_FILE)
    torch_cgx.set_default(bits=8, bucket_size=64, quantizer="e4m3")
    me.start_group("cgx")
    net = DistributedDataParallel(make_net(), gradient_as_bucket_view=True)
    torch_cgx.reset_stats()
    loss_of(net, 0, me.rank).backward()
    stats = torch_cgx.stats()
    assert stats["compressed_operations"] == stats["operations"] == 1
    numel = sum(parameter.numel() for parameter in net.parameters())
    assert stats["bytes_before"] == 4 * numel
    assert numel < stats["bytes_after"] < numel * 1.1
    of_ranks = torch.stack([joined(gradients_of(net.module, loss_of, 0, rank)) for rank in range(me.world)]).double()
    averaged = joined([parameter.grad for parameter in net.parameters() if parameter.grad is not None])
    exact, of_largest = of_ranks.mean(0), float(of_ranks.abs().max()) * OF_LARGEST
    sent = of_ranks.abs().mean(0) * OF_ITSELF + of_largest
    reduced = (exact.abs() + sent) * OF_ITSELF + of_largest * 2
    error = (averaged.double() - exact).abs()
    assert (error <= sent + reduced).all()
    assert (error > exact.abs() * 2**-10).any(), "nothing was quantized"
    dist.barrier()
    return averaged


@pytest.mark.ranks
def test_ddp_averages_with_the_codec_where_the_native_library_is_missing() -> None:
    same_on_all_ranks(run_ranks(train_step, 2, None))
