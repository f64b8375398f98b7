"""The cases of `cgx bench kernels`: one for each operation, dtype, width, SIMD level and peer.

A group is all cases of one size and width. They are checked here and timed together (alternate.py). Every case
of a group handles the same number of values, and reads and writes the same buffers if it can:

    quantize            encode, rounding to nearest
    dequantize          decode over the values
    dequantize-add      decode and add to the values
    reduce              add one payload to the values, halve, encode, write the decoded back: one fused call
    quantize-stochastic encode, stochastic rounding
    quantize-residual   encode with error feedback, if the kernels have it

`layer_cases` are another group: one call for 200 layers of mixed widths against one call for each width.
Measuring, tables and files are elsewhere.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from torch_cgx.cli.bench.kernel_check import (
    KEPT,
    REDUCED,
    ROUNDED,
    ROUNDED_AT_RANDOM,
    Bound,
    Check,
    Loss,
    check_result,
    check_rotated,
    check_same,
)
from torch_cgx.cli.bench.kernel_peers import PEERS
from torch_cgx.codecs import Codec, Rotated
from torch_cgx.kernels import NEAREST, Piece, Rounding
from torch_cgx.kernels.native import NativeKernels
from torch_cgx.plan.layout import Chunk, Layer, make_layout

STOCHASTIC = Rounding(stochastic=True, seed=1)
SCALE = 0.5
"""The scale of `reduce`: the mean of the values and the payload, so that values keep their magnitude."""
LAYERS = 200
LAYER_OPERATIONS = ("quantize", "dequantize", "reduce")
LAYER_SIZES = 1000
"""The largest layer has up to this many times the values of the smallest, like a weight compared to a bias."""

Labels = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    labels: Labels  # the fields that name it in its cell of the report
    run: Callable[[], object]
    check: Callable[[], Check]
    restore: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One way to run our kernels."""

    simd: str
    threads: int


def make_kernels(level: Level) -> NativeKernels:
    return NativeKernels(level.simd, threads=level.threads)


