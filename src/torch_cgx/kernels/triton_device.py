# mypy: ignore-errors
"""What runs on the GPU: the kernels in Triton's language, which looks like Python but has no types to check.

One program works on a part of one run (`triton_table.py` says what runs are); `triton.py` launches them. The
arithmetic is docs/wire_format.md's, operation by operation: compiled without fusion, divided by `div_rn`.
Values are loaded and stored as the integers that their bits are, so that raw values stay what they were, and the
bits of every NaN are ours.

A tile is ROWS rows of TILE values. In whole runs a row is one block, and bits are a constant; the other kinds
take any bits, any block and any alignment, byte by byte.
"""

import triton
import triton.language as tl

from torch_cgx.kernels.triton_table import EDGE, FIELDS, FLAT, RAW, TAIL, WHOLE

_EDGE = tl.constexpr(EDGE)
_FIELDS = tl.constexpr(FIELDS)
_FLAT = tl.constexpr(FLAT)
_RAW = tl.constexpr(RAW)
_TAIL = tl.constexpr(TAIL)
_WHOLE = tl.constexpr(WHOLE)

F32 = tl.constexpr(0)
F16 = tl.constexpr(1)
BF16 = tl.constexpr(2)
F64 = tl.constexpr(3)

_INF = tl.constexpr(float("inf"))
_NAN = tl.constexpr(0x7FC00000)
_SMALLEST_UNIT = tl.constexpr(2.0**-126)
_WHOLE_FROM = tl.constexpr(2.0**23)  # float32 of this size and above are whole numbers


@triton.jit
def _widen(bits, TYPE: tl.constexpr):
    if TYPE == F16:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif TYPE == BF16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif TYPE == F64:
        return bits.to(tl.float64, bitcast=True)
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _narrow(x, TYPE: tl.constexpr):
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
        return tl.where(x == x, bits, tl.full(x.shape, _NAN, tl.int32))


@triton.jit
def _double(bits):
    """A float64 argument, which comes as its bits: Triton passes floats as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _pointer(slot, offset, element: tl.constexpr):
    """To an element of a slot whose address, like the offset, is a multiple of 8."""
    base = tl.multiple_of(slot.to(tl.pointer_type(tl.uint8)), 8)
    return (base + ((offset >> 3) << 3)).to(tl.pointer_type(element))


@triton.jit
def _payload(payloads, k):
    """The address of payload k. They come as 2 * address + 1: Triton compiles anew for multiples of 16, but not so."""
    address = payloads[0]
    for j in tl.static_range(1, len(payloads)):
        address = tl.where(k == j, payloads[j], address)
    return address.to(tl.int64) >> 1


@triton.jit
def _load(pointer, offset, index, mask, ALIGN: tl.constexpr, MASKED: tl.constexpr):
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
def _store(pointer, offset, index, bits, mask, ALIGN: tl.constexpr, MASKED: tl.constexpr):
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
def _header(lo, hi, bits):
    """Steps 1 to 3 of the encoder, after a NaN has become an infinity: unit and lo as they travel, and 1 / unit.

    The last is 0 in blocks whose levels are all 0.
    """
    lo = lo + 0.0
    hi = hi + 0.0
    spread = hi - lo
    good = spread < _INF
    top = tl.full(lo.shape, (1 << bits) - 1, tl.int32).to(tl.float32)
    unit = tl.maximum(tl.div_rn(spread, top), _SMALLEST_UNIT)
    inv = tl.where(good & (lo != hi), tl.div_rn(tl.full(lo.shape, 1.0, tl.float32), unit), 0.0)
    nan = tl.full(lo.shape, _NAN, tl.int32).to(tl.float32, bitcast=True)
    unit = tl.where(good, tl.where(lo != hi, unit, 0.0), nan)
    return unit, tl.where(good, lo, nan), inv


@triton.jit
def _write_header(pointer, unit, lo):
    tl.store(pointer, _header_bits(unit))
    tl.store(pointer + 1, _header_bits(lo))


@triton.jit
def _levels(x, lo, inv, index, base, bits, key, mask, STOCHASTIC: tl.constexpr):
    """Step 4 of the encoder. `base` is where in the tensor index 0 lies: the random numbers' counter."""
    position = tl.where(mask & (inv != 0.0), (x - lo) * inv, 0.0)
    if STOCHASTIC:
        odd = (base & 1).to(tl.int32)
        # The low 32 bits of (base + index) >> 1.
        pair = (base >> 1).to(tl.uint32) + ((index + odd) >> 1).to(tl.uint32)
        u = pair * 0x9E3779B1 + key[0]
        u ^= u >> 16
        u = u * 0x7FEB352D + key[1]
        u ^= u >> 15
        u = u * 0x846CA68B
        u ^= u >> 16
        random = (u >> (((index + odd) & 1) << 4).to(tl.uint32)) & 0xFFFF
        scaled = position * 65536.0
        scaled = tl.where(scaled < _WHOLE_FROM, (scaled + _WHOLE_FROM) - _WHOLE_FROM, scaled)
        level = (scaled.to(tl.int32) + random.to(tl.int32)) >> 16
    else:
        level = (position + 0.5).to(tl.int32)
    return tl.minimum(level, (1 << bits) - 1)


