"""The layout of one flat tensor of consecutive layers: slices, chunks and pieces of layers.

Pure arithmetic on shapes and settings, identical on every rank: no values, no rank's own state, no I/O. One program
handles one slice. A chunk is the part of a slice that one rank reduces. A piece is the part of a chunk that lies in
one layer, and one row of the kernels' table. Cuts lie at layers' ends or at multiples of the codec's `cut_numel`
from a layer's start, so that no block and no byte of levels is ever divided.

A tensor for an allreduce is cut wherever that is best. A tensor with one share per rank, as in reduce-scatters and
all-gathers, is cut by shares first: chunk c of every slice lies in the share of rank c.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from torch_cgx.codecs import RAW, Codec
from torch_cgx.config import Compression, Settings
from torch_cgx.kernels import Piece

__all__ = ["Chunk", "Layer", "Layout", "Piece", "Slice", "layer_of", "make_layout", "make_shares_layout"]


@dataclass(frozen=True, slots=True)
class Layer:
    """Consecutive values that are quantized the same way. An empty layer is allowed."""

    numel: int
    codec: Codec

    @property
    def is_exact(self) -> bool:
        return self.codec.is_exact


def layer_of(numel: int, compression: Compression, settings: Settings) -> Layer:
    """Return a layer of `numel` values. A layer too small for a header is exact."""
    if numel < settings.minimal_numel:
        return Layer(numel, RAW)
    return Layer(numel, compression.codec(settings.skip_incomplete))


@dataclass(frozen=True)
class Chunk:
    """The part of a slice that one rank reduces. Its payload fills a slot. An empty chunk has 0 bytes."""

    pieces: tuple[Piece, ...]  # consecutive values
    nbytes: int
    itemsize: int  # bytes per value
    share: int = 0  # offset of the share that contains it

    @cached_property
    def in_share(self) -> tuple[Piece, ...]:
        """Return the pieces with offsets from the start of the share."""
        return tuple(replace(piece, offset=piece.offset - self.share) for piece in self.pieces)

    @cached_property
    def exact(self) -> Chunk:
        """Return these values as one raw piece, whatever their codecs: the form of exact payloads."""
        if not self.pieces:
            return self
        numel = sum(piece.numel for piece in self.pieces)
        piece = Piece.of(RAW, self.pieces[0].offset, numel)
        return Chunk((piece,), RAW.payload_nbytes(numel, self.itemsize), self.itemsize, self.share)

    @property
    def is_as_it_lies(self) -> bool:
        """Return whether the payload without its padding is identical to the values in the tensor."""
        return len(self.pieces) == 1 and self.pieces[0].is_raw

    def coded(self, exact: bool) -> Chunk:
        """Return this chunk as one of the two codings lays it out, exact or compressed."""
        return self.exact if exact else self


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a tensor that one program handles."""

    chunks: tuple[Chunk, ...]
    _joined: dict[tuple[int, ...], Chunk] = field(default_factory=dict, repr=False, compare=False)

    def joined(self, chunks: tuple[int, ...]) -> Chunk:
        """Return these chunks as one. Its payload is their payloads, concatenated."""
        if len(chunks) == 1:
            return self.chunks[chunks[0]]
        if chunks not in self._joined:
            pieces: list[Piece] = []
            nbytes = 0
            for chunk in (self.chunks[number] for number in chunks):
                pieces.extend(replace(piece, payload=piece.payload + nbytes) for piece in chunk.pieces)
                nbytes += chunk.nbytes
            self._joined[chunks] = Chunk(tuple(pieces), nbytes, self.chunks[0].itemsize)
        return self._joined[chunks]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all chunks' payloads."""
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole tensor, slice after slice. A tensor without values has no slices."""

    slices: tuple[Slice, ...]


def make_layout(layers: Sequence[Layer], n_chunks: int, itemsize: int, slice_nbytes: int) -> Layout:
    """Cut consecutive layers of one flat tensor with values of `itemsize` bytes into slices of `n_chunks` chunks.

    The algorithm decides how many chunks a slice has: SRA has one per rank. A slice covers at most `slice_nbytes` of
    values, but at least one cut unit.
    """
    return _make_layout(tuple(layers), n_chunks, itemsize, slice_nbytes)


def make_shares_layout(layers: Sequence[Layer], world: int, itemsize: int, slice_nbytes: int) -> Layout:
    """Cut a tensor with one share per rank into slices with one chunk per share. Every share has these layers.

    A slice covers at most `slice_nbytes` of values over all shares together, but at least one cut unit of each share.
    """
    return _make_shares_layout(tuple(layers), world, itemsize, slice_nbytes)


class _Span(NamedTuple):
    """Values of one layer that lie in one slice."""

    offset: int  # from the start of the tensor
    numel: int
    codec: Codec


@lru_cache(maxsize=512)
def _make_layout(layers: tuple[Layer, ...], n_chunks: int, itemsize: int, slice_nbytes: int) -> Layout:
    _check(layers, n_chunks, itemsize, slice_nbytes)
    slices = _cut_slices(layers, slice_nbytes // itemsize)
    return Layout(tuple(_cut_chunks(spans, n_chunks, itemsize) for spans in slices))


@lru_cache(maxsize=512)
def _make_shares_layout(layers: tuple[Layer, ...], world: int, itemsize: int, slice_nbytes: int) -> Layout:
    _check(layers, world, itemsize, slice_nbytes)
    share_numel = sum(layer.numel for layer in layers)
    slices = []
    for spans in _cut_slices(layers, slice_nbytes // itemsize // world):
        first = _whole_chunk(spans, itemsize)
        starts = (rank * share_numel for rank in range(world))
        slices.append(Slice(tuple(_moved(first, start) for start in starts)))
    return Layout(tuple(slices))


def _check(layers: tuple[Layer, ...], n_chunks: int, itemsize: int, slice_nbytes: int) -> None:
    if n_chunks < 1:
        raise ValueError(f"n_chunks: expected at least 1, got {n_chunks}")
    if itemsize < 1:
        raise ValueError(f"itemsize: expected at least 1 byte, got {itemsize}")
    if slice_nbytes < 1:
        raise ValueError(f"slice_nbytes: expected at least 1 byte, got {slice_nbytes}")
    for layer in layers:
        if layer.numel < 0:
            raise ValueError(f"numel of a layer: expected 0 or more, got {layer.numel}")


def _cut_slices(layers: tuple[Layer, ...], slice_numel: int) -> Iterator[list[_Span]]:
    """Fill slice after slice with as many values as fit."""
    spans: list[_Span] = []
    room = slice_numel
    offset = 0
    for layer in layers:
        rest = layer.numel
        while rest:
            cut = layer.codec.cut_numel
            take = rest if rest <= room else room // cut * cut
            if not take and not spans:
                take = min(rest, cut)
            if take:
                spans.append(_Span(offset, take, layer.codec))
                offset += take
                rest -= take
                room = max(0, room - take)
            if rest:
                yield spans
                spans, room = [], slice_numel
    if spans:
        yield spans


def _cut_chunks(spans: list[_Span], n_chunks: int, itemsize: int) -> Slice:
    """Cut a slice into `n_chunks` chunks, whose payloads are as equal in bytes as the cuts allow."""
    total = sum(span.codec.payload_nbytes(span.numel, itemsize) for span in spans)
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    nbytes = 0
    before = 0  # payload bytes of the spans before this one
    for span in spans:
        span_nbytes = span.codec.payload_nbytes(span.numel, itemsize)
        start = 0
        while start < span.numel:
            end = span.numel
            # Chunk c ends after (c + 1) / n_chunks of all bytes. The last chunk takes the rest.
            if len(chunks) < n_chunks - 1:
                boundary = max(0, total * (len(chunks) + 1) // n_chunks - before)
                if boundary < span_nbytes:
                    end = max(start, _nearest_cut(span, boundary, itemsize))
            if end > start:
                piece_nbytes = span.codec.payload_nbytes(end - start, itemsize)
                pieces.append(_piece(span, start, end, nbytes))
                nbytes += piece_nbytes
                start = end
            if start < span.numel:
                chunks.append(Chunk(tuple(pieces), nbytes, itemsize))
                pieces, nbytes = [], 0
        before += span_nbytes
    chunks.append(Chunk(tuple(pieces), nbytes, itemsize))
    chunks.extend([Chunk((), 0, itemsize)] * (n_chunks - len(chunks)))
    return Slice(tuple(chunks))


def _whole_chunk(spans: list[_Span], itemsize: int) -> Chunk:
    """Return all of these values as one chunk."""
    pieces: list[Piece] = []
    nbytes = 0
    for span in spans:
        pieces.append(_piece(span, 0, span.numel, nbytes))
        nbytes += span.codec.payload_nbytes(span.numel, itemsize)
    return Chunk(tuple(pieces), nbytes, itemsize)


def _moved(chunk: Chunk, start: int) -> Chunk:
    """Return the chunk at the same position in the share that begins at `start`."""
    pieces = tuple(replace(piece, offset=piece.offset + start) for piece in chunk.pieces)
    return Chunk(pieces, chunk.nbytes, chunk.itemsize, share=start)


def _nearest_cut(span: _Span, boundary: int, itemsize: int) -> int:
    """Return the cut of a span, in values from its start, that has nearest to `boundary` payload bytes before it."""
    cut = span.codec.cut_numel
    # Eight cut units fill a whole number of 8-byte words. One alone might be padded.
    eight_nbytes = span.codec.payload_nbytes(8 * cut, itemsize)
    lower = min(boundary * 8 // eight_nbytes * cut, (span.numel - 1) // cut * cut)
    upper = min(lower + cut, span.numel)
    below = boundary - span.codec.payload_nbytes(lower, itemsize)
    above = span.codec.payload_nbytes(upper, itemsize) - boundary
    return lower if below < above else upper


def _piece(span: _Span, start: int, end: int, payload: int) -> Piece:
    return Piece.of(span.codec, span.offset + start, end - start, payload)
