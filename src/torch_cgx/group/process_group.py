"""`ProcessGroupCGX`: what is compressed, in which order, and who carries it. No arithmetic.

Every collective is first entered in the group's ledger, so that ranks that lose step find out. Then it goes to Gloo
(CPU) or NCCL (CUDA), which this group registers in itself, except for what we make faster or smaller, which runs as
programs: allreduces, reduce-scatters, all-gathers, broadcasts, exchanges and the barrier.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from torch_cgx import _native
from torch_cgx.config import Compression, Settings
from torch_cgx.engines.host.native import SharedGroup
from torch_cgx.engines.plain import PlainEngine
from torch_cgx.engines.recorder import GroupRecorder, Trail, process_recorder
from torch_cgx.errors import CGXError, MismatchError
from torch_cgx.group import notices
from torch_cgx.group.allreduces import EXACT, milliseconds
from torch_cgx.group.bootstrap import handshake
from torch_cgx.group.bootstrap.handshake import Joining
from torch_cgx.group.bootstrap.linked import open_linked_group
from torch_cgx.group.bootstrap.mpi_process import finalises_at_exit
from torch_cgx.group.bootstrap.rendezvous import meet
from torch_cgx.group.bootstrap.topology import topology_of
from torch_cgx.group.calls import collective_call, options_from
from torch_cgx.group.cuda import CudaSide, Engine, cuda_engine, cuda_problem, open_side
from torch_cgx.group.dynamo import skip_package
from torch_cgx.group.futures import Completions
from torch_cgx.group.layer_table import LayerTable
from torch_cgx.group.ledger import Ledger, NoLedger
from torch_cgx.group.ledger.board import BoardLedger
from torch_cgx.group.ledger.starter import Nothing, hang_up
from torch_cgx.group.ledger.store import StoreLedger
from torch_cgx.group.moves import Moves
from torch_cgx.group.reducers import PlainReducer, Reducer, SharedReducer
from torch_cgx.group.requests import Place, Request
from torch_cgx.group.trace_signal import listen
from torch_cgx.group.work import CarriedWork, CompositeWork, DoneWork, EndOf
from torch_cgx.kernels.native import default_kernels, thread_count
from torch_cgx.version import warn_of_conflict

__all__ = ["ProcessGroupCGX", "create", "live_groups"]

_BARRIER_NUMEL = 16

_groups: weakref.WeakSet[ProcessGroupCGX] = weakref.WeakSet()


def create(options: Any, backend_options: Any = None) -> ProcessGroupCGX:
    """What torch.distributed calls for backend "cgx" (registered with extended_api=True)."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ProcessGroupCGX(options.store, options.group_rank, options.group_size, options.timeout, ranks)


def live_groups() -> list[ProcessGroupCGX]:
    """The groups of this process that have not been shut down."""
    return [group for group in list(_groups) if not group.is_closed]


