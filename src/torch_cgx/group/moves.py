"""Broadcasts and exchanges (all-to-alls) of CPU tensors, by the native engine where it is there. No arithmetic.

Values are moved as they are, whatever their type. Gloo or NCCL carries the rest: tensors of other devices, parts whose
sizes are given, and groups without the native engine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from torch_cgx.group.allreduces import EXACT
from torch_cgx.group.shares import Shares, exact_bytes_of, lies_flat
from torch_cgx.tensors import check_in_place, check_input, check_output, copy_values, overlap, waited_for

__all__ = ["Moves"]


class Moves(Shares):
    """In terms of the reducers of `Allreduces`."""

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not isinstance(opts, c10d.BroadcastOptions):
            root, opts = opts, c10d.BroadcastOptions()
            opts.rootRank = root or 0
        tensors = [waited_for(tensor) for tensor in tensors]
        is_usual = len(tensors) == 1 and 0 <= opts.rootRank < self._world and opts.rootTensor == 0
        if not is_usual or not self._has_engine_for(tensors[0]):
            return super().broadcast(tensors, opts, timeout)
        tensor = tensors[0]
        self._check_usable()
        check_in_place("broadcast", tensor)
        layers = exact_bytes_of(tensor)
        request = self._request("broadcast", tensor, tensors, None, EXACT, opts, layers, None)
        request.algorithm, request.root = "BROADCAST", opts.rootRank
        return self._submit(request, tensor, tensor)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None
    ) -> Any:
        opts = opts if opts is not None else c10d.AllToAllOptions()
        output, input = waited_for(output), waited_for(input)
        # Sizes that are given may differ from rank to rank, and be equal on one by chance.
        if output_split_sizes or input_split_sizes or not self._are_exchangeable(output, input):
            return super().alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)
        operation = "all_to_all_single"
        self._check_usable()
        check_input(operation, input)
        check_output(operation, output)
        given = input.detach().resolve_neg().resolve_conj()
        values = (given.clone() if overlap(output, input) else given).view(-1)
        written = output.detach() if lies_flat(output) else torch.empty_like(output.detach().resolve_neg())
        into = written.view(-1)
        mine = slice(self._rank * values.numel() // self._world, (self._rank + 1) * values.numel() // self._world)
        copy_values(into[mine], values[mine])
        layers = exact_bytes_of(values[mine])
        request = self._request(operation, values, [output], None, EXACT, opts, layers, None)
        request.algorithm, request.share = "EXCHANGE", into
        return self._submit(request, output, written)

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def _are_exchangeable(self, output: Tensor, input: Tensor) -> bool:
        """Return whether the engine can do it. A call that is wrong is left for torch to refuse."""
        return (
            all(self._has_engine_for(each) and each.is_contiguous() for each in (output, input))
            and output.numel() == input.numel()
            and input.numel() % self._world == 0
            and output.dtype is input.dtype
        )
