"""`ProcessGroupCGX`: the signatures that torch.distributed, DDP and FSDP call. No decisions, no arithmetic.

Method names and argument orders are those of `torch.distributed.ProcessGroup`. Python calls them, and C++ (DDP,
functional collectives) through trampolines. Every method with a trampoline must be overridden: torch's own would call
Gloo while it holds the GIL. To free tensors, Gloo's threads wait for the GIL while they hold Gloo's lock.

`allreduces`, `shares` and `moves` decide who carries a call, and `compression` how it is compressed. `delegate` calls
torch's own groups, and `lifecycle` makes and closes the parts.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from torch_cgx.config import Settings
from torch_cgx.group.allreduces import AllReduces
from torch_cgx.group.bootstrap.handshake import Joining
from torch_cgx.group.bootstrap.mpi_process import finalises_at_exit
from torch_cgx.group.calls import options_from
from torch_cgx.group.compression import COMPRESSIBLE, CompressionRules, Override, is_summable
from torch_cgx.group.cuda import Engine, cuda_engine, cuda_problem
from torch_cgx.group.delegate import TorchDelegate
from torch_cgx.group.dynamo import skip_package
from torch_cgx.group.layer_table import LayerTable
from torch_cgx.group.lifecycle import Parts
from torch_cgx.group.moves import Moves
from torch_cgx.group.shares import Shares
from torch_cgx.group.submit import Submitter
from torch_cgx.plan.layout import Layer

__all__ = ["ProcessGroupCGX", "create", "live_groups"]

_groups: weakref.WeakSet[ProcessGroupCGX] = weakref.WeakSet()


def create(options: Any, backend_options: Any = None) -> ProcessGroupCGX:
    """Make a group. torch.distributed calls this for backend "cgx" (registered with extended_api=True)."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ProcessGroupCGX(options.store, options.group_rank, options.group_size, options.timeout, ranks)


def live_groups() -> list[ProcessGroupCGX]:
    """Return the groups of this process that have not been shut down."""
    return [group for group in list(_groups) if not group.is_closed]


