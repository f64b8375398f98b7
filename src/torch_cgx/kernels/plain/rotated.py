"""The rotated quantizer, as docs/wire_format.md defines it. Each line of arithmetic is one IEEE binary32 operation.

Tensors of values, levels and rotated values have one row per block; those of scales, one number per block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_cgx.codecs.rotated import KEY_NBYTES, SCALE_NBYTES, rotated_numel
from torch_cgx.kernels import NEAREST, Piece, Rounding
from torch_cgx.kernels.plain.codec import PlainCodec, Run, keep_lost, scaled
from torch_cgx.kernels.plain.streams import pack, unpack
from torch_cgx.kernels.random import key, random_pairs

__all__ = ["MAGNITUDES", "THRESHOLDS_SQUARED", "PlainRotated"]

_hex = float.fromhex

# The Lloyd-Max levels of the normal distribution for each number of bits, and the squared thresholds between them.
MAGNITUDES = {
    1: (_hex("0x1.988454p-1"),),
    2: (_hex("0x1.cfa592p-2"), _hex("0x1.82aabap+0")),
    3: (_hex("0x1.f5f3f0p-3"), _hex("0x1.831320p-1"), _hex("0x1.580a70p+0"), _hex("0x1.1372f4p+1")),
    4: (
        *(_hex("0x1.06f3fap-3"), _hex("0x1.8d5c88p-2"), _hex("0x1.5042bcp-1"), _hex("0x1.e27a72p-1")),
        *(_hex("0x1.41985ep+0"), _hex("0x1.9e384ap+0"), _hex("0x1.08d58ep+1"), _hex("0x1.5dc57ep+1")),
    ),
}
THRESHOLDS_SQUARED: dict[int, tuple[float, ...]] = {
    1: (),
    2: (_hex("0x1.ed54a0p-1"),),
    3: (_hex("0x1.009030p-2"), _hex("0x1.1a3790p+0"), _hex("0x1.871272p+1")),
    4: (
        *(_hex("0x1.111d66p-4"), _hex("0x1.177494p-2"), _hex("0x1.474fb0p-1"), _hex("0x1.355ba0p+0")),
        *(_hex("0x1.085dfap+1"), _hex("0x1.b305a4p+1"), _hex("0x1.70e308p+2")),
    ),
}


class PlainRotated(PlainCodec):
    """A run's whole blocks at once, then the incomplete one. Payloads are summed before they are rotated back."""

    def coded_nbytes(self, piece: Piece) -> int:
        coded = piece.numel - piece.raw_tail
        if not coded:
            return 0
        levels = coded // piece.block * piece.block + rotated_numel(coded % piece.block)
        return KEY_NBYTES + SCALE_NBYTES * -(-coded // piece.block) + levels * piece.bits // 8

    def encode(self, run: Run, x: Tensor, payload: Tensor, rounding: Rounding) -> None:
        signs_key = _key(rounding)
        _write_key(payload, signs_key)
        for rows in _rows_of(run):
            values = rows.of(x)
            rotation = _Rotation(signs_key, rows.block)
            coded = _encode(rotation.rotate(values), rows.bits)
            rows.write(payload, _with_constants(coded, values, rows))

    def decode(self, run: Run, payload: Tensor) -> Tensor:
        signs_key = _read_key(payload)
        decoded = torch.empty(run.numel, dtype=torch.float32, device="cpu")
        for rows in _rows_of(run):
            rows.of_run(decoded).copy_(rows.real(_decode(rows.read(payload), _Rotation(signs_key, rows.block))))
        return decoded

    def reduce(
        self,
        run: Run,
        x: Tensor,
        payloads: Sequence[Tensor],
        out: Tensor,
        scale: float,
        rounding: Rounding,
        residual: Tensor | None,
    ) -> Tensor:
        signs_key = _key(rounding)
        _write_key(out, signs_key)
        decoded = torch.empty(run.numel, dtype=torch.float32, device="cpu")
        for rows in _rows_of(run):
            rotation = _Rotation(signs_key, rows.block)
            arrived = [rows.read(payload) for payload in payloads]
            total = _plus_constants(rows.of(x), arrived, rows)
            # Where no rotated payload takes part, the sum is encoded as any block is.
            rotated = _any_rotated(arrived, rows)
            total = torch.where(rotated, total, scaled(total, scale))
            y = rotation.rotate(total)
            for coded in arrived:
                y = torch.where(coded.rotated, y + coded.steps(), y)
            y = torch.where(rotated, scaled(y, scale), y)

            new = _encode(y, rows.bits)
            new = new.where(rotated, _with_constants(new, total, rows))
            rows.write(out, new)
            values = _decode(new, rotation)
            rows.of_run(decoded).copy_(rows.real(values))
            if residual is not None:
                lost_rotated = rotation.back(y - new.steps())
                lost = torch.where(rotated, scaled(lost_rotated, 1.0 / scale), scaled(total - values, 1.0 / scale))
                keep_lost(rows.of_run(residual), rows.real(lost))
        return decoded

    def sum(self, run: Run, x: Tensor, payloads: Sequence[Tensor], scale: float) -> Tensor:
        signs_key = _read_key(payloads[0])
        summed = torch.empty(run.numel, dtype=torch.float32, device="cpu")
        for rows in _rows_of(run):
            arrived = [rows.read(payload) for payload in payloads]
            total = _plus_constants(rows.of(x), arrived, rows)
            steps = torch.zeros_like(total)
            started = torch.zeros(rows.blocks, 1, dtype=torch.bool, device="cpu")
            for coded in arrived:
                more = torch.where(started, steps + coded.steps(), coded.steps())
                steps = torch.where(coded.rotated, more, steps)
                started = started | coded.rotated
            back = _Rotation(signs_key, rows.block).back(steps)
            total = torch.where(started, total + back, total)
            rows.of_run(summed).copy_(rows.real(scaled(total, scale)))
        return summed


@dataclass(frozen=True, slots=True)
class _Coded:
    """What a payload says of some blocks."""

    scale: Tensor  # float32
    levels: Tensor  # int64
    bits: int

    @property
    def zero(self) -> Tensor:
        """Which blocks are all zeros, one row each."""
        return (self.scale == 0)[:, None]

    @property
    def constant(self) -> Tensor:
        """Which blocks have the same value everywhere, not 0, one row each."""
        return torch.signbit(self.scale)[:, None] & ~self.zero

    @property
    def rotated(self) -> Tensor:
        """Which blocks have rotated values, one row each."""
        return ~self.zero & ~self.constant

    @property
    def values_of_constant(self) -> Tensor:
        """What each block would be if it were constant, one row each."""
        size = self.scale.abs()
        return torch.where(self.levels[:, 0] >= _negative(self.bits), -size, size)[:, None]

    def steps(self) -> Tensor:
        """Return the rotated values that the levels stand for."""
        return self.scale[:, None] * self.centers()

    def centers(self) -> Tensor:
        """Return the rotated values before they are scaled."""
        size = _table(MAGNITUDES[self.bits])[self.levels & (_negative(self.bits) - 1)]
        return torch.where(self.levels >= _negative(self.bits), -size, size)

    def where(self, condition: Tensor, other: _Coded) -> _Coded:
        """Return these blocks where the condition holds, one row each, and the others elsewhere."""
        levels = torch.where(condition, self.levels, other.levels)
        return _Coded(torch.where(condition[:, 0], self.scale, other.scale), levels, self.bits)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Blocks of one length in a run: its whole blocks, or its incomplete one."""

    start: int  # of its first value, counted from the run's first
    filled: int  # how many values of each block are real: all, or those of the incomplete one
    block: int
    blocks: int
    bits: int
    scales: int  # where its scales and its levels start in the payload, in bytes
    levels: int

    def of_run(self, x: Tensor) -> Tensor:
        """Return the part of the run's values that lies here."""
        return x[self.start : self.start + self.blocks * self.filled]

    def of(self, x: Tensor) -> Tensor:
        """Return one row per block of the run's values, with zeros behind those that are real."""
        rows = self.of_run(x).view(self.blocks, self.filled)
        return torch.nn.functional.pad(rows, (0, self.block - self.filled))

    def real(self, values: Tensor) -> Tensor:
        """Return the real values of the rows, as a run has them."""
        return values[:, : self.filled].reshape(-1)

    def write(self, payload: Tensor, coded: _Coded) -> None:
        payload[self.scales : self.scales + SCALE_NBYTES * self.blocks] = coded.scale.view(torch.uint8)
        payload[self.levels : self.levels + self._levels_nbytes] = pack(coded.levels.flatten(), self.bits)

    def read(self, payload: Tensor) -> _Coded:
        scale = payload[self.scales : self.scales + SCALE_NBYTES * self.blocks].clone().view(torch.float32)
        stream = payload[self.levels : self.levels + self._levels_nbytes]
        levels = unpack(stream, self.bits, self.blocks * self.block)
        return _Coded(scale, levels.view(self.blocks, self.block), self.bits)

    @property
    def _levels_nbytes(self) -> int:
        return self.blocks * self.block * self.bits // 8


def _rows_of(run: Run) -> Iterator[_Rows]:
    piece = run.piece
    whole, rest = divmod(run.numel, piece.block)
    before = run.start // piece.block
    scales = KEY_NBYTES + SCALE_NBYTES * before
    levels = KEY_NBYTES + SCALE_NBYTES * -(-run.coded // piece.block) + before * piece.block * piece.bits // 8
    if whole:
        yield _Rows(0, piece.block, piece.block, whole, piece.bits, scales, levels)
    if rest:
        scales += SCALE_NBYTES * whole
        levels += whole * piece.block * piece.bits // 8
        yield _Rows(whole * piece.block, rest, rotated_numel(rest), 1, piece.bits, scales, levels)


class _Rotation:
    """The Hadamard transform of n values, with random signs before it."""

    def __init__(self, signs_key: tuple[int, int], n: int) -> None:
        k = n.bit_length() - 1
        f = k // 2
        signs = _signs(signs_key, n)
        self._before = signs * 2.0**-f
        self._after = signs * 2.0 ** -(k - f)

    def rotate(self, x: Tensor) -> Tensor:
        return _hadamard(x * self._before)

    def back(self, y: Tensor) -> Tensor:
        return _hadamard(y) * self._after


def _hadamard(v: Tensor) -> Tensor:
    blocks, n = v.shape
    h = 1
    while h < n:
        a, b = v.view(blocks, n // (2 * h), 2, h).unbind(dim=2)
        v = torch.stack((a + b, a - b), dim=2).view(blocks, n)
        h *= 2
    return v


def _tree(v: Tensor) -> Tensor:
    while v.shape[1] > 1:
        left, right = v.chunk(2, dim=1)
        v = left + right
    return v[:, 0]


def _encode(y: Tensor, bits: int) -> _Coded:
    """Encode rotated values, by the steps 1 to 5."""
    n = y.shape[1]
    largest = y.abs().amax(dim=1)  # NaN if any is
    exponent = (largest.view(torch.int32) >> 23).clamp_(1, 253)
    z = y * _power_of_two(127 - exponent)[:, None]
    zz = z * z
    q = _tree(zz)
    mean = q * (1.0 / n)
    levels = torch.zeros_like(y, dtype=torch.int64)
    for t in _table(THRESHOLDS_SQUARED[bits]):
        levels += (t * mean)[:, None] < zz
    d = _tree(z.abs() * _table(MAGNITUDES[bits])[levels])
    ratio = q / d
    scale = ratio * _power_of_two(exponent - 127)
    levels += torch.where(z < 0, _negative(bits), 0)

    scale = torch.where(largest == 0, 0.0, scale)
    bad = ~(torch.isfinite(largest) & torch.isfinite(scale))
    nan = torch.tensor(math.nan, dtype=torch.float32, device="cpu")  # 0x7FC00000
    return _Coded(torch.where(bad, nan, scale), torch.where(bad[:, None], 0, levels), bits)


def _with_constants(coded: _Coded, values: Tensor, rows: _Rows) -> _Coded:
    """Return the encoded blocks, but those whose real values are equal and finite as constants."""
    first = values[:, :1]
    constant = (values[:, : rows.filled] == first).all(dim=1, keepdim=True) & torch.isfinite(first)
    scale = torch.where(first == 0, 0.0, -first.abs())[:, 0]
    levels = torch.where(first < 0, _negative(rows.bits), 0).expand_as(coded.levels)
    return _Coded(scale, levels, rows.bits).where(constant, coded)


def _decode(coded: _Coded, rotation: _Rotation) -> Tensor:
    values = coded.scale[:, None] * rotation.back(coded.centers())
    values = torch.where(coded.constant, coded.values_of_constant, values)
    return torch.where(coded.zero, 0.0, values)


def _plus_constants(values: Tensor, arrived: Sequence[_Coded], rows: _Rows) -> Tensor:
    """Return the values plus the sum of the payloads that are constant, with zeros behind those that are real."""
    total = torch.zeros(rows.blocks, 1, dtype=torch.float32, device="cpu")
    some = torch.zeros(rows.blocks, 1, dtype=torch.bool, device="cpu")
    for coded in arrived:
        total = torch.where(coded.constant, total + coded.values_of_constant, total)
        some = some | coded.constant
    values = torch.where(some, values + total, values)
    values[:, rows.filled :] = 0.0
    return values


def _any_rotated(arrived: Sequence[_Coded], rows: _Rows) -> Tensor:
    rotated = torch.zeros(rows.blocks, 1, dtype=torch.bool, device="cpu")
    for coded in arrived:
        rotated = rotated | coded.rotated
    return rotated


def _negative(bits: int) -> int:
    """Return the bit that a level of a negative value has."""
    return 1 << (bits - 1)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to these powers, from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def _table(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def _key(rounding: Rounding) -> tuple[int, int]:
    """Return the key of the signs, which all ranks have in both stages of an operation."""
    return key(replace(rounding, rank=0, stage=0) if rounding.stochastic else NEAREST)


def _signs(signs_key: tuple[int, int], n: int) -> Tensor:
    i = torch.arange(n, dtype=torch.int64, device="cpu")
    bit = random_pairs(signs_key, i >> 5) >> (i & 31) & 1
    return 1.0 - 2.0 * bit.to(torch.float32)


def _read_key(payload: Tensor) -> tuple[int, int]:
    k0, k1 = payload[:KEY_NBYTES].clone().view(torch.int32).tolist()
    return k0 & 0xFFFFFFFF, k1 & 0xFFFFFFFF


def _write_key(payload: Tensor, signs_key: tuple[int, int]) -> None:
    words = torch.tensor(signs_key, dtype=torch.int64, device="cpu").to(torch.int32)
    payload[:KEY_NBYTES] = words.view(torch.uint8)
