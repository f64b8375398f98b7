"""`quantize` and `dequantize`: the kernels on single tensors, for users, tests and other transports."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_cgx.config import Settings
from torch_cgx.kernels import Kernels, Piece, Rounding
from torch_cgx.kernels.cpu import default_kernels, thread_count
from torch_cgx.quantizers import MaxMin

__all__ = ["dequantize", "payload_nbytes", "quantize"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantize(
    x: Tensor,
    bits: int = 4,
    bucket_size: int = 512,
    *,
    stochastic: bool = False,
    seed: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The payload of a tensor, as docs/wire_format.md defines it: a uint8 tensor of `payload_nbytes` bytes.

    `stochastic` rounds up or down at random, without bias; the same `seed` gives the same payload, and None draws a
    seed from torch's generator. `out`, if given, is filled and returned.
    """
    _check_values("x", x)
    if seed is not None:
        _check_integers(seed=seed)
    else:
        seed = int(torch.randint(2**62, ()).item()) if stochastic else 0
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: expected 0 to 2^64 - 1, got {seed}")
    nbytes = payload_nbytes(x.numel(), x.dtype, bits, bucket_size)
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8)
    _check_payload("out", out, nbytes)
    flat = x.detach().contiguous().view(-1)
    _kernels().encode(_pieces(x.numel(), bits, bucket_size), flat, out, Rounding(stochastic, seed))
    return out


def dequantize(
    payload: Tensor,
    numel: int,
    dtype: torch.dtype,
    bits: int,
    bucket_size: int,
    *,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """The values of a payload that `quantize` made with the same arguments, as a 1-D tensor.

    `out`, if given, is filled (or, with `add`, added to) and returned; it may have any shape of `numel` values.
    """
    nbytes = payload_nbytes(numel, dtype, bits, bucket_size)
    _check_payload("payload", payload, nbytes)
    if out is None:
        if add:
            raise ValueError("add=True: expected an `out` to add to, got None")
        out = torch.empty(numel, dtype=dtype)
    _check_values("out", out)
    if out.dtype != dtype or out.numel() != numel or not out.is_contiguous():
        raise ValueError(
            f"out: expected a contiguous tensor of {numel} values of {dtype}, "
            f"got shape {tuple(out.shape)}, {out.dtype}, strides {out.stride()}"
        )
    _kernels().decode(_pieces(numel, bits, bucket_size), payload, out.detach().view(-1), add=add)
    return out


def payload_nbytes(numel: int, dtype: torch.dtype, bits: int, bucket_size: int) -> int:
    """How many bytes the payload of so many values has."""
    _check_integers(numel=numel, bits=bits, bucket_size=bucket_size)
    if numel < 0:
        raise ValueError(f"numel: expected 0 or more, got {numel}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: expected {_names()}, got {dtype}")
    return MaxMin(bits, bucket_size).payload_nbytes(numel, dtype.itemsize)


def _kernels() -> Kernels:
    settings = Settings.from_environ()
    return default_kernels(settings.simd, thread_count(settings.num_threads))


def _pieces(numel: int, bits: int, bucket_size: int) -> tuple[Piece, ...]:
    return (Piece(0, numel, bits, bucket_size, 0, 0),) if numel else ()


def _check_integers(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):  # numpy's integers have it, floats do not
            raise ValueError(f"{name}: expected a whole number, got {value!r}")


def _names() -> str:
    return ", ".join(str(dtype) for dtype in _DTYPES)


def _check_values(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.layout is not torch.strided or x.device.type != "cpu":
        got = f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name}: expected a dense CPU tensor of {_names()}, got {got}")


def _check_payload(name: str, payload: Tensor, nbytes: int) -> None:
    if not isinstance(payload, Tensor) or payload.dtype != torch.uint8 or payload.device.type != "cpu":
        got = f"{payload.dtype} on {payload.device}" if isinstance(payload, Tensor) else type(payload).__name__
        raise ValueError(f"{name}: expected a uint8 CPU tensor, got {got}")
    if payload.numel() != nbytes or payload.dim() != 1 or not payload.is_contiguous():
        raise ValueError(f"{name}: expected {nbytes} contiguous bytes, got shape {tuple(payload.shape)}")
