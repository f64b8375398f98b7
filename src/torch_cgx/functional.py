"""`quantize` and `dequantize`: the kernels on single tensors, for users, tests and other transports."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_cgx import codecs
from torch_cgx.codecs import Codec
from torch_cgx.config import DEFAULT_QUANTIZER, Compression, Settings, whole_number
from torch_cgx.kernels import Kernels, Piece, Rounding
from torch_cgx.kernels.native import default_kernels, thread_count
from torch_cgx.tensors import sharing_memory

__all__ = ["dequantize", "payload_nbytes", "quantize"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantize(
    x: Tensor,
    bits: int = 4,
    bucket_size: int | None = None,
    quantizer: str = DEFAULT_QUANTIZER,
    *,
    stochastic: bool = False,
    seed: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the payload of a tensor, as docs/wire_format.md defines it: a uint8 tensor of `payload_nbytes` bytes.

    Args:
        x: a dense CPU tensor of float32, float16 or bfloat16, of any shape.
        bits: 1 to 8 per value, or 32: unchanged.
        bucket_size: how many values share a header. None: 512; 1024 for "rotated".
        quantizer: "maxmin" takes 1 to 8 bits and 1 to 65536 values; "rotated" takes 1 to 4 bits and a power of two from
            64 to 4096, and loses far less at these bits.
        stochastic: round up or down at random, without bias.
        seed: for that; the same seed gives the same payload, and None draws one from torch's generator.
        out: a tensor to fill and return, if given.
    """
    _check_values("x", x)
    if seed is not None:
        seed = whole_number("seed", seed)
    else:
        seed = int(torch.randint(2**62, (), device="cpu").item()) if stochastic else 0
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: expected 0 to 2^64 - 1, got {seed}")
    if bucket_size is None:
        bucket_size = codecs.family(quantizer).default_block
    codec = _codec(bits, bucket_size, quantizer)
    nbytes = codec.payload_nbytes(x.numel(), x.dtype.itemsize)
    flat = x.detach().resolve_neg().contiguous().view(-1)
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    _check_payload("out", out, nbytes)
    _check_apart("out", out, flat)
    _kernels().encode(_pieces(x.numel(), codec), flat, out, Rounding(stochastic, seed))
    return out


def dequantize(
    payload: Tensor,
    numel: int,
    dtype: torch.dtype,
    bits: int,
    bucket_size: int,
    quantizer: str = DEFAULT_QUANTIZER,
    *,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Return the values of a payload that `quantize` made with the same arguments, as a 1-D tensor.

    Args:
        payload: a uint8 tensor of `payload_nbytes` bytes.
        numel: how many values `quantize` was given.
        dtype: their type.
        bits: as `quantize` was given.
        bucket_size: as `quantize` was given.
        quantizer: as `quantize` was given.
        out: a tensor to fill and return, if given, of any shape with `numel` values.
        add: add to `out` instead.
    """
    nbytes = payload_nbytes(numel, dtype, bits, bucket_size, quantizer)
    numel, codec = int(numel.__index__()), _codec(bits, bucket_size, quantizer)
    _check_payload("payload", payload, nbytes)
    if out is None:
        if add:
            raise ValueError("add=True: expected an `out` to add to, got None")
        out = torch.empty(numel, dtype=dtype, device="cpu")
    _check_values("out", out)
    if out.dtype != dtype or out.numel() != numel or not out.is_contiguous() or out.is_neg():
        raise ValueError(
            f"out: expected a contiguous tensor of {numel} values of {dtype}, "
            f"got shape {tuple(out.shape)}, {out.dtype}, strides {out.stride()}{', negated' if out.is_neg() else ''}"
        )
    _check_apart("out", out, payload)
    _kernels().decode(_pieces(numel, codec), payload, out.detach().view(-1), add=add)
    return out


def payload_nbytes(
    numel: int, dtype: torch.dtype, bits: int, bucket_size: int, quantizer: str = DEFAULT_QUANTIZER
) -> int:
    """Return how many bytes a payload of `numel` values has: headers, levels and padding."""
    numel, codec = whole_number("numel", numel), _codec(bits, bucket_size, quantizer)
    if not 0 <= numel < 2**60:
        raise ValueError(f"numel: expected 0 or more, and below 2^60, got {numel}")
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
        raise ValueError(f"dtype: expected {_names()}, got {dtype}")
    return codec.payload_nbytes(numel, dtype.itemsize)


def _kernels() -> Kernels:
    settings = Settings.from_environ()
    return default_kernels(settings.simd, thread_count(settings.num_threads))


def _codec(bits: int, bucket_size: int, quantizer: str) -> Codec:
    found = Compression(whole_number("bits", bits), whole_number("bucket_size", bucket_size), quantizer)
    return found.codec()


def _pieces(numel: int, codec: Codec) -> tuple[Piece, ...]:
    return (Piece.of(codec, 0, numel),) if numel else ()


def _check_apart(name: str, tensor: Tensor, other: Tensor) -> None:
    if any(sharing_memory([tensor, other])):
        raise ValueError(f"{name}: expected memory of its own, got some that the other tensor has too")


def _names() -> str:
    return ", ".join(str(dtype) for dtype in _DTYPES)


def _check_values(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES or _is_strange(x):
        got = (
            f"{x.dtype} on {x.device}, {x.layout}{', nested' if x.is_nested else ''}"
            if isinstance(x, Tensor)
            else type(x).__name__
        )
        raise ValueError(f"{name}: expected a dense CPU tensor of {_names()}, got {got}")


def _is_strange(x: Tensor) -> bool:
    return x.layout is not torch.strided or x.is_nested or x.device.type != "cpu"


def _check_payload(name: str, payload: Tensor, nbytes: int) -> None:
    if not isinstance(payload, Tensor) or payload.dtype != torch.uint8 or _is_strange(payload):
        got = f"{payload.dtype} on {payload.device}" if isinstance(payload, Tensor) else type(payload).__name__
        raise ValueError(f"{name}: expected a uint8 CPU tensor, got {got}")
    if payload.numel() != nbytes or payload.dim() != 1 or not payload.is_contiguous():
        raise ValueError(f"{name}: expected {nbytes} contiguous bytes, got shape {tuple(payload.shape)}")
