"""The table that the Triton kernels work through: a chunk's pieces, cut into runs that are each done in one way.

Plain arithmetic on shapes; nothing here needs Triton or a GPU. A launch has one program for each `step` values of
each run. Kinds of runs:

- whole: tiles of whole blocks, whose levels are whole 32-bit words. All that matters for speed is here.
- edge: the rest of a piece whose blocks fit a tile; blocks of its own, any length, any alignment of the slot.
- flat: a piece whose blocks do not fit: not a multiple of 32, longer than a tile, or much shorter than it. Headers
  are written by a launch before, then values are done in tiles that know nothing of blocks.
- raw: values that travel raw, from a multiple of 8 bytes on.
- tail: raw values that may start at any byte, and the zeros after a piece.
- rotated: blocks of the rotated codec, all of one length; an incomplete last block is a run of its own.

Each codec has kernels of its own, and so a launch. Raw values are done by either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_cgx.codecs import Rotated
from torch_cgx.codecs.maxmin import HEADER_NBYTES
from torch_cgx.codecs.rotated import KEY_NBYTES, SCALE_NBYTES, rotated_numel
from torch_cgx.kernels import Piece

__all__ = ["EDGE", "FIELDS", "FLAT", "RAW", "ROTATED", "TAIL", "WHOLE", "Launch", "Run", "Table", "make_table"]

WHOLE, EDGE, FLAT, RAW, TAIL, ROTATED = range(6)

_SMALLEST_TILE, _TILE, _LARGEST_TILE = 32, 1024, 4096  # values; a warp holds 1024 of them in 32 registers a thread
_ROTATED_WARP = 512  # values; with more of them registers do not suffice
_MANY_PROGRAMS = 4096  # more than fill any GPU; from there on a program does several tiles
_MOST_TILES = 8  # a program does


class Run(NamedTuple):
    """Values of one piece that are done in one way; a row of the table on the device, where all are int64."""

    kind: int
    bits: int
    block: int
    offset: int  # of the piece's first value, or first raw value, in the tensor; of a rotated run's own first value
    numel: int  # quantized values of the piece, or raw ones; of a rotated run its own
    headers: int  # where headers, or raw values, start in the slot; of a rotated run, its own scales
    levels: int  # where levels start in the slot; of raw values, where the padding after them ends
    first_program: int
    begin: int  # the run's first value and its end, counted from `offset`
    step: int  # values of one program: whole tiles, of edges one block
    end: int
    key: int = 0  # where the key of a rotated run's piece lies in the slot

    @property
    def programs(self) -> int:
        return max(1, -(-(self.end - self.begin) // self.step))


FIELDS = len(Run._fields)


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launch works through, with the constants that it is compiled for."""

    runs: tuple[Run, ...]
    rows: int
    tile: int
    warps: int
    bits: int | None  # of all runs that are done in whole tiles, 0 if they differ; None: compiled for any

    @property
    def programs(self) -> int:
        return self.runs[-1].first_program + self.runs[-1].programs if self.runs else 0

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each program its row, and the rows."""
        counts = torch.tensor([run.programs for run in self.runs], dtype=torch.int64, device="cpu")
        rows = torch.repeat_interleave(torch.arange(len(self.runs), dtype=torch.int32, device="cpu"), counts)
        runs = torch.tensor(self.runs, dtype=torch.int64, device="cpu")
        return _copied(rows, device), _copied(runs, device)


def _copied(table: Tensor, device: torch.device) -> Tensor:
    """From pinned memory to a GPU: the host would wait for all that the stream has been given before."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


@dataclass(frozen=True, slots=True)
class Table:
    """A chunk's launches, and how large tensor and slot must at least be."""

    main: Launch
    headers: Launch | None  # where there are flat runs, before the other, if encoding
    rotated: Launch | None
    main_pieces: Sequence[Piece]  # without those that the rotated launch does
    words: bool  # every slot starts at a multiple of 8 bytes
    exact: bool  # all whole runs have blocks of just a tile
    numel: int
    nbytes: int


