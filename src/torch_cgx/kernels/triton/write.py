# mypy: ignore-errors
"""Writing payloads on the GPU, headers and levels, in Triton's language; `device.py` has what reads them."""

import triton
import triton.language as tl

from torch_cgx.kernels.triton.device import NAN, aligned_pointer


@triton.jit
def _header_bits(x):
    return tl.where(x == x, x.to(tl.int32, bitcast=True), NAN)


@triton.jit
def write_header(pointer, unit, lo):
    tl.store(pointer, _header_bits(unit))
    tl.store(pointer + 1, _header_bits(lo))


@triton.jit
def write_header_of(slot, run, number, unit, lo, mask, WORDS: tl.constexpr):
    if WORDS:
        pointer = aligned_pointer(slot, run[4], tl.int32) + number * 2
        tl.store(pointer, _header_bits(unit), mask=mask)
        tl.store(pointer + 1, _header_bits(lo), mask=mask)
    else:
        pointer = slot.to(tl.pointer_type(tl.uint8)) + run[4]
        write_bytes(pointer, number * 8, _header_bits(unit), mask, 4)
        write_bytes(pointer + 4, number * 8, _header_bits(lo), mask, 4)


@triton.jit
def write_bytes(pointer, where, bits, mask, NBYTES: tl.constexpr):
    for j in tl.static_range(0, NBYTES):
        tl.store(pointer + where + j, (bits >> (8 * j)).to(tl.uint8), mask=mask)


@triton.jit
def write_whole_levels(
    slot,
    offset,
    span,
    rows,
    levels,
    BITS: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr = 8,
):
    """Four levels (of 1 bit: eight) become 1, 2 or 4 bytes; of other bits eight become as many bytes as bits."""
    if BITS == 1:
        GROUP: tl.constexpr = 8
    else:
        GROUP: tl.constexpr = 4
    shifts = tl.arange(0, GROUP)[None, None, :] * BITS
    groups = tl.sum(tl.reshape(levels, [ROWS, TILE // GROUP, GROUP]) << shifts, axis=2)
    row = tl.arange(0, ROWS)[:, None]
    if BITS == 1 or BITS == 2 or BITS == 4 or BITS == 8:
        if BITS == 8:
            element: tl.constexpr = tl.int32
        elif BITS == 4:
            element: tl.constexpr = tl.int16
        else:
            element: tl.constexpr = tl.int8
        group = tl.arange(0, TILE // GROUP)[None, :]
        pointers = aligned_pointer(slot, offset, element, ALIGN) + row * (span // GROUP) + group
        if EXACT:
            tl.store(pointers, groups.to(element))
        else:
            tl.store(pointers, groups.to(element), mask=(group * GROUP < span) & (row < rows))
    else:
        write_octets(
            aligned_pointer(slot, offset, tl.uint8, ALIGN),
            groups,
            row * (span // 8 * BITS),
            span,
            BITS,
            rows * (span // 8 * BITS),
            ROWS,
            TILE,
        )


@triton.jit
def write_octets(pointer, quads, row, span, bits, end, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Pairs of four levels as `bits` bytes each, as far as `end`, which is counted from the tile's first byte."""
    halves = tl.reshape(quads, [ROWS, TILE // 8, 2]).to(tl.uint32, bitcast=True).to(tl.int64)
    octets = tl.sum(halves << (tl.arange(0, 2)[None, None, :] * (4 * bits)).to(tl.int64), axis=2)
    byte = tl.arange(0, 8)[None, None, :]
    group = tl.arange(0, TILE // 8)[None, :, None]
    where = row[:, :, None] + group * bits + byte
    mask = (byte < bits) & (group * 8 < span) & (where < end)
    tl.store(pointer + where, (octets[:, :, None] >> (byte * 8).to(tl.int64)).to(tl.uint8), mask=mask)
