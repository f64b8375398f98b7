"""Dispatch of the allreduce family and the barrier: what is compressed, and who carries it. No arithmetic.

Compressed ones run as programs of a side's reducer. So do exact ones if that is faster than torch's own group.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from torch_cgx.config import EXACT
from torch_cgx.engines.recorder import OpInfo
from torch_cgx.group.calls import options_from, reduction_name
from torch_cgx.group.compression import COMPRESSIBLE, CompressionRules, is_summable, widest_compression
from torch_cgx.group.context import GroupContext
from torch_cgx.group.delegate import TorchCall, TorchDelegate
from torch_cgx.group.fusion import Fused, fusable
from torch_cgx.group.requests import Request
from torch_cgx.group.sides import Side, Sides
from torch_cgx.group.submit import Submitter
from torch_cgx.group.work import CompositeWork, EndOf
from torch_cgx.plan.layout import Layer
from torch_cgx.tensors import check_in_place, sharing_memory, strides_hash, waited_for

__all__ = ["AllReduces"]

_BARRIER_NUMEL = 16


class AllReduces:
    """Decides who carries an all_reduce."""

    def __init__(
        self,
        context: GroupContext,
        sides: Sides,
        rules: CompressionRules,
        torch_delegate: TorchDelegate,
        submitter: Submitter,
    ) -> None:
        self._context = context
        self._sides = sides
        self._rules = rules
        self._torch = torch_delegate
        self._submitter = submitter

    def all_reduce(self, tensor: Tensor, result: list[Tensor], opts: Any) -> Any:
        """Reduce a tensor in place, compressed by the group's rules."""
        self._context.check_usable()
        tensor = waited_for(tensor)
        compression = self._rules.for_all_reduce(tensor)
        layers = None if compression.is_exact else self._rules.layers_of(tensor)
        return self._reduce(Request("all_reduce", tensor, result, None, compression, 0, True, layers=layers), opts)

    def all_reduce_exactly(self, operation: str, tensor: Tensor, opts: Any) -> Any:
        """Reduce a tensor in place, uncompressed, for a user's call of another name (`operation`)."""
        self._context.check_usable()
        tensor = waited_for(tensor)
        return self._reduce(Request(operation, tensor, [tensor], None, EXACT, 0, True), opts)

    def all_reduce_layers(
        self, tensor: Tensor, layers: tuple[Layer, ...], residual: Tensor | None, stochastic: bool | None
    ) -> Any:
        """Average a flat tensor whose consecutive layers have quantizers of their own."""
        self._context.check_usable()
        if tensor.device.type == "cpu" and not is_summable(tensor, "AVG"):  # e.g. sparse: Gloo has no AVG
            tensor.div_(self._context.world)
            opts = options_from(c10d.AllreduceOptions, dist.ReduceOp.SUM)
        else:
            opts = options_from(c10d.AllreduceOptions, dist.ReduceOp.AVG)
        if hasattr(opts, "asyncOp"):  # torch 2.6 lacks it, and there every call counts as asynchronous
            opts.asyncOp = True  # hooks never wait
        compression = widest_compression(layers)
        request = Request("all_reduce", waited_for(tensor), [tensor], None, compression, 0, True, layers=layers)
        request.residual, request.stochastic = residual, stochastic
        return self._reduce(request, opts)

    def _reduce(self, request: Request, opts: Any) -> Any:
        """Reduce in place, by cgx's programs or by torch's own group. Completes the request from the options."""
        tensor, operation, result = request.tensor, request.operation, request.result
        side = self._sides.of(tensor)
        if not side.enqueues:  # NCCL checks its tensors itself
            check_in_place(operation, tensor, sparse=True)
        reduction = reduction_name(opts.reduceOp)
        if side.coalescing or not side.compresses:
            request.compression = EXACT
        if not is_summable(tensor, reduction) or (side.enqueues and request.compression.is_exact):
            shape = None if tensor.is_sparse else tuple(tensor.shape)
            call = TorchCall(side, "allreduce", ([tensor], _allreduce_options(opts, opts.reduceOp)))
            layout = 0 if tensor.is_sparse else strides_hash(tensor)
            return self._torch.carry(OpInfo(operation, tensor.dtype, shape, reduction), call, result, layout=layout)
        if side.enqueues:
            check_in_place(operation, tensor)
        if tensor.numel() == 0:
            return self._torch.note(OpInfo(operation, tensor.dtype, tuple(tensor.shape), reduction), result)
        if request.compression.is_exact and not side.carries_exact:
            return self._sum_by_torch(request, side, reduction, opts)
        request.reduction = reduction
        request.timeout_ms = self._context.milliseconds(opts.timeout)
        request.asynchronous = getattr(opts, "asyncOp", True)
        return self._submitter.submit(request, side)

    def _sum_by_torch(self, request: Request, side: Side, reduction: str, opts: Any) -> Any:
        """Reduce by Gloo, which is faster than programs without the native engine but has no AVG."""
        tensor, result = request.tensor, request.result
        average = reduction == "AVG"
        # The sum behind an average might overflow 16 bits.
        summed = tensor.detach().float() if average and tensor.element_size() == 2 else tensor
        call = TorchCall(side, "allreduce", ([summed], _allreduce_options(opts, dist.ReduceOp.SUM)))
        work = self._torch.carry(OpInfo(request.operation, tensor.dtype, tuple(tensor.shape), reduction), call, result)
        if not average:
            return work

        def divide() -> None:
            tensor.detach().copy_(summed.detach().div_(self._context.world))

        return CompositeWork([work], divide, result, self._context.completions)

    # ---- several at once ----

    def all_reduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce several tensors in place."""
        self._context.check_usable()
        sides = [self._sides.of(tensor) for tensor in tensors]  # raises if one is on an unsupported device
        if any(side.enqueues for side in sides):
            return self._coalesce_on_device(tensors, sides[0], opts)
        for tensor in tensors:
            check_in_place("all_reduce_coalesced", tensor, sparse=True)
        shares = sharing_memory(tensors)
        return self._reduce_copies(tensors, shares, opts) if any(shares) else self._reduce_apart(tensors, opts)

    def _reduce_apart(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce tensors that share no memory with each other."""
        together = self._fusable(tensors, reduction_name(opts.reduceOp))
        alone = [tensor for tensor in tensors if not any(tensor is other for other in together)]
        fused = Fused(together) if together else None  # before any is reduced: one may be a part of another
        parts = [self.all_reduce(tensor, [tensor], opts) for tensor in alone]
        completions = self._context.completions
        if fused is None:
            return self._sides.host.together(parts, tensors, completions)
        layers = _interned(tuple(layer for tensor in together for layer in self._layers_of(tensor)))
        request = Request("all_reduce", fused.flat, [fused.flat], None, widest_compression(layers), 0, True)
        request.layers = layers
        parts.append(self._reduce(request, opts))
        return CompositeWork(parts, fused.hand_out, tensors, completions)

    def _reduce_copies(self, tensors: list[Tensor], shares: list[bool], opts: Any) -> Any:
        """Reduce tensors that share memory. Like Gloo, sum the values from before the call."""
        pairs = [(t, t.detach().clone() if shared else t) for t, shared in zip(tensors, shares, strict=True)]
        work = self._reduce_apart([copy for _, copy in pairs], opts)

        def hand_out() -> None:
            for tensor, copy in pairs:
                if copy is not tensor:
                    # detach() of a sparse tensor is not a view.
                    (tensor if tensor.is_sparse else tensor.detach()).copy_(copy)

        return CompositeWork([work], hand_out, tensors, self._context.completions)

    def _coalesce_on_device(self, tensors: list[Tensor], side: Side, opts: Any) -> Any:
        """Let NCCL reduce them if nothing is compressed, else reduce one after the other."""
        reduction = reduction_name(opts.reduceOp)
        compressed = any(is_summable(t, reduction) and not self._rules.for_all_reduce(t).is_exact for t in tensors)
        if not side.enqueues or side.coalescing or not compressed:
            call = TorchCall(side, "allreduce_coalesced", (tensors, opts))
            return self._torch.carry(OpInfo("all_reduce", tensors[0].dtype), call, tensors)
        parts = [self.all_reduce(tensor, [tensor], opts) for tensor in tensors]
        return side.together(parts, tensors, self._context.completions)

    def _fusable(self, tensors: list[Tensor], reduction: str) -> list[Tensor]:
        """Return the tensors worth fusing into one message, even if each is too small to be compressed."""
        if self._context.world == 1 or self._rules.default().is_exact:
            return []
        return fusable([t for t in tensors if is_summable(t, reduction) and t.dtype in COMPRESSIBLE])

    def _layers_of(self, tensor: Tensor) -> tuple[Layer, ...]:
        context, compression = self._context, self._rules.for_all_reduce(tensor)
        own = None if compression.is_exact else self._rules.layers_of(tensor)
        return own or context.layers.cut(tensor.numel(), compression, context.settings)

    # ---- the barrier, as an allreduce ----

    def barrier(self, opts: Any) -> Any:
        """Wait for all ranks, and for the operations that torch's own group has in progress here."""
        self._context.check_usable()
        side = self._sides.for_barrier(opts.device)
        if side.enqueues:
            return self._torch.carry(OpInfo("barrier"), TorchCall(side, "barrier", (opts,)), [])
        before = [EndOf(work) for work in self._torch.under_way()]
        asynchronous = getattr(opts, "asyncOp", True)
        if side.carries_exact:
            values = torch.zeros(_BARRIER_NUMEL, device="cpu")
            timeout_ms = self._context.milliseconds(opts.timeout)
            work = side.reducer.submit(Request("barrier", values, [], "SUM", EXACT, timeout_ms, asynchronous))
        else:
            work = self._torch.compare(OpInfo("barrier"), [], asynchronous=asynchronous)
        return CompositeWork([work, *before], lambda: None, [], self._context.completions) if before else work


@lru_cache(maxsize=1024)
def _interned(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return the same object for equal layers, because reducers use its identity as a cache key."""
    return layers


def _allreduce_options(given: Any, reduction: Any) -> Any:
    """Return options for Gloo's allreduce, copied from those of the user's call."""
    options = c10d.AllreduceOptions()
    options.reduceOp = reduction
    options.timeout = given.timeout
    if hasattr(given, "asyncOp") and hasattr(options, "asyncOp"):  # in torch 2.6 only some options have it
        options.asyncOp = given.asyncOp
    return options
