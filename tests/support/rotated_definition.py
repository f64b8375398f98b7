"""The rotated quantizer of docs/wire_format.md, one float32 number at a time, without torch: the oracle must match it.

Lists of numpy's float32 scalars, loops, and the levels as one long integer. Slow, and for short pieces. The tables are
read from the page itself. Overflows are part of it: callers ignore numpy's warnings.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "wire_format.md").read_text(encoding="utf-8")
F = np.float32
Floats = list[np.float32]
Key = tuple[int, int]

_NAN_BITS = 0x7FC00000
_M32, _M64 = 2**32 - 1, 2**64 - 1


def _floats(words: str) -> Floats:
    return [F(float.fromhex(word)) for word in words.split()]


_ROWS = re.findall(r"^\| ([1-4]) \| (.*) \| (.*)\|$", PAGE, re.M)
M = {int(bits): _floats(magnitudes) for bits, magnitudes, _ in _ROWS}
T = {int(bits): _floats(thresholds) for bits, _, thresholds in _ROWS}


def key_of(seed: int = 0, op: int = 0) -> Key:
    """Return the key of a seed and an operation, with rank 0 and stage 0."""

    def mix64(z: int) -> int:
        z ^= z >> 30
        z = z * 0xBF58476D1CE4E5B9 & _M64
        z ^= z >> 27
        z = z * 0x94D049BB133111EB & _M64
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    k = mix64((seed + golden) & _M64)
    k = mix64(((k ^ op) + golden) & _M64)
    k = mix64((k + golden) & _M64)
    return k & _M32, k >> 32


def random_pair(key: Key, j: int) -> int:
    u = (j * 0x9E3779B1 + key[0]) & _M32
    u ^= u >> 16
    u = (u * 0x7FEB352D + key[1]) & _M32
    u ^= u >> 15
    u = u * 0x846CA68B & _M32
    return u ^ u >> 16


def signs(key: Key, n: int) -> Floats:
    return [F(-1) if random_pair(key, i >> 5) >> (i & 31) & 1 else F(1) for i in range(n)]


def hadamard(values: Floats) -> Floats:
    v, h = list(values), 1
    while h < len(v):
        for i in range(len(v)):
            if not i & h:
                v[i], v[i + h] = v[i] + v[i + h], v[i] - v[i + h]
        h *= 2
    return v


def exponents(n: int) -> tuple[int, int]:
    k = n.bit_length() - 1
    return k // 2, k - k // 2


def rotate(x: Floats, key: Key) -> Floats:
    f, _ = exponents(len(x))
    return hadamard([a * (s * F(2.0**-f)) for a, s in zip(x, signs(key, len(x)), strict=True)])


def back(y: Floats, key: Key) -> Floats:
    _, c = exponents(len(y))
    return [a * (s * F(2.0**-c)) for a, s in zip(hadamard(y), signs(key, len(y)), strict=True)]


def tree(values: Floats) -> np.float32:
    v = list(values)
    while len(v) > 1:
        half = len(v) // 2
        v = [v[i] + v[i + half] for i in range(half)]
    return v[0]


@dataclass(frozen=True)
class Block:
    """A block as a payload has it."""

    scale: np.float32
    levels: list[int]
    bits: int

    @property
    def is_zero(self) -> bool:
        return bool(self.scale == 0)

    @property
    def is_constant(self) -> bool:
        return bool(np.signbit(self.scale)) and not self.is_zero

    @property
    def constant(self) -> np.float32:
        return -abs(self.scale) if self.levels[0] >> (self.bits - 1) else abs(self.scale)

    def centers(self) -> Floats:
        top = 2 ** (self.bits - 1)
        return [-M[self.bits][level - top] if level >= top else M[self.bits][level] for level in self.levels]

    def decoded(self, key: Key) -> Floats:
        if self.is_zero:
            return [F(0)] * len(self.levels)
        if self.is_constant:
            return [self.constant] * len(self.levels)
        return [self.scale * v for v in back(self.centers(), key)]


def _nan_block(n: int, bits: int) -> Block:
    return Block(np.uint32(_NAN_BITS).view(F), [0] * n, bits)


def encode_rotated(y: Floats, bits: int) -> Block:
    n = len(y)
    if not all(np.isfinite(v) for v in y):
        return _nan_block(n, bits)
    largest = max(abs(v) for v in y)
    if largest == 0:
        return Block(F(0), [0] * n, bits)
    exponent = min(max(int(largest.view(np.uint32)) >> 23 & 255, 1), 253)
    z = [v * F(2.0 ** (127 - exponent)) for v in y]
    q = tree([v * v for v in z])
    thresholds = [t * (q * F(1 / n)) for t in T[bits]]
    counts = [sum(bool(t < v * v) for t in thresholds) for v in z]
    d = tree([abs(v) * M[bits][m] for v, m in zip(z, counts, strict=True)])
    scale = (q / d) * F(2.0 ** (exponent - 127))
    if not np.isfinite(scale):
        return _nan_block(n, bits)
    return Block(scale, [m + (2 ** (bits - 1) if v < 0 else 0) for m, v in zip(counts, z, strict=True)], bits)


def filled(x: Floats) -> Floats:
    n = 64
    while n < len(x):
        n *= 2
    return [*x, *[F(0)] * (n - len(x))]


def encode_block(x: Floats, bits: int, key: Key) -> Block:
    """Encode the real values of a block."""
    n = len(filled(x))
    if all(v == x[0] for v in x) and np.isfinite(x[0]):
        a = x[0]
        scale = F(0) if a == 0 else -abs(a)
        return Block(scale, [2 ** (bits - 1) if a < 0 else 0] * n, bits)
    return encode_rotated(rotate(filled(x), key), bits)


def _with_constants(x: Floats, payloads: Sequence[Block]) -> Floats:
    constants = [block.constant for block in payloads if block.is_constant]
    if not constants:
        return list(x)
    total = constants[0]
    for more in constants[1:]:
        total = total + more
    return [v + total for v in x]


def _rotated(payloads: Sequence[Block]) -> list[Block]:
    return [block for block in payloads if not block.is_constant and not block.is_zero]


def reduce_block(
    x: Floats, payloads: Sequence[Block], scale: float, bits: int, key: Key
) -> tuple[Block, Floats, Floats]:
    """Return the new block, the owner's new values, and what is lost of each."""
    total, others, inv = _with_constants(x, payloads), _rotated(payloads), F(1.0 / scale)
    if not others:
        total = [v * F(scale) for v in total]
        block = encode_block(total, bits, key)
        decoded = block.decoded(key)[: len(x)]
        return block, decoded, [(v - w) * inv for v, w in zip(total, decoded, strict=True)]
    y = rotate(filled(total), key)
    for other in others:
        y = [v + other.scale * c for v, c in zip(y, other.centers(), strict=True)]
    y = [v * F(scale) for v in y]
    block = encode_rotated(y, bits)
    lost = back([v - block.scale * c for v, c in zip(y, block.centers(), strict=True)], key)
    return block, block.decoded(key)[: len(x)], [v * inv for v in lost[: len(x)]]


