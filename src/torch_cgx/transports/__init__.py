"""Transports carry messages between ranks: bytes with a tag, in any order, many in flight.

They know nothing of programs, payloads or quantizers. A new one is one file here.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Pending", "Transport"]


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Until it has left (send) or arrived (receive); raises one of our errors, naming the peer."""


class Transport(Protocol):
    """Messages between the ranks of one group."""

    def send(self, payload: Tensor, peer: int, tag: int) -> Pending:
        """The payload must not change until the message has left."""

    def receive(self, payload: Tensor, peer: int, tag: int) -> Pending:
        """Fills the payload, whose length both sides know."""
