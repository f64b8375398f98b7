# mypy: ignore-errors
"""Encoding and reducing on the GPU, in Triton's language; a kernel that reduces is one that first adds payloads."""

import triton
import triton.language as tl

from torch_cgx.kernels.triton.device import (
    EDGE_RUN,
    F64,
    FLAT_RUN,
    NAN,
    TAIL_RUN,
    WHOLE_RUN,
    aligned_pointer,
    decoded,
    double,
    header_of,
    load_tile,
    narrow,
    own_run,
    payload_address,
    random_pair,
    store_tile,
    whole_levels,
    widen,
)
from torch_cgx.kernels.triton.raw import encode_raw
from torch_cgx.kernels.triton.write import write_header, write_header_of, write_octets, write_whole_levels

INF = tl.constexpr(float("inf"))
_SMALLEST_UNIT = tl.constexpr(2.0**-126)
_WHOLE_FROM = tl.constexpr(2.0**23)  # float32 of this size and above are whole numbers


@triton.jit
def _header(lo, hi, bits):
    """Steps 1 to 3 of the encoder, after a NaN has become an infinity: unit and lo as they travel, and 1 / unit.

    The last is 0 in blocks whose levels are all 0.
    """
    lo = lo + 0.0
    hi = hi + 0.0
    spread = hi - lo
    good = spread < INF
    top = tl.full(lo.shape, (1 << bits) - 1, tl.int32).to(tl.float32)
    unit = tl.maximum(tl.div_rn(spread, top), _SMALLEST_UNIT)
    inv = tl.where(good & (lo != hi), tl.div_rn(tl.full(lo.shape, 1.0, tl.float32), unit), 0.0)
    nan = tl.full(lo.shape, NAN, tl.int32).to(tl.float32, bitcast=True)
    unit = tl.where(good, tl.where(lo != hi, unit, 0.0), nan)
    return unit, tl.where(good, lo, nan), inv


@triton.jit
def _levels(x, lo, inv, index, base, bits, key, mask, STOCHASTIC: tl.constexpr):
    """Step 4 of the encoder. `base` is where in the tensor index 0 lies: the random numbers' counter."""
    position = tl.where(mask & (inv != 0.0), (x - lo) * inv, 0.0)
    if STOCHASTIC:
        odd = (base & 1).to(tl.int32)
        # The low 32 bits of (base + index) >> 1.
        pair = (base >> 1).to(tl.uint32) + ((index + odd) >> 1).to(tl.uint32)
        random = (random_pair(pair, key) >> (((index + odd) & 1) << 4).to(tl.uint32)) & 0xFFFF
        scaled = position * 65536.0
        scaled = tl.where(scaled < _WHOLE_FROM, (scaled + _WHOLE_FROM) - _WHOLE_FROM, scaled)
        level = (scaled.to(tl.int32) + random.to(tl.int32)) >> 16
    else:
        level = (position + 0.5).to(tl.int32)
    return tl.minimum(level, (1 << bits) - 1)


