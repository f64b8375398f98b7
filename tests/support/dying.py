"""Ranks that die while they work with others."""

from __future__ import annotations

import os
import signal
import threading

import torch
import torch.distributed as dist

from tests.support.harness import Rank

__all__ = ["die_after", "reduce_until_one_dies"]


def die_after(me: Rank, seconds: float) -> None:
    """Whatever the rank does by then. Its mark is the time of its death."""

    def die() -> None:
        me.mark()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Timer(seconds, die).start()


def reduce_until_one_dies(me: Rank, numel: int = 100_000) -> None:
    """Rank 2 does, between or in the middle of sums."""
    x = torch.ones(numel)
    dist.all_reduce(x)
    if me.rank == 2:
        die_after(me, 0.3)
    while True:
        dist.all_reduce(x)
        x.fill_(1.0)
