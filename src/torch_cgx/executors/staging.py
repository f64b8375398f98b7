"""Memory for payloads under way, used again and again: new memory costs a page fault every 4 KB."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

__all__ = ["Staging"]

_LEAST_NBYTES = 4096


class Staging:
    """Keeps at most so many bytes for the next operation."""

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._kept_nbytes = 0
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, nbytes: int) -> Tensor:
        room = _room(nbytes)
        free = self._free[room]
        if not free:
            return _new(room, nbytes)
        self._kept_nbytes -= room
        payload = free.pop()
        return payload if payload.numel() == nbytes else _resized(payload, nbytes)

    def give(self, payload: Tensor) -> None:
        """Back what `take` has given; nobody else may hold it."""
        room = _room(payload.numel())
        if self._kept_nbytes + room > self._most_nbytes:
            self._free.clear()  # sizes of another time
            self._kept_nbytes = 0
        if room <= self._most_nbytes:
            self._free[room].append(payload)
            self._kept_nbytes += room


def _room(nbytes: int) -> int:
    """What is allocated for so many bytes."""
    return -(-max(nbytes, 1) // _LEAST_NBYTES) * _LEAST_NBYTES


# Whoever fills a payload need not be in the mode that the caller is in.


@torch.inference_mode(False)
def _new(room: int, nbytes: int) -> Tensor:
    return torch.empty(room, dtype=torch.uint8, device="cpu")[:nbytes]


@torch.inference_mode(False)
def _resized(payload: Tensor, nbytes: int) -> Tensor:
    """The same memory, which is of the same room."""
    return payload.as_strided((nbytes,), (1,), 0)