class ProcessGroupCGX(Moves):
    """One rank's end of a process group with backend "cgx"."""

    def __init__(
        self, store: c10d.Store, rank: int, world: int, timeout: timedelta, global_ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._rank, self._world = rank, world
        self._timeout = timeout
        self._global_ranks = tuple(global_ranks)
        self._lock = threading.Lock()  # one order of notes and of what they announce, whatever threads they come from
        self._carried: weakref.WeakSet[CarriedWork] = weakref.WeakSet()  # for the barrier, which waits for them
        self._closed = False
        self._aborting = False
        self._exiting = False
        self._forked = False
        self._has_decider = False
        self._own_compression: Compression | None = None
        self._coalescing = False
        self.layers = LayerTable()

        if self._global_ranks[rank] == 0:
            warn_of_conflict()
            notices.warn_of_unknown_variables()
        met = meet(c10d.PrefixStore("cgx meeting", store), rank, world, timeout, self._global_ranks)
        prefixed = partial(c10d.PrefixStore, store=c10d.PrefixStore(met, store))
        # Settings are compared before any connection is made, so that a wrong one fails on all ranks at once.
        self._settings = handshake.agree(prefixed("cgx"), rank, world, Settings.from_environ)
        facts = (self._settings, self._global_ranks, self._cuda_problem(), timeout)
        self._members = handshake.join(prefixed("cgx"), rank, world, *facts)
        recorder, folder = process_recorder(), self._settings.trace_folder
        self._recorder = GroupRecorder(recorder, rank, self._global_ranks, folder=folder)
        if folder is not None:
            listen(recorder.write)
        self._completions = Completions(f"cgx-futures-{rank}", self._recorder.fail)

        with handshake.naming_the_absent(rank, self._global_ranks):
            self._connect(prefixed)
        _groups.add(self)
        # Children of multiprocessing end without atexit, and forget what their parent registered.
        multiprocessing.util.Finalize(self, _close, args=(weakref.ref(self),), exitpriority=10)

    def _connect(self, prefixed: Callable[[str], c10d.Store]) -> None:
        """Open all that reaches the other ranks: Gloo's connections, shared memory and links, the CUDA side."""
        rank, world, members = self._rank, self._world, self._members
        self._shared: SharedGroup | None = None
        self._ledger: Ledger = NoLedger()
        self._cuda: CudaSide | None = None
        self._reducer: Reducer | None = None
        self._gloo: Any = dist.ProcessGroupGloo(prefixed("gloo"), rank, world, self._timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        # torch asks every group for its default backend: from 2.15 on when it attaches its flight recorder.
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        joining = Joining(prefixed, rank, world, self._timeout, self._global_ranks, self._settings, members)
        place = Place(rank, world, self._settings, self.layers, self._completions, self._recorder)
        if world > 1 and members.one_host and all(members.native) and self._settings.inner_communicator == "SHM":
            self._shared = handshake.open_shared_group(joining, "cgx")
        carrier = "GLOO"
        if world > 1 and self._shared is None and all(members.native):
            self._shared, carrier = open_linked_group(joining)
        if self._shared is not None:
            name = f"rank {self._global_ranks[rank]}"
            self._ledger = BoardLedger(self._shared, self._gloo, self._timeout, name)
            self._reducer = SharedReducer(self._shared, place, topology_of(members.nodes, self._settings))
        elif world > 1:
            handshake.check_plain(joining)
            facts = (self._gloo, rank, self._global_ranks, self._timeout)
            self._ledger = StoreLedger(prefixed("cgx inquiry"), *facts)
            threads = thread_count(self._settings.num_threads, members.ranks_here(rank))
            engine = PlainEngine(self._gloo, default_kernels(self._settings.simd, threads), rank)
            self._reducer = PlainReducer(engine, self._ledger, place, self._lock)
        sharing = None if self._shared is None or self._shared.linked else self._shared
        self._recorder.attach(self, carrier if sharing is None else "SHM", self._shared)
        if members.all_have_cuda:
            self._cuda = open_side(self._engine(joining), joining, place, sharing, self._lock, self._ledger.note)
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, self._cuda.carrier)

    def _cuda_problem(self) -> str:
        """What keeps this rank from CUDA tensors, or ""."""
        return cuda_problem()

    def _engine(self, joining: Joining) -> Engine:
        """What serves CUDA tensors, where nothing keeps any rank from them."""
        return cuda_engine(joining)

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
        self._recorder.close()
        self._note_figures()
        failed = self._ledger.has_failed
        if self._reducer is not None:
            self._reducer.close()
        if not self._forked:
            self._ledger.close()
        if self._cuda is not None:
            self._cuda.close(at_once=failed or self._aborting, at_exit=self._exiting)
        self._completions.close()

    def abort(self) -> None:
        """Like shutdown, but peers fail at once instead of when they next wait for this rank."""
        reason = CGXError(f"rank {self._global_ranks[self._rank]} called abort(): restart all ranks")
        if not self._closed and not self._forked:
            self._ledger.abort(reason)
        self._aborting = True
        self.shutdown()

    def leave_at_exit(self) -> None:
        """Like shutdown, but without NCCL's own, which waits for peers: they may wait for this process to end."""
        self._exiting = True
        self.shutdown()

    def hang_up(self) -> None:
        """At exit, where this process may have to wait for others: peers that still need it shall not wait for it."""
        if self._world > 1 and not self._forked:
            hang_up(self._gloo)

    def __del__(self) -> None:
        if getattr(self, "_reducer", None) is not None and not self._forked:
            self.leave_at_exit()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._ledger.set_timeout(timeout)
        for reducer in self._reducers():
            reducer.set_timeout(timeout)
        if self._cuda is not None:
            self._cuda.set_timeout(timeout)

    # ---- the barrier, as an allreduce ----

    def barrier(self, opts: Any = None) -> Any:
        opts = options_from(c10d.BarrierOptions, opts)
        self._check_usable()
        on_cuda = self._cuda is not None and opts.device is not None and opts.device.type == "cuda"
        if self._reducer is None or on_cuda:
            run = partial((self._cuda.carrier if self._cuda is not None and on_cuda else self._gloo).barrier, opts)
            return self._carry("barrier", run, None, None, [])
        before = [EndOf(carried) for carried in self._carried if not carried.done]
        if self._shared is None:  # that calls are compared makes all ranks wait for each other
            work = self._carry("barrier", partial(_nothing, opts), None, None, [])
        else:
            timeout_ms = milliseconds(opts.timeout, self._timeout)
            asynchronous = getattr(opts, "asyncOp", True)
            values = torch.zeros(_BARRIER_NUMEL, device="cpu")
            work = self._reducer.submit(Request("barrier", values, [], "SUM", EXACT, timeout_ms, asynchronous))
        return CompositeWork([work, *before], lambda: None, [], self._completions) if before else work

    # ---- what others carry ----

    def _backend(self, tensor: Tensor) -> Any:
        side = self._side(tensor)
        if side is not None:
            return side.carrier
        if tensor.device.type == "cpu":
            return self._gloo
        if tensor.device.type == "cuda" and self._cuda is None:
            raise MismatchError(
                f"this group serves CPU tensors alone, and got one on {tensor.device}: CUDA tensors need a GPU and "
                f"NCCL on all of its ranks; without are {self._members.without_cuda(self._global_ranks)}"
            )
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
        layout: int = 0,
    ) -> Any:
        """Enter a call in the ledger and hand it to the group that carries it (None: there is nothing to carry)."""
        self._check_usable()
        if root >= self._world:  # before it is noted: torch refuses it on some ranks, which note nothing
            raise ValueError(f"{operation}: expected a root from 0 to {self._world - 1}, got {root}")
        carrier = None if self._cuda is None else self._cuda.carrier
        side = self._cuda if run is not None and carrier is getattr(run.func, "__self__", self) else None
        with self._lock:
            call = collective_call(operation, dtype, shape, reduction=reduction, root=root, layout=layout)
            called = (operation, dtype, shape, reduction, 0, root, None, None)
            if side is not None and run is not None:
                return self._enqueue(run, call, called, result)
            asynchronous = getattr(run.args[-1], "asyncOp", True) if run is not None and run.args else True
            with self._recorder.noting_failures():
                entry = self._ledger.enter(call, asynchronous=asynchronous or run is None)
            trail = self._recorder.begin(called, "gloo", entry.number)
            with self._recording(operation, trail):
                if run is None:
                    entry.has_ended()
                    trail.finish()
                    return DoneWork(result, self._completions)
                inner = entry.start(run, asynchronous=asynchronous)
        work = CarriedWork(inner, entry, result, self._completions, trail)
        self._carried.add(work)
        return work

    def _enqueue(self, run: partial[Any], call: _native.Call, called: tuple[Any, ...], result: list[Tensor]) -> Any:
        """Enqueue a call with NCCL. The caller holds the group's lock."""
        with self._recorder.noting_failures():
            number = self._ledger.note(call)
        trail = self._recorder.begin(called, "nccl", number)
        with self._recording(called[0], trail):
            if self._shared is not None:
                self._shared.check(number)
            inner = run()
        trail.enqueued = True
        trail.finish()
        # Its wait with a time limit would abort the communicator, and it is complete on a stream. What is on the
        # caller's own stream has no handle of NCCL's, and None would crash callers in C++.
        return DoneWork(result, self._completions) if inner is None else inner

    @contextmanager
    def _recording(self, operation: str, trail: Trail) -> Iterator[None]:
        try:
            with record_function(f"cgx::{operation}"):
                yield
        except Exception as error:
            trail.finish(error)
            self._recorder.fail(error)
            raise

    def _check_usable(self) -> None:
        if self._forked:
            raise CGXError("a process group does not survive fork: call init_process_group in the child")
        if self._closed:
            raise CGXError("this process group has been destroyed: call init_process_group again")

    # ---- figures ----

    @property
    def carrier(self) -> str:
        """Return what its own allreduces go over: SHM, TCP, MPI, or GLOO without the native engine."""
        return self._recorder.carrier

    def stats(self) -> dict[str, float]:
        """What this rank has done since the group's creation or `reset_stats`."""
        counts = ("operations", "compressed_operations", "bytes_before", "bytes_after", "bytes_sent")
        found = [reducer.stats() for reducer in self._reducers()]
        return {
            name: sum(each[name] for each in found) for name in (*counts, "encode_s", "wait_s", "reduce_s", "decode_s")
        }

    def reset_stats(self) -> None:
        self._note_figures()
        for reducer in self._reducers():
            reducer.reset_stats()

    def _note_figures(self) -> None:
        if not self._forked:  # the native library may be locked by a thread that the child does not have
            compressed = self.stats()["compressed_operations"]
            notices.note_group(self._world, self._settings.minimal_numel, compressed)

    def _reducers(self) -> list[Reducer]:
        on_cuda = None if self._cuda is None else self._cuda.reducer
        return [reducer for reducer in (self._reducer, on_cuda) if reducer is not None]

    def mark_forked(self) -> None:
        self._forked = True


def _nothing(opts: Any) -> Nothing:
    return Nothing()


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
