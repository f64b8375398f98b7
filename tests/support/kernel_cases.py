"""What the tests of every kernel set share: awkward values, pieces, and payloads that nobody may write around."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_cgx.codecs import make_codec
from torch_cgx.kernels import Piece

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GUARD = 64  # bytes around each payload that nobody may touch


def random_values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of very different size, some exactly alike, with subnormals and both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= torch.exp2(torch.randint(-20, 8, (numel,), generator=generator).float())
    x[torch.rand(numel, generator=generator) < 0.05] = -0.0
    x[torch.rand(numel, generator=generator) < 0.02] = 1e-41
    return x.to(dtype)


# What a whole block may be like. Some of these are special to a quantizer, some are where its arithmetic ends.
KINDS = (
    *("normal", "heavy", "constant", "zeros", "one value", "subnormal", "tiny", "huge", "overflowing", "infinite"),
    *("only infinities", "not numbers", "any bits"),
)


def values_of_kind(kind: str, numel: int, generator: torch.Generator) -> torch.Tensor:
    """Return float32 values of one of `KINDS`."""
    x = torch.randn(numel, generator=generator)
    match kind:
        case "heavy":
            return x / torch.rand(numel, generator=generator)
        case "constant":
            return torch.full((numel,), float(x[0]))
        case "zeros":
            return torch.where(x < 0, -0.0, 0.0)
        case "one value":
            return torch.where(torch.arange(numel) == numel // 2, x, 0.0)
        case "subnormal":
            return x * 2.0**-140
        case "tiny":
            return x * 2.0**-122
        case "huge":
            return x * 2.0**120
        case "overflowing":
            return x * 2.0**126
        case "infinite":
            return torch.where(x > 1.5, math.inf, x)
        case "only infinities":
            return torch.full((numel,), math.inf)
        case "not numbers":
            return torch.where(x > 1.0, math.nan, x)
        case "any bits":
            return torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32).view(torch.float32)
    assert kind == "normal"
    return x


def blocks_of_kinds(kinds: Sequence[str], block: int, seed: int) -> torch.Tensor:
    """Return float32 values with one block of each of these kinds, in this order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([values_of_kind(kind, block, generator) for kind in kinds])


def piece_for(
    numel: int,
    bits: int,
    block: int,
    *,
    skip: bool = False,
    offset: int = 0,
    payload: int = 0,
    quantizer: str = "maxmin",
) -> Piece:
    return Piece.of(make_codec(quantizer, bits, block, skip), offset, numel, payload)


def payload_nbytes(piece: Piece, dtype: torch.dtype) -> int:
    return piece.codec.payload_nbytes(piece.numel, dtype.itemsize)


class Guarded:
    """A payload inside a larger buffer, to see writes outside of it."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.full((nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        self.payload = self.buffer[GUARD : GUARD + nbytes]

    def untouched(self) -> bool:
        guards = torch.cat((self.buffer[:GUARD], self.buffer[len(self.buffer) - GUARD :]))
        return bool((guards == 0xA5).all())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def table_of(
    rows: list[tuple[int, int, int, bool]], dtype: torch.dtype, offset: int = 0, quantizer: str = "maxmin"
) -> tuple[tuple[Piece, ...], int, int]:
    """Consecutive pieces of (numel, bits, block, skip incomplete), the end of their values and of their payloads."""
    pieces, nbytes = [], 0
    for numel, bits, block, skip in rows:
        piece = piece_for(numel, bits, block, skip=skip, offset=offset, payload=nbytes, quantizer=quantizer)
        pieces.append(piece)
        offset += numel
        nbytes += payload_nbytes(piece, dtype)
    return tuple(pieces), offset, nbytes
