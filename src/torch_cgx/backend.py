"""`ProcessGroupCGX`: what is compressed, in which order, and who carries it. No arithmetic.

Every collective is first noted on the group's board, so that ranks that lose step find out. Then it goes to Gloo
(CPU) or NCCL (CUDA), which this group registers in itself, except for what we make faster or smaller: the allreduce
family and the barrier, which run as programs over shared memory or, without it, over messages.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.autograd.graph import increment_version
from torch.autograd.profiler import record_function

from torch_cgx import _native, calls, defaults, membership
from torch_cgx.calls import collective_call, reduction_name
from torch_cgx.carried import CarriedCollectives
from torch_cgx.config import Compression, Settings
from torch_cgx.errors import CGXError
from torch_cgx.executors.messages import MessageExecutor
from torch_cgx.executors.shm import Prepared, SharedGroup, make_plan
from torch_cgx.kernels import Rounding
from torch_cgx.kernels.cpu import default_kernels
from torch_cgx.layers import LayerTable
from torch_cgx.layout import Layer, Layout, make_layout
from torch_cgx.quantizers import Identity, MaxMin
from torch_cgx.transports.gloo import GlooTransport
from torch_cgx.work import CarriedWork, Completions, DoneWork, JobWork, SharedWork

__all__ = ["ProcessGroupCGX", "create", "live_groups"]

_COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)
_OURS = (*_COMPRESSIBLE, torch.float64)
_PREPARED = 1024  # kept a group; a training has a few dozen shapes
_BARRIER_NUMEL = 16

_log = logging.getLogger("torch_cgx")
_groups: weakref.WeakSet[ProcessGroupCGX] = weakref.WeakSet()


def create(options: Any, backend_options: Any = None) -> ProcessGroupCGX:
    """What torch.distributed calls for backend "cgx" (registered with extended_api=True)."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ProcessGroupCGX(options.store, options.group_rank, options.group_size, options.timeout, ranks)


def live_groups() -> list[ProcessGroupCGX]:
    """The groups of this process that have not been shut down."""
    return [group for group in list(_groups) if not group.is_closed]


