"""The rendezvous of a new group's ranks, at a store that may hold entries of an earlier group.

torchrun restarts the processes of a training run on the store of the ended ones, sometimes under the same names. A rank
that read an address or a segment's name there could read that of a process that is gone. So ranks first make sure that
they talk to each other, and then use names that have never been used before:

1. Every rank writes a hello with a number that it has just drawn.
2. Rank 0 writes the numbers of all ranks: the roster.
3. A rank that finds its own number in the roster writes which roster it has seen.
4. When all have seen the same roster, rank 0 seals it.

A hello of a rank that is gone can get into a roster. But the live rank will not acknowledge that roster, and when its
hello replaces the old one, rank 0 writes another.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from torch_cgx.errors import CGXTimeoutError, MismatchError

__all__ = ["meet"]

_POLL_S = 0.002
_LONGEST_POLL_S = 0.05
_NUMBER_NBYTES = 16
_ANSWER_NBYTES = 64  # a hello or a digest is shorter


def meet(store: Store, rank: int, world: int, timeout: timedelta, global_ranks: Sequence[int]) -> str:
    """Return a name for the rendezvous of exactly these processes, identical on all of them and never used before."""
    number = secrets.token_hex(_NUMBER_NBYTES)
    store.set(f"hello/{rank}", number)
    patience = _Patience(timeout)
    if rank == 0:
        return _gather(store, world, patience, global_ranks)
    return _attend(store, rank, number, world, patience, global_ranks)


class _Patience:
    """The pauses of a polling loop, which grow until the timeout."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()
        self._deadline = time.monotonic() + self.timeout_s
        self._pause_s = _POLL_S

    def pause(self) -> bool:
        """Sleep for one pause. Return whether there is time left."""
        time.sleep(self._pause_s)
        self._pause_s = min(_LONGEST_POLL_S, 1.2 * self._pause_s)
        return time.monotonic() < self._deadline


def _gather(store: Store, world: int, patience: _Patience, global_ranks: Sequence[int]) -> str:
    """Do rank 0's part: write rosters until all ranks have seen one, seal it, and return its name."""
    written = None
    while True:
        hellos = [_read(store, f"hello/{other}") for other in range(world)]
        missing = [other for other, hello in enumerate(hellos) if not hello]
        if not missing:
            roster = json.dumps(hellos)
            name = _digest(roster)
            if name != written:
                store.set("roster", roster)
                written = name
            missing = [other for other in range(1, world) if _read(store, f"seen/{other}") != name]
            if not missing:
                store.set("sealed", name)
                return name
        if not patience.pause():
            raise _absence(0, missing, patience, global_ranks)


def _attend(store: Store, rank: int, number: str, world: int, patience: _Patience, global_ranks: Sequence[int]) -> str:
    """Do the part of every other rank: acknowledge rosters until one is sealed, and return its name."""
    seen = None
    while True:
        roster = _read(store, "roster", world * _ANSWER_NBYTES)
        name = _digest(roster)
        if roster and name != seen and _numbers(roster, world)[rank] == number:
            store.set(f"seen/{rank}", name)
            seen = name
        if seen is not None and _read(store, "sealed") == seen:
            return seen
        if not patience.pause():
            silent = [other for other in range(world) if not _read(store, f"hello/{other}")]
            unseen = [other for other in range(1, world) if _read(store, f"seen/{other}") != name]
            raise _absence(rank, silent or (unseen if seen == name else []) or [0], patience, global_ranks)


def _read(store: Store, key: str, most_nbytes: int = _ANSWER_NBYTES) -> str:
    """Return the text under `key`; "" if there is none yet."""
    if not store.check([key]):
        return ""
    found = bytes(store.get(key))
    if len(found) > most_nbytes:
        raise MismatchError(f"the store's {key} has {len(found)} bytes, more than the {most_nbytes} that it can have")
    return found.decode(errors="replace")


def _numbers(roster: str, world: int) -> list[str]:
    """Return the numbers in a roster, one per rank. An earlier group's roster may have another length and content."""
    try:
        numbers = json.loads(roster)
    except ValueError:
        numbers = None
    return [*(numbers if isinstance(numbers, list) else []), *[""] * world][:world]


def _digest(roster: str) -> str:
    return hashlib.sha256(roster.encode()).hexdigest()[: 2 * _NUMBER_NBYTES]


def _absence(rank: int, missing: Sequence[int], patience: _Patience, global_ranks: Sequence[int]) -> CGXTimeoutError:
    named = ", ".join(str(global_ranks[other]) for other in missing[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return CGXTimeoutError(
        f"rank {global_ranks[rank]}: Timed out after {patience.timeout_s:g} s waiting for "
        f"rank{'s' if len(missing) > 1 else ''} {named}{more} to join the group. Look at that rank's output: it has "
        "not called init_process_group (or new_group, which all ranks must call in the same order), or has failed "
        "there. Then restart all ranks."
    )