def sum_block(x: Floats, payloads: Sequence[Block], scale: float, key: Key) -> Floats:
    total, others = _with_constants(x, payloads), _rotated(payloads)
    if others:
        w = [others[0].scale * c for c in others[0].centers()]
        for other in others[1:]:
            w = [v + other.scale * c for v, c in zip(w, other.centers(), strict=True)]
        total = [v + r for v, r in zip(total, back(w, key), strict=False)]
    return [v * F(scale) for v in total]


def blocks_of(x: Floats, block: int) -> list[Floats]:
    return [x[start : start + block] for start in range(0, len(x), block)]


def payload_of(blocks: Sequence[Block], bits: int, key: Key, raw: bytes = b"") -> bytes:
    """Return the bytes of coded blocks, of which there may be none, and of the raw tail."""
    head = struct.pack("<II", *key) if blocks else b""
    scales = b"".join(block.scale.tobytes() for block in blocks)
    stream, count = 0, 0
    for block in blocks:
        for level in block.levels:
            stream |= level << count * bits
            count += 1
    coded = head + scales + stream.to_bytes(-(-count * bits // 8), "little") + raw
    return coded + bytes(-len(coded) % 8)


def blocks_in(payload: bytes, numel: int, block: int, bits: int) -> tuple[Key, list[Block]]:
    """Return the key and the blocks of so many coded values."""
    lengths = [len(filled([F(0)] * min(block, numel - start))) for start in range(0, numel, block)]
    k0, k1, *scales = struct.unpack_from(f"<II{len(lengths)}I", payload)
    stream = int.from_bytes(payload[8 + 4 * len(lengths) :], "little")
    blocks = []
    for bits_of_scale, n in zip(scales, lengths, strict=True):
        levels = [stream >> i * bits & (2**bits - 1) for i in range(n)]
        stream >>= n * bits
        blocks.append(Block(np.uint32(bits_of_scale).view(F), levels, bits))
    return (k0, k1), blocks