class ProcessGroupCGX(CarriedCollectives):
    """One rank's end of a process group with backend "cgx"."""

    def __init__(
        self, store: c10d.Store, rank: int, world: int, timeout: timedelta, global_ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._rank, self._world = rank, world
        self._timeout = timeout
        self._global_ranks = tuple(global_ranks)
        self._store = store
        prefixed = partial(c10d.PrefixStore, store=store)
        # Settings are compared before any connection is made, so that a wrong one fails on all ranks at once.
        self._settings = membership.agree(prefixed("cgx"), rank, Settings.from_environ)
        members = membership.join(prefixed("cgx"), rank, world, self._settings, self._global_ranks)
        self._lock = threading.Lock()  # one order of notes and submissions, whatever threads they come from
        self._completions = Completions(f"cgx-futures-{rank}")
        self._prepared: dict[object, Prepared] = {}
        self._barrier: Prepared | None = None
        self._pending: deque[tuple[int, object]] = deque()
        self._sequence = 0
        self._closed = False
        self._forked = False
        self.layers = LayerTable()
        self._messages: MessageExecutor | None = None
        self._exact_stats = {"operations": 0, "compressed_operations": 0, "bytes_before": 0, "bytes_after": 0}

        self._gloo = dist.ProcessGroupGloo(prefixed("gloo"), rank, world, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(prefixed("nccl"), rank, world, options)
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
            self._nccl: Any = nccl
        else:
            self._nccl = None

        self._shared: SharedGroup | None = None
        if world > 1 and members.one_host and all(members.native):
            self._shared = membership.open_shared_group(
                prefixed("cgx"), rank, world, self._global_ranks, calls.NAMES, self._settings
            )
        _groups.add(self)

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
        if self._shared is not None:
            self._shared.close()
        if self._messages is not None:
            self._messages.close()
        self._completions.close()
        self._pending.clear()

    def abort(self) -> None:
        """Like shutdown, but peers fail at once instead of when they next wait for this rank."""
        if self._shared is not None and not self._closed:
            self._shared.fail(CGXError(f"rank {self._global_ranks[self._rank]} called abort()"))
        self.shutdown()

    def __del__(self) -> None:
        if getattr(self, "_completions", None) is not None and not self._forked:
            self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    # ---- allreduce ----

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = _options(c10d.AllreduceOptions, opts)
        return self._allreduce_many(_as_list(tensors), opts, "all_reduce")

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._allreduce_many(
            _as_list(tensors), _options(c10d.AllreduceCoalescedOptions, opts), "all_reduce_coalesced"
        )

    def _allreduce_many(self, tensors: list[Tensor], opts: Any, operation: str) -> Any:
        reduction = reduction_name(opts.reduceOp)
        if len(tensors) == 1:
            return self._allreduce_one(tensors[0], tensors, reduction, opts)
        if operation == "all_reduce":
            raise ValueError(f"all_reduce: expected one tensor, got a list of {len(tensors)}")
        if not all(self._is_ours(tensor, reduction) for tensor in tensors):
            run = partial(self._backend(tensors[0]).allreduce_coalesced, tensors, opts)
            return self._carry(operation, run, tensors[0].dtype, None, tensors, reduction=reduction)
        # In order on one executor: the last is done when all are.
        works = [self._allreduce_one(tensor, tensors, reduction, opts) for tensor in tensors]
        return works[-1] if works else DoneWork([], self._completions)

    def _allreduce_one(self, tensor: Tensor, result: list[Tensor], reduction: str, opts: Any) -> Any:
        self._check_usable()
        if self._world == 1 and self._is_ours(tensor, reduction):
            return DoneWork(result, self._completions)
        if not self._is_ours(tensor, reduction):
            run = partial(self._backend(tensor).allreduce, [tensor], opts)
            shape = None if tensor.is_sparse else tuple(tensor.shape)
            return self._carry("all_reduce", run, tensor.dtype, shape, result, reduction=reduction)
        compression = self._compression_for(tensor)
        scale = 1.0 / self._world if reduction == "AVG" else 1.0
        timeout_ms = _milliseconds(opts.timeout, self._timeout)
        if not _profiler_enabled():
            return self._submit(
                tensor, result, compression, reduction, scale, timeout_ms, getattr(opts, "asyncOp", True)
            )
        with record_function(f"cgx::all_reduce {compression.bits} bits"):
            work = self._submit(tensor, result, compression, reduction, scale, timeout_ms, True)
        work.get_future()  # the thread that completes futures shows the operation's time in the profile
        return work

    def _is_ours(self, tensor: Tensor, reduction: str) -> bool:
        """Whether our programs can do it; all else is Gloo's or NCCL's."""
        return (
            tensor.dtype in _OURS
            and tensor.device.type == "cpu"
            and reduction in ("SUM", "AVG")
            and tensor.layout is torch.strided
        )

    def _compression_for(self, tensor: Tensor) -> Compression:
        compression = defaults.compression()
        if compression.bits != 32 and tensor.dtype in _COMPRESSIBLE and tensor.numel() >= self._settings.minimal_numel:
            return compression
        return Compression(32, compression.block)

    def _layers_for(self, tensor: Tensor, compression: Compression) -> tuple[Layer, ...]:
        if compression.bits == 32:
            return (Layer(tensor.numel(), Identity()),)
        found = self.layers.find(tensor.numel())
        if found is None:
            return (Layer(tensor.numel(), MaxMin(compression.bits, compression.block, self._settings.skip_incomplete)),)
        return tuple(
            self._layer(numel, bits or compression.bits, block or compression.block) for numel, bits, block in found
        )

    def _layer(self, numel: int, bits: int, block: int) -> Layer:
        if bits == 32 or numel < self._settings.minimal_numel:
            return Layer(numel, Identity())
        return Layer(numel, MaxMin(bits, block, self._settings.skip_incomplete))

    def _submit(
        self,
        tensor: Tensor,
        result: list[Tensor],
        compression: Compression,
        reduction: str,
        scale: float,
        timeout_ms: int,
        asynchronous: bool,
    ) -> Any:
        if not tensor.is_contiguous():
            _check_dense(tensor)
        if tensor.numel() == 0:
            return self._carry("all_reduce", None, tensor.dtype, tuple(tensor.shape), result, reduction=reduction)
        if self._shared is None:
            return self._submit_messages(tensor, result, compression, reduction, scale)
        if not tensor.is_inference():
            increment_version(tensor)  # autograd shall notice that values it saved have changed
        key = (tensor.shape, tensor.dtype, reduction, compression, self.layers.version, tensor.stride())
        prepared = self._prepared.get(key) or self._prepare(key, tensor, compression, reduction, scale)
        return self._submit_shared(self._shared, prepared, tensor, result, timeout_ms, asynchronous)

    def _submit_shared(
        self,
        shared: SharedGroup,
        prepared: Prepared,
        tensor: Tensor,
        result: list[Tensor],
        timeout_ms: int,
        asynchronous: bool,
    ) -> SharedWork:
        number, completed = shared.submit(prepared, tensor.data_ptr(), timeout_ms, wake=asynchronous)
        # A caller may drop its work and its tensor while the operation is under way.
        with self._lock:
            pending = self._pending
            while pending and pending[0][0] <= completed:
                pending.popleft()
            pending.append((number, (prepared, tensor)))
        return SharedWork(shared, number, (prepared, tensor), result, self._completions)

    def _prepare(self, key: object, tensor: Tensor, compression: Compression, reduction: str, scale: float) -> Prepared:
        call = collective_call(
            "all_reduce",
            tensor.dtype,
            tuple(tensor.shape),
            reduction=reduction,
            bits=compression.bits,
            block=compression.block if compression.bits != 32 else 0,
            layout=0 if tensor.is_contiguous() else _stable_hash(tensor.stride()),
        )
        prepared = self._prepare_call(call, tensor, compression, scale)
        if len(self._prepared) >= _PREPARED:
            self._prepared.clear()
        self._prepared[key] = prepared
        return prepared

    def _prepare_call(self, call: _native.Call, tensor: Tensor, compression: Compression, scale: float) -> Prepared:
        assert self._shared is not None
        plan = make_plan(
            self._layers_for(tensor, compression),
            self._rank,
            self._world,
            tensor.dtype,
            algorithm=self._settings.inner_reduction,
            slice_nbytes=self._settings.fusion_nbytes,
            limit_nbytes=self._shared.limit_nbytes,
        )
        return Prepared(
            plan,
            call,
            scale=scale,
            nbytes=tensor.numel() * tensor.element_size(),
            compressed=compression.bits != 32,
            stochastic=self._settings.stochastic,
            seed=self._settings.seed,
        )

    # ---- without shared memory ----

    def _executor(self) -> MessageExecutor:
        if self._messages is None:
            store = c10d.PrefixStore("messages", self._store)
            transport = GlooTransport(store, self._rank, self._world, self._timeout, self._global_ranks)
            self._messages = MessageExecutor(
                transport,
                default_kernels(self._settings.simd),
                self._rank,
                self._world,
                self._settings.cross_reduction,
                self._global_ranks,
            )
        return self._messages

    def _submit_messages(
        self, tensor: Tensor, result: list[Tensor], compression: Compression, reduction: str, scale: float
    ) -> JobWork:
        flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
        layout = make_layout(
            self._layers_for(tensor, compression), self._world, tensor.element_size(), self._settings.fusion_nbytes
        )
        agreed = _stable_hash((tuple(tensor.shape), str(tensor.dtype), reduction, compression.bits, compression.block))
        with self._lock:
            executor = self._executor()
            self._sequence += 1
            rounding = Rounding(self._settings.stochastic, self._settings.seed, self._sequence)
            job = executor.allreduce(flat, layout, scale, rounding, agreed)
            self._count_messages(tensor, layout, compression)
        return JobWork(job, result, self._completions)

    def _count_messages(self, tensor: Tensor, layout: Layout, compression: Compression) -> None:
        self._exact_stats["operations"] += 1
        self._exact_stats["compressed_operations"] += compression.bits != 32
        self._exact_stats["bytes_before"] += tensor.numel() * tensor.element_size()
        self._exact_stats["bytes_after"] += sum(part.nbytes for part in layout.slices)

    # ---- barrier and what others carry ----

    def barrier(self, opts: Any = None) -> Any:
        opts = _options(c10d.BarrierOptions, opts)
        self._check_usable()
        if self._shared is None or (opts.device is not None and opts.device.type != "cpu"):
            return self._carry("barrier", partial(self._barrier_backend(opts).barrier, opts), None, None, [])
        values = torch.zeros(_BARRIER_NUMEL)
        if self._barrier is None:
            self._barrier = self._prepare_call(collective_call("barrier"), values, Compression(32), 1.0)
        timeout_ms = _milliseconds(opts.timeout, self._timeout)
        return self._submit_shared(self._shared, self._barrier, values, [], timeout_ms, getattr(opts, "asyncOp", True))

    def _barrier_backend(self, opts: Any) -> Any:
        on_cuda = self._nccl is not None and opts.device is not None and opts.device.type == "cuda"
        return self._nccl if on_cuda else self._gloo

    def _backend(self, tensor: Tensor) -> Any:
        if tensor.device.type == "cpu":
            return self._gloo
        if tensor.device.type == "cuda" and self._nccl is not None:
            return self._nccl
        raise ValueError(f"backend cgx: expected tensors on cpu, or on cuda with NCCL; got one on {tensor.device}")

    def _carry(
        self,
        operation: str,
        run: Any,
        dtype: torch.dtype | None,
        shape: tuple[int, ...] | None,
        result: list[Tensor],
        *,
        reduction: str | None = None,
        root: int = -1,
    ) -> Any:
        """Note a call on the board and hand it to the engine that carries it."""
        self._check_usable()
        with self._lock:
            sequence = 0
            if self._shared is not None:
                call = collective_call(operation, dtype, shape, reduction=reduction, root=root)
                sequence = self._shared.note(call)
                self._shared.check(sequence, look_at_peers=False)
            if run is None:
                return DoneWork(result, self._completions)
            with record_function(f"cgx::{operation}"):
                inner = run()
        what = f"{operation} (operation {sequence} of rank {self._global_ranks[self._rank]})"
        return CarriedWork(inner, what, self._shared, sequence, result, self._completions)

    def _check_usable(self) -> None:
        if self._forked:
            raise CGXError("a process group does not survive fork: call init_process_group in the child")
        if self._closed:
            raise CGXError("this process group has been destroyed: call init_process_group again")

    # ---- figures ----

    def stats(self) -> dict[str, float]:
        """What this rank has done since the group's creation or `reset_stats`."""
        native = self._shared.stats() if self._shared is not None else _native.Stats()
        sent = self._messages.sent_nbytes if self._messages is not None else 0
        figures: dict[str, float] = {
            name: getattr(native, name) + self._exact_stats[name] for name in self._exact_stats
        }
        figures["bytes_sent"] = native.bytes_sent + sent
        for phase in ("encode", "wait", "reduce", "decode"):
            figures[f"{phase}_s"] = getattr(native, f"{phase}_ns") * 1e-9
        return figures

    def reset_stats(self) -> None:
        if self._shared is not None:
            self._shared.reset_stats()
        if self._messages is not None:
            self._messages.sent_nbytes = 0
        for name in self._exact_stats:
            self._exact_stats[name] = 0

    def mark_forked(self) -> None:
        self._forked = True


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _options(kind: Any, given: Any) -> Any:
    """torch's options, from whichever of its calling forms this one is."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None:
        options.reduceOp = given
    return options


def _milliseconds(asked: timedelta, default: timedelta) -> int:
    chosen = asked if asked > timedelta(0) else default
    return max(1, int(chosen.total_seconds() * 1000))


def _check_dense(tensor: Tensor) -> None:
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise ValueError(
            f"all_reduce: expected a tensor without gaps or overlaps in memory, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}: call .contiguous() first"
        )


def _stable_hash(facts: object) -> int:
    """The same in every process, as `hash` of a string is not."""
    import zlib

    return zlib.crc32(repr(facts).encode())


def _close_all() -> None:
    for group in live_groups():
        group.shutdown()


def _after_fork() -> None:
    for group in list(_groups):
        group.mark_forked()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