class ProcessGroupCGX(dist.ProcessGroup):
    """One rank's end of a process group with backend "cgx"."""

    def __init__(
        self, store: c10d.Store, rank: int, world: int, timeout: timedelta, global_ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._rank = rank
        parts = Parts(store, rank, world, timeout, global_ranks, self._cuda_problem(), self._engine)
        self._parts = parts
        self._rules = CompressionRules(parts.context.settings)
        self._torch = TorchDelegate(parts.context, parts.sides, parts.ledger)
        submitter = Submitter(parts.context)
        common = (parts.context, parts.sides, self._rules, self._torch, submitter)
        self._all_reduces = AllReduces(*common)
        self._shares = Shares(*common, self._all_reduces)
        self._moves = Moves(parts.context, parts.sides, self._torch, submitter)

        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, parts.gloo)
        # torch asks every group for its default backend; since 2.15 it does so to attach its flight recorder.
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        if parts.cuda is not None:
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, parts.cuda.carrier)
        parts.context.recorder.attach(self, parts.carrier, parts.native)
        _groups.add(self)
        # Children of multiprocessing end without atexit, and forget what their parent registered.
        multiprocessing.util.Finalize(self, _close, args=(weakref.ref(self),), exitpriority=10)

    def _cuda_problem(self) -> str:
        """Return why this rank cannot have CUDA tensors, or ""."""
        return cuda_problem()

    def _engine(self, joining: Joining) -> Engine:
        """Return the engine for CUDA tensors. Called if all ranks can have them."""
        return cuda_engine(joining)

    # ---- all_reduce and barrier ----

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        tensors = _listed(tensors)
        if len(tensors) != 1:
            raise ValueError(f"all_reduce: expected one tensor, got a list of {len(tensors)}")
        return self._all_reduces.all_reduce(tensors[0], tensors, options_from(c10d.AllreduceOptions, opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = options_from(c10d.AllreduceCoalescedOptions, opts)
        return self._all_reduces.all_reduce_coalesced(list(tensors), opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._all_reduces.barrier(options_from(c10d.BarrierOptions, opts))

    # ---- reduce_scatter and all_gather ----

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._shares.reduce_scatter(list(outputs), inputs, options_from(c10d.ReduceScatterOptions, opts))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._shares.reduce_scatter_tensor(output, input, options_from(c10d.ReduceScatterOptions, opts))

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = _asynchronous(c10d.ReduceScatterOptions, options_from(c10d.ReduceScatterOptions, opts))
        pairs = zip(outputs, inputs, strict=True)
        parts = [self._reduce_scatter_base(output, input, opts) for output, input in pairs]
        return self._together(parts, list(outputs))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = opts if isinstance(opts, c10d.AllgatherOptions) else c10d.AllgatherOptions()
        return self._shares.all_gather(outputs, list(inputs), opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        return self._shares.all_gather_into_tensor(output, input, opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = _asynchronous(c10d.AllgatherOptions, opts)
        parts = [self._allgather_base(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return self._together(parts, list(outputs))

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        return self._torch.all_gather_coalesced(outputs, inputs, opts)

    # ---- what only moves values ----

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        if not isinstance(opts, c10d.BroadcastOptions):
            root, opts = opts, c10d.BroadcastOptions()
            opts.rootRank = root or 0
        return self._moves.broadcast(_listed(tensors), opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None
    ) -> Any:
        opts = opts if opts is not None else c10d.AllToAllOptions()
        return self._moves.all_to_all_single(output, input, output_split_sizes, input_split_sizes, opts)

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllToAllOptions()
        return self._torch.all_to_all(list(outputs), list(inputs), opts)

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> Any:
        if isinstance(tensors, Tensor):
            root, opts = opts, c10d.ReduceOptions()
            opts.rootRank = root
            if more:
                opts.reduceOp = more[0]
        return self._torch.reduce(_listed(tensors), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        opts = opts if isinstance(opts, c10d.GatherOptions) else c10d.GatherOptions()
        return self._torch.gather(outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        opts = opts if isinstance(opts, c10d.ScatterOptions) else c10d.ScatterOptions()
        return self._torch.scatter(list(outputs), inputs, opts)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._torch.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._torch.recv(tensors, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        return self._torch.recv_anysource(tensors, tag)

    # ---- several calls as one ----

    def _start_coalescing(self, device: torch.device) -> None:
        side = self._parts.cuda
        if side is None or device.type != side.kind:
            super()._start_coalescing(device)
        else:
            with self._parts.context.lock:
                side.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        side = self._parts.cuda
        return super()._end_coalescing(device) if side is None or not side.coalescing else side.end_coalescing()

    def _together(self, parts: list[Any], result: list[Tensor]) -> Any:
        """Return one handle on the operations of a coalesced call."""
        sides = self._parts.sides
        side = sides.of(result[0]) if result else sides.host
        return side.together(parts, result, self._parts.context.completions)

    # ---- what hooks and FSDP2 call ----

    def allreduce_layers(
        self,
        tensor: Tensor,
        layers: tuple[Layer, ...],
        *,
        residual: Tensor | None = None,
        stochastic: bool | None = None,
    ) -> Any:
        """Average a flat tensor whose consecutive layers have quantizers of their own.

        `residual`, float32 and of the same length, receives what this rank's encoding loses: see `Kernels`. Plans are
        cached by the identity of `layers`, so pass the same object again.
        """
        return self._all_reduces.all_reduce_layers(tensor, layers, residual, stochastic)

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
        """Sum up this rank's share. All shares consist of consecutive layers with quantizers of their own.

        `op` is SUM, AVG or PREMUL_SUM. Values that cannot be compressed are sent uncompressed.
        """
        return self._shares.reduce_scatter_layers(output, input, layers, op, stochastic, asynchronous)

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

        Every rank, including this one, ends with the decoded shares. Values that cannot be compressed are sent
        uncompressed.
        """
        return self._shares.all_gather_layers(output, input, layers, stochastic, asynchronous)

    def can_compress(self, tensor: Tensor) -> bool:
        """Return whether an average of such tensors can be compressed. If not, it is exact."""
        is_compressible = tensor.dtype in COMPRESSIBLE and is_summable(tensor, "AVG")
        return is_compressible and self._parts.sides.of(tensor).compresses

    def ignore_env_bits(self) -> None:
        """Ignore CGX_COMPRESSION_QUANTIZATION_BITS on this group from now on, because a hook's state decides."""
        self._rules.ignore_env_bits()

    def override_compression(self, override: Override | None) -> None:
        """Compress this group's all_reduces in this way from now on, unless a block specifies otherwise.

        Call it identically on all ranks. None: use the variables and `set_default` again, which an override ignores.
        """
        self._rules.override(override)

    def record_use(self, *tensors: Tensor) -> None:
        """Note that the calling thread's stream uses these tensors, which may have been made on another."""
        for tensor in tensors:
            self._parts.sides.of(tensor).record_use(tensor)

    @property
    def settings(self) -> Settings:
        return self._parts.context.settings

    @property
    def layers(self) -> LayerTable:
        """The table behind `register_layer`."""
        return self._parts.context.layers

    # ---- figures ----

    @property
    def carrier(self) -> str:
        """Return the carrier of cgx's own allreduces: SHM, TCP, MPI, or GLOO without the native engine."""
        return self._parts.carrier

    def stats(self) -> dict[str, float]:
        """Return this rank's statistics since the group's creation or `reset_stats`."""
        return self._parts.stats()

    def reset_stats(self) -> None:
        self._parts.reset_stats()

    # ---- its life ----

    def getBackendName(self) -> str:  # torch's name for it
        return "cgx"

    @property
    def is_closed(self) -> bool:
        return self._parts.context.closed

    def set_timeout(self, timeout: timedelta) -> None:
        self._parts.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group. Peers that still wait for this rank learn that it has left."""
        self._parts.close(aborting=False, at_exit=False)

    def abort(self) -> None:
        """Leave the group like `shutdown`, but peers fail at once instead of when they next wait for this rank."""
        self._parts.abort()
        self._parts.close(aborting=True, at_exit=False)

    def leave_at_exit(self) -> None:
        """Leave the group like `shutdown`, but do not wait in NCCL for peers: they may wait for this process to end."""
        self._parts.close(aborting=False, at_exit=True)

    def hang_up(self) -> None:
        """Close connections at exit, when this process may have to wait for others."""
        self._parts.hang_up()

    def mark_forked(self) -> None:
        self._parts.context.forked = True

    def __del__(self) -> None:
        if hasattr(self, "_parts") and not self._parts.context.forked:
            self.leave_at_exit()


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _asynchronous(kind: Any, given: Any) -> Any:
    """Copy the caller's options for one part of a coalesced call, made asynchronous so that every part has a Work."""
    options = kind()  # by torch's default the caller does not wait at once
    for name in ("reduceOp", "timeout"):
        if hasattr(given, name):
            setattr(options, name, getattr(given, name))
    return options


def _close(reference: weakref.ref[ProcessGroupCGX]) -> None:
    group = reference()
    if group is not None:
        group.leave_at_exit()


def _close_all() -> None:
    for group in live_groups():
        group.leave_at_exit()
    if finalises_at_exit():
        for group in list(_groups):
            group.hang_up()


def _after_fork() -> None:
    for group in list(_groups):
        group.mark_forked()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
skip_package("torch_cgx")
