"""`ProcessGroupCGX`: what is compressed, in which order, and who carries it. No arithmetic.

Every collective is first noted on the group's board, so that ranks that lose step find out. Then it goes to Gloo
(CPU) or NCCL (CUDA), which this group registers in itself, except for what we make faster or smaller: the allreduce
family, the reduce-scatters (which Gloo makes of allreduces too) and the barrier, which run as programs.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import threading
import weakref
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

from torch_cgx import calls, defaults, membership
from torch_cgx.calls import collective_call, options_from, reduction_name
from torch_cgx.config import Compression, Settings
from torch_cgx.errors import CGXError
from torch_cgx.executors.shm import SharedGroup
from torch_cgx.fusion import Fused, fusable
from torch_cgx.layers import LayerTable
from torch_cgx.layout import Layer
from torch_cgx.nodes import open_executor
from torch_cgx.reduce_scatters import ReduceScatters
from torch_cgx.reducers import MessageReducer, Place, Reducer, Request, SharedReducer
from torch_cgx.transports.gloo import hang_up
from torch_cgx.transports.mpi_process import finalises_at_exit
from torch_cgx.untraced import skip_package
from torch_cgx.work import CarriedWork, Completions, CompositeWork, DoneWork

__all__ = ["ProcessGroupCGX", "create", "live_groups"]

_COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)
_OURS = (*_COMPRESSIBLE, torch.float64)
_EXACT = Compression(bits=32)
_BARRIER_NUMEL = 16

_groups: weakref.WeakSet[ProcessGroupCGX] = weakref.WeakSet()


def create(options: Any, backend_options: Any = None) -> ProcessGroupCGX:
    """What torch.distributed calls for backend "cgx" (registered with extended_api=True)."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ProcessGroupCGX(options.store, options.group_rank, options.group_size, options.timeout, ranks)


def live_groups() -> list[ProcessGroupCGX]:
    """The groups of this process that have not been shut down."""
    return [group for group in list(_groups) if not group.is_closed]


