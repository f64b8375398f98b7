"""What the tests of every kernel set share: awkward values, pieces, and payloads that nobody may write around."""

from __future__ import annotations

import torch

from torch_cgx.codecs import RAW, MaxMin
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


def piece_for(numel: int, bits: int, block: int, *, skip: bool = False, offset: int = 0, payload: int = 0) -> Piece:
    quantizer = RAW if bits == 32 else MaxMin(bits, block, skip)
    return Piece.of(quantizer, offset, numel, payload)


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
    rows: list[tuple[int, int, int, bool]], dtype: torch.dtype, offset: int = 0
) -> tuple[tuple[Piece, ...], int, int]:
    """Consecutive pieces of (numel, bits, block, skip incomplete), the end of their values and of their payloads."""
    pieces, nbytes = [], 0
    for numel, bits, block, skip in rows:
        pieces.append(piece_for(numel, bits, block, skip=skip, offset=offset, payload=nbytes))
        offset += numel
        quantizer = RAW if bits == 32 else MaxMin(bits, block, skip)
        nbytes += quantizer.payload_nbytes(numel, dtype.itemsize)
    return tuple(pieces), offset, nbytes