def has_residual() -> bool:
    """Return whether these kernels can keep the rounding error."""
    return "residual" in inspect.signature(NativeKernels.encode).parameters


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive values of one dtype, and the buffers that operations on them write to."""

    values: Tensor
    work: Tensor
    residual: Tensor | None  # float32; None if the kernels have no such operation


class Buffers:
    """The values of one size in every dtype, and buffers of the same size, touched so that their pages exist."""

    def __init__(self, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        self.numel = numel
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        self.values = {dtype: values.to(dtype) for dtype in dict.fromkeys((torch.float32, *dtypes))}
        self.work = {dtype: x.clone() for dtype, x in self.values.items()}
        self.residual = torch.zeros(numel) if has_residual() else None

    def part(self, dtype: torch.dtype, start: int = 0, end: int | None = None) -> Part:
        residual = None if self.residual is None else self.residual[start:end]
        return Part(self.values[dtype][start:end], self.work[dtype][start:end], residual)


def group_cases(
    buffers: Buffers,
    codec: Codec,
    dtypes: Sequence[torch.dtype],
    levels: Sequence[Level],
    peers: Sequence[str],
) -> list[Case]:
    """Return all cases of one width, memcpy first."""
    cases = [_memcpy_case(buffers)]
    bits, block, layers = codec.bits, codec.block, (Layer(buffers.numel, codec),)
    for dtype in dtypes:
        values, work = buffers.values[dtype], buffers.work[dtype]
        labels = {"dtype": _name(dtype), "bits": bits}
        for level in levels:
            ours = {"backend": "cgx", **labels, "bucket_size": block, "simd": level.simd, "threads": level.threads}
            cases += _cgx_cases(make_kernels(level), _one_chunk(layers, dtype), buffers.part(dtype), ours)
        for name in peers:
            for case in PEERS[name].cases(values, work, bits, block):
                theirs = {"backend": name, **labels, "bucket_size": block if name == "fbgemm" else None, "threads": 1}
                cases.append(
                    Case({**theirs, "operation": case.operation, "simd": None}, case.run, case.check, case.restore)
                )
    return cases


def _memcpy_case(buffers: Buffers) -> Case:
    source, target = buffers.values[torch.float32], buffers.work[torch.float32]
    labels = {"backend": "memcpy", "operation": "memcpy", "dtype": "float32", "bits": None, "bucket_size": None}

    def check() -> Check:
        target.copy_(source)
        check_same("memcpy", target, source)
        return Check(0.0, 0.0)

    return Case({**labels, "simd": None, "threads": 1}, lambda: target.copy_(source), check)


def _cgx_cases(kernels: NativeKernels, chunk: Chunk, part: Part, labels: Labels) -> Iterator[Case]:
    """Yield every operation of ours on one payload of the values."""
    pieces, values, work, residual = chunk.pieces, part.values, part.work, part.residual
    payload, out = (torch.zeros(chunk.nbytes, dtype=torch.uint8) for _ in range(2))
    kernels.encode(pieces, values, payload, NEAREST)
    what = f"of {labels['dtype']} at {labels['bits']} bits with {labels['simd']} kernels"
    encode: Any = kernels.encode

    def restore() -> None:
        work.copy_(values)

    def check_decoded(name: str, from_payload: Tensor, loss: Loss) -> Check:
        kernels.decode(pieces, from_payload, work)
        return _check_pieces(f"{name} {what}", pieces, values, work, loss)

    def check_quantize() -> Check:
        encode(pieces, values, out, NEAREST)
        return check_decoded("quantize", out, ROUNDED)

    def check_stochastic() -> Check:
        encode(pieces, values, out, STOCHASTIC)
        return check_decoded("quantize-stochastic", out, ROUNDED_AT_RANDOM)

    def check_residual() -> Check:
        assert residual is not None
        residual.zero_()
        encode(pieces, values, out, NEAREST, residual)
        check = check_decoded("quantize-residual", out, ROUNDED)
        kept = (work.float() + residual).to(values.dtype)
        _check_pieces(f"the residual {what}", pieces, values, kept, KEPT)
        return check

    def check_add() -> Check:
        restore()
        kernels.decode(pieces, payload, work, add=True)
        return _check_pieces(f"dequantize-add {what}", pieces, values, work, ROUNDED, factor=2.0)

    def check_reduce() -> Check:
        restore()
        kernels.reduce(pieces, work, [payload], out, SCALE, NEAREST)
        decoded = torch.empty_like(work)
        kernels.decode(pieces, out, decoded)
        check_same(f"reduce {what}", work, decoded)
        return _check_pieces(f"reduce {what}", pieces, values, work, REDUCED)

    def case(
        operation: str,
        run: Callable[[], object],
        check: Callable[[], Check],
        restore: Callable[[], object] | None = None,
    ) -> Case:
        return Case({**labels, "operation": operation}, run, check, restore)

    yield case("quantize", lambda: encode(pieces, values, out, NEAREST), check_quantize)
    yield case(
        "dequantize",
        lambda: kernels.decode(pieces, payload, work),
        lambda: check_decoded("dequantize", payload, ROUNDED),
    )
    yield case("dequantize-add", lambda: kernels.decode(pieces, payload, work, add=True), check_add, restore)
    yield case("reduce", lambda: kernels.reduce(pieces, work, [payload], out, SCALE, NEAREST), check_reduce, restore)
    yield case("quantize-stochastic", lambda: encode(pieces, values, out, STOCHASTIC), check_stochastic)
    if residual is not None:
        yield case("quantize-residual", lambda: encode(pieces, values, out, NEAREST, residual), check_residual)


def layer_cases(buffers: Buffers, codecs: Sequence[Codec], levels: Sequence[Level]) -> list[Case]:
    """Return pairs of cases in float32: one call for all layers, then one call per width with as many values of it.

    Both handle the same number of values at each width, so that the difference is the cost of layers: their tables
    and their incomplete blocks.
    """
    dtype = torch.float32
    layers = mixed_layers(buffers.numel, codecs)
    totals = {codec: sum(layer.numel for layer in layers if layer.codec == codec) for codec in codecs}
    bounds = [0, *accumulate(totals.values())]
    single = [
        (start, end, _one_chunk((Layer(end - start, codec),), dtype))
        for (start, end), codec in zip(pairwise(bounds), totals, strict=True)
        if end > start
    ]
    cases = []
    for level in levels:
        kernels = make_kernels(level)
        labels = {"backend": "cgx", "dtype": "float32", "simd": level.simd, "threads": level.threads}
        mixed = {**labels, "bits": "mixed"}
        whole = _by_operation(_cgx_cases(kernels, _one_chunk(layers, dtype), buffers.part(dtype), mixed))
        parts = [
            _by_operation(
                _cgx_cases(kernels, chunk, buffers.part(dtype, start, end), {**labels, "bits": chunk.pieces[0].bits})
            )
            for start, end, chunk in single
        ]
        for operation in LAYER_OPERATIONS:
            case = whole[operation]
            cases += [
                replace(case, labels={**case.labels, "layers": len(layers)}),
                _together({**case.labels, "layers": len(parts)}, [part[operation] for part in parts], case.restore),
            ]
    return cases


def _by_operation(cases: Iterator[Case]) -> dict[str, Case]:
    return {case.labels["operation"]: case for case in cases}


def _together(labels: Labels, cases: Sequence[Case], restore: Callable[[], object] | None) -> Case:
    """Return one case that runs several cases one after the other."""

    def run() -> None:
        for case in cases:
            case.run()

    def check() -> Check:
        return max((case.check() for case in cases), key=lambda check: check.max_error_share)

    return Case(labels, run, check, restore)


def mixed_layers(numel: int, codecs: Sequence[Codec]) -> tuple[Layer, ...]:
    """Return `LAYERS` layers of very different sizes and widths, the same ones every time."""
    draw = random.Random(200)
    sizes = [LAYER_SIZES ** draw.random() for _ in range(LAYERS)]
    ends = [round(numel * part / sum(sizes)) for part in accumulate(sizes)]
    return tuple(Layer(end - start, draw.choice(codecs)) for start, end in pairwise([0, *ends]))


def _one_chunk(layers: tuple[Layer, ...], dtype: torch.dtype) -> Chunk:
    """Return the layers as one table, as for a group of one rank."""
    numel = sum(layer.numel for layer in layers)
    ((chunk,),) = (one.chunks for one in make_layout(layers, 1, dtype.itemsize, numel * dtype.itemsize).slices)
    return chunk


def _check_pieces(
    what: str, pieces: Sequence[Piece], values: Tensor, got: Tensor, loss: Loss, factor: float = 1.0
) -> Check:
    """Check every piece against its own bound, and return the worst check."""
    checks = []
    for piece in pieces:
        span = slice(piece.offset, piece.offset + piece.numel)
        if piece.kind == Rotated.kind:
            checks.append(check_rotated(what, values[span], got[span], piece.bits, loss, factor=factor))
        else:
            bound = Bound(piece.bits, piece.block, loss.units)
            checks.append(check_result(what, values[span], got[span], bound, factor=factor))
    return max(checks, key=lambda check: check.max_error_share)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
