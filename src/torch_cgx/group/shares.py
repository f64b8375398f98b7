"""Reduce-scatters and all-gathers of tensors with one share per rank. No arithmetic.

Only `torch_cgx.compressed`, or a caller with layers of its own (FSDP2's), compresses them. With the native engine,
exact ones of CPU tensors run as the same programs; all-gathers do so for all types. Otherwise Gloo or NCCL gathers, and
a reduce-scatter of CPU tensors is an allreduce of a copy. Gloo does the same internally, but its handle can neither be
polled nor interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from torch_cgx.codecs import RAW
from torch_cgx.config import EXACT, Compression, Settings
from torch_cgx.group.allreduces import AllReduces
from torch_cgx.group.calls import options_from, premultiplier, reduction_name
from torch_cgx.group.compression import COMPRESSIBLE, CompressionRules, is_summable, widest_compression
from torch_cgx.group.context import GroupContext
from torch_cgx.group.delegate import TorchDelegate
from torch_cgx.group.sides import Sides
from torch_cgx.group.submit import Submitter
from torch_cgx.group.work import CompositeWork
from torch_cgx.plan.layout import Layer, layer_of
from torch_cgx.tensors import check_input, check_output, copy_values, overlap, waited_for

__all__ = ["Shares", "exact_bytes_of", "is_movable", "lies_flat"]

_CONTIGUOUS = torch.contiguous_format


class Shares:
    """Decides who carries a reduce-scatter or an all-gather."""

    def __init__(
        self,
        context: GroupContext,
        sides: Sides,
        rules: CompressionRules,
        torch_delegate: TorchDelegate,
        submitter: Submitter,
        all_reduces: AllReduces,
    ) -> None:
        self._context = context
        self._rank, self._world = context.rank, context.world
        self._sides = sides
        self._rules = rules
        self._torch = torch_delegate
        self._submitter = submitter
        self._all_reduces = all_reduces

    # ---- with layers ----

    def reduce_scatter_layers(
        self,
        output: Tensor,
        input: Tensor,
        layers: tuple[Layer, ...],
        op: Any,
        stochastic: bool | None,
        asynchronous: bool,
    ) -> Any:
        """Sum up this rank's share. Every share consists of these layers."""
        opts = _options(c10d.ReduceScatterOptions, op, asynchronous)
        compression = widest_compression(layers)
        _check_layers("reduce_scatter_tensor", layers, output.numel())
        ours = self._can_compress(input, reduction_name(op))
        if not ours or (compression.is_exact and reduction_name(op) != "PREMUL_SUM"):
            return self._reduce_scatter_exactly(output, input, opts)
        return self._reduce_scatter("reduce_scatter_tensor", output, input, layers, opts, compression, stochastic)

    def all_gather_layers(
        self, output: Tensor, input: Tensor, layers: tuple[Layer, ...], stochastic: bool | None, asynchronous: bool
    ) -> Any:
        """Gather the shares of all ranks. Every share consists of these layers."""
        opts = _options(c10d.AllgatherOptions, None, asynchronous)
        compression = widest_compression(layers)
        _check_layers("all_gather_into_tensor", layers, input.numel())
        if not self._can_compress(input) or compression.is_exact:
            return self._all_gather_exactly(output, input, opts)
        return self._all_gather("all_gather_into_tensor", output, input, layers, opts, compression, stochastic)

    # ---- torch's calls ----

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        output, input = waited_for(output), waited_for(input)
        compression = self._compression_for(input, output.numel(), reduction_name(opts.reduceOp))
        if compression.is_exact:
            return self._reduce_scatter_exactly(output, input, opts)
        layers = self._one_layer(output, compression)
        return self._reduce_scatter("reduce_scatter_tensor", output, input, layers, opts, compression)

    def all_gather_into_tensor(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        output, input = waited_for(output), waited_for(input)
        compression = self._compression_for(input, input.numel())
        if compression.is_exact:
            return self._all_gather_exactly(output, input, opts)
        layers = self._one_layer(input, compression)
        return self._all_gather("all_gather_into_tensor", output, input, layers, opts, compression)

    def reduce_scatter(self, outputs: list[Tensor], inputs: Any, opts: Any) -> Any:
        if not len(outputs) == len(inputs) == 1:
            return self._reduce_scatter_list_by_torch(outputs, inputs, opts)
        output, shares = waited_for(outputs[0]), [waited_for(share) for share in inputs[0]]
        reduction = reduction_name(opts.reduceOp)
        compression = self._compression_for(output, output.numel(), reduction)
        alike = len(shares) == self._world and all(_same_kind(share, output) for share in shares)
        exact = compression.is_exact
        ours = not exact or (self._runs_exactly(output) and is_summable(output, reduction))
        if not ours or not alike or self._sides.of(output).enqueues:
            return self._reduce_scatter_list_by_torch(outputs, inputs, opts)
        for share in shares:
            check_input("reduce_scatter", share)
        together = torch.cat([share.detach().reshape(-1) for share in shares])
        layers = _exact_layer_of(output.numel()) if exact else self._one_layer(output, compression)
        return self._reduce_scatter("reduce_scatter", output, together, layers, opts, compression)

    def all_gather(self, outputs: Any, inputs: list[Tensor], opts: Any) -> Any:
        if not len(outputs) == len(inputs) == 1:
            return self._torch.all_gather(outputs, inputs, opts)
        input, shares = waited_for(inputs[0]), [waited_for(share) for share in outputs[0]]
        compression = self._compression_for(input, input.numel())
        alike = len(shares) == self._world and all(_same_kind(share, input) for share in shares)
        exact = compression.is_exact
        # Gloo also requires one shape. Its refusals then hold for all types.
        ours = not exact or (self._runs_exactly(input) and all(share.shape == input.shape for share in shares))
        if not ours or not alike or self._sides.of(input).enqueues:
            return self._torch.all_gather(outputs, inputs, opts)
        if exact:
            check_input("all_gather", input)
        for share in shares:
            check_output("all_gather", share)
        together = torch.empty((self._world, input.numel()), dtype=input.dtype, device=input.device)
        layers = exact_bytes_of(input) if exact else self._one_layer(input, compression)
        work = self._all_gather("all_gather", together, input, layers, opts, compression)

        def hand_out() -> None:
            for share, gathered in zip(shares, together, strict=True):
                copy_values(share.detach(), gathered.view(share.shape))

        return CompositeWork([work], hand_out, list(shares), self._context.completions)

    # ---- exact ones ----

    def _reduce_scatter_exactly(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        if not (self._runs_pair_exactly(output, input) and is_summable(input, reduction_name(opts.reduceOp))):
            return self._reduce_scatter_by_torch(output, input, opts)
        layers = _exact_layer_of(output.numel())
        return self._reduce_scatter("reduce_scatter_tensor", output, input, layers, opts, EXACT)

    def _all_gather_exactly(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        # Only shapes that Gloo takes, so no stack of inputs: then all dtypes behave identically.
        if not self._runs_pair_exactly(input, output) or not _is_concatenation(output, input, self._world):
            return self._torch.all_gather_into_tensor(output, input, opts)
        return self._all_gather("all_gather_into_tensor", output, input, exact_bytes_of(input), opts, EXACT)

    def _runs_pair_exactly(self, share: Tensor, whole: Tensor) -> bool:
        """Return whether the engine carries these uncompressed. A wrong call is left for torch to refuse."""
        return (
            self._runs_exactly(share)
            and self._runs_exactly(whole)
            and share.numel() * self._world == whole.numel()
            and share.dtype is whole.dtype
        )

    def _runs_exactly(self, tensor: Tensor) -> bool:
        return is_movable(tensor, self._sides)

    # ---- by torch's own groups ----

    def _reduce_scatter_by_torch(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        if self._sides.of(input).enqueues:
            return self._torch.reduce_scatter_tensor(output, input, opts)
        check_input("reduce_scatter_tensor", input)
        if input.numel() != output.numel() * self._world:
            raise ValueError(
                f"reduce_scatter_tensor: expected an input of {self._world} times the output's "
                f"{output.numel()} values, got {input.numel()}"
            )
        _check_share("reduce_scatter_tensor", output, output.numel(), input)
        buffer = input.detach().clone(memory_format=torch.contiguous_format).view(-1)
        mine = buffer.view(self._world, -1)[self._rank].view(output.shape)
        return self._scatter_sum("reduce_scatter_tensor", buffer, mine, output, opts)

    def _reduce_scatter_list_by_torch(self, outputs: list[Tensor], inputs: Any, opts: Any) -> Any:
        if self._sides.of(outputs[0]).enqueues:
            return self._torch.reduce_scatter(outputs, inputs, opts)
        output, shares = outputs[0], inputs[0]
        if len(shares) != self._world:
            raise ValueError(f"reduce_scatter: expected {self._world} input tensors, one per rank, got {len(shares)}")
        for share in shares:
            check_input("reduce_scatter", share)
        own = shares[self._rank]
        _check_share("reduce_scatter", output, own.numel(), own)
        buffer = torch.cat([share.detach().reshape(-1) for share in shares])
        start = sum(share.numel() for share in shares[: self._rank])
        mine = buffer[start : start + own.numel()].view(own.shape)
        return self._scatter_sum("reduce_scatter", buffer, mine, output, opts)

    def _scatter_sum(self, operation: str, buffer: Tensor, mine: Tensor, output: Tensor, opts: Any) -> Any:
        """Reduce a copy of the inputs, then copy this rank's share to the output."""
        work = self._all_reduces.all_reduce_exactly(operation, buffer, opts)
        return CompositeWork([work], lambda: output.detach().copy_(mine), [output], self._context.completions)

    # ---- by our programs ----

    def _compression_for(self, tensor: Tensor, share_numel: int, reduction: str = "SUM") -> Compression:
        asked = self._rules.for_shares(tensor, share_numel)
        return asked if asked.is_exact or self._can_compress(tensor, reduction) else EXACT

    def _can_compress(self, tensor: Tensor, reduction: str = "SUM") -> bool:
        return (
            tensor.dtype in COMPRESSIBLE
            and tensor.numel() > 0
            and is_summable(tensor, "SUM" if reduction == "PREMUL_SUM" else reduction)
            and self._sides.of(tensor).compresses
            and not self._sides.of(tensor).coalescing
        )

    def _one_layer(self, share: Tensor, compression: Compression) -> tuple[Layer, ...]:
        return _layers_of(share.numel(), compression, self._context.settings)

    def _reduce_scatter(
        self,
        operation: str,
        output: Tensor,
        input: Tensor,
        layers: tuple[Layer, ...],
        opts: Any,
        compression: Compression,
        stochastic: bool | None = None,
    ) -> Any:
        self._check_pair(operation, output, input, output)
        values = input.detach().resolve_neg().contiguous().view(-1)
        share = output.detach() if lies_flat(output) else torch.empty_like(output, memory_format=_CONTIGUOUS)
        share = share.view(-1)
        if share.data_ptr() != values.view(self._world, -1)[self._rank].data_ptr():
            if overlap(values, share):  # the sum would overwrite values that are still to be sent
                values = values.clone()
            copy_values(share, values.view(self._world, -1)[self._rank])
        reduction = reduction_name(opts.reduceOp)
        request = self._submitter.request(operation, values, [output], reduction, compression, opts, layers, stochastic)
        request.algorithm, request.share = "REDUCE_SCATTER", share
        request.factor = premultiplier(opts.reduceOp)
        return self._submitter.submit_into(request, self._sides.of(values), output, share.view(output.shape))

    def _all_gather(
        self,
        operation: str,
        output: Tensor,
        input: Tensor,
        layers: tuple[Layer, ...],
        opts: Any,
        compression: Compression,
        stochastic: bool | None = None,
    ) -> Any:
        self._check_pair(operation, input, output, output)
        gathered = output.detach() if lies_flat(output) else torch.empty_like(output, memory_format=_CONTIGUOUS)
        values = gathered.view(-1)
        mine = values.view(self._world, -1)[self._rank].view(input.shape)
        if mine.data_ptr() != input.data_ptr() or not lies_flat(input):
            copy_values(mine, input.detach().clone() if overlap(values, input) else input.detach())
        request = self._submitter.request(operation, values, [output], None, compression, opts, layers, stochastic)
        request.algorithm, request.shape = "ALL_GATHER", tuple(input.shape)
        return self._submitter.submit_into(request, self._sides.of(values), output, gathered)

    def _check_pair(self, operation: str, share: Tensor, whole: Tensor, output: Tensor) -> None:
        """Check a share and the tensor of all ranks' shares. One of the two is the output."""
        self._context.check_usable()
        for tensor in (share, whole):
            (check_output if tensor is output else check_input)(operation, tensor)
        if whole.numel() != share.numel() * self._world or share.dtype != whole.dtype or share.device != whole.device:
            raise ValueError(
                f"{operation}: expected a tensor of {self._world} shares, one per rank, of {share.numel()} values of "
                f"{share.dtype} on {share.device} each, got {whole.numel()} values of {whole.dtype} on {whole.device}"
            )
        if self._sides.of(share).enqueues and not (lies_flat(share) and lies_flat(whole)):
            raise ValueError(f"{operation}: expected contiguous CUDA tensors: call .contiguous() first")


def is_movable(tensor: Tensor, sides: Sides) -> bool:
    """Return whether the engine can move this tensor's values, regardless of their type."""
    return (
        sides.of(tensor).carries_exact
        and tensor.layout is torch.strided
        and not tensor.is_nested  # strided, but without a shape
        and tensor.numel() > 0
        and tensor.data_ptr() != 0  # 0: a subclass that only wraps other tensors
    )


def lies_flat(tensor: Tensor) -> bool:
    """Return whether the tensor's memory holds its values one after the other."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()) and tensor.data_ptr() != 0


def exact_bytes_of(share: Tensor) -> tuple[Layer, ...]:
    """Return the single layer of a share that is moved unchanged, as bytes."""
    return _exact_layer_of(share.numel() * share.element_size())


@lru_cache(maxsize=1024)
def _layers_of(numel: int, compression: Compression, settings: Settings) -> tuple[Layer, ...]:
    """Return the same object for equal shares, because reducers use its identity as a cache key."""
    return (layer_of(numel, compression, settings),)


@lru_cache(maxsize=1024)
def _exact_layer_of(numel: int) -> tuple[Layer, ...]:
    return (Layer(numel, RAW),)


def _options(kind: Any, op: Any, asynchronous: bool) -> Any:
    opts = options_from(kind, op)
    if hasattr(opts, "asyncOp"):  # torch 2.6 lacks it, and there every call counts as asynchronous
        opts.asyncOp = asynchronous
    return opts


def _check_layers(operation: str, layers: Sequence[Layer], numel: int) -> None:
    total = sum(layer.numel for layer in layers)
    if total != numel:
        raise ValueError(f"{operation}: expected layers of {numel} values, as many as a share has, got {total}")


def _check_share(operation: str, output: Tensor, numel: int, input: Tensor) -> None:
    check_output(operation, output)
    if output.numel() != numel or output.dtype != input.dtype or output.device != input.device:
        raise ValueError(
            f"{operation}: expected an output of {numel} values of {input.dtype} on {input.device}, "
            f"got {output.numel()} of {output.dtype} on {output.device}"
        )


def _is_concatenation(whole: Tensor, share: Tensor, world: int) -> bool:
    return share.dim() > 0 and whole.shape == (world * share.shape[0], *share.shape[1:])


def _same_kind(tensor: Tensor, other: Tensor) -> bool:
    return tensor.numel() == other.numel() and tensor.dtype == other.dtype and tensor.device == other.device
