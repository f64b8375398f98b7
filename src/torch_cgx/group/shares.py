"""Reduce-scatters and all-gathers, of tensors of which every rank has a share. No arithmetic.

Nothing but `torch_cgx.compressed` or a caller with layers of his own (FSDP2's) compresses them. Exact ones of CPU
tensors run as the same programs where the native engine is there, all-gathers of all types. All else continues as it
does without this: the reduce-scatter as an allreduce of a copy, the all-gather by Gloo or NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor
from torch.distributed import ReduceOp

from torch_cgx import scopes
from torch_cgx.codecs import Identity, MaxMin
from torch_cgx.config import Compression
from torch_cgx.group.allreduces import EXACT, Allreduces, is_profiled, milliseconds, widest_compression
from torch_cgx.group.calls import options_from, premultiplier, reduction_name
from torch_cgx.group.requests import Request
from torch_cgx.group.work import CompositeWork, DoneWork
from torch_cgx.plan.layout import Layer
from torch_cgx.tensors import check_input, check_output, copy_values, overlap, waited_for

__all__ = ["Shares", "exact_bytes_of", "lies_flat"]

_COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)


class Shares(Allreduces):
    """In terms of the reducers of `Allreduces`."""

    def reduce_scatter_layers(
        self,
        output: Tensor,
        input: Tensor,
        layers: tuple[Layer, ...],
        *,
        op: Any = ReduceOp.SUM,
        stochastic: bool | None = None,
        asynchronous: bool = True,
    ) -> Any:
        """Sum up this rank's share, which consists of consecutive layers with quantizers of their own, as all do.

        `op` is SUM, AVG or PREMUL_SUM. What cannot be compressed is exact.
        """
        opts = _options(c10d.ReduceScatterOptions, op, asynchronous)
        compression = widest_compression(layers)
        _check_layers("reduce_scatter_tensor", layers, output.numel())
        ours = self._shares_are_ours(input, reduction_name(op))
        if not ours or (compression.bits == 32 and reduction_name(op) != "PREMUL_SUM"):
            return self._reduce_scatter_exactly(output, input, opts)
        return self._reduce_scatter_shares(
            "reduce_scatter_tensor", output, input, layers, opts, compression, stochastic
        )

    def all_gather_layers(
        self,
        output: Tensor,
        input: Tensor,
        layers: tuple[Layer, ...],
        *,
        stochastic: bool | None = None,
        asynchronous: bool = True,
    ) -> Any:
        """Gather shares that consist of consecutive layers with quantizers of their own.

        Every rank, this one included, ends with what a share decodes to. What cannot be compressed is exact.
        """
        opts = _options(c10d.AllgatherOptions, None, asynchronous)
        compression = widest_compression(layers)
        _check_layers("all_gather_into_tensor", layers, input.numel())
        if not self._shares_are_ours(input) or compression.bits == 32:
            return self._all_gather_exactly(output, input, opts)
        return self._all_gather_shares("all_gather_into_tensor", output, input, layers, opts, compression, stochastic)

    # ---- torch's methods ----

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        output, input = waited_for(output), waited_for(input)
        opts = options_from(c10d.ReduceScatterOptions, opts)
        compression = self._asked_of_shares(input, output.numel(), reduction_name(opts.reduceOp))
        if compression.bits == 32:
            return self._reduce_scatter_exactly(output, input, opts)
        return self._reduce_scatter_shares(
            "reduce_scatter_tensor", output, input, self._one_layer(output, compression), opts, compression
        )

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        output, input = waited_for(output), waited_for(input)
        opts = opts if opts is not None else c10d.AllgatherOptions()
        compression = self._asked_of_shares(input, input.numel())
        if compression.bits == 32:
            return self._all_gather_exactly(output, input, opts)
        return self._all_gather_shares(
            "all_gather_into_tensor", output, input, self._one_layer(input, compression), opts, compression
        )

    all_gather_single = _allgather_base

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        into, given = ([outputs], [inputs]) if isinstance(outputs, Tensor) else (outputs, inputs)
        opts = options_from(c10d.ReduceScatterOptions, opts)
        if not len(into) == len(given) == 1:
            return super().reduce_scatter(outputs, inputs, opts, *more)
        output, shares = waited_for(into[0]), [waited_for(share) for share in given[0]]
        compression = self._asked_of_shares(output, output.numel(), reduction_name(opts.reduceOp))
        alike = len(shares) == self._world and all(_same_kind(share, output) for share in shares)
        exact = compression.bits == 32
        ours = not exact or (self._has_engine_for(output) and self._is_ours(output, reduction_name(opts.reduceOp)))
        if not ours or not alike or self._side(output) is not None:
            return super().reduce_scatter(outputs, inputs, opts, *more)
        for share in shares:
            check_input("reduce_scatter", share)
        together = torch.cat([share.detach().reshape(-1) for share in shares])
        layers = _exact_layer_of(output.numel()) if exact else self._one_layer(output, compression)
        return self._reduce_scatter_shares("reduce_scatter", output, together, layers, opts, compression)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        into, given = ([outputs], [inputs]) if isinstance(inputs, Tensor) else (outputs, inputs)
        if not len(into) == len(given) == 1:
            return super().allgather(outputs, inputs, opts, *more)
        input, shares = waited_for(given[0]), [waited_for(share) for share in into[0]]
        compression = self._asked_of_shares(input, input.numel())
        alike = len(shares) == self._world and all(_same_kind(share, input) for share in shares)
        exact = compression.bits == 32
        # Gloo wants one shape, too; what it refuses is refused for all types alike.
        ours = not exact or (self._has_engine_for(input) and all(share.shape == input.shape for share in shares))
        if not ours or not alike or self._side(input) is not None:
            return super().allgather(outputs, inputs, opts, *more)
        if exact:
            check_input("all_gather", input)
        for share in shares:
            check_output("all_gather", share)
        opts = opts if isinstance(opts, c10d.AllgatherOptions) else c10d.AllgatherOptions()
        together = torch.empty((self._world, input.numel()), dtype=input.dtype, device=input.device)
        layers = exact_bytes_of(input) if exact else self._one_layer(input, compression)
        work = self._all_gather_shares("all_gather", together, input, layers, opts, compression)

        def hand_out() -> None:
            for share, gathered in zip(shares, together, strict=True):
                copy_values(share.detach(), gathered.view(share.shape))

        return CompositeWork([work], hand_out, list(shares), self._completions)

    # ---- exact ones ----

    def _reduce_scatter_exactly(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        reduction = reduction_name(opts.reduceOp)
        if not (self._is_engines(output, input) and self._is_ours(input, reduction)):
            return super()._reduce_scatter_base(output, input, opts)
        return self._reduce_scatter_shares(
            "reduce_scatter_tensor", output, input, _exact_layer_of(output.numel()), opts, EXACT
        )

    def _all_gather_exactly(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        # Only what Gloo takes, no stack of inputs say: then all dtypes behave alike.
        if not self._is_engines(input, output) or not _is_concatenation(output, input, self._world):
            return super()._allgather_base(output, input, opts)
        return self._all_gather_shares("all_gather_into_tensor", output, input, exact_bytes_of(input), opts, EXACT)

    def _is_engines(self, share: Tensor, whole: Tensor) -> bool:
        """Return whether the native engine carries these exactly. A call that is wrong is left for torch to refuse."""
        return (
            self._has_engine_for(share)
            and self._has_engine_for(whole)
            and share.numel() * self._world == whole.numel()
            and share.dtype is whole.dtype
        )

    def _has_engine_for(self, tensor: Tensor) -> bool:
        """Return whether the native engine can move this tensor's values, whatever they are."""
        return (
            self._shared is not None
            and self._side(tensor) is None
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and not tensor.is_nested  # strided, but without a shape
            and tensor.numel() > 0
            and tensor.data_ptr() != 0  # a subclass that only wraps others
        )

    # ---- what they have in common ----

    def _asked_of_shares(self, tensor: Tensor, share_numel: int, reduction: str = "SUM") -> Compression:
        asked = scopes.share_compression()
        if asked.bits == 32 or share_numel < self._settings.minimal_numel:
            return EXACT
        return asked if self._shares_are_ours(tensor, reduction) else EXACT

    def _shares_are_ours(self, tensor: Tensor, reduction: str = "SUM") -> bool:
        """Whether our programs can do it."""
        return (
            tensor.dtype in _COMPRESSIBLE
            and tensor.numel() > 0
            and not self._coalescing
            and self._is_ours(tensor, "SUM" if reduction == "PREMUL_SUM" else reduction)
        )

    def _one_layer(self, share: Tensor, compression: Compression) -> tuple[Layer, ...]:
        return _layer_of(share.numel(), compression, self._settings.skip_incomplete)

    def _reduce_scatter_shares(
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
            if overlap(values, share):  # the sum would be written over what is still to be sent
                values = values.clone()
            copy_values(share, values.view(self._world, -1)[self._rank])
        reduction = reduction_name(opts.reduceOp)
        request = self._request(operation, values, [output], reduction, compression, opts, layers, stochastic)
        request.algorithm, request.share = "REDUCE_SCATTER", share
        request.factor = premultiplier(opts.reduceOp)
        if self._reducer_for(values) is None and request.factor != 1.0:  # alone
            copy_values(share, share * request.factor)
        return self._submit(request, output, share.view(output.shape))

    def _all_gather_shares(
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
        request = self._request(operation, values, [output], None, compression, opts, layers, stochastic)
        request.algorithm, request.shape = "ALL_GATHER", tuple(input.shape)
        return self._submit(request, output, gathered)

    def _check_pair(self, operation: str, share: Tensor, whole: Tensor, output: Tensor) -> None:
        """A share, and the tensor of all ranks' shares, one of which is the output."""
        self._check_usable()
        for tensor in (share, whole):
            (check_output if tensor is output else check_input)(operation, tensor)
        if whole.numel() != share.numel() * self._world or share.dtype != whole.dtype or share.device != whole.device:
            raise ValueError(
                f"{operation}: expected a tensor of {self._world} shares, one a rank, of {share.numel()} values of "
                f"{share.dtype} on {share.device} each, got {whole.numel()} values of {whole.dtype} on {whole.device}"
            )
        if self._side(share) is not None and not (lies_flat(share) and lies_flat(whole)):
            raise ValueError(f"{operation}: expected contiguous CUDA tensors: call .contiguous() first")

    def _request(
        self,
        operation: str,
        values: Tensor,
        result: list[Tensor],
        reduction: str | None,
        compression: Compression,
        opts: Any,
        layers: tuple[Layer, ...],
        stochastic: bool | None,
    ) -> Request:
        timeout_ms = milliseconds(opts.timeout, self._timeout)
        asynchronous = getattr(opts, "asyncOp", True)
        return Request(
            *(operation, values, result, reduction, compression, timeout_ms, asynchronous),
            layers=layers,
            stochastic=stochastic,
        )

    def _submit(self, request: Request, output: Tensor, written: Tensor) -> Any:
        """`written` is the output, or what is to be copied there."""
        reducer = self._reducer_for(request.tensor)
        if reducer is None:  # alone
            output.detach().copy_(written)
            return DoneWork(request.result, self._completions)
        copied = written.data_ptr() != output.data_ptr()
        if copied:
            request.asynchronous = True
        work = self._profiled(request, reducer) if is_profiled() else reducer.submit(request)
        if not copied:
            return work
        return CompositeWork([work], lambda: copy_values(output.detach(), written), [output], self._completions)


_CONTIGUOUS = torch.contiguous_format


def lies_flat(tensor: Tensor) -> bool:
    """Whether its memory holds its values, one after the other."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()) and tensor.data_ptr() != 0


@lru_cache(maxsize=1024)
def _layer_of(numel: int, compression: Compression, skip_incomplete: bool) -> tuple[Layer, ...]:
    """The same object for the same share: reducers keep what they have prepared by it."""
    return (Layer(numel, MaxMin(compression.bits, compression.block, skip_incomplete)),)


@lru_cache(maxsize=1024)
def _exact_layer_of(numel: int) -> tuple[Layer, ...]:
    return (Layer(numel, Identity()),)


def exact_bytes_of(share: Tensor) -> tuple[Layer, ...]:
    """Return the only layer of values that are moved as they are."""
    return _exact_layer_of(share.numel() * share.element_size())


def _options(kind: Any, op: Any, asynchronous: bool) -> Any:
    opts = options_from(kind, op)
    if hasattr(opts, "asyncOp"):  # torch 2.6 has it not, and all counts as asynchronous there
        opts.asyncOp = asynchronous
    return opts


def _check_layers(operation: str, layers: Sequence[Layer], numel: int) -> None:
    total = sum(layer.numel for layer in layers)
    if total != numel:
        raise ValueError(f"{operation}: expected layers of {numel} values, as many as a share has, got {total}")


def _is_concatenation(whole: Tensor, share: Tensor, world: int) -> bool:
    return share.dim() > 0 and whole.shape == (world * share.shape[0], *share.shape[1:])


def _same_kind(tensor: Tensor, other: Tensor) -> bool:
    return tensor.numel() == other.numel() and tensor.dtype == other.dtype and tensor.device == other.device
