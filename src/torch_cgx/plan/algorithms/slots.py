"""The names of slots. A name says what the payload is; in one set of programs every slot has one writer."""

from __future__ import annotations

from torch_cgx.plan.program import Slot

__all__ = ["HOP", "INSIDE", "PART", "ROW", "SUM", "SUMS", "hop", "inside", "part", "row", "sums", "total"]

PART, INSIDE, HOP, ROW, SUMS, SUM = "part", "inside", "hop", "row", "sums", "sum"


def part(source: int, chunk: int) -> Slot:
    """Name one rank's values of a chunk, for the rank that sums them."""
    return Slot(PART, chunk, source)


def inside(source: int, chunk: int) -> Slot:
    """Name one rank's values of a chunk, for the rank that speaks for its node."""
    return Slot(INSIDE, chunk, source)


def hop(source: int, chunk: int) -> Slot:
    """Name the partial sum of a chunk that one rank sends to the next."""
    return Slot(HOP, chunk, source)


def row(source: int, chunk: int) -> Slot:
    """Name one rank's values of another column. `chunk` is the first of that column."""
    return Slot(ROW, chunk, source)


def sums(source: int, chunk: int) -> Slot:
    """Name the joined sums of a rank's column. `chunk` is the first of that column."""
    return Slot(SUMS, chunk, source)


def total(chunk: int) -> Slot:
    """Name a chunk's sum."""
    return Slot(SUM, chunk)