@triton.jit
def _summed(values, reducing, run, first, index, mask, TYPE: tl.constexpr, WORDS: tl.constexpr, REDUCE: tl.constexpr):
    """The values, or with payloads their sum: own values first, then payloads in order; then scaled."""
    payloads, count, scale, _ = reducing
    x = widen(tl.load(values + run[2] + first + index, mask=mask, other=0), TYPE)
    if REDUCE:
        for k in range(count):
            x = x + decoded(payload_address(payloads, k), run, first, index, mask, WORDS)
        x = x * scale
    return x


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
        x = widen(load_tile(values, offset + first, index, mask, ALIGN, not EXACT), TYPE)
        header = headers + first // span * 8
        levels_from = levels_at + (first >> 5) * (4 * BITS)
        if REDUCE:
            for k in range(count):
                other = payload_address(payloads, k)
                pointer = aligned_pointer(other, header, tl.float32) + r * 2
                levels = whole_levels(other, levels_from, span, ROWS, BITS, EXACT, ROWS, TILE)
                step = tl.load(pointer)[:, None] * levels.to(tl.float32)
                x = x + (tl.load(pointer + 1)[:, None] + step)
            x = x * scale
        y = tl.where(x == x, x, INF)
        if EXACT:
            unit, lo, inv = _header(tl.min(y, axis=1), tl.max(y, axis=1), BITS)
        else:
            lowest = tl.min(tl.where(mask, y, INF), axis=1)
            unit, lo, inv = _header(lowest, tl.max(tl.where(mask, y, -INF), axis=1), BITS)
        write_header(aligned_pointer(slot, header, tl.int32) + r * 2, unit, lo)
        levels = _levels(x, lo[:, None], inv[:, None], index, offset + first, BITS, key, mask, STOCHASTIC)
        write_whole_levels(slot, levels_from, span, ROWS, levels, BITS, EXACT, ROWS, TILE)
        if REDUCE or RESIDUAL:
            decoded = lo[:, None] + unit[:, None] * levels.to(tl.float32)
            if REDUCE:
                store_tile(values, offset + first, index, narrow(decoded, TYPE), mask, ALIGN, not EXACT)
            if RESIDUAL:
                good = mask & (lo == lo)[:, None]
                store_tile(residual, offset + first, index, (x - decoded) * unscale, good, 4, True)


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
    """Levels of any values, by the header given, or in flat runs by those in the slot."""
    values, slot, residual = tensors
    bits = run[0]
    index = tl.arange(0, STRIP)[None, :]
    for first in range(begin, end, STRIP):
        mask = first + index < end
        x = _summed(values, reducing, run, first, index, mask, TYPE, WORDS, REDUCE)
        if FLAT:
            unit, lo = header_of(slot, run, first, index, mask, WORDS)
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
        write_octets(pointer, tl.sum(quads, axis=2), tl.zeros([1, 1], tl.int32), STRIP, bits, nbytes, 1, STRIP)
        if REDUCE or RESIDUAL:
            decoded = lo + unit * levels.to(tl.float32)
            if REDUCE:
                tl.store(values + run[2] + first + index, narrow(decoded, TYPE), mask=mask)
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
    lowest = tl.full([STRIP], INF, tl.float32)
    highest = tl.full([STRIP], -INF, tl.float32)
    for first in range(begin, end, STRIP):
        mask = first + index < end
        x = _summed(values, reducing, run, first, index, mask, TYPE, WORDS, REDUCE)
        y = tl.where(x == x, x, INF)
        lowest = tl.minimum(lowest, tl.where(mask, y, INF))
        highest = tl.maximum(highest, tl.where(mask, y, -INF))
    bits = run[0]
    low = tl.reshape(tl.min(tl.reshape(lowest, [1, STRIP]), axis=1), [1, 1])
    high = tl.reshape(tl.max(tl.reshape(highest, [1, STRIP]), axis=1), [1, 1])
    header = _header(low, high, bits)
    number = tl.zeros([1, 1], tl.int64) + begin // run[1]
    write_header_of(slot, run, number, header[0], header[1], number >= 0, WORDS)
    _encode_strips(
        tensors, reducing, key, run, begin, end, header, False, TYPE, STRIP, WORDS, STOCHASTIC, RESIDUAL, REDUCE
    )


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
    kind, run, begin, end = own_run(programs, runs)
    tensors = (values, slot, residual)
    STRIP: tl.constexpr = ROWS * TILE // 4
    if TYPE == F64:
        reducing = (payloads, count, double(scale), 1.0)
        encode_raw(tensors, reducing, run, begin, end, True, TYPE, STRIP, RESIDUAL, REDUCE)
    else:
        ALIGN: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
        reducing = (payloads, count, double(scale).to(tl.float32), double(unscale).to(tl.float32))
        key = (k0.to(tl.uint32), k1.to(tl.uint32))
        if kind == WHOLE_RUN:
            for b in tl.static_range(1, 9):
                if b == BITS or BITS == 0:
                    if run[0] == b:
                        _encode_whole(
                            tensors, reducing, key, run, begin, end, b, TYPE, ALIGN, EXACT, ROWS, TILE,
                            STOCHASTIC, RESIDUAL, REDUCE,
                        )  # fmt: skip
        elif kind == EDGE_RUN:
            _encode_edge(tensors, reducing, key, run, begin, end, TYPE, STRIP, WORDS, STOCHASTIC, RESIDUAL, REDUCE)
        elif kind == FLAT_RUN:
            if FLAT:
                _encode_strips(
                    tensors, reducing, key, run, begin, end, (0.0, 0.0, 0.0), True, TYPE, STRIP, WORDS,
                    STOCHASTIC, RESIDUAL, REDUCE,
                )  # fmt: skip
        elif kind == TAIL_RUN:
            encode_raw(tensors, reducing, run, begin, end, True, TYPE, STRIP, RESIDUAL, REDUCE)
        else:
            encode_raw(tensors, reducing, run, begin, end, False, TYPE, STRIP, RESIDUAL, REDUCE)


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
    _kind, run, begin, end = own_run(programs, runs)
    block, numel = run[1], run[3]
    reducing = (payloads, count, double(scale).to(tl.float32), 1.0)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, TILE)[None, :]
    for first in range(begin, end, ROWS * block):
        lowest = tl.full([ROWS], INF, tl.float32)
        highest = tl.full([ROWS], -INF, tl.float32)
        for column in range(0, block.to(tl.int32), TILE):
            index = r[:, None] * block.to(tl.int32) + column + c
            mask = (column + c < block) & (first + index < numel)
            x = _summed(values, reducing, run, first, index, mask, TYPE, WORDS, REDUCE)
            y = tl.where(x == x, x, INF)
            lowest = tl.minimum(lowest, tl.min(tl.where(mask, y, INF), axis=1))
            highest = tl.maximum(highest, tl.max(tl.where(mask, y, -INF), axis=1))
        unit, lo, _inv = _header(lowest, highest, run[0])
        number = first // block + r
        write_header_of(slot, run, number, unit, lo, number * block < numel, WORDS)
