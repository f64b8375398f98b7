# mypy: ignore-errors
"""What the Triton kernels share: types, addresses, reading payloads. Triton's language has no types to check.

One program works on a part of one run (`table.py` says what runs are). A tile is ROWS rows of TILE values.
In whole runs a row is one block, and bits are a constant; other runs are done in strips, with any bits, any block
and any alignment, byte by byte. The arithmetic is docs/wire_format.md's, operation by operation. Values are
loaded and stored as the integers that their bits are, so that raw values stay what they were, and the bits of every
NaN are ours.
"""

import triton
import triton.language as tl

from torch_cgx.kernels.triton.table import EDGE, FIELDS, FLAT, RAW, ROTATED, TAIL, WHOLE

EDGE_RUN = tl.constexpr(EDGE)
FLAT_RUN = tl.constexpr(FLAT)
RAW_RUN = tl.constexpr(RAW)
ROTATED_RUN = tl.constexpr(ROTATED)
TAIL_RUN = tl.constexpr(TAIL)
WHOLE_RUN = tl.constexpr(WHOLE)
_FIELDS = tl.constexpr(FIELDS)

F32 = tl.constexpr(0)
F16 = tl.constexpr(1)
BF16 = tl.constexpr(2)
F64 = tl.constexpr(3)

NAN = tl.constexpr(0x7FC00000)


@triton.jit
def widen(bits, TYPE: tl.constexpr):
    if TYPE == F16:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif TYPE == BF16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif TYPE == F64:
        return bits.to(tl.float64, bitcast=True)
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """The bits of x in the tensor's type, nearest even; every NaN becomes the one quiet NaN."""
    if TYPE == F16:
        bits = x.to(tl.float16).to(tl.int16, bitcast=True)
        return tl.where(x == x, bits, tl.full(x.shape, 0x7E00, tl.int16))
    elif TYPE == BF16:
        wide = x.to(tl.uint32, bitcast=True)
        bits = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).to(tl.int16)
        return tl.where(x == x, bits, tl.full(x.shape, 0x7FC0, tl.int16))
    elif TYPE == F64:
        bits = x.to(tl.int64, bitcast=True)
        return tl.where(x == x, bits, tl.full(x.shape, 0x7FF8000000000000, tl.int64))
    else:
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(x == x, bits, tl.full(x.shape, NAN, tl.int32))


