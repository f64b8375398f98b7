# mypy: ignore-errors
"""Runs of raw values on the GPU, encoded, reduced, summed and decoded, in Triton's language.

Their row has in the place of headers where their bytes start, of levels where their padding ends. A tail may start at
any byte; other raw runs are aligned.
"""

import triton
import triton.language as tl

from torch_cgx.kernels.triton.device import aligned_pointer, load_bytes, narrow, payload_address, widen
from torch_cgx.kernels.triton.write import write_bytes


@triton.jit
def _raw_bits(slot, start, index, mask, NBYTES: tl.constexpr, TAIL: tl.constexpr, element: tl.constexpr):
    if TAIL:
        return load_bytes(slot.to(tl.pointer_type(tl.uint8)) + start, index * NBYTES, mask, NBYTES)
    else:
        return tl.load(aligned_pointer(slot, start, element) + index, mask=mask, other=0)


@triton.jit
def _summed_bits(bits, reducing, at, index, mask, TAIL: tl.constexpr, TYPE: tl.constexpr, element: tl.constexpr):
    """The sum of these values and those that the payloads have at `at`, scaled, in the tensor's type."""
    payloads, count, scale, _ = reducing
    total = widen(bits, TYPE)
    for k in range(count):
        other = _raw_bits(payload_address(payloads, k), at, index, mask, element.primitive_bitwidth // 8, TAIL, element)
        total = total + widen(other, TYPE)
    return narrow(total * scale, TYPE)


@triton.jit
def encode_raw(
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
    values, slot, residual = tensors
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
            bits = _summed_bits(bits, reducing, at, i, mask, TAIL, TYPE, element)
            tl.store(values + offset + first + i, bits, mask=mask)
        if TAIL:
            write_bytes(target + at, i * NBYTES, bits, mask, NBYTES)
        else:
            tl.store(aligned_pointer(slot, at, element) + i, bits, mask=mask)
        if RESIDUAL:
            tl.store(residual + offset + first + i, tl.zeros([STRIP], tl.float32), mask=mask)


@triton.jit
def sum_raw(values, reducing, run, begin, end, TAIL: tl.constexpr, TYPE: tl.constexpr, STRIP: tl.constexpr):
    offset, start = run[2], run[4]
    element: tl.constexpr = values.dtype.element_ty
    NBYTES: tl.constexpr = element.primitive_bitwidth // 8
    i = tl.arange(0, STRIP)
    for first in range(begin, end, STRIP):
        mask = first + i < end
        bits = tl.load(values + offset + first + i, mask=mask, other=0)
        bits = _summed_bits(bits, reducing, start + first * NBYTES, i, mask, TAIL, TYPE, element)
        tl.store(values + offset + first + i, bits, mask=mask)


@triton.jit
def decode_raw(
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
            bits = narrow(widen(mine, TYPE) + widen(bits, TYPE), TYPE)
        tl.store(values + offset + first + i, bits, mask=mask)