@triton.jit
def _whole_levels(slot, offset, span, BITS: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """The levels of a tile. Four of them lie in at most 32 bits, which one or two words hold."""
    row = tl.arange(0, ROWS)[:, None] * (span // 32 * BITS)
    quad = tl.arange(0, TILE // 4)[None, :]
    inside = (quad * 4 < span) & (row >= 0)
    shift = (quad * (4 * BITS)) & 31
    words = _pointer(slot, offset, tl.uint32) + row + ((quad * (4 * BITS)) >> 5)
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
def _write_whole_levels(slot, offset, span, levels, BITS: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Four levels (of 1 bit: eight) become 1, 2 or 4 bytes; of other bits eight become as many bytes as they have bits."""
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
        pointers = _pointer(slot, offset, element) + row * (span // GROUP) + group
        if EXACT:
            tl.store(pointers, groups.to(element))
        else:
            tl.store(pointers, groups.to(element), mask=(group * GROUP < span) & (row >= 0))
    else:
        _write_octets(_pointer(slot, offset, tl.uint8), groups, row * (span // 8 * BITS), span, BITS, 0x7FFFFFFF, ROWS, TILE)


@triton.jit
def _write_octets(pointer, quads, row, span, bits, end, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Pairs of four levels as `bits` bytes each, as far as `end`, which is counted from the tile's first byte."""
    halves = tl.reshape(quads, [ROWS, TILE // 8, 2]).to(tl.uint32, bitcast=True).to(tl.int64)
    octets = tl.sum(halves << (tl.arange(0, 2)[None, None, :] * (4 * bits)).to(tl.int64), axis=2)
    byte = tl.arange(0, 8)[None, None, :]
    group = tl.arange(0, TILE // 8)[None, :, None]
    where = row[:, :, None] + group * bits + byte
    mask = (byte < bits) & (group * 8 < span) & (where < end)
    tl.store(pointer + where, (octets[:, :, None] >> (byte * 8).to(tl.int64)).to(tl.uint8), mask=mask)


@triton.jit
def _bytes(pointer, where, mask, NBYTES: tl.constexpr):
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
def _write_bytes(pointer, where, bits, mask, NBYTES: tl.constexpr):
    for j in tl.static_range(0, NBYTES):
        tl.store(pointer + where + j, (bits >> (8 * j)).to(tl.uint8), mask=mask)


@triton.jit
def _header_of(slot, run, first, index, mask, WORDS: tl.constexpr):
    """Unit and lo of the block of each value."""
    block = run[1]
    start = first // block
    number = ((first - start * block).to(tl.int32) + index) // block.to(tl.int32)
    offset = run[4] + start * 8
    if WORDS:
        pointer = _pointer(slot, offset, tl.float32) + number * 2
        unit = tl.load(pointer, mask=mask, other=0.0)
        lo = tl.load(pointer + 1, mask=mask, other=0.0)
    else:
        pointer = slot.to(tl.pointer_type(tl.uint8)) + offset
        unit = _bytes(pointer, number * 8, mask, 4).to(tl.float32, bitcast=True)
        lo = _bytes(pointer + 4, number * 8, mask, 4).to(tl.float32, bitcast=True)
    return unit, lo


@triton.jit
def _write_header_of(slot, run, number, unit, lo, mask, WORDS: tl.constexpr):
    if WORDS:
        pointer = _pointer(slot, run[4], tl.int32) + number * 2
        tl.store(pointer, _header_bits(unit), mask=mask)
        tl.store(pointer + 1, _header_bits(lo), mask=mask)
    else:
        pointer = slot.to(tl.pointer_type(tl.uint8)) + run[4]
        _write_bytes(pointer, number * 8, _header_bits(unit), mask, 4)
        _write_bytes(pointer + 4, number * 8, _header_bits(lo), mask, 4)


@triton.jit
def _decoded(slot, run, first, index, mask, WORDS: tl.constexpr):
    """Decoded values of a piece from `first` (a multiple of 8) on, whatever their block, bits and alignment."""
    bits = run[0]
    unit, lo = _header_of(slot, run, first, index, mask, WORDS)
    bit = index * bits
    pointer = slot.to(tl.pointer_type(tl.uint8)) + run[5] + (first >> 3) * bits + (bit >> 3)
    level = tl.load(pointer, mask=mask, other=0).to(tl.int32)
    level |= tl.load(pointer + 1, mask=mask & ((bit & 7) + bits > 8), other=0).to(tl.int32) << 8
    level = (level >> (bit & 7)) & ((1 << bits) - 1)
    return lo + unit * level.to(tl.float32)


@triton.jit
def _summed(values, reducing, run, first, index, mask, TYPE: tl.constexpr, WORDS: tl.constexpr, REDUCE: tl.constexpr):
    """The values, or with payloads their sum: own values first, then payloads in order; then scaled."""
    payloads, count, scale, _ = reducing
    x = _widen(tl.load(values + run[2] + first + index, mask=mask, other=0), TYPE)
    if REDUCE:
        for k in range(count):
            x = x + _decoded(_payload(payloads, k), run, first, index, mask, WORDS)
        x = x * scale
    return x


@triton.jit
def _raw_bits(slot, start, index, mask, NBYTES: tl.constexpr, TAIL: tl.constexpr, element: tl.constexpr):
    if TAIL:
        return _bytes(slot.to(tl.pointer_type(tl.uint8)) + start, index * NBYTES, mask, NBYTES)
    else:
        return tl.load(_pointer(slot, start, element) + index, mask=mask, other=0)


@triton.jit
def _run(programs, runs):
    """This program's row of the table, and which values of its piece are its own."""
    pid = tl.program_id(0)
    row = runs + tl.load(programs + pid).to(tl.int64) * _FIELDS
    bits, block, numel = tl.load(row + 1).to(tl.int32), tl.load(row + 2), tl.load(row + 4)
    step = tl.load(row + 9)
    begin = tl.load(row + 8) + (pid - tl.load(row + 7)) * step
    end = tl.minimum(begin + step, tl.load(row + 10))
    return tl.load(row), (bits, block, tl.load(row + 3), numel, tl.load(row + 5), tl.load(row + 6)), begin, end


@triton.jit
def _encode_whole(
    tensors,
    reducing,
    key,
    run,
    begin,
    end,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RESIDUAL: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """Whole tiles of whole blocks, each in registers from the first load to the last store."""
    values, slot, residual = tensors
    payloads, count, scale, unscale = reducing
    block, offset, headers, levels_at = run[1], run[2], run[4], run[5]
    if EXACT:
        span: tl.constexpr = TILE
    else:
        span = (block >> 5) << 5
    r = tl.arange(0, ROWS)
    c = tl.arange(0, TILE)[None, :]
    index = r[:, None] * span + c
    mask = (c < span) & (r[:, None] >= 0)
    for first in range(begin, end, ROWS * span):
        x = _widen(_load(values, offset + first, index, mask, ALIGN, not EXACT), TYPE)
        header = headers + first // span * 8
        levels_from = levels_at + (first >> 5) * (4 * BITS)
        if REDUCE:
            for k in range(count):
                other = _payload(payloads, k)
                pointer = _pointer(other, header, tl.float32) + r * 2
                levels = _whole_levels(other, levels_from, span, BITS, EXACT, ROWS, TILE)
                step = tl.load(pointer)[:, None] * levels.to(tl.float32)
                x = x + (tl.load(pointer + 1)[:, None] + step)
            x = x * scale
        y = tl.where(x == x, x, _INF)
        if EXACT:
            unit, lo, inv = _header(tl.min(y, axis=1), tl.max(y, axis=1), BITS)
        else:
            lowest = tl.min(tl.where(mask, y, _INF), axis=1)
            unit, lo, inv = _header(lowest, tl.max(tl.where(mask, y, -_INF), axis=1), BITS)
        _write_header(_pointer(slot, header, tl.int32) + r * 2, unit, lo)
        levels = _levels(x, lo[:, None], inv[:, None], index, offset + first, BITS, key, mask, STOCHASTIC)
        _write_whole_levels(slot, levels_from, span, levels, BITS, EXACT, ROWS, TILE)
        if REDUCE or RESIDUAL:
            decoded = lo[:, None] + unit[:, None] * levels.to(tl.float32)
            if REDUCE:
                _store(values, offset + first, index, _narrow(decoded, TYPE), mask, ALIGN, not EXACT)
            if RESIDUAL:
                good = mask & (lo == lo)[:, None]
                _store(residual, offset + first, index, (x - decoded) * unscale, good, 4, True)


@triton.jit
def _encode_strips(
    tensors,
    reducing,
    key,
    run,
    begin,
    end,
    header,
    FLAT: tl.constexpr,
    TYPE: tl.constexpr,
    STRIP: tl.constexpr,
    WORDS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RESIDUAL: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """Levels of any values, by the one header given, or in flat runs each by that of its block, which is in the slot."""
    values, slot, residual = tensors
    bits = run[0]
    index = tl.arange(0, STRIP)[None, :]
    for first in range(begin, end, STRIP):
        mask = first + index < end
        x = _summed(values, reducing, run, first, index, mask, TYPE, WORDS, REDUCE)
        if FLAT:
            unit, lo = _header_of(slot, run, first, index, mask, WORDS)
            levelled = (unit != 0.0) & (unit == unit)
            one = tl.full(unit.shape, 1.0, tl.float32)
            inv = tl.where(levelled, tl.div_rn(one, tl.where(levelled, unit, 1.0)), 0.0)
        else:
            unit, lo, inv = header
        levels = _levels(x, lo, inv, index, run[2] + first, bits, key, mask, STOCHASTIC)
        quads = tl.reshape(levels, [1, STRIP // 4, 4]) << (tl.arange(0, 4)[None, None, :] * bits)
        start = (first >> 3) * bits
        nbytes = ((end * bits + 7) >> 3) - start
        pointer = slot.to(tl.pointer_type(tl.uint8)) + run[5] + start
        _write_octets(pointer, tl.sum(quads, axis=2), tl.zeros([1, 1], tl.int32), STRIP, bits, nbytes, 1, STRIP)
        if REDUCE or RESIDUAL:
            decoded = lo + unit * levels.to(tl.float32)
            if REDUCE:
                tl.store(values + run[2] + first + index, _narrow(decoded, TYPE), mask=mask)
            if RESIDUAL:
                lost = (x - decoded) * reducing[3]
                tl.store(residual + run[2] + first + index, lost, mask=mask & (lo == lo))


@triton.jit
def _encode_edge(
    tensors,
    reducing,
    key,
    run,
    begin,
    end,
    TYPE: tl.constexpr,
    STRIP: tl.constexpr,
    WORDS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RESIDUAL: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """One block, in two passes."""
    values, slot, _ = tensors
    index = tl.arange(0, STRIP)
    lowest = tl.full([STRIP], _INF, tl.float32)
    highest = tl.full([STRIP], -_INF, tl.float32)
    for first in range(begin, end, STRIP):
        mask = first + index < end
        x = _summed(values, reducing, run, first, index, mask, TYPE, WORDS, REDUCE)
        y = tl.where(x == x, x, _INF)
        lowest = tl.minimum(lowest, tl.where(mask, y, _INF))
        highest = tl.maximum(highest, tl.where(mask, y, -_INF))
    bits = run[0]
    low = tl.reshape(tl.min(tl.reshape(lowest, [1, STRIP]), axis=1), [1, 1])
    high = tl.reshape(tl.max(tl.reshape(highest, [1, STRIP]), axis=1), [1, 1])
    header = _header(low, high, bits)
    number = tl.zeros([1, 1], tl.int64) + begin // run[1]
    _write_header_of(slot, run, number, header[0], header[1], number >= 0, WORDS)
    _encode_strips(
        tensors, reducing, key, run, begin, end, header, False, TYPE, STRIP, WORDS, STOCHASTIC, RESIDUAL, REDUCE
    )


@triton.jit
def _header_bits(x):
    return tl.where(x == x, x.to(tl.int32, bitcast=True), _NAN)


@triton.jit
def _encode_raw(
    tensors,
    reducing,
    run,
    begin,
    end,
    TAIL: tl.constexpr,
    TYPE: tl.constexpr,
    STRIP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """Raw values: their row has in the place of headers where their bytes start, of levels where their padding ends."""
    values, slot, residual = tensors
    payloads, count, scale, _ = reducing
    offset, numel, start, padded = run[2], run[3], run[4], run[5]
    element: tl.constexpr = values.dtype.element_ty
    NBYTES: tl.constexpr = element.primitive_bitwidth // 8
    i = tl.arange(0, STRIP)
    target = slot.to(tl.pointer_type(tl.uint8))
    if TAIL:
        if begin == 0:
            padding = numel * NBYTES + tl.arange(0, 8)
            tl.store(target + start + padding, tl.zeros([8], tl.uint8), mask=start + padding < padded)
    for first in range(begin, end, STRIP):
        mask = first + i < numel
        bits = tl.load(values + offset + first + i, mask=mask, other=0)
        at = start + first * NBYTES
        if REDUCE:
            total = _widen(bits, TYPE)
            for k in range(count):
                total = total + _widen(_raw_bits(_payload(payloads, k), at, i, mask, NBYTES, TAIL, element), TYPE)
            bits = _narrow(total * scale, TYPE)
            tl.store(values + offset + first + i, bits, mask=mask)
        if TAIL:
            _write_bytes(target + at, i * NBYTES, bits, mask, NBYTES)
        else:
            tl.store(_pointer(slot, at, element) + i, bits, mask=mask)
        if RESIDUAL:
            tl.store(residual + offset + first + i, tl.zeros([STRIP], tl.float32), mask=mask)


@triton.jit(do_not_specialize=["slot", "count", "scale", "unscale", "k0", "k1"])
def encode_kernel(
    programs,
    runs,
    values,
    slot: tl.int64,
    residual,
    payloads,
    count: tl.int32,
    scale: tl.int64,
    unscale: tl.int64,
    k0: tl.int64,
    k1: tl.int64,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    WORDS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RESIDUAL: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """Encode; with REDUCE, the scaled sum of the values and `count` payloads, of which the decoded values are kept.

    BITS is what all whole runs have, or 0 where they differ; WORDS is whether every slot starts at a multiple of 8.
    """
    kind, run, begin, end = _run(programs, runs)
    tensors = (values, slot, residual)
    STRIP: tl.constexpr = ROWS * TILE // 4
    if TYPE == F64:
        reducing = (payloads, count, _double(scale), 1.0)
        _encode_raw(tensors, reducing, run, begin, end, True, TYPE, STRIP, RESIDUAL, REDUCE)
    else:
        ALIGN: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
        reducing = (payloads, count, _double(scale).to(tl.float32), _double(unscale).to(tl.float32))
        key = (k0.to(tl.uint32), k1.to(tl.uint32))
        if kind == _WHOLE:
            for b in tl.static_range(1, 9):
                if BITS == b or BITS == 0:
                    if run[0] == b:
                        _encode_whole(
                            tensors, reducing, key, run, begin, end, b, TYPE, ALIGN, EXACT, ROWS, TILE,
                            STOCHASTIC, RESIDUAL, REDUCE,
                        )  # fmt: skip
        elif kind == _EDGE:
            _encode_edge(
                tensors, reducing, key, run, begin, end, TYPE, STRIP, WORDS, STOCHASTIC, RESIDUAL, REDUCE
            )
        elif kind == _FLAT:
            if FLAT:
                _encode_strips(
                    tensors, reducing, key, run, begin, end, (0.0, 0.0, 0.0), True, TYPE, STRIP, WORDS,
                    STOCHASTIC, RESIDUAL, REDUCE,
                )  # fmt: skip
        elif kind == _TAIL:
            _encode_raw(tensors, reducing, run, begin, end, True, TYPE, STRIP, RESIDUAL, REDUCE)
        else:
            _encode_raw(tensors, reducing, run, begin, end, False, TYPE, STRIP, RESIDUAL, REDUCE)


@triton.jit(do_not_specialize=["slot", "count", "scale"])
def headers_kernel(
    programs,
    runs,
    values,
    slot: tl.int64,
    payloads,
    count: tl.int32,
    scale: tl.int64,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """The headers of blocks that flat runs are made of, before `encode_kernel` writes their levels."""
    _, run, begin, end = _run(programs, runs)
    block, numel = run[1], run[3]
    reducing = (payloads, count, _double(scale).to(tl.float32), 1.0)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, TILE)[None, :]
    for first in range(begin, end, ROWS * block):
        lowest = tl.full([ROWS], _INF, tl.float32)
        highest = tl.full([ROWS], -_INF, tl.float32)
        for column in range(0, block.to(tl.int32), TILE):
            index = r[:, None] * block.to(tl.int32) + column + c
            mask = (column + c < block) & (first + index < numel)
            x = _summed(values, reducing, run, first, index, mask, TYPE, WORDS, REDUCE)
            y = tl.where(x == x, x, _INF)
            lowest = tl.minimum(lowest, tl.min(tl.where(mask, y, _INF), axis=1))
            highest = tl.maximum(highest, tl.max(tl.where(mask, y, -_INF), axis=1))
        unit, lo, _ = _header(lowest, highest, run[0])
        number = first // block + r
        _write_header_of(slot, run, number, unit, lo, number * block < numel, WORDS)


@triton.jit
def _decode_whole(
    values,
    slot,
    run,
    begin,
    end,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
):
    block, offset, headers, levels_at = run[1], run[2], run[4], run[5]
    if EXACT:
        span: tl.constexpr = TILE
    else:
        span = (block >> 5) << 5
    r = tl.arange(0, ROWS)
    c = tl.arange(0, TILE)[None, :]
    index = r[:, None] * span + c
    mask = (c < span) & (r[:, None] >= 0)
    for first in range(begin, end, ROWS * span):
        pointer = _pointer(slot, headers + first // span * 8, tl.float32) + r * 2
        levels = _whole_levels(slot, levels_at + (first >> 5) * (4 * BITS), span, BITS, EXACT, ROWS, TILE)
        x = tl.load(pointer + 1)[:, None] + tl.load(pointer)[:, None] * levels.to(tl.float32)
        if ADD:
            x = _widen(_load(values, offset + first, index, mask, ALIGN, not EXACT), TYPE) + x
        _store(values, offset + first, index, _narrow(x, TYPE), mask, ALIGN, not EXACT)


@triton.jit
def _decode_strips(
    values,
    slot,
    run,
    begin,
    end,
    TYPE: tl.constexpr,
    STRIP: tl.constexpr,
    WORDS: tl.constexpr,
    ADD: tl.constexpr,
):
    i = tl.arange(0, STRIP)
    for first in range(begin, end, STRIP):
        mask = first + i < end
        x = _decoded(slot, run, first, i, mask, WORDS)
        if ADD:
            x = _widen(tl.load(values + run[2] + first + i, mask=mask, other=0), TYPE) + x
        tl.store(values + run[2] + first + i, _narrow(x, TYPE), mask=mask)


@triton.jit
def _decode_raw(
    values,
    slot,
    run,
    begin,
    end,
    TAIL: tl.constexpr,
    TYPE: tl.constexpr,
    STRIP: tl.constexpr,
    ADD: tl.constexpr,
):
    offset, start = run[2], run[4]
    element: tl.constexpr = values.dtype.element_ty
    NBYTES: tl.constexpr = element.primitive_bitwidth // 8
    i = tl.arange(0, STRIP)
    for first in range(begin, end, STRIP):
        mask = first + i < end
        bits = _raw_bits(slot, start + first * NBYTES, i, mask, NBYTES, TAIL, element)
        if ADD:
            mine = tl.load(values + offset + first + i, mask=mask, other=0)
            bits = _narrow(_widen(mine, TYPE) + _widen(bits, TYPE), TYPE)
        tl.store(values + offset + first + i, bits, mask=mask)


@triton.jit(do_not_specialize=["slot"])
def decode_kernel(
    programs,
    runs,
    values,
    slot: tl.int64,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    ADD: tl.constexpr,
):
    kind, run, begin, end = _run(programs, runs)
    STRIP: tl.constexpr = ROWS * TILE // 4
    if TYPE == F64:
        _decode_raw(values, slot, run, begin, end, True, TYPE, STRIP, ADD)
    else:
        ALIGN: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
        if kind == _WHOLE:
            for b in tl.static_range(1, 9):
                if BITS == b or BITS == 0:
                    if run[0] == b:
                        _decode_whole(values, slot, run, begin, end, b, TYPE, ALIGN, EXACT, ROWS, TILE, ADD)
        elif kind == _TAIL:
            _decode_raw(values, slot, run, begin, end, True, TYPE, STRIP, ADD)
        elif kind == _RAW:
            _decode_raw(values, slot, run, begin, end, False, TYPE, STRIP, ADD)
        else:
            _decode_strips(values, slot, run, begin, end, TYPE, STRIP, WORDS, ADD)
