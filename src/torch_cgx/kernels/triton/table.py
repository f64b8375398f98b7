"""The table that the Triton kernels work through: a chunk's pieces, cut into runs that are each done in one way.

Plain arithmetic on shapes; nothing here needs Triton or a GPU. A launch has one program for each `step` values of
each run. Kinds of runs:

- whole: tiles of whole blocks, whose levels are whole 32-bit words. All that matters for speed is here.
- edge: the rest of a piece whose blocks fit a tile; blocks of its own, any length, any alignment of the slot.
- flat: a piece whose blocks do not fit: not a multiple of 32, longer than a tile, or much shorter than it. Headers
  are written by a launch before, then values are done in tiles that know nothing of blocks.
- raw: values that travel raw, from a multiple of 8 bytes on.
- tail: raw values that may start at any byte, and the zeros after a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_cgx.kernels import Piece
from torch_cgx.kernels.reference import HEADER_NBYTES

__all__ = ["EDGE", "FIELDS", "FLAT", "RAW", "TAIL", "WHOLE", "Launch", "Run", "Table", "make_table"]

WHOLE, EDGE, FLAT, RAW, TAIL = range(5)

_SMALLEST_TILE, _TILE, _LARGEST_TILE = 32, 1024, 4096  # values; a warp holds 1024 of them in 32 registers a thread
_MANY_PROGRAMS = 4096  # more than fill any GPU; from there on a program does several tiles
_MOST_TILES = 8  # a program does


class Run(NamedTuple):
    """Values of one piece that are done in one way; a row of the table on the device, where all are int64."""

    kind: int
    bits: int
    block: int
    offset: int  # of the piece's first value, or first raw value, in the tensor
    numel: int  # quantized values of the piece, or raw ones
    headers: int  # where headers, or raw values, start in the slot
    levels: int  # where levels start in the slot; of raw values, where the padding after them ends
    first_program: int
    begin: int  # the run's first value and its end, counted from `offset`
    step: int  # values of one program: whole tiles, of edges one block
    end: int

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
    bits: int  # of all whole runs, 0 if they differ; 1 if there are none
    words: bool  # every slot starts at a multiple of 8 bytes
    exact: bool  # all whole runs have blocks of just a tile
    numel: int
    nbytes: int


def make_table(pieces: Sequence[Piece], itemsize: int, aligned: bool) -> Table:
    """`aligned`: every slot starts at a multiple of 8 bytes."""
    tile = _choose_tile(pieces)
    rows = max(1, _TILE // tile)
    total = sum(piece.numel for piece in pieces)
    tiles = min(_MOST_TILES, max(1, total // (rows * tile) // _MANY_PROGRAMS))
    runs: list[Run] = []
    flat: list[Run] = []
    numel = nbytes = 0
    for piece in pieces:
        _check(piece, itemsize)
        for run in _runs(piece, itemsize, aligned, rows, tile, tiles):
            first = runs[-1].first_program + runs[-1].programs if runs else 0
            runs.append(run._replace(first_program=first))
            if run.kind == FLAT:
                flat.append(run)
            numel = max(numel, piece.offset + piece.numel)
            nbytes = max(nbytes, _end(piece, itemsize)[1])
    whole = [run for run in runs if run.kind == WHOLE]
    widths = {run.bits for run in whole} or {1}
    return Table(
        main=Launch(tuple(runs), rows, tile, warps=rows * tile // _TILE),
        headers=_headers_launch(flat) if flat else None,
        bits=widths.pop() if len(widths) == 1 else 0,
        words=aligned,
        exact=all(run.block == tile for run in whole),
        numel=numel,
        nbytes=nbytes,
    )


def _choose_tile(pieces: Sequence[Piece]) -> int:
    """The power of two that holds the blocks of most values."""
    values: dict[int, int] = {}
    for piece in pieces:
        if not piece.is_raw and piece.block % 32 == 0 and piece.block <= _LARGEST_TILE:
            tile = _power_of_two(piece.block)
            values[tile] = values.get(tile, 0) + piece.numel
    return max(values, key=lambda tile: values[tile]) if values else _TILE


def _runs(piece: Piece, itemsize: int, aligned: bool, rows: int, tile: int, tiles: int) -> Iterator[Run]:
    raw = piece.numel if piece.is_raw else piece.raw_tail
    quantized = piece.numel - raw
    levels = piece.payload + HEADER_NBYTES * -(-quantized // piece.block)
    raw_end, padded_end = _end(piece, itemsize)
    coded = (piece.bits, piece.block, piece.offset, quantized, piece.payload, levels, 0)
    fits = piece.block % 32 == 0 and tile // 2 < piece.block <= tile
    if quantized and not fits:
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


def _end(piece: Piece, itemsize: int) -> tuple[int, int]:
    """Where a piece's payload ends in the slot, and where its padding does."""
    raw = piece.numel if piece.is_raw else piece.raw_tail
    quantized = piece.numel - raw
    nbytes = HEADER_NBYTES * -(-quantized // piece.block) + -(-quantized * piece.bits // 8) + raw * itemsize
    return piece.payload + nbytes, piece.payload + -(-nbytes // 8) * 8


def _headers_launch(flat: Sequence[Run]) -> Launch:
    tile = min(_TILE, _power_of_two(max(run.block for run in flat)))
    rows = _TILE // tile
    runs: list[Run] = []
    for run in flat:
        first = runs[-1].first_program + runs[-1].programs if runs else 0
        runs.append(run._replace(first_program=first, step=rows * run.block))
    return Launch(tuple(runs), rows, tile, warps=4)


def _power_of_two(block: int) -> int:
    """The smallest that is not less, and no less than the smallest tile."""
    return max(_SMALLEST_TILE, 1 << (block - 1).bit_length())


def _check(piece: Piece, itemsize: int) -> None:
    if not piece.is_raw and not 1 <= piece.bits <= 8:
        raise ValueError(f"bits of a piece: expected 1 to 8, or 32, got {piece.bits}")
    if not piece.is_raw and itemsize == 8:
        raise TypeError(f"values at {piece.bits} bits: expected float32, float16 or bfloat16, got float64")
    if piece.block < 1:
        raise ValueError(f"block of a piece: expected at least 1, got {piece.block}")
