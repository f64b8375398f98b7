"""Submission of operations to a side's reducer, under the names that a profiler shows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from torch_cgx.config import Compression
from torch_cgx.group.context import GroupContext
from torch_cgx.group.requests import Request
from torch_cgx.group.sides import Side
from torch_cgx.group.work import CompositeWork, PolledWork
from torch_cgx.plan.layout import Layer
from torch_cgx.tensors import copy_values

__all__ = ["Submitter"]


class Submitter:
    """The submitter of one group, which makes requests and hands them to reducers."""

    def __init__(self, context: GroupContext) -> None:
        self._context = context

    def request(
        self,
        operation: str,
        values: Tensor,
        result: list[Tensor],
        reduction: str | None,
        compression: Compression,
        opts: Any,
        layers: tuple[Layer, ...] | None,
        stochastic: bool | None = None,
    ) -> Request:
        """Return a request with the options of a torch call."""
        timeout_ms = self._context.milliseconds(opts.timeout)
        asynchronous = getattr(opts, "asyncOp", True)  # torch 2.6 does not have it everywhere
        return Request(
            *(operation, values, result, reduction, compression, timeout_ms, asynchronous),
            layers=layers,
            stochastic=stochastic,
        )

    def submit(self, request: Request, side: Side) -> PolledWork:
        """Start an operation."""
        if not _is_profiled():
            return side.reducer.submit(request)
        request.asynchronous = True
        bits = "" if request.only_moves else f" {request.compression.bits} bits"
        with record_function(f"cgx::{request.operation}{bits}"):
            work = side.reducer.submit(request)
        if not side.enqueues:  # the profiler sees a device's work on the device
            self._context.completions.watch(work, f"cgx::run {request.operation}")
        return work

    def submit_into(self, request: Request, side: Side, output: Tensor, written: Tensor) -> PolledWork:
        """Start an operation that writes into `written`: the output, or a buffer that is copied there at the end."""
        copied = written.data_ptr() != output.data_ptr()
        if copied:
            request.asynchronous = True
        work = self.submit(request, side)
        if not copied:
            return work
        completions = self._context.completions
        return CompositeWork([work], lambda: copy_values(output.detach(), written), [output], completions)


def _is_profiled() -> bool:
    # The second covers only this thread, and not a profiler that was started with profile_all_threads.
    return profiler._is_profiler_enabled or _profiler_enabled()