@triton.jit
def double(bits):
    """A float64 argument, which comes as its bits: Triton passes floats as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def random_pair(pair, key):
    """The hash that two neighbouring values share."""
    u = pair * 0x9E3779B1 + key[0]
    u ^= u >> 16
    u = u * 0x7FEB352D + key[1]
    u ^= u >> 15
    u = u * 0x846CA68B
    return u ^ (u >> 16)


@triton.jit
def aligned_pointer(slot, offset, element: tl.constexpr, ALIGN: tl.constexpr = 8):
    """To an element of a slot at a multiple of 8, where the offset is one of ALIGN."""
    base = tl.multiple_of(slot.to(tl.pointer_type(tl.uint8)), 8)
    return (base + (offset // ALIGN) * ALIGN).to(tl.pointer_type(element))


@triton.jit
def load_tile(pointer, offset, index, mask, ALIGN: tl.constexpr, MASKED: tl.constexpr):
    """A tile of values (or residuals): in 16 bytes at once where the run starts at a multiple of them."""
    aligned = pointer + (offset // ALIGN) * ALIGN + index
    if MASKED:
        if offset % ALIGN == 0:
            bits = tl.load(aligned, mask=mask, other=0)
        else:
            bits = tl.load(pointer + offset + index, mask=mask, other=0)
    else:
        if offset % ALIGN == 0:
            bits = tl.load(aligned)
        else:
            bits = tl.load(pointer + offset + index)
    return bits


@triton.jit
def store_tile(pointer, offset, index, bits, mask, ALIGN: tl.constexpr, MASKED: tl.constexpr):
    aligned = pointer + (offset // ALIGN) * ALIGN + index
    if MASKED:
        if offset % ALIGN == 0:
            tl.store(aligned, bits, mask=mask)
        else:
            tl.store(pointer + offset + index, bits, mask=mask)
    else:
        if offset % ALIGN == 0:
            tl.store(aligned, bits)
        else:
            tl.store(pointer + offset + index, bits)


@triton.jit
def whole_levels(
    slot,
    offset,
    span,
    rows,
    BITS: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr = 8,
):
    """The levels of a tile, `span` in each of `rows` rows. Four lie in at most 32 bits, which one or two words hold."""
    row = tl.arange(0, ROWS)[:, None]
    quad = tl.arange(0, TILE // 4)[None, :]
    inside = (quad * 4 < span) & (row < rows)
    shift = (quad * (4 * BITS)) & 31
    words = aligned_pointer(slot, offset, tl.uint32, ALIGN) + row * (span // 32 * BITS) + ((quad * (4 * BITS)) >> 5)
    if EXACT:
        packed = tl.load(words) >> shift.to(tl.uint32)
    else:
        packed = tl.load(words, mask=inside, other=0) >> shift.to(tl.uint32)
    if 32 % (4 * BITS) != 0:
        straddles = shift + 4 * BITS > 32
        high = tl.load(words + 1, mask=inside & straddles, other=0) << ((32 - shift) & 31).to(tl.uint32)
        packed |= tl.where(straddles, high, 0)
    four = tl.arange(0, 4)[None, None, :] * BITS
    levels = (packed[:, :, None] >> four.to(tl.uint32)) & ((1 << BITS) - 1)
    return tl.reshape(levels.to(tl.int32), [ROWS, TILE])


@triton.jit
def load_bytes(pointer, where, mask, NBYTES: tl.constexpr):
    """A little-endian integer that may start at any byte."""
    if NBYTES == 8:
        wide: tl.constexpr = tl.int64
    else:
        wide: tl.constexpr = tl.int32
    bits = tl.load(pointer + where, mask=mask, other=0).to(wide)
    for j in tl.static_range(1, NBYTES):
        bits |= tl.load(pointer + where + j, mask=mask, other=0).to(wide) << (8 * j)
    if NBYTES == 2:
        bits = bits.to(tl.int16)
    return bits


@triton.jit
def header_of(slot, run, first, index, mask, WORDS: tl.constexpr):
    """Unit and lo of the block of each value."""
    block = run[1]
    start = first // block
    number = ((first - start * block).to(tl.int32) + index) // block.to(tl.int32)
    offset = run[4] + start * 8
    if WORDS:
        pointer = aligned_pointer(slot, offset, tl.float32) + number * 2
        unit = tl.load(pointer, mask=mask, other=0.0)
        lo = tl.load(pointer + 1, mask=mask, other=0.0)
    else:
        pointer = slot.to(tl.pointer_type(tl.uint8)) + offset
        unit = load_bytes(pointer, number * 8, mask, 4).to(tl.float32, bitcast=True)
        lo = load_bytes(pointer + 4, number * 8, mask, 4).to(tl.float32, bitcast=True)
    return unit, lo


@triton.jit
def decoded(slot, run, first, index, mask, WORDS: tl.constexpr):
    """Decoded values of a piece from `first` (a multiple of 8) on, whatever their block, bits and alignment."""
    bits = run[0]
    unit, lo = header_of(slot, run, first, index, mask, WORDS)
    bit = index * bits
    pointer = slot.to(tl.pointer_type(tl.uint8)) + run[5] + (first >> 3) * bits + (bit >> 3)
    level = tl.load(pointer, mask=mask, other=0).to(tl.int32)
    level |= tl.load(pointer + 1, mask=mask & ((bit & 7) + bits > 8), other=0).to(tl.int32) << 8
    level = (level >> (bit & 7)) & ((1 << bits) - 1)
    return lo + unit * level.to(tl.float32)


@triton.jit
def payload_address(payloads, k):
    """The address of payload k. They come as 2 * address + 1: Triton compiles anew for multiples of 16, but not so."""
    address = payloads[0]
    for j in tl.static_range(1, len(payloads)):
        address = tl.where(k == j, payloads[j], address)
    return address.to(tl.int64) >> 1


@triton.jit
def own_run(programs, runs):
    """This program's row of the table, and which values of its piece are its own."""
    pid = tl.program_id(0)
    row = runs + tl.load(programs + pid).to(tl.int64) * _FIELDS
    bits, block, numel = tl.load(row + 1).to(tl.int32), tl.load(row + 2), tl.load(row + 4)
    step = tl.load(row + 9)
    begin = tl.load(row + 8) + (pid - tl.load(row + 7)) * step
    end = tl.minimum(begin + step, tl.load(row + 10))
    run = (bits, block, tl.load(row + 3), numel, tl.load(row + 5), tl.load(row + 6), tl.load(row + 11))
    return tl.load(row), run, begin, end
