"""Runs programs over transports, from a Python thread: between nodes, and where there is no native library.

Operations run in the order of submission on one thread a group, their slices overlapping as `schedule` tells. A
rank that fails closes its transports, so that its peers fail at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch

from torch_cgx.engines.computing import Reduction
from torch_cgx.engines.jobs import Job, JobThread
from torch_cgx.engines.recorder import Trail
from torch_cgx.errors import CGXError
from torch_cgx.executors.pipeline import Pipeline
from torch_cgx.kernels import Kernels
from torch_cgx.transports import Transport

__all__ = ["MessageExecutor"]

Explain = Callable[[CGXError], CGXError]


class MessageExecutor:
    """Runs jobs in order; most of them are programs.

    `transports` has one for each peer, by rank; a rank's own place holds None.
    """

    def __init__(
        self,
        transports: Sequence[Transport | None],
        kernels: Kernels,
        rank: int,
        global_ranks: Sequence[int],
        staging_nbytes: int,
    ) -> None:
        self._transports = tuple(transports)
        self._pipeline = Pipeline(transports, kernels, rank, global_ranks, staging_nbytes)
        self._thread = JobThread("cgx-messages", self.hang_up)

    def submit(self, run: Callable[[], None], trail: Trail | None = None, explain: Explain | None = None) -> Job:
        return self._thread.submit(run, trail, explain)

    def allreduce(self, operation: Reduction, trail: Trail | None = None, explain: Explain | None = None) -> Job:
        return self.submit(lambda: self._pipeline.run(operation, trail), trail, explain)

    def allreduce_widened(
        self, operation: Reduction, trail: Trail | None = None, explain: Explain | None = None
    ) -> Job:
        """The same in a float32 copy, which the layout is made for; the values get what it ends with."""

        def run() -> None:
            wide = operation.values.to(torch.float32)
            self._pipeline.run(replace(operation, values=wide), trail)
            with torch.inference_mode():  # they may be a tensor of that mode
                operation.values.copy_(wide)

        return self.submit(run, trail, explain)

    def stats(self) -> dict[str, float]:
        """Bytes sent, and seconds by phase."""
        return dict(self._pipeline.figures)

    def reset_stats(self) -> None:
        self._pipeline.reset_figures()

    def set_timeout(self, timeout: timedelta) -> None:
        """For waits that begin from now on."""
        for transport in self._transports:
            if transport is not None:
                transport.timeout = timeout

    def close(self) -> None:
        self._thread.close()

    def hang_up(self) -> None:
        """Close all connections: whoever waits, here or on a peer, raises."""
        for transport in set(self._transports):
            if transport is not None:
                with suppress(Exception):  # it is in ruins already, and whoever waits must still be told
                    transport.close()
