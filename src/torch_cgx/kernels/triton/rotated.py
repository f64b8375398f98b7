# mypy: ignore-errors
"""The rotated codec on the GPU, in Triton's language: blocks are rotated, quantized and rotated back in registers.

A tile has one block a row, at the row's beginning. Most runs have blocks as long as TILE: of their tiles everything
but the last few is constant (EXACT). In all others n, the values of a block, is not, and what lies behind a block is 0.
Sums of pairs of halves are reductions of axes of length 2, so that their order is the one of docs/wire_format.md.
"""

import triton
import triton.language as tl

from torch_cgx.kernels.plain.rotated import MAGNITUDES, THRESHOLDS_SQUARED
from torch_cgx.kernels.triton.device import (
    NAN,
    RAW_RUN,
    ROTATED_RUN,
    aligned_pointer,
    double,
    load_bytes,
    load_tile,
    narrow,
    own_run,
    payload_address,
    random_pair,
    store_tile,
    whole_levels,
    widen,
)
from torch_cgx.kernels.triton.raw import decode_raw, encode_raw, sum_raw
from torch_cgx.kernels.triton.write import write_bytes, write_octets, write_whole_levels

INF = tl.constexpr(float("inf"))
_NOT_FINITE = tl.constexpr(0x7F800000)  # the smallest bits of a number's magnitude that is not finite
_MAX_STAGES = tl.constexpr(12)  # of a rotation of 4096 values


# Of 1 bit, 2 bits and so on.
_MAGNITUDES = tl.constexpr(tuple(MAGNITUDES.values()))
_THRESHOLDS = tl.constexpr(tuple(THRESHOLDS_SQUARED.values()))


# ---- the rotation ----


