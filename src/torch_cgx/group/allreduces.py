"""The allreduce family: what is compressed, and who carries it. No arithmetic.

Compressed ones, and on CPU tensors over shared memory the exact ones too, run as programs, by the reducer of the
tensor's device; all else is Gloo's or NCCL's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from torch_cgx import scopes
from torch_cgx.config import Compression, Settings
from torch_cgx.engines.host.native import SharedGroup
from torch_cgx.group.calls import options_from, reduction_name
from torch_cgx.group.cuda import CudaSide
from torch_cgx.group.fusion import Fused, fusable
from torch_cgx.group.layer_table import LayerTable
from torch_cgx.group.reduce_scatters import ReduceScatters
from torch_cgx.group.reducers import Reducer
from torch_cgx.group.requests import Request
from torch_cgx.group.work import CompositeWork, DoneWork
from torch_cgx.plan.layout import Layer
from torch_cgx.tensors import check_in_place, sharing_memory, strides_hash, waited_for

__all__ = ["EXACT", "Allreduces", "is_profiled", "milliseconds", "widest_compression"]

EXACT = Compression(bits=32)
_COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)
_OURS = (*_COMPRESSIBLE, torch.float64)


class Allreduces(ReduceScatters):
    """In terms of `_carry` and two reducers: of CPU tensors, and of those on the CUDA side."""

    layers: LayerTable
    _settings: Settings
    _timeout: timedelta
    _gloo: Any
    _shared: SharedGroup | None
    _reducer: Reducer | None  # of CPU tensors; None: this rank is alone
    _cuda: CudaSide | None
    _has_decider: bool
    _own_compression: Compression | None
    _coalescing: bool  # NCCL is gathering calls, which it will launch as one
    _lock: threading.Lock

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if len(tensors) != 1:
            raise ValueError(f"all_reduce: expected one tensor, got a list of {len(tensors)}")
        return self._allreduce("all_reduce", tensors[0], tensors, options_from(c10d.AllreduceOptions, opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = options_from(c10d.AllreduceCoalescedOptions, opts)
        tensors = list(tensors)
        if any(self._side(tensor) is not None for tensor in tensors):
            return self._allreduce_coalesced_on_cuda(tensors, opts)
        for tensor in tensors:
            self._backend(tensor)  # raises where it lies on another device
            check_in_place("all_reduce_coalesced", tensor, sparse=True)
        shares = sharing_memory(tensors)
        return self._allreduce_copies(tensors, shares, opts) if any(shares) else self._allreduce_apart(tensors, opts)

    def _allreduce_apart(self, tensors: list[Tensor], opts: Any) -> Any:
        """Of tensors of which none shares memory with another."""
        together = self._fusable(tensors, reduction_name(opts.reduceOp))
        alone = [tensor for tensor in tensors if not any(tensor is other for other in together)]
        fused = Fused(together) if together else None  # before any is reduced: one may be a part of another
        parts = [self._allreduce("all_reduce", tensor, [tensor], opts) for tensor in alone]
        if fused is None:
            return CompositeWork(parts, _nothing, tensors, self._completions)
        cut = self.layers.cut
        layers = tuple(layer for t in together for layer in cut(t.numel(), self._compression_for(t), self._settings))
        parts.append(self._allreduce("all_reduce", fused.flat, [fused.flat], opts, layers))
        return CompositeWork(parts, fused.hand_out, tensors, self._completions)

    def _allreduce_copies(self, tensors: list[Tensor], shares: list[bool], opts: Any) -> Any:
        """Where tensors share memory, every sum is of what was there before the call, as Gloo has it."""
        pairs = [(t, t.detach().clone() if shared else t) for t, shared in zip(tensors, shares, strict=True)]
        work = self._allreduce_apart([copy for _, copy in pairs], opts)

        def hand_out() -> None:
            for tensor, copy in pairs:
                if copy is not tensor:
                    # Of a sparse tensor, detach() is no view.
                    (tensor if tensor.is_sparse else tensor.detach()).copy_(copy)

        return CompositeWork([work], hand_out, tensors, self._completions)

    def _allreduce_coalesced_on_cuda(self, tensors: list[Tensor], opts: Any) -> Any:
        """NCCL's own, where nothing is compressed; else one after the other."""
        side, reduction = self._side(tensors[0]), reduction_name(opts.reduceOp)
        compressed = any(self._is_ours(t, reduction) and self._compression_for(t).bits != 32 for t in tensors)
        if side is None or self._coalescing or not compressed:
            run = partial(self._backend(tensors[0]).allreduce_coalesced, tensors, opts)
            return self._carry("all_reduce", run, tensors[0].dtype, None, tensors)
        parts = [self._allreduce("all_reduce", tensor, [tensor], opts) for tensor in tensors]
        return side.together(parts, tensors, self._completions)

    def _start_coalescing(self, device: torch.device) -> None:
        """What is called until `_end_coalescing`, NCCL launches as one: exact, for no program can be part of that."""
        side = self._cuda
        if side is None or device.type != side.kind:
            super()._start_coalescing(device)
        else:
            with self._lock:
                side.carrier._start_coalescing()
                self._coalescing = True

    def _end_coalescing(self, device: torch.device) -> Any:
        if not self._coalescing:
            return super()._end_coalescing(device)
        assert self._cuda is not None
        self._coalescing = False
        return self._cuda.carrier._end_coalescing()

    def _together(self, parts: list[Any], result: list[Tensor]) -> Any:
        side = self._side(result[0]) if result else None
        if side is not None:
            return side.together(parts, result, self._completions)
        return CompositeWork(parts, _nothing, result, self._completions)

    def _fusable(self, tensors: list[Tensor], reduction: str) -> list[Tensor]:
        """Also where each is too small to be compressed: one message instead of many is what they gain."""
        if self._reducer is None or self._default().bits == 32:
            return []
        return fusable([t for t in tensors if self._is_ours(t, reduction) and t.dtype in _COMPRESSIBLE])

    def allreduce_layers(
        self,
        tensor: Tensor,
        layers: tuple[Layer, ...],
        *,
        residual: Tensor | None = None,
        stochastic: bool | None = None,
    ) -> Any:
        """Average a flat tensor whose consecutive layers have quantizers of their own: what hooks call.

        `residual`, float32 and as long, gets what this rank's encoding loses: see `Kernels`.
        """
        if tensor.device.type == "cpu" and not self._is_ours(tensor, "AVG"):  # sparse, say: Gloo's, which knows no AVG
            tensor.div_(self._world)
            opts = options_from(c10d.AllreduceOptions, dist.ReduceOp.SUM)
        else:
            opts = options_from(c10d.AllreduceOptions, dist.ReduceOp.AVG)
        if hasattr(opts, "asyncOp"):  # torch 2.6 has it not, and all counts as asynchronous there
            opts.asyncOp = True  # hooks never wait
        return self._allreduce("all_reduce", tensor, [tensor], opts, layers, residual, stochastic)

    def heed_no_variable(self) -> None:
        """From now on CGX_COMPRESSION_QUANTIZATION_BITS compresses nothing on this group: a hook's state decides.

        For good, not for as long as the state lives: ranks collect garbage at different times.
        """
        self._has_decider = True

    def can_compress(self, tensor: Tensor) -> bool:
        """Whether an average of such tensors would be compressed if asked for; else it is exact."""
        return tensor.dtype in _COMPRESSIBLE and self._is_ours(tensor, "AVG")

    def keep(self, *tensors: Tensor) -> None:
        """The calling thread's stream uses these, which may have been made on another: what futures' callbacks need."""
        for tensor in tensors:
            side = self._side(tensor)
            if side is not None:
                side.keep(tensor)

    @property
    def settings(self) -> Settings:
        return self._settings

    def _allreduce(
        self,
        operation: str,
        tensor: Tensor,
        result: list[Tensor],
        opts: Any,
        layers: tuple[Layer, ...] | None = None,
        residual: Tensor | None = None,
        stochastic: bool | None = None,
    ) -> Any:
        """Reduce in place, by us or by whoever can. Only what the user called an all_reduce is compressed."""
        self._check_usable()
        tensor = waited_for(tensor)
        on_cuda = self._side(tensor) is not None
        if not on_cuda:  # NCCL looks at its tensors itself
            check_in_place(operation, tensor, sparse=True)
        reduction = reduction_name(opts.reduceOp)
        if layers is not None:
            compression = widest_compression(layers)
        else:
            compression = self._compression_for(tensor) if operation == "all_reduce" else EXACT
        if on_cuda and self._coalescing:
            compression = EXACT
        if not self._is_ours(tensor, reduction) or (on_cuda and compression.bits == 32):
            shape = None if tensor.is_sparse else tuple(tensor.shape)
            run = partial(self._backend(tensor).allreduce, [tensor], _allreduce_options(opts, opts.reduceOp))
            layout = 0 if tensor.is_sparse else strides_hash(tensor)
            return self._carry(operation, run, tensor.dtype, shape, result, reduction=reduction, layout=layout)
        reducer = self._reducer_for(tensor)
        if reducer is None:  # alone, the sum and the average are what is there
            return DoneWork(result, self._completions)
        if on_cuda:
            check_in_place(operation, tensor)
        if tensor.numel() == 0:
            return self._carry(operation, None, tensor.dtype, tuple(tensor.shape), result, reduction=reduction)
        if self._shared is None and compression.bits == 32:
            return self._allreduce_by_gloo(operation, tensor, result, reduction, opts)
        timeout_ms = milliseconds(opts.timeout, self._timeout)
        asynchronous = getattr(opts, "asyncOp", True)
        request = Request(
            *(operation, tensor, result, reduction, compression, timeout_ms, asynchronous),
            layers=layers,
            residual=residual,
            stochastic=stochastic,
        )
        return self._profiled(request, reducer) if is_profiled() else reducer.submit(request)

    def _side(self, tensor: Tensor) -> CudaSide | None:
        """The CUDA side, for the tensors that are its own."""
        return self._cuda if self._cuda is not None and tensor.device.type == self._cuda.kind else None

    def _reducer_for(self, tensor: Tensor) -> Reducer | None:
        side = self._side(tensor)
        return self._reducer if side is None else side.reducer

    def _is_ours(self, tensor: Tensor, reduction: str) -> bool:
        """Whether our programs can do it; all else is Gloo's or NCCL's."""
        side = self._side(tensor)
        return (
            tensor.dtype in _OURS
            and (tensor.device.type == "cpu" if side is None else side.reducer is not None)
            and reduction in ("SUM", "AVG")
            and tensor.layout is torch.strided
        )

    def compress_all_reduces(self, compression: Compression | None) -> None:
        """Compress this group's all_reduces from now on, unless a block says otherwise; all ranks alike.

        None: as the variables and `set_default` say, which until then count for nothing.
        """
        self._own_compression = compression

    def _default(self) -> Compression:
        if self._own_compression is not None and not scopes.in_block():
            return self._own_compression
        return scopes.asked_compression() if self._has_decider else scopes.compression()

    def _compression_for(self, tensor: Tensor) -> Compression:
        compression = self._default()
        if compression.bits == 32 or tensor.dtype not in _COMPRESSIBLE:
            return EXACT
        return compression if tensor.numel() >= self._settings.minimal_numel else EXACT

    def _allreduce_by_gloo(
        self, operation: str, tensor: Tensor, result: list[Tensor], reduction: str, opts: Any
    ) -> Any:
        """Exact, where there is no shared memory: Gloo is faster than programs driven from Python. It knows no AVG."""
        average = reduction == "AVG"
        # The sum of which an average is made might overflow 16 bits.
        summed = tensor.detach().float() if average and tensor.element_size() == 2 else tensor
        run = partial(self._gloo.allreduce, [summed], _allreduce_options(opts, dist.ReduceOp.SUM))
        work = self._carry(operation, run, tensor.dtype, tuple(tensor.shape), result, reduction=reduction)
        if not average:
            return work
        return CompositeWork(
            [work], lambda: tensor.detach().copy_(summed.detach().div_(self._world)), result, self._completions
        )

    def _profiled(self, request: Request, reducer: Reducer) -> Any:
        request.asynchronous = True
        bits = "" if request.only_moves else f" {request.compression.bits} bits"
        with record_function(f"cgx::{request.operation}{bits}"):
            work = reducer.submit(request)
        if reducer is self._reducer:  # what runs on a device, the profiler sees there
            self._completions.watch(work, f"cgx::run {request.operation}")
        return work


def _nothing() -> None:
    pass


def is_profiled() -> bool:
    # The second knows of this thread alone, and nothing of a profiler that was started with profile_all_threads.
    return profiler._is_profiler_enabled or _profiler_enabled()


def _allreduce_options(given: Any, reduction: Any) -> Any:
    """Options for Gloo's allreduce from those of whatever is made of it."""
    options = c10d.AllreduceOptions()
    options.reduceOp = reduction
    options.timeout = given.timeout
    if hasattr(given, "asyncOp") and hasattr(options, "asyncOp"):  # of torch 2.6, only some options have it
        options.asyncOp = given.asyncOp
    return options


def widest_compression(layers: Sequence[Layer]) -> Compression:
    """What describes a call of several layers: for errors and profiles."""
    compressed = [layer.quantizer for layer in layers if layer.quantizer.bits != 32]
    if not compressed:
        return EXACT
    widest = max(compressed, key=lambda quantizer: quantizer.bits)
    return Compression(widest.bits, widest.block)


def milliseconds(asked: timedelta, default: timedelta) -> int:
    chosen = asked if asked > timedelta(0) else default
    return max(1, int(chosen.total_seconds() * 1000))
