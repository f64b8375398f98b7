"""The names of slots. A name says what the payload is; in one set of programs every slot has one writer."""

from __future__ import annotations

from collections.abc import Callable


def part(source: int, chunk: int) -> str:
    """One rank's values of a chunk, for whoever sums them up."""
    return f"part:{source}>{chunk}"


def inside(source: int, chunk: int) -> str:
    """One rank's values of a chunk, for the rank that speaks for its node."""
    return f"inside:{source}>{chunk}"


def hop(source: int, chunk: int) -> str:
    """The sum of a chunk so far, as one rank hands it to the next."""
    return f"hop:{source}>{chunk}"


def row(source: int, chunk: int) -> str:
    """Name one rank's values of another column. `chunk` is the first of that column."""
    return f"row:{source}>{chunk}"


def sums(source: int, chunk: int) -> str:
    """Name the joined sums of a rank's column. `chunk` is the first of that column."""
    return f"sums:{source}>{chunk}"


def total(chunk: int) -> str:
    """A chunk's sum."""
    return f"sum:{chunk}"


def moved(slot: str, rank: Callable[[int], int], chunk: Callable[[int], int]) -> str:
    """The name that a slot has where ranks and chunks are numbered differently."""
    kind, _, numbers = slot.partition(":")
    source, apart, of_chunk = numbers.rpartition(">")
    return f"{kind}:{rank(int(source)) if apart else ''}{apart}{chunk(int(of_chunk))}"
