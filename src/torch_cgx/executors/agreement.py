"""How ranks that are about to exchange payloads make sure that they mean the same call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from torch_cgx.errors import MismatchError
from torch_cgx.transports import Transport

__all__ = ["AGREEMENT_TAG", "Agreement"]

AGREEMENT_TAG = 0
_LATE_S = 2.0  # for a rank that comes later to a call that differs; one that never comes shall not hold up the error
_POLL_S = 0.002


class Agreement:
    """What this rank is about to do, told to each peer that it will talk to, and compared with what they tell.

    `facts` are the number of the call and a hash of it. Nobody waits for it before `finish`.
    """

    def __init__(
        self,
        transport: Callable[[int], Transport],
        peers: Sequence[int],
        facts: tuple[int, int],
        rank: int,
        global_ranks: Sequence[int],
    ) -> None:
        self._mine = torch.tensor(facts, dtype=torch.int64, device="cpu")
        self._names = [f"rank {each}" for each in global_ranks]
        self._rank = rank
        self._theirs = {peer: torch.empty_like(self._mine) for peer in peers}
        self._arriving = {
            peer: transport(peer).receive(theirs.view(torch.uint8), peer, AGREEMENT_TAG)
            for peer, theirs in self._theirs.items()
        }
        self._leaving = [transport(peer).send(self._mine.view(torch.uint8), peer, AGREEMENT_TAG) for peer in peers]

    def finish(self, waiting_for: Callable[[int], AbstractContextManager[None]] | None = None) -> None:
        """`waiting_for` gets to know which peer that is."""
        for peer, message in self._arriving.items():
            with nullcontext() if waiting_for is None else waiting_for(peer):
                message.wait()
            self._compare(peer)
        for sent in self._leaving:
            sent.wait()

    def _let_leave(self) -> None:
        """Tell all peers before this rank fails and hangs up: they would take it for dead."""
        deadline = time.monotonic() + _LATE_S
        while not all(sent.done() for sent in self._leaving) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _compare(self, peer: int) -> None:
        theirs = self._theirs[peer]
        if not torch.equal(theirs, self._mine):
            self._let_leave()
            raise MismatchError(
                f"{self._names[self._rank]} and {self._names[peer]} have lost step: their compressed operations "
                f"number {int(self._mine[0])} and {int(theirs[0])} differ in shape, type, reduction, bits, bucket size "
                "or layers. All ranks must make the same calls, in one order."
            )
