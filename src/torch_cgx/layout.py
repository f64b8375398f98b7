"""How one flat tensor of consecutive layers is cut: into slices, one chunk a rank, and pieces of layers.

Pure arithmetic on shapes and settings, the same on every rank: no values, no ranks' own state, no I/O. A
slice is what one program handles; a chunk is the share of it that one rank reduces; a piece is the part of a
chunk that lies in one layer, one row of the kernels' table. Cuts lie at layers' ends or at multiples of the
quantizer's `cut_numel` from a layer's start, so that no block and no byte of levels is ever divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch_cgx.kernels import Piece
from torch_cgx.quantizers import Quantizer

__all__ = ["Chunk", "Layer", "Layout", "Piece", "Slice", "make_layout"]


@dataclass(frozen=True, slots=True)
class Layer:
    """Consecutive values that are quantized the same way; an empty one is allowed."""

    numel: int
    quantizer: Quantizer


@dataclass(frozen=True, slots=True)
class Chunk:
    """The share of a slice that one rank reduces. Its payload fills a slot; 0 bytes where it is empty."""

    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Slice:
    """What one program handles: one chunk a rank."""

    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its chunks' payloads."""
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole tensor, slice after slice. A tensor without values has none."""

    slices: tuple[Slice, ...]


def make_layout(layers: Sequence[Layer], world: int, itemsize: int, slice_nbytes: int) -> Layout:
    """Cut consecutive layers of one flat tensor with values of `itemsize` bytes for `world` ranks.

    A slice covers at most `slice_nbytes` of values, but at least one cut unit.
    """
    return _make_layout(tuple(layers), world, itemsize, slice_nbytes)


class _Span(NamedTuple):
    """Values of one layer that lie in one slice."""

    offset: int  # from the start of the tensor
    numel: int
    quantizer: Quantizer


@lru_cache(maxsize=512)
def _make_layout(layers: tuple[Layer, ...], world: int, itemsize: int, slice_nbytes: int) -> Layout:
    if world < 1:
        raise ValueError(f"world: expected at least 1 rank, got {world}")
    if itemsize < 1:
        raise ValueError(f"itemsize: expected at least 1 byte, got {itemsize}")
    if slice_nbytes < 1:
        raise ValueError(f"slice_nbytes: expected at least 1 byte, got {slice_nbytes}")
    for layer in layers:
        if layer.numel < 0:
            raise ValueError(f"numel of a layer: expected 0 or more, got {layer.numel}")
    slices = _cut_slices(layers, slice_nbytes // itemsize)
    return Layout(tuple(_cut_chunks(spans, world, itemsize) for spans in slices))


def _cut_slices(layers: tuple[Layer, ...], slice_numel: int) -> Iterator[list[_Span]]:
    """Fill slice after slice with as many values as fit."""
    spans: list[_Span] = []
    room = slice_numel
    offset = 0
    for layer in layers:
        rest = layer.numel
        while rest:
            cut = layer.quantizer.cut_numel
            take = rest if rest <= room else room // cut * cut
            if not take and not spans:
                take = min(rest, cut)
            if take:
                spans.append(_Span(offset, take, layer.quantizer))
                offset += take
                rest -= take
                room = max(0, room - take)
            if rest:
                yield spans
                spans, room = [], slice_numel
    if spans:
        yield spans


def _cut_chunks(spans: list[_Span], world: int, itemsize: int) -> Slice:
    """One chunk a rank, as near to the same number of payload bytes as the cuts allow."""
    total = sum(span.quantizer.payload_nbytes(span.numel, itemsize) for span in spans)
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    nbytes = 0
    before = 0  # payload bytes of the spans before this one
    for span in spans:
        span_nbytes = span.quantizer.payload_nbytes(span.numel, itemsize)
        start = 0
        while start < span.numel:
            end = span.numel
            # Chunk c ends where (c + 1) / world of all bytes lie before; the last chunk takes what is left.
            if len(chunks) < world - 1:
                boundary = max(0, total * (len(chunks) + 1) // world - before)
                if boundary < span_nbytes:
                    end = max(start, _nearest_cut(span, boundary, itemsize))
            if end > start:
                piece_nbytes = span.quantizer.payload_nbytes(end - start, itemsize)
                pieces.append(_piece(span, start, end, nbytes))
                nbytes += piece_nbytes
                start = end
            if start < span.numel:
                chunks.append(Chunk(tuple(pieces), nbytes))
                pieces, nbytes = [], 0
        before += span_nbytes
    chunks.append(Chunk(tuple(pieces), nbytes))
    chunks.extend([Chunk((), 0)] * (world - len(chunks)))
    return Slice(tuple(chunks))


def _nearest_cut(span: _Span, boundary: int, itemsize: int) -> int:
    """The cut of a span (in values from its start) that has nearest to `boundary` payload bytes before it."""
    cut = span.quantizer.cut_numel
    # Eight cut units are a whole number of 8-byte words, where one alone might be padded.
    eight_nbytes = span.quantizer.payload_nbytes(8 * cut, itemsize)
    lower = min(boundary * 8 // eight_nbytes * cut, (span.numel - 1) // cut * cut)
    upper = min(lower + cut, span.numel)
    below = boundary - span.quantizer.payload_nbytes(lower, itemsize)
    above = span.quantizer.payload_nbytes(upper, itemsize) - boundary
    return lower if below < above else upper


def _piece(span: _Span, start: int, end: int, payload: int) -> Piece:
    return Piece(
        offset=span.offset + start,
        numel=end - start,
        bits=span.quantizer.bits,
        block=span.quantizer.block,
        raw_tail=span.quantizer.raw_tail(end - start),
        payload=payload,
    )