def make_table(pieces: Sequence[Piece], itemsize: int, aligned: bool) -> Table:
    """`aligned`: every slot starts at a multiple of 8 bytes."""
    numel = nbytes = 0
    for piece in pieces:
        _check(piece, itemsize)
        numel = max(numel, piece.offset + piece.numel)
        nbytes = max(nbytes, _end(piece, itemsize)[1])
    main_pieces, rotated = _by_launch(pieces)
    main = _launch(main_pieces, itemsize, aligned, _choose_tile(main_pieces), _TILE)
    flat = [run for run in main.runs if run.kind == FLAT]
    return Table(
        main=main,
        headers=_headers_launch(flat) if flat else None,
        rotated=_launch(rotated, itemsize, aligned, _rotated_tile(rotated), _ROTATED_WARP) if rotated else None,
        main_pieces=main_pieces,
        words=aligned,
        exact=all(run.block == main.tile for run in main.runs if run.kind == WHOLE),
        numel=numel,
        nbytes=nbytes,
    )


def _by_launch(pieces: Sequence[Piece]) -> tuple[Sequence[Piece], Sequence[Piece]]:
    """Return the pieces of the main launch, and of the rotated one: raw ones, too, if the main one has nothing else."""
    rotated = [piece for piece in pieces if piece.kind == Rotated.kind]
    if not rotated:
        return pieces, ()
    others = [piece for piece in pieces if piece.kind != Rotated.kind]
    if all(piece.is_raw for piece in others):
        return (), pieces
    return tuple(others), rotated


