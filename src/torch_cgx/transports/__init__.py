"""Transports carry messages between the ranks of one group: bytes with a tag, in any order, many in flight.

They know nothing of programs, payloads or quantizers. A new one is one file here and one line in `factory`, which
makes them by name. An `Exchange` carries the messages of all ranks at once, of tensors on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch import Tensor

__all__ = ["TAGS", "Arrival", "Exchange", "Pending", "Transport"]

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


class Arrival(Protocol):
    """An exchange under way. Each must be waited for; its payloads are the exchange's until then."""

    def wait(self) -> None:
        """Until the payloads are there for whatever the calling thread's current stream is given from now on."""


class Exchange(Protocol):
    """One message from each rank to each other, all at once. All ranks call alike, in one order."""

    @property
    def waits(self) -> bool:
        """The host waits, for the device and for peers: use it on a thread of its own."""

    @property
    def most_nbytes(self) -> int | None:
        """Of values in a slice, whose payloads have to fit into its memory; None: any number."""

    def begin(self, number: int, agreed: int, peers: Sequence[int]) -> None:
        """A call of this number and hash comes next, in which this rank talks to these peers."""

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], room_nbytes: int) -> Arrival:
        """By rank, in uint8; empty where there is nothing. No payload of any rank is longer than the room."""

    def set_timeout(self, timeout: timedelta) -> None: ...

    def close(self) -> None:
        """Leave; peers that wait for this rank raise. May be called twice."""

    def abort(self) -> None:
        """The same, without waiting for what is under way on the device. May follow or precede `close`."""
