"""The ledger of a group: who called what, who has failed, and what to say of it.

A group has one, by how its ranks reach each other: a board (board.py) where all have the native engine, the group's
store (store.py) where not, and `NoLedger` where a rank is alone. Every call that torch's own groups carry is entered
before it is started, and whoever waits for it asks its entry.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from torch_cgx import _native
from torch_cgx.errors import CGXError, CGXTimeoutError, PeerLostError

__all__ = ["Entry", "Ledger", "NoLedger", "trouble_of"]

_TIMEOUT_WORDS = ("imed out", "timeout caused")
_CONNECTION_WORDS = ("onnection", "peer", "roken pipe", "transport/tcp")  # of Gloo's errors when a peer is lost


class Entry(Protocol):
    """One call, of which `number` is the same on all ranks."""

    @property
    def number(self) -> int: ...

    def start(self, run: Callable[[], Any], *, asynchronous: bool) -> Any:
        """Start it once all ranks are known to have made the same call; return a handle like those of torch's groups.

        With the group's lock held.
        """

    def still_waits(self) -> None:
        """It is not done. Raise what the group has failed with, here or on a peer."""

    def has_ended(self) -> None:
        """It is done. Raise where another rank turns out to have called something else."""

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Return trouble between ranks as one of our errors, told to the peers; what was refused as it is."""


class Ledger(Protocol):
    """One rank's end of it."""

    @property
    def has_failed(self) -> bool:
        """Whether nothing can be carried out on this group any more."""

    def enter(self, call: _native.Call, *, asynchronous: bool, timeout: timedelta | None = None) -> Entry:
        """Note a call that a CPU group of torch's carries. With the group's lock held.

        `asynchronous`: nobody waits for it at once. `timeout`: of the comparison with other ranks' calls; None: the
        group's.
        """

    def note(self, call: _native.Call) -> int:
        """Note a call that something else carries, and return its number. With the group's lock held."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of comparisons that begin from now on."""

    def abort(self, reason: CGXError) -> None:
        """Let all ranks fail with this."""

    def close(self) -> None:
        """Leave, once the group's engine is closed. What is queued fails."""


def trouble_of(error: RuntimeError) -> tuple[type[CGXError], str] | None:
    """Return the kind of trouble between ranks that Gloo's words tell of, and how to say it; None: it is none."""
    if any(word in str(error) for word in _TIMEOUT_WORDS):
        return CGXTimeoutError, "failed: Timed out waiting for other ranks"
    if any(word in str(error) for word in _CONNECTION_WORDS):
        return PeerLostError, "failed"
    return None


class _Alone:
    number = 0

    def start(self, run: Callable[[], Any], *, asynchronous: bool) -> Any:
        return run()

    def still_waits(self) -> None: ...

    def has_ended(self) -> None: ...

    def explained(self, error: RuntimeError) -> RuntimeError:
        return error


class NoLedger:
    """For a rank that is alone."""

    has_failed = False

    def enter(self, call: _native.Call, *, asynchronous: bool, timeout: timedelta | None = None) -> Entry:
        return _Alone()

    def note(self, call: _native.Call) -> int:
        return 0

    def set_timeout(self, timeout: timedelta) -> None: ...

    def abort(self, reason: CGXError) -> None: ...

    def close(self) -> None: ...
