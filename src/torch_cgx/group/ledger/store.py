"""The ledger of groups in which a rank lacks the native engine. Ranks compare calls over Gloo, and publish them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch._C._distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from torch_cgx import _native
from torch_cgx.errors import CGXError
from torch_cgx.group.calls import digest, operation_name
from torch_cgx.group.ledger import Entry, trouble_of
from torch_cgx.group.ledger.inquiry import Inquiry
from torch_cgx.group.ledger.starter import GlooComparison, Nothing, Starter, hang_up

__all__ = ["StoreLedger"]

_ODD = 0x9E3779B97F4A7C15 >> 8
_WONDER_S = (0.5, 60.0)  # a waiting rank asks the others after the first, then after twice as long, up to the second


class StoreLedger:
    """The ledger of one rank. `gloo` carries all calls."""

    def __init__(self, store: Store, gloo: Any, rank: int, global_ranks: Sequence[int], timeout: timedelta) -> None:
        self._gloo = gloo
        self._timeout = timeout
        self._name = f"rank {global_ranks[rank]}"
        self._inquiry = Inquiry(store, rank, global_ranks, partial(hang_up, gloo))
        self._starter = Starter(gloo)
        self._in_detail = c10d.get_debug_level() == c10d.DebugLevel.DETAIL

    @property
    def has_failed(self) -> bool:
        return self._inquiry.failure is not None

    def enter(self, call: _native.Call, *, asynchronous: bool, timeout: timedelta | None = None) -> Entry:
        number = self._inquiry.note(call)
        facts = (digest(call) + number * _ODD) & ((1 << 62) - 1)
        compare = partial(GlooComparison, self._gloo, facts, timeout or self._timeout)
        what = f"{operation_name(call)} (operation {number} of {self._name})"
        return _StoreEntry(self._inquiry, self._starter, compare, number, what)

    def note(self, call: _native.Call) -> int:
        """Note a call. With TORCH_DISTRIBUTED_DEBUG=DETAIL, first wait until all ranks have made the same call."""
        if not self._in_detail:
            return self._inquiry.note(call)
        entry = self.enter(call, asynchronous=True)
        try:
            entry.start(Nothing, asynchronous=True).wait()  # in one order with all of Gloo's calls
        except RuntimeError as error:
            raise entry.explained(error) from None
        return entry.number

    def check(self, number: int) -> None:
        self._inquiry.check()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def abort(self, reason: CGXError) -> None:
        self._inquiry.close(reason)
        self._inquiry.hang_up()

    def close(self) -> None:
        self._inquiry.close()
        self._starter.close()


class _StoreEntry:
    """A call that all ranks compare over Gloo. After a long wait, a rank asks the others through the store."""

    def __init__(
        self, inquiry: Inquiry, starter: Starter, compare: Callable[[], GlooComparison], number: int, what: str
    ) -> None:
        self._inquiry = inquiry
        self._starter = starter
        self._compare = compare
        self.number = number
        self._what = what
        self._asks_s = _WONDER_S[0]
        self._waits_since_s: float | None = None

    def start(self, run: Callable[[], Any], *, asynchronous: bool) -> Any:
        return self._starter.carry(self._compare, run, asynchronous)

    def still_waits(self) -> None:
        self._inquiry.check()
        now_s = time.monotonic()
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        elif now_s - self._waits_since_s > self._asks_s:
            self._waits_since_s, self._asks_s = now_s, min(2 * self._asks_s, _WONDER_S[1])
            self._inquiry.wonder()

    def has_ended(self) -> None:
        """Do nothing: the calls were compared before the operation started."""

    def explained(self, error: RuntimeError) -> RuntimeError:
        if isinstance(error, CGXError):
            return self._inquiry.explain(error, self.number)
        trouble = trouble_of(error)
        if trouble is None:
            return error
        kind, failed = trouble
        return self._inquiry.explain(kind(f"{self._what} {failed}: {error}"), self.number)
