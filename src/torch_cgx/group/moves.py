"""Broadcasts and exchanges (all-to-alls) of CPU tensors over the native engine, if available. No arithmetic.

Values of any type are moved unchanged. Gloo or NCCL carries the rest: tensors on other devices, exchanges with explicit
split sizes, and groups without the native engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_cgx.config import EXACT
from torch_cgx.group.context import GroupContext
from torch_cgx.group.delegate import TorchDelegate
from torch_cgx.group.shares import exact_bytes_of, is_movable, lies_flat
from torch_cgx.group.sides import Sides
from torch_cgx.group.submit import Submitter
from torch_cgx.tensors import check_in_place, check_input, check_output, copy_values, overlap, waited_for

__all__ = ["Moves"]


class Moves:
    """Decides who carries a broadcast or an exchange."""

    def __init__(
        self, context: GroupContext, sides: Sides, torch_delegate: TorchDelegate, submitter: Submitter
    ) -> None:
        self._context = context
        self._sides = sides
        self._torch = torch_delegate
        self._submitter = submitter

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        tensors = [waited_for(tensor) for tensor in tensors]
        is_usual = len(tensors) == 1 and 0 <= opts.rootRank < self._context.world and opts.rootTensor == 0
        if not is_usual or not is_movable(tensors[0], self._sides):
            return self._torch.broadcast(tensors, opts)
        tensor = tensors[0]
        self._context.check_usable()
        check_in_place("broadcast", tensor)
        layers = exact_bytes_of(tensor)
        request = self._submitter.request("broadcast", tensor, tensors, None, EXACT, opts, layers)
        request.algorithm, request.root = "BROADCAST", opts.rootRank
        return self._submitter.submit(request, self._sides.of(tensor))

    def all_to_all_single(self, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, opts: Any) -> Any:
        output, input = waited_for(output), waited_for(input)
        # Explicit sizes may differ between ranks, even if they happen to be equal on this one.
        if output_sizes or input_sizes or not self._are_exchangeable(output, input):
            return self._torch.all_to_all_single(output, input, output_sizes, input_sizes, opts)
        operation, rank, world = "all_to_all_single", self._context.rank, self._context.world
        self._context.check_usable()
        check_input(operation, input)
        check_output(operation, output)
        given = input.detach().resolve_neg().resolve_conj()
        values = (given.clone() if overlap(output, input) else given).view(-1)
        written = output.detach() if lies_flat(output) else torch.empty_like(output.detach().resolve_neg())
        into = written.view(-1)
        mine = slice(rank * values.numel() // world, (rank + 1) * values.numel() // world)
        copy_values(into[mine], values[mine])
        layers = exact_bytes_of(values[mine])
        request = self._submitter.request(operation, values, [output], None, EXACT, opts, layers)
        request.algorithm, request.share = "EXCHANGE", into
        return self._submitter.submit_into(request, self._sides.of(values), output, written)

    def _are_exchangeable(self, output: Tensor, input: Tensor) -> bool:
        """Return whether the engine can exchange these. A wrong call is left for torch to refuse."""
        return (
            all(is_movable(each, self._sides) and each.is_contiguous() for each in (output, input))
            and output.numel() == input.numel()
            and input.numel() % self._context.world == 0
            and output.dtype is input.dtype
        )
