# mypy: ignore-errors
"""Decoding on the GPU, over the values or added to them, in Triton's language."""

import triton
import triton.language as tl

from torch_cgx.kernels.triton.device import (
    F64,
    RAW_RUN,
    TAIL_RUN,
    WHOLE_RUN,
    aligned_pointer,
    decoded,
    load_tile,
    narrow,
    own_run,
    store_tile,
    whole_levels,
    widen,
)
from torch_cgx.kernels.triton.raw import decode_raw


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
        pointer = aligned_pointer(slot, headers + first // span * 8, tl.float32) + r * 2
        levels = whole_levels(slot, levels_at + (first >> 5) * (4 * BITS), span, ROWS, BITS, EXACT, ROWS, TILE)
        x = tl.load(pointer + 1)[:, None] + tl.load(pointer)[:, None] * levels.to(tl.float32)
        if ADD:
            x = widen(load_tile(values, offset + first, index, mask, ALIGN, not EXACT), TYPE) + x
        store_tile(values, offset + first, index, narrow(x, TYPE), mask, ALIGN, not EXACT)


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
        x = decoded(slot, run, first, i, mask, WORDS)
        if ADD:
            x = widen(tl.load(values + run[2] + first + i, mask=mask, other=0), TYPE) + x
        tl.store(values + run[2] + first + i, narrow(x, TYPE), mask=mask)


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
    kind, run, begin, end = own_run(programs, runs)
    STRIP: tl.constexpr = ROWS * TILE // 4
    if TYPE == F64:
        decode_raw(values, slot, run, begin, end, True, TYPE, STRIP, ADD)
    else:
        ALIGN: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
        if kind == WHOLE_RUN:
            for b in tl.static_range(1, 9):
                if b == BITS or BITS == 0:
                    if run[0] == b:
                        _decode_whole(values, slot, run, begin, end, b, TYPE, ALIGN, EXACT, ROWS, TILE, ADD)
        elif kind == TAIL_RUN:
            decode_raw(values, slot, run, begin, end, True, TYPE, STRIP, ADD)
        elif kind == RAW_RUN:
            decode_raw(values, slot, run, begin, end, False, TYPE, STRIP, ADD)
        else:
            _decode_strips(values, slot, run, begin, end, TYPE, STRIP, WORDS, ADD)
