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

    @torch.inference_mode(False)  # whoever fills it need not be in the mode that the caller is in
    def take(self, nbytes: int) -> Tensor:
        room = -(-max(nbytes, 1) // _LEAST_NBYTES) * _LEAST_NBYTES
        free = self._free[room]
        if free:
            self._kept_nbytes -= room
            return free.pop()[:nbytes]
        return torch.empty(room, dtype=torch.uint8)[:nbytes]

    def give(self, payload: Tensor) -> None:
        whole = payload.as_strided((payload.untyped_storage().nbytes(),), (1,), 0)
        if self._kept_nbytes + whole.numel() > self._most_nbytes:
            self._free.clear()  # sizes of another time
            self._kept_nbytes = 0
        if whole.numel() <= self._most_nbytes:
            self._free[whole.numel()].append(whole)
            self._kept_nbytes += whole.numel()
