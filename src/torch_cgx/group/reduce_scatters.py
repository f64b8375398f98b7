"""The reduce-scatters, each an exact allreduce of a copy, of which every rank takes its share.

As Gloo makes them, whose own handle for it can neither be polled nor interrupted.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from torch_cgx.group.calls import options_from
from torch_cgx.group.delegate import CarriedCollectives, unwaited
from torch_cgx.group.work import CompositeWork
from torch_cgx.tensors import check_input, check_output

__all__ = ["ReduceScatters"]


class ReduceScatters(CarriedCollectives):
    """In terms of `_allreduce`."""

    _rank: int
    _world: int
    _gloo: Any

    def _allreduce(self, operation: str, tensor: Tensor, result: list[Tensor], opts: Any) -> Any:
        raise NotImplementedError

    def _side(self, tensor: Tensor) -> Any:
        raise NotImplementedError

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = options_from(c10d.ReduceScatterOptions, opts)
        backend = self._backend(outputs[0])
        if backend is not self._gloo:
            run = partial(backend.reduce_scatter, outputs, inputs, opts)
            return self._carry("reduce_scatter", run, outputs[0].dtype, None, list(outputs))
        output, shares = outputs[0], inputs[0]
        if len(shares) != self._world:
            raise ValueError(f"reduce_scatter: expected {self._world} input tensors, one a rank, got {len(shares)}")
        for share in shares:
            check_input("reduce_scatter", share)
        _check_output("reduce_scatter", output, shares[self._rank].numel(), shares[self._rank])
        buffer = torch.cat([share.detach().reshape(-1) for share in shares])
        start = sum(share.numel() for share in shares[: self._rank])
        mine = buffer[start : start + shares[self._rank].numel()].view(shares[self._rank].shape)
        return self._scatter_sum("reduce_scatter", buffer, mine, output, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = options_from(c10d.ReduceScatterOptions, opts)
        backend = self._backend(input)
        if backend is not self._gloo:
            run = partial(backend._reduce_scatter_base, output, input, opts)
            return self._carry("reduce_scatter_tensor", run, input.dtype, tuple(input.shape), [output])
        check_input("reduce_scatter_tensor", input)
        if input.numel() != output.numel() * self._world:
            raise ValueError(
                f"reduce_scatter_tensor: expected an input of {self._world} times the output's "
                f"{output.numel()} values, got {input.numel()}"
            )
        _check_output("reduce_scatter_tensor", output, output.numel(), input)
        buffer = input.detach().clone(memory_format=torch.contiguous_format).view(-1)
        mine = buffer.view(self._world, -1)[self._rank].view(output.shape)
        return self._scatter_sum("reduce_scatter_tensor", buffer, mine, output, opts)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = unwaited(c10d.ReduceScatterOptions, options_from(c10d.ReduceScatterOptions, opts))
        pairs = zip(outputs, inputs, strict=True)
        parts = [self._reduce_scatter_base(output, input, opts) for output, input in pairs]
        return self._together(parts, list(outputs))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def _scatter_sum(self, operation: str, buffer: Tensor, mine: Tensor, output: Tensor, opts: Any) -> Any:
        """Reduce a copy of the inputs, then take this rank's share; as Gloo does, whose handle cannot be polled."""
        work = self._allreduce(operation, buffer, [buffer], opts)
        return CompositeWork([work], lambda: output.detach().copy_(mine), [output], self._completions)


def _check_output(operation: str, output: Tensor, numel: int, input: Tensor) -> None:
    check_output(operation, output)
    if output.numel() != numel or output.dtype != input.dtype or output.device != input.device:
        raise ValueError(
            f"{operation}: expected an output of {numel} values of {input.dtype} on {input.device}, "
            f"got {output.numel()} of {output.dtype} on {output.device}"
        )
