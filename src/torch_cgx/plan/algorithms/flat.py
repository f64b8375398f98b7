"""Helpers for the arguments of algorithms without nodes."""

from __future__ import annotations

from collections.abc import Sequence


def check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank: expected 0 to {world - 1}, got {rank}")


def in_turn(rank: int, world: int) -> list[int]:
    """Return the peers of a rank from the next one on, so that not all ranks write to the same one."""
    return [(rank + distance) % world for distance in range(1, world)]


def owned_chunks(chunks_nonempty: Sequence[bool], rank: int, world: int) -> list[int | None]:
    """Return the chunk that each rank owns: chunk c for rank c, or None if that chunk is empty."""
    check_rank(rank, world)
    if len(chunks_nonempty) != world:
        raise ValueError(f"chunks: expected one for each of {world} ranks, got {len(chunks_nonempty)}")
    return [chunk if nonempty else None for chunk, nonempty in enumerate(chunks_nonempty)]