@triton.jit
def _hadamard(y, k, EXACT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """H of each row's first 2 ** k values, of all of them where EXACT; strides ascend."""
    if EXACT:
        for stage in tl.static_range(_MAX_STAGES):
            if (1 << stage) < TILE:
                pairs = tl.permute(tl.reshape(y, [ROWS * TILE >> (stage + 1), 2, 1 << stage]), (0, 2, 1))
                a, b = tl.split(pairs)
                y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [ROWS, TILE])
    else:
        # Pairs are neighbours in all stages: each takes the lowest bit of the index to its highest.
        for _stage in range(k):
            a, b = tl.split(tl.reshape(y, [ROWS, TILE // 2, 2]))
            y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [ROWS, TILE])
        for _stage in range(k, _log2(TILE)):
            y = tl.reshape(tl.permute(tl.reshape(y, [ROWS, TILE // 2, 2]), (0, 2, 1)), [ROWS, TILE])
    return y


@triton.jit
def _log2(n):
    return (tl.cast(n, tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _power(exponent):
    """2 to this integer, which is that of a normal number."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _sign_bits(key, TILE: tl.constexpr):
    """Of the i-th value of a block, 1 << 31 where its sign is -1."""
    words = random_pair(tl.arange(0, TILE // 32).to(tl.uint32), key)
    bits = (words[:, None] >> tl.arange(0, 32).to(tl.uint32)[None, :]) << 31
    return tl.reshape(bits, [1, TILE])


@triton.jit
def _signed(signs, factor):
    return (signs | factor.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _rotate(x, signs, k, EXACT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    return _hadamard(x * _signed(signs, _power(-(k >> 1))), k, EXACT, ROWS, TILE)


@triton.jit
def _back(y, signs, k, EXACT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    return _hadamard(y, k, EXACT, ROWS, TILE) * _signed(signs, _power(-(k - (k >> 1))))


@triton.jit
def _tree(v, ROWS: tl.constexpr, TILE: tl.constexpr):
    """For each row the sum of its values, by halves. Zeros behind a shorter block change nothing: no value is -0."""
    for k in tl.static_range(_MAX_STAGES):
        if (TILE >> k) > 1:
            v = tl.sum(tl.reshape(v, [ROWS, 2, TILE >> (k + 1)]), axis=1)
    return tl.reshape(v, [ROWS, 1])


# ---- quantizing ----


@triton.jit
def _quantized(y, k, BITS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Scales, levels and centroids of rotated values."""
    top = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)[:, None]
    exponent = tl.minimum(tl.maximum(top >> 23, 1), 253) - 127
    z = y * _power(-exponent)
    square = z * z
    q = _tree(square, ROWS, TILE)
    mean = q * _power(-k)
    level = tl.zeros([ROWS, TILE], tl.int32)
    magnitude = tl.full([ROWS, TILE], _MAGNITUDES[BITS - 1][0], tl.float32)
    for j in tl.static_range((1 << (BITS - 1)) - 1):
        above = mean * _THRESHOLDS[BITS - 1][j] < square
        level += above.to(tl.int32)
        magnitude = tl.where(above, _MAGNITUDES[BITS - 1][j + 1], magnitude)
    d = _tree(tl.abs(z) * magnitude, ROWS, TILE)
    scale = tl.div_rn(q, d) * _power(exponent)
    good = (top < _NOT_FINITE) & (tl.abs(scale) < INF)
    nan = tl.full(scale.shape, NAN, tl.int32).to(tl.float32, bitcast=True)
    scale = tl.where(top == 0, 0.0, tl.where(good, scale, nan))
    level = tl.where(good, tl.where(z < 0.0, level + (1 << (BITS - 1)), level), 0)
    return scale, level, tl.where(z < 0.0, -magnitude, magnitude)


@triton.jit
def _magnitude(index, BITS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Of those from FIRST on, chosen by as many low bits of the index as COUNT needs."""
    if COUNT == 1:
        return tl.full(index.shape, _MAGNITUDES[BITS - 1][FIRST], tl.float32)
    else:
        low = _magnitude(index, BITS, FIRST, COUNT // 2)
        high = _magnitude(index, BITS, FIRST + COUNT // 2, COUNT // 2)
        return tl.where((index & (COUNT // 2)) != 0, high, low)


@triton.jit
def _centroids(levels, BITS: tl.constexpr):
    magnitude = _magnitude(levels, BITS, 0, 1 << (BITS - 1))
    return tl.where(levels >> (BITS - 1) != 0, -magnitude, magnitude)


@triton.jit
def _constant(x, real, EXACT: tl.constexpr):
    """Whether all real values of a row are equal and finite; which they then are."""
    known = tl.where(x == x, x, INF)
    if EXACT:
        lowest, highest = tl.min(known, axis=1), tl.max(known, axis=1)
    else:
        lowest = tl.min(tl.where(real, known, INF), axis=1)
        highest = tl.max(tl.where(real, known, -INF), axis=1)
    constant = (lowest == highest) & (tl.abs(lowest) < INF)
    return constant[:, None], (lowest + 0.0)[:, None]


@triton.jit
def _decoded(scale, negative, centroids, signs, k, EXACT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """`negative`: of each row, whether its first level is that of a negative value."""
    x = scale * _back(centroids, signs, k, EXACT, ROWS, TILE)
    amount = tl.where(negative, scale, -scale)
    return tl.where(scale == 0.0, 0.0, tl.where(_is_constant(scale), amount, x))


@triton.jit
def _is_constant(scale):
    return (scale.to(tl.int32, bitcast=True) < 0) & (scale != 0.0)


# ---- payloads ----


@triton.jit
def _load_words(slot, offset, index, mask, WORDS: tl.constexpr):
    if WORDS:
        return tl.load(aligned_pointer(slot, offset, tl.int32, 4) + index, mask=mask, other=0)
    else:
        return load_bytes(slot.to(tl.pointer_type(tl.uint8)) + offset, index * 4, mask, 4)


@triton.jit
def _store_words(slot, offset, index, bits, mask, WORDS: tl.constexpr):
    if WORDS:
        tl.store(aligned_pointer(slot, offset, tl.int32, 4) + index, bits, mask=mask)
    else:
        write_bytes(slot.to(tl.pointer_type(tl.uint8)) + offset, index * 4, bits, mask, 4)


@triton.jit
def _own_key(slot, run, WORDS: tl.constexpr):
    """The key that a payload's signs are drawn from."""
    k0 = _load_words(slot, run[6], 0, True, WORDS)
    k1 = _load_words(slot, run[6], 1, True, WORDS)
    return (k0.to(tl.uint32, bitcast=True), k1.to(tl.uint32, bitcast=True))


@triton.jit
def _write_key(slot, run, begin, key, WORDS: tl.constexpr):
    """By the program that has its piece's first block, whose scale follows the key."""
    if (begin == 0) & (run[4] == run[6] + 8):
        i = tl.arange(0, 2)
        words = tl.where(i == 0, key[0], key[1]).to(tl.int32, bitcast=True)
        _store_words(slot, run[6], i, words, i >= 0, WORDS)


@triton.jit
def _scales(slot, run, first, n, rows, BITS: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr):
    """Of each row, and whether its first level is that of a negative value."""
    r = tl.arange(0, ROWS)
    mask = r < rows
    scale = _load_words(slot, run[4] + first // n * 4, r, mask, WORDS).to(tl.float32, bitcast=True)
    pointer = slot.to(tl.pointer_type(tl.uint8)) + run[5] + (first >> 3) * BITS
    level = tl.load(pointer + r * (n // 8 * BITS), mask=mask, other=0).to(tl.int32) & ((1 << BITS) - 1)
    return scale[:, None], (level >> (BITS - 1) != 0)[:, None]


@triton.jit
def _load_levels(
    slot,
    run,
    first,
    n,
    rows,
    BITS: tl.constexpr,
    EXACT: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    offset = run[5] + (first >> 3) * BITS
    if WORDS:
        return whole_levels(slot, offset, n, rows, BITS, EXACT, ROWS, TILE, 4)
    else:
        r = tl.arange(0, ROWS)[:, None]
        c = tl.arange(0, TILE)[None, :]
        mask = (c < n) & (r < rows)
        bit = c * BITS
        pointer = slot.to(tl.pointer_type(tl.uint8)) + offset + r * (n // 8 * BITS) + (bit >> 3)
        level = tl.load(pointer, mask=mask, other=0).to(tl.int32)
        if BITS == 3:
            level |= tl.load(pointer + 1, mask=mask & ((bit & 7) + BITS > 8), other=0).to(tl.int32) << 8
        return (level >> (bit & 7)) & ((1 << BITS) - 1)


@triton.jit
def _write_levels(
    slot,
    run,
    first,
    n,
    rows,
    levels,
    BITS: tl.constexpr,
    EXACT: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    offset = run[5] + (first >> 3) * BITS
    if WORDS:
        write_whole_levels(slot, offset, n, rows, levels, BITS, EXACT, ROWS, TILE, 4)
    else:
        quads = tl.sum(tl.reshape(levels, [ROWS, TILE // 4, 4]) << (tl.arange(0, 4)[None, None, :] * BITS), axis=2)
        nbytes = n // 8 * BITS
        row = tl.arange(0, ROWS)[:, None] * nbytes
        write_octets(slot.to(tl.pointer_type(tl.uint8)) + offset, quads, row, n, BITS, rows * nbytes, ROWS, TILE)


@triton.jit
def _constants(reducing, run, first, n, rows, BITS: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr):
    """Of the payloads: the sum of those whose block is constant, whether there are any, and whether others are left."""
    payloads, count, _, _ = reducing
    amount = tl.zeros([ROWS, 1], tl.float32)
    constants = tl.zeros([ROWS, 1], tl.int32)
    others = tl.zeros([ROWS, 1], tl.int32)
    for i in range(count):
        scale, negative = _scales(payload_address(payloads, i), run, first, n, rows, BITS, WORDS, ROWS)
        constant = _is_constant(scale)
        amount += tl.where(constant, tl.where(negative, scale, -scale), 0.0)
        constants |= constant.to(tl.int32)
        others |= ((scale != 0.0) & ~constant).to(tl.int32)
    return amount, constants != 0, others != 0


@triton.jit
def _rotated_payload(
    slot,
    run,
    first,
    n,
    rows,
    BITS: tl.constexpr,
    EXACT: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A payload's rotated values, and where there are any: not in blocks that are constant or 0."""
    scale, _ = _scales(slot, run, first, n, rows, BITS, WORDS, ROWS)
    takes_part = (scale != 0.0) & ~_is_constant(scale)
    if not EXACT:
        takes_part = takes_part & (tl.arange(0, TILE)[None, :] < n)
    levels = _load_levels(slot, run, first, n, rows, BITS, EXACT, WORDS, ROWS, TILE)
    return scale * _centroids(levels, BITS), takes_part


# ---- tiles ----


@triton.jit
def _place(first, end, n, EXACT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Of a tile: how many rows there are, where values lie behind the first, and which there are."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, TILE)[None, :]
    if EXACT:
        return ROWS, r * TILE + c, (r >= 0) & (c >= 0)
    else:
        left = (end - first).to(tl.int32)
        return (left + n - 1) // n, r * n + c, (c < n) & (r * n + c < left)


@triton.jit
def _with_constants(
    values,
    place,
    reducing,
    run,
    first,
    n,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    EXACT: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The values, to which constant blocks of payloads are added; and whether there are other payloads."""
    rows, index, real = place
    x = widen(load_tile(values, run[2] + first, index, real, ALIGN, not EXACT), TYPE)
    amount, constants, others = _constants(reducing, run, first, n, rows, BITS, WORDS, ROWS)
    return tl.where(constants & real, x + amount, x), others


@triton.jit
def _encode_tile(
    tensors,
    reducing,
    signs,
    run,
    first,
    end,
    n,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    EXACT: tl.constexpr,
    WORDS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    REDUCE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    values, slot, residual = tensors
    payloads, count, by, unscale = reducing
    place = _place(first, end, n, EXACT, ROWS, TILE)
    rows, index, real = place
    k = _log2(n)
    if REDUCE:
        x, others = _with_constants(values, place, reducing, run, first, n, BITS, TYPE, ALIGN, EXACT, WORDS, ROWS)
        x = tl.where(others, x, x * by)
        constant, amount = _constant(x, real, EXACT)
        constant = constant & ~others
    else:
        x = widen(load_tile(values, run[2] + first, index, real, ALIGN, not EXACT), TYPE)
        constant, amount = _constant(x, real, EXACT)
    y = _rotate(x, signs, k, EXACT, ROWS, TILE)
    if REDUCE:
        for i in range(count):
            part, takes_part = _rotated_payload(
                payload_address(payloads, i), run, first, n, rows, BITS, EXACT, WORDS, ROWS, TILE
            )
            y = tl.where(takes_part, y + part, y)
        y = tl.where(others, y * by, y)
    scale, levels, centroids = _quantized(y, k, BITS, ROWS, TILE)
    negative = amount < 0.0
    scale = tl.where(constant, tl.where(amount == 0.0, 0.0, -tl.abs(amount)), scale)
    levels = tl.where(constant, tl.where(negative, 1 << (BITS - 1), 0), levels)
    r = tl.arange(0, ROWS)
    bits = tl.where(scale == scale, scale.to(tl.int32, bitcast=True), NAN)
    _store_words(slot, run[4] + first // n * 4, r[:, None], bits, r[:, None] < rows, WORDS)
    _write_levels(slot, run, first, n, rows, levels, BITS, EXACT, WORDS, ROWS, TILE)
    if REDUCE or RESIDUAL:
        decoded = _decoded(scale, negative, centroids, signs, k, EXACT, ROWS, TILE)
        if REDUCE:
            store_tile(values, run[2] + first, index, narrow(decoded, TYPE), real, ALIGN, not EXACT)
        if RESIDUAL:
            lost = x - decoded
            if REDUCE:
                lost = tl.where(others, _back(y - scale * centroids, signs, k, EXACT, ROWS, TILE), lost) * unscale
            store_tile(residual, run[2] + first, index, lost, real & (lost == lost), 4, True)


@triton.jit
def _decode_tile(
    values,
    slot,
    signs,
    run,
    first,
    end,
    n,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    EXACT: tl.constexpr,
    WORDS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    rows, index, real = _place(first, end, n, EXACT, ROWS, TILE)
    scale, negative = _scales(slot, run, first, n, rows, BITS, WORDS, ROWS)
    centroids = _centroids(_load_levels(slot, run, first, n, rows, BITS, EXACT, WORDS, ROWS, TILE), BITS)
    x = _decoded(scale, negative, centroids, signs, _log2(n), EXACT, ROWS, TILE)
    if ADD:
        x = widen(load_tile(values, run[2] + first, index, real, ALIGN, not EXACT), TYPE) + x
    store_tile(values, run[2] + first, index, narrow(x, TYPE), real, ALIGN, not EXACT)


@triton.jit
def _sum_tile(
    values,
    reducing,
    signs,
    run,
    first,
    end,
    n,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    EXACT: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    payloads, count, by, _ = reducing
    place = _place(first, end, n, EXACT, ROWS, TILE)
    rows, index, real = place
    x, others = _with_constants(values, place, reducing, run, first, n, BITS, TYPE, ALIGN, EXACT, WORDS, ROWS)
    total = tl.zeros([ROWS, TILE], tl.float32)
    begun = tl.zeros([ROWS, TILE], tl.int32)
    for i in range(count):
        part, takes_part = _rotated_payload(
            payload_address(payloads, i), run, first, n, rows, BITS, EXACT, WORDS, ROWS, TILE
        )
        total = tl.where(takes_part, tl.where(begun != 0, total + part, part), total)
        begun |= takes_part.to(tl.int32)
    x = tl.where(others, x + _back(total, signs, _log2(n), EXACT, ROWS, TILE), x)
    store_tile(values, run[2] + first, index, narrow(x * by, TYPE), real, ALIGN, not EXACT)


# ---- kernels ----


@triton.jit
def _block_of(run):
    """A multiple of 64, which the compiler is told."""
    return ((run[1] >> 6) << 6).to(tl.int32)


@triton.jit(do_not_specialize=["slot", "count", "scale", "unscale", "k0", "k1"])
def encode_rotated_kernel(
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
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """Encode; with REDUCE, the scaled sum of the values and `count` payloads, of which the decoded values are kept."""
    kind, run, begin, end = own_run(programs, runs)
    tensors = (values, slot, residual)
    reducing = (payloads, count, double(scale).to(tl.float32), double(unscale).to(tl.float32))
    STRIP: tl.constexpr = ROWS * TILE // 4
    if kind == ROTATED_RUN:
        ALIGN: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
        key = (k0.to(tl.uint32), k1.to(tl.uint32))
        _write_key(slot, run, begin, key, WORDS)
        signs = _sign_bits(key, TILE)
        n = _block_of(run)
        for b in tl.static_range(1, 5):
            if b == BITS or BITS == 0:
                if run[0] == b:
                    for first in range(begin, end, ROWS * n):
                        if (n == TILE) & (first + ROWS * TILE <= end):
                            _encode_tile(
                                tensors, reducing, signs, run, first, end, TILE, b, TYPE, ALIGN, True, WORDS,
                                RESIDUAL, REDUCE, ROWS, TILE,
                            )  # fmt: skip
                        else:
                            _encode_tile(
                                tensors, reducing, signs, run, first, end, n, b, TYPE, ALIGN, False, WORDS,
                                RESIDUAL, REDUCE, ROWS, TILE,
                            )  # fmt: skip
    elif kind == RAW_RUN:
        encode_raw(tensors, reducing, run, begin, end, False, TYPE, STRIP, RESIDUAL, REDUCE)
    else:
        encode_raw(tensors, reducing, run, begin, end, True, TYPE, STRIP, RESIDUAL, REDUCE)


@triton.jit(do_not_specialize=["slot"])
def decode_rotated_kernel(
    programs,
    runs,
    values,
    slot: tl.int64,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    ADD: tl.constexpr,
):
    kind, run, begin, end = own_run(programs, runs)
    STRIP: tl.constexpr = ROWS * TILE // 4
    if kind == ROTATED_RUN:
        ALIGN: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
        signs = _sign_bits(_own_key(slot, run, WORDS), TILE)
        n = _block_of(run)
        for b in tl.static_range(1, 5):
            if b == BITS or BITS == 0:
                if run[0] == b:
                    for first in range(begin, end, ROWS * n):
                        if (n == TILE) & (first + ROWS * TILE <= end):
                            _decode_tile(
                                values, slot, signs, run, first, end, TILE, b, TYPE, ALIGN, True, WORDS,
                                ADD, ROWS, TILE,
                            )  # fmt: skip
                        else:
                            _decode_tile(
                                values, slot, signs, run, first, end, n, b, TYPE, ALIGN, False, WORDS,
                                ADD, ROWS, TILE,
                            )  # fmt: skip
    elif kind == RAW_RUN:
        decode_raw(values, slot, run, begin, end, False, TYPE, STRIP, ADD)
    else:
        decode_raw(values, slot, run, begin, end, True, TYPE, STRIP, ADD)


@triton.jit(do_not_specialize=["count", "scale"])
def sum_rotated_kernel(
    programs,
    runs,
    values,
    payloads,
    count: tl.int32,
    scale: tl.int64,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Add `count` payloads to the values, scale, and round once. Signs are those of the first payload."""
    kind, run, begin, end = own_run(programs, runs)
    reducing = (payloads, count, double(scale).to(tl.float32), 1.0)
    STRIP: tl.constexpr = ROWS * TILE // 4
    if kind == ROTATED_RUN:
        ALIGN: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
        signs = _sign_bits(_own_key(payload_address(payloads, 0), run, WORDS), TILE)
        n = _block_of(run)
        for b in tl.static_range(1, 5):
            if b == BITS or BITS == 0:
                if run[0] == b:
                    for first in range(begin, end, ROWS * n):
                        if (n == TILE) & (first + ROWS * TILE <= end):
                            _sum_tile(
                                values, reducing, signs, run, first, end, TILE, b, TYPE, ALIGN, True, WORDS,
                                ROWS, TILE,
                            )  # fmt: skip
                        else:
                            _sum_tile(
                                values, reducing, signs, run, first, end, n, b, TYPE, ALIGN, False, WORDS,
                                ROWS, TILE,
                            )  # fmt: skip
    elif kind == RAW_RUN:
        sum_raw(values, reducing, run, begin, end, False, TYPE, STRIP)
    else:
        sum_raw(values, reducing, run, begin, end, True, TYPE, STRIP)
