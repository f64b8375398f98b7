"""Values of every kind out of a string of bytes, so that a fuzzer that knows bytes alone can make arguments."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

__all__ = ["Source"]

T = TypeVar("T")
NUMBERS = (
    0,
    1,
    -1,
    2,
    4,
    8,
    9,
    16,
    32,
    33,
    512,
    1024,
    65536,
    65537,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
)
FLOATS = (0.0, 1.0, -1.0, 4.0, 0.5, math.nan, math.inf, -math.inf, 1e308, 5e-324)
WORDS = (
    "",
    "auto",
    "bits",
    "bucket_size",
    "bytes",
    "error",
    "greedy",
    "linear",
    "4",
    " 8 ",
    "-1",
    "1e3",
    "SRA",
    "ring",
    "\0",
)


class Source:
    """Eats the bytes from the front; when they are gone, everything is zero."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        self._at += count
        return found.ljust(count, b"\0")

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)

    def rest(self) -> bytes:
        found = self._data[self._at :]
        self._at = len(self._data)
        return found

    def below(self, limit: int) -> int:
        return int.from_bytes(self.take(2 if limit <= 65536 else 8), "little") % limit

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def number(self) -> int:
        return self.choice(NUMBERS) if self.below(2) else struct.unpack("<q", self.take(8))[0]

    def floating(self) -> float:
        return self.choice(FLOATS) if self.below(2) else struct.unpack("<d", self.take(8))[0]

    def text(self) -> str:
        if self.below(2):
            return self.choice(WORDS)
        return self.take(self.below(24)).decode("utf-8", errors="surrogateescape" if self.below(2) else "replace")

    def plain(self, depth: int = 3) -> Any:
        """What JSON has."""
        kind = self.below(8 if depth else 6)
        if kind == 0:
            return None
        if kind == 1:
            return bool(self.below(2))
        if kind in (2, 3):
            return self.number()
        if kind == 4:
            return self.floating()
        if kind == 5:
            return self.text()
        if kind == 6:
            return [self.plain(depth - 1) for _ in range(self.below(4))]
        return {self.text(): self.plain(depth - 1) for _ in range(self.below(4))}

    def anything(self) -> Any:
        """What a caller may hand over by mistake."""
        kind = self.below(10)
        if kind < 6:
            return self.plain()
        if kind == 6:
            return self.tensor()
        if kind == 7:
            return {self.number(): self.plain()}
        if kind == 8:
            return object()
        return self.choice(
            [b"", b"4", (), (2, 8), (8, 2), {1, 2}, torch.float32, int, range(3), 4 + 0j, torch.nn.Linear(2, 2)]
        )

    def tensor(self) -> torch.Tensor:
        shape = [self.below(5) for _ in range(self.below(4))]
        dtype = self.choice(
            [torch.float32, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64]
        )
        found = torch.zeros(shape, dtype=dtype)
        odd = self.below(8)
        if odd == 0 and found.dim() == 2:
            return found.t()
        if odd == 1:
            return found.to("meta")
        if odd == 2:
            return found.to_sparse()
        if odd == 3 and dtype.is_floating_point:
            return found.requires_grad_()
        return found
