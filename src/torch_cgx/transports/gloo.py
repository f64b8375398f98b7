"""Messages over a Gloo group of our own, so that they never meet the user's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo

from torch_cgx.errors import CGXError, CGXTimeoutError, PeerLostError
from torch_cgx.transports import Pending

__all__ = ["GlooTransport"]


class _Message:
    def __init__(self, work: Any, tensor: Tensor, what: str) -> None:
        self._work = work
        self._tensor = tensor  # Gloo works on its memory
        self._what = what

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            kind: type[CGXError] = CGXTimeoutError if "imed out" in str(error) else PeerLostError
            raise kind(f"{self._what}: {error}. Look at that rank's output, then restart all ranks.") from error


class GlooTransport:
    """Implements `torch_cgx.transports.Transport`."""

    def __init__(self, store: Store, rank: int, world: int, timeout: timedelta, global_ranks: Sequence[int]) -> None:
        self._group: Any = ProcessGroupGloo(store, rank, world, timeout)
        self._me = global_ranks[rank]
        self._global_ranks = tuple(global_ranks)

    def send(self, payload: Tensor, peer: int, tag: int) -> Pending:
        what = f"rank {self._me} could not send to rank {self._global_ranks[peer]}"
        return _Message(self._group.send([payload], peer, tag), payload, what)

    def receive(self, payload: Tensor, peer: int, tag: int) -> Pending:
        what = f"rank {self._me} waited for rank {self._global_ranks[peer]}"
        return _Message(self._group.recv([payload], peer, tag), payload, what)