def _launch(pieces: Sequence[Piece], itemsize: int, aligned: bool, tile: int, warp: int) -> Launch:
    """`warp`: how many values of a tile a warp holds."""
    rows = max(1, _TILE // tile)
    total = sum(piece.numel for piece in pieces)
    tiles = min(_MOST_TILES, max(1, total // (rows * tile) // _MANY_PROGRAMS))
    runs: list[Run] = []
    for piece in pieces:
        for run in _runs(piece, itemsize, aligned, rows, tile, tiles):
            first = runs[-1].first_program + runs[-1].programs if runs else 0
            runs.append(run._replace(first_program=first))
    widths = {run.bits for run in runs if run.kind in (WHOLE, ROTATED)} or {1}
    bits = widths.pop() if len(widths) == 1 else 0
    return Launch(tuple(runs), rows, tile, rows * tile // warp, bits)


def _choose_tile(pieces: Sequence[Piece]) -> int:
    """The power of two that holds the blocks of most values."""
    values: dict[int, int] = {}
    for piece in pieces:
        if not piece.is_raw and piece.block % 32 == 0 and piece.block <= _LARGEST_TILE:
            tile = _power_of_two(piece.block)
            values[tile] = values.get(tile, 0) + piece.numel
    return max(values, key=lambda tile: values[tile]) if values else _TILE


def _rotated_tile(pieces: Sequence[Piece]) -> int:
    return max(piece.block for piece in pieces if not piece.is_raw)


def _runs(piece: Piece, itemsize: int, aligned: bool, rows: int, tile: int, tiles: int) -> Iterator[Run]:
    raw = piece.raw_tail
    quantized = piece.numel - raw
    levels = piece.payload + _headers_nbytes(piece)
    raw_end, padded_end = _end(piece, itemsize)
    coded = (piece.bits, piece.block, piece.offset, quantized, piece.payload, levels, 0)
    fits = piece.block % 32 == 0 and tile // 2 < piece.block <= tile
    if piece.kind == Rotated.kind:
        yield from _rotated_runs(piece, rows, tiles)
    elif quantized and not fits:
        yield Run(FLAT, *coded, begin=0, step=rows * tile * tiles, end=quantized)
    elif quantized:
        span = rows * piece.block
        whole = quantized // span * span if aligned else 0
        if whole:
            yield Run(WHOLE, *coded, begin=0, step=span * tiles, end=whole)
        if whole < quantized:
            yield Run(EDGE, *coded, begin=whole, step=piece.block, end=quantized)
    offset, start = piece.offset + quantized, raw_end - raw * itemsize
    at_once = rows * tile * tiles
    # Eight bytes a value are only summed, never compressed: not worth a way of their own.
    if raw and piece.is_raw and aligned and itemsize < 8:
        yield Run(RAW, 32, 1, offset, raw, start, padded_end, 0, begin=0, step=at_once, end=raw)
        offset, start, raw = offset + raw, raw_end, 0
    if raw or padded_end > raw_end:
        yield Run(TAIL, 32, 1, offset, raw, start, padded_end, 0, begin=0, step=at_once, end=raw)


def _rotated_runs(piece: Piece, rows: int, tiles: int) -> Iterator[Run]:
    """Whole blocks, and an incomplete one, which is shorter. Each run begins at its own first value."""
    quantized = piece.numel - piece.raw_tail
    whole = quantized // piece.block * piece.block
    if whole:
        yield _rotated_run(piece, 0, whole, piece.block)._replace(step=rows * piece.block * tiles)
    if whole < quantized:
        yield _rotated_run(piece, whole, quantized - whole, rotated_numel(quantized - whole))


def _rotated_run(piece: Piece, start: int, numel: int, block: int) -> Run:
    return Run(
        ROTATED,
        piece.bits,
        block,
        offset=piece.offset + start,
        numel=numel,
        headers=piece.payload + KEY_NBYTES + start // piece.block * SCALE_NBYTES,
        levels=piece.payload + _headers_nbytes(piece) + start * piece.bits // 8,
        first_program=0,
        begin=0,
        step=block,
        end=numel,
        key=piece.payload,
    )


def _headers_nbytes(piece: Piece) -> int:
    """Return the bytes before a piece's levels."""
    quantized = piece.numel - piece.raw_tail
    blocks = -(-quantized // piece.block)
    if piece.kind == Rotated.kind:
        return (KEY_NBYTES if quantized else 0) + SCALE_NBYTES * blocks
    return HEADER_NBYTES * blocks


def _end(piece: Piece, itemsize: int) -> tuple[int, int]:
    """Where a piece's payload ends in the slot, and where its padding does."""
    raw = piece.raw_tail
    coded = piece.numel - raw
    if piece.kind == Rotated.kind:
        coded = Rotated(piece.bits, piece.block).coded_numel(coded)
    nbytes = _headers_nbytes(piece) + -(-coded * piece.bits // 8) + raw * itemsize
    return piece.payload + nbytes, piece.payload + -(-nbytes // 8) * 8


def _headers_launch(flat: Sequence[Run]) -> Launch:
    tile = min(_TILE, _power_of_two(max(run.block for run in flat)))
    rows = _TILE // tile
    runs: list[Run] = []
    for run in flat:
        first = runs[-1].first_program + runs[-1].programs if runs else 0
        runs.append(run._replace(first_program=first, step=rows * run.block))
    return Launch(tuple(runs), rows, tile, warps=4, bits=None)


def _power_of_two(block: int) -> int:
    """The smallest that is not less, and no less than the smallest tile."""
    return max(_SMALLEST_TILE, 1 << (block - 1).bit_length())


def _check(piece: Piece, itemsize: int) -> None:
    if piece.is_raw:
        return
    if piece.kind == Rotated.kind:
        Rotated(piece.bits, piece.block)
    elif not 1 <= piece.bits <= 8:
        raise ValueError(f"bits of a piece: expected 1 to 8, or 32, got {piece.bits}")
    elif piece.block < 1:
        raise ValueError(f"block of a piece: expected at least 1, got {piece.block}")
    if itemsize == 8:
        raise TypeError(f"values at {piece.bits} bits: expected float32, float16 or bfloat16, got float64")
