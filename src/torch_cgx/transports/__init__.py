"""Transports carry messages between the ranks of one group: bytes with a tag, in any order, many in flight.

They know nothing of programs, payloads or quantizers. A new one is one file here and one line in `factory`, which
makes them by name.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from torch import Tensor

__all__ = ["TAGS", "Pending", "Transport"]

TAGS = 1 << 18  # at least so many; every MPI that we know has them, the standard promises 2^15


class Pending(Protocol):
    """A message under way. Each must be waited for, or be seen done; its payload is the transport's until then."""

    def wait(self) -> None:
        """Until it has left (send) or arrived (receive); other threads run meanwhile.

        Raises `CGXTimeoutError` after the transport's timeout and `PeerLostError` where the peer cannot be reached;
        both name the peer, what was waited for and for how long.
        """

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once. Never blocks."""


class Transport(Protocol):
    """Messages between the ranks of one group. Peers are numbered as in the group.

    Payloads are contiguous uint8 tensors on the CPU, of any length, 0 included. Tags are 0 to `tags` - 1. Messages of
    one tag between two ranks arrive in the order of their sending; those of different tags in any order.
    """

    timeout: timedelta  # of waits that begin from now on
    tags: int  # TAGS, or more

    def send(self, payload: Tensor, peer: int, tag: int) -> Pending:
        """The payload must not change until the message has left, for which the peer may have to receive it."""

    def receive(self, payload: Tensor, peer: int, tag: int) -> Pending:
        """Fills the payload, whose length both sides know."""

    def close(self) -> None:
        """Leave. Messages still under way are given up: whoever waits for one of them raises. May be called twice."""
