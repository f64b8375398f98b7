"""The ledger of a group records who called what and who failed, and words the errors.

`BoardLedger` serves groups whose ranks all have the native engine, `StoreLedger` other groups, and `NoLedger` a single
rank. A call that a torch group carries is entered in the ledger before it starts. While its handle waits, it checks the
entry for trouble.
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
    """One call. Its `number` is identical on all ranks."""

    @property
    def number(self) -> int: ...

    def start(self, run: Callable[[], Any], *, asynchronous: bool) -> Any:
        """Start the call once all ranks are known to have made it, and return a handle like those of torch groups.

        The caller holds the group's lock.
        """

    def still_waits(self) -> None:
        """Raise if the group has failed, here or on a peer. Called while the operation is not done."""

    def has_ended(self) -> None:
        """Raise if another rank has called something else. Called when the operation is done."""

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Turn trouble between ranks into a `CGXError` and tell the peers; return a refusal of the engine unchanged."""


class Ledger(Protocol):
    """One rank's part of the ledger."""

    @property
    def has_failed(self) -> bool:
        """Return whether the group has failed and can run nothing more."""

    def enter(self, call: _native.Call, *, asynchronous: bool, timeout: timedelta | None = None) -> Entry:
        """Enter a call that torch's Gloo group carries. The caller holds the group's lock.

        `asynchronous`: the caller does not wait at once. `timeout` limits the comparison with other ranks' calls, by
        default to the group's timeout.
        """

    def note(self, call: _native.Call) -> int:
        """Note a call that another engine carries, and return its number. The caller holds the group's lock."""

    def check(self, number: int) -> None:
        """Raise if the group has failed, or if ranks are known to be out of step at this call."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later comparisons."""

    def abort(self, reason: CGXError) -> None:
        """Make the group fail on all ranks with this error."""

    def close(self) -> None:
        """Leave the group after its engine is closed. Queued operations fail."""


def trouble_of(error: RuntimeError) -> tuple[type[CGXError], str] | None:
    """Return the error class and the words for a Gloo error between ranks; None for any other error."""
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
    """The ledger of a group of one rank."""

    has_failed = False

    def enter(self, call: _native.Call, *, asynchronous: bool, timeout: timedelta | None = None) -> Entry:
        return _Alone()

    def note(self, call: _native.Call) -> int:
        return 0

    def check(self, number: int) -> None: ...

    def set_timeout(self, timeout: timedelta) -> None: ...

    def abort(self, reason: CGXError) -> None: ...

    def close(self) -> None: ...