class ProcessGroupCGX(ReduceScatters):
    """One rank's end of a process group with backend "cgx"."""

    def __init__(
        self, store: c10d.Store, rank: int, world: int, timeout: timedelta, global_ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._rank, self._world = rank, world
        self._timeout = timeout
        self._global_ranks = tuple(global_ranks)
        self._lock = threading.Lock()  # one order of notes and of what they announce, whatever threads they come from
        self._completions = Completions(f"cgx-futures-{rank}")
        self._carried: weakref.WeakSet[CarriedWork] = weakref.WeakSet()  # for the barrier, which waits for them
        self._closed = False
        self._forked = False
        self._has_decider = False
        self.layers = LayerTable()

        prefixed = partial(c10d.PrefixStore, store=store)
        # Settings are compared before any connection is made, so that a wrong one fails on all ranks at once.
        self._settings = membership.agree(prefixed("cgx"), rank, world, Settings.from_environ)
        members = membership.join(prefixed("cgx"), rank, world, self._settings, self._global_ranks)

        self._gloo: Any = dist.ProcessGroupGloo(prefixed("gloo"), rank, world, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._nccl: Any = None
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._nccl = dist.ProcessGroupNCCL(prefixed("nccl"), rank, world, options)
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, self._nccl)

        place = Place(rank, world, self._settings, self.layers, self._completions)
        self._shared: SharedGroup | None = None
        self._reducer: Reducer | None = None
        if world > 1 and members.one_host and all(members.native) and self._settings.inner_communicator == "SHM":
            self._shared = membership.open_shared_group(
                prefixed("cgx"), rank, world, self._global_ranks, calls.NAMES, self._settings
            )
        if self._shared is not None:
            self._reducer = SharedReducer(self._shared, place)
        elif world > 1:
            executor, topology = open_executor(
                prefixed, rank, world, timeout, self._global_ranks, members, self._settings
            )
            self._reducer = MessageReducer(executor, topology, place)
        _groups.add(self)
        # Children of multiprocessing end without atexit, and forget what their parent registered.
        multiprocessing.util.Finalize(self, _close, args=(weakref.ref(self),), exitpriority=10)

    # ---- what torch asks a group ----

    def getBackendName(self) -> str:  # torch's name for it
        return "cgx"

    @property
    def is_closed(self) -> bool:
        return self._closed

    def shutdown(self) -> None:
        """Leave the group. Peers that still wait for this rank are told that it has left."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._reducer is not None:
            self._reducer.close()
        if self._nccl is not None:
            self._nccl.shutdown()
        self._completions.close()

    def abort(self) -> None:
        """Like shutdown, but peers fail at once instead of when they next wait for this rank."""
        if self._shared is not None and not self._closed:
            self._shared.fail(CGXError(f"rank {self._global_ranks[self._rank]} called abort()"))
        self.shutdown()

    def hang_up(self) -> None:
        """At exit, where this process may have to wait for others: peers that still need it shall not wait for it."""
        if self._world > 1 and not self._forked:
            hang_up(self._gloo)

    def __del__(self) -> None:
        if getattr(self, "_reducer", None) is not None and not self._forked:
            self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._reducer is not None:
            self._reducer.set_timeout(timeout)

    # ---- allreduce ----

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if len(tensors) != 1:
            raise ValueError(f"all_reduce: expected one tensor, got a list of {len(tensors)}")
        return self._allreduce("all_reduce", tensors[0], tensors, options_from(c10d.AllreduceOptions, opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = options_from(c10d.AllreduceCoalescedOptions, opts)
        tensors = list(tensors)
        if any(tensor.device.type != "cpu" for tensor in tensors):
            run = partial(self._backend(tensors[0]).allreduce_coalesced, tensors, opts)
            return self._carry("all_reduce", run, tensors[0].dtype, None, tensors)
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

    def _fusable(self, tensors: list[Tensor], reduction: str) -> list[Tensor]:
        """Also where each is too small to be compressed: one message instead of many is what they gain."""
        if self._reducer is None or self._default().bits == 32:
            return []
        ours = fusable([t for t in tensors if self._is_ours(t, reduction) and t.dtype in _COMPRESSIBLE])
        for tensor in ours:
            _check_dense(tensor)
        return ours

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
        reduction = reduction_name(opts.reduceOp)
        if not self._is_ours(tensor, reduction):
            shape = None if tensor.is_sparse else tuple(tensor.shape)
            run = partial(self._backend(tensor).allreduce, [tensor], _allreduce_options(opts, opts.reduceOp))
            return self._carry(operation, run, tensor.dtype, shape, result, reduction=reduction)
        if self._reducer is None:  # alone, the sum and the average are what is there
            return DoneWork(result, self._completions)
        if not tensor.is_contiguous():
            _check_dense(tensor)
        if layers is not None:
            compression = _widest_compression(layers)
        else:
            compression = self._compression_for(tensor) if operation == "all_reduce" else _EXACT
        if tensor.numel() == 0:
            return self._carry(operation, None, tensor.dtype, tuple(tensor.shape), result, reduction=reduction)
        if self._shared is None and compression.bits == 32:
            return self._allreduce_by_gloo(operation, tensor, result, reduction, opts)
        timeout_ms = _milliseconds(opts.timeout, self._timeout)
        asynchronous = getattr(opts, "asyncOp", True)
        request = Request(
            *(operation, tensor, result, reduction, compression, timeout_ms, asynchronous),
            layers=layers,
            residual=residual,
            stochastic=stochastic,
        )
        return self._profiled(request) if _is_profiled() else self._reducer.submit(request)

    def _is_ours(self, tensor: Tensor, reduction: str) -> bool:
        """Whether our programs can do it; all else is Gloo's or NCCL's."""
        return (
            tensor.dtype in _OURS
            and tensor.device.type == "cpu"
            and reduction in ("SUM", "AVG")
            and tensor.layout is torch.strided
        )

    def _default(self) -> Compression:
        return defaults.asked_compression() if self._has_decider else defaults.compression()

    def _compression_for(self, tensor: Tensor) -> Compression:
        compression = self._default()
        if compression.bits == 32 or tensor.dtype not in _COMPRESSIBLE:
            return _EXACT
        return compression if tensor.numel() >= self._settings.minimal_numel else _EXACT

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

    def _profiled(self, request: Request) -> Any:
        assert self._reducer is not None
        request.asynchronous = True
        with record_function(f"cgx::{request.operation} {request.compression.bits} bits"):
            work = self._reducer.submit(request)
        self._completions.watch(work, f"cgx::run {request.operation}")
        return work

    # ---- the barrier, as an allreduce ----

    def barrier(self, opts: Any = None) -> Any:
        opts = options_from(c10d.BarrierOptions, opts)
        self._check_usable()
        on_cuda = self._nccl is not None and opts.device is not None and opts.device.type == "cuda"
        if self._shared is None or self._reducer is None or on_cuda:
            run = partial((self._nccl if on_cuda else self._gloo).barrier, opts)
            return self._carry("barrier", run, None, None, [])
        timeout_ms = _milliseconds(opts.timeout, self._timeout)
        asynchronous = getattr(opts, "asyncOp", True)
        values = torch.zeros(_BARRIER_NUMEL)
        work = self._reducer.submit(Request("barrier", values, [], "SUM", _EXACT, timeout_ms, asynchronous))
        before = [carried for carried in self._carried if not carried.done]
        return CompositeWork([work, *before], _nothing, [], self._completions) if before else work

    # ---- what others carry ----

    def _backend(self, tensor: Tensor) -> Any:
        if tensor.device.type == "cpu":
            return self._gloo
        if tensor.device.type == "cuda" and self._nccl is not None:
            return self._nccl
        raise ValueError(f"backend cgx: expected tensors on cpu, or on cuda with NCCL; got one on {tensor.device}")

    def _carry(
        self,
        operation: str,
        run: partial[Any] | None,
        dtype: torch.dtype | None,
        shape: tuple[int, ...] | None,
        result: list[Tensor],
        *,
        reduction: str | None = None,
        root: int = -1,
    ) -> Any:
        """Note a call on the board and hand it to the engine that carries it (None: there is nothing to carry)."""
        self._check_usable()
        with self._lock:
            sequence = 0
            if self._shared is not None:
                call = collective_call(operation, dtype, shape, reduction=reduction, root=root)
                sequence = self._shared.note(call)
                self._shared.check(sequence)
            if run is None:
                return DoneWork(result, self._completions)
            with record_function(f"cgx::{operation}"):
                inner = run()
        if self._nccl is not None and getattr(run.func, "__self__", None) is self._nccl:
            return inner  # its wait with a time limit would abort the communicator, and it is complete on a stream
        what = f"{operation} (operation {sequence} of rank {self._global_ranks[self._rank]})"
        work = CarriedWork(inner, what, self._shared, sequence, result, self._completions)
        self._carried.add(work)
        return work

    def _check_usable(self) -> None:
        if self._forked:
            raise CGXError("a process group does not survive fork: call init_process_group in the child")
        if self._closed:
            raise CGXError("this process group has been destroyed: call init_process_group again")

    # ---- figures ----

    def stats(self) -> dict[str, float]:
        """What this rank has done since the group's creation or `reset_stats`."""
        empty = ("operations", "compressed_operations", "bytes_before", "bytes_after", "bytes_sent")
        phases = ("encode_s", "wait_s", "reduce_s", "decode_s")
        return self._reducer.stats() if self._reducer is not None else dict.fromkeys(empty + phases, 0)

    def reset_stats(self) -> None:
        if self._reducer is not None:
            self._reducer.reset_stats()

    def mark_forked(self) -> None:
        self._forked = True


def _nothing() -> None:
    pass


def _is_profiled() -> bool:
    # The second knows of this thread alone, and nothing of a profiler that was started with profile_all_threads.
    return profiler._is_profiler_enabled or _profiler_enabled()


def _allreduce_options(given: Any, reduction: Any) -> Any:
    """Options for Gloo's allreduce from those of whatever is made of it."""
    options = c10d.AllreduceOptions()
    options.reduceOp = reduction
    options.timeout = given.timeout
    return options


def _widest_compression(layers: Sequence[Layer]) -> Compression:
    """What describes a call of several layers: for errors and profiles."""
    compressed = [layer.quantizer for layer in layers if layer.quantizer.bits != 32]
    if not compressed:
        return _EXACT
    widest = max(compressed, key=lambda quantizer: quantizer.bits)
    return Compression(widest.bits, widest.block)


def _milliseconds(asked: timedelta, default: timedelta) -> int:
    chosen = asked if asked > timedelta(0) else default
    return max(1, int(chosen.total_seconds() * 1000))


def _check_dense(tensor: Tensor) -> None:
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise ValueError(
            f"all_reduce: expected a tensor without gaps or overlaps in memory, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}: call .contiguous() first"
        )


def _close(reference: weakref.ref[ProcessGroupCGX]) -> None:
    group = reference()
    if group is not None:
        group.shutdown()


def _close_all() -> None:
    for group in live_groups():
        group.shutdown()
    if finalises_at_exit():
        for group in list(_groups):
            group.hang_up()


def _after_fork() -> None:
    for group in list(_groups):
        group.mark_forked()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
skip_package("torch_cgx")
