"""The ledger of groups whose ranks all have the native engine: each rank sees the others' calls on a board.

Within a host the board is in shared memory. Between hosts it is filled by calls that arrive over links. Ranks announce
a call that Gloo carries to each other before it starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as c10d

from torch_cgx import _native
from torch_cgx.engines.host.native import SharedGroup
from torch_cgx.errors import CGXError, PeerLostError
from torch_cgx.group.calls import describe
from torch_cgx.group.ledger import Entry, trouble_of
from torch_cgx.group.ledger.starter import NativeComparison, Starter

__all__ = ["BoardLedger"]

_DYING_S = 1.0  # how long a peer's death may take to become visible after its connection was lost


class BoardLedger:
    """The ledger of one rank. `gloo` carries the entered calls. Errors call this rank `name`."""

    def __init__(self, board: SharedGroup, gloo: Any, timeout: timedelta, name: str) -> None:
        self._board = board
        self._timeout = timeout
        self._name = name
        self._starter = Starter(gloo) if board.linked else None

    @property
    def has_failed(self) -> bool:
        return self._board.has_failed

    def enter(self, call: _native.Call, *, asynchronous: bool, timeout: timedelta | None = None) -> Entry:
        what = f"{describe(call)} (operation {{}} of {self._name})"
        if self._starter is None:
            return _BoardEntry(self._board, self._board.note(call), what)
        number, sequence = self._agree(call, timeout or self._timeout, wake=asynchronous)
        return _LinkedEntry(self._board, sequence, what, self._starter, NativeComparison(self._board, number))

    def note(self, call: _native.Call) -> int:
        """Note a call. Between hosts it is compared only with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
        if self._starter is None or c10d.get_debug_level() != c10d.DebugLevel.DETAIL:
            return self._board.note(call)
        number, sequence = self._agree(call, self._timeout, wake=False)
        NativeComparison(self._board, number).wait()
        return sequence

    def check(self, number: int) -> None:
        self._board.check(number)

    def _agree(self, call: _native.Call, timeout: timedelta, *, wake: bool) -> tuple[int, int]:
        return self._board.agree(call, max(1, int(timeout.total_seconds() * 1000)), wake=wake)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def abort(self, reason: CGXError) -> None:
        self._board.fail(reason)

    def close(self) -> None:
        if self._starter is not None:
            self._starter.close()


class _BoardEntry:
    """A call that all ranks of one host can see on their board."""

    def __init__(self, board: SharedGroup, number: int, what: str) -> None:
        self._board = board
        self.number = number
        self._what = what.format(number)

    def start(self, run: Callable[[], Any], *, asynchronous: bool) -> Any:
        self._board.check(self.number)
        return run()

    def still_waits(self) -> None:
        self._board.check_missing(self.number)

    def has_ended(self) -> None:
        self._board.check(self.number)

    def explained(self, error: RuntimeError) -> RuntimeError:
        self._board.check_missing(self.number)
        if isinstance(error, CGXError):
            return error
        trouble = trouble_of(error)
        if trouble is None:
            return error
        kind, failed = trouble
        if kind is PeerLostError:
            self._name_the_lost()
        behind = self._board.laggards(self.number)
        if behind:
            why = f"{behind}. Make sure that all ranks call the same collectives."
        else:
            why = "all ranks have made this call, so one of them is stopped, or cut off from others. Restart all ranks."
        ours = kind(f"{self._what} {failed}: {why} ({error})")
        self._board.fail(ours)
        return ours

    def _name_the_lost(self) -> None:
        """Raise an error that names the peer, if one dies now. A process's sockets close a moment before it is gone."""
        deadline = time.monotonic() + _DYING_S
        while time.monotonic() < deadline:
            self._board.check_alive(self.number)
            time.sleep(0.001)


class _LinkedEntry(_BoardEntry):
    """A call between hosts. It starts once every rank has announced it."""

    def __init__(
        self, board: SharedGroup, number: int, what: str, starter: Starter, comparison: NativeComparison
    ) -> None:
        super().__init__(board, number, what)
        self._starter = starter
        self._comparison = comparison

    def start(self, run: Callable[[], Any], *, asynchronous: bool) -> Any:
        self._board.check(self.number)
        return self._starter.carry(lambda: self._comparison, run, asynchronous)
