"""The life of a group's parts: made when the group is created, closed when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from torch_cgx.config import Settings
from torch_cgx.engines.host.native import SharedGroup
from torch_cgx.engines.plain import PlainEngine
from torch_cgx.engines.recorder import GroupRecorder, process_recorder
from torch_cgx.errors import CGXError
from torch_cgx.group import notices
from torch_cgx.group.bootstrap import handshake
from torch_cgx.group.bootstrap.handshake import Joining
from torch_cgx.group.bootstrap.linked import open_linked_group
from torch_cgx.group.bootstrap.rendezvous import meet
from torch_cgx.group.bootstrap.topology import Chooser
from torch_cgx.group.context import GroupContext
from torch_cgx.group.cuda import CudaSide, Engine, open_side
from torch_cgx.group.futures import Completions
from torch_cgx.group.layer_table import LayerTable
from torch_cgx.group.ledger import Ledger, NoLedger
from torch_cgx.group.ledger.board import BoardLedger
from torch_cgx.group.ledger.starter import hang_up
from torch_cgx.group.ledger.store import StoreLedger
from torch_cgx.group.reducers import LoneReducer, PlainReducer, SharedReducer, no_figures
from torch_cgx.group.sides import CpuSide, Side, Sides
from torch_cgx.group.trace_signal import listen
from torch_cgx.kernels.native import default_kernels, thread_count
from torch_cgx.plan.costs import HOST
from torch_cgx.version import warn_of_conflict

__all__ = ["Parts"]


class Parts:
    """All parts of one rank's end of a group."""

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        world: int,
        timeout: timedelta,
        global_ranks: Sequence[int],
        cuda_problem: str,
        make_engine: Callable[[Joining], Engine],
    ) -> None:
        """Meet the other ranks, compare settings, and connect. All ranks call it.

        `cuda_problem` says why this rank cannot have CUDA tensors, or is "". `make_engine` returns the engine for CUDA
        tensors. It is called if all ranks can have them.
        """
        self._rank, self._world = rank, world
        self.global_ranks = tuple(global_ranks)
        self.carrier = "GLOO"  # of its own allreduces
        self.native: SharedGroup | None = None
        if self.global_ranks[rank] == 0:
            warn_of_conflict()
            notices.warn_of_unknown_variables()
        met = meet(c10d.PrefixStore("cgx meeting", store), rank, world, timeout, self.global_ranks)
        prefixed = partial(c10d.PrefixStore, store=c10d.PrefixStore(met, store))
        # Settings are compared before any connection is made, so that a wrong setting fails on all ranks at once.
        settings = handshake.agree(prefixed("cgx"), rank, world, Settings.from_environ)
        members = handshake.join(prefixed("cgx"), rank, world, settings, self.global_ranks, cuda_problem, timeout)
        recorder = GroupRecorder(process_recorder(), rank, self.global_ranks, folder=settings.trace_folder)
        if settings.trace_folder is not None:
            listen(process_recorder().write)
        completions = Completions(f"cgx-futures-{rank}", recorder.fail)
        self.context = GroupContext(rank, world, settings, LayerTable(), completions, recorder, timeout)
        joining = Joining(prefixed, rank, world, timeout, self.global_ranks, settings, members)
        with handshake.naming_the_absent(rank, self.global_ranks):
            self.gloo: Any = dist.ProcessGroupGloo(prefixed("gloo"), rank, world, timeout)
            self.host, self.ledger = self._open_host(joining)
            self.cuda: CudaSide | None = None
            if members.all_have_cuda:
                try:
                    self.cuda = open_side(make_engine(joining), joining, self.context, self.ledger)
                except BaseException:
                    self._close_host()
                    raise
        by_kind: dict[str, Side] = {} if self.cuda is None else {self.cuda.kind: self.cuda}
        self.sides = Sides(self.host, by_kind, members.without_cuda(self.global_ranks))

    def _open_host(self, joining: Joining) -> tuple[CpuSide, Ledger]:
        """Open the side for CPU tensors: the native engine, over shared memory or links, or Gloo."""
        context, members = self.context, joining.members
        rank, world, settings = joining.rank, joining.world, joining.settings
        if world == 1:
            return CpuSide(self.gloo, LoneReducer(context), carries_exact=True), NoLedger()
        if all(members.native):
            self.native = self._open_native(joining)
            name = f"rank {joining.global_ranks[rank]}"
            chooser = Chooser.of(members.nodes, settings, HOST, members.link_costs, rank)
            context.recorder.reduction = chooser.described
            reducer = SharedReducer(self.native, context, chooser)
            board = BoardLedger(self.native, self.gloo, joining.timeout, name)
            return CpuSide(self.gloo, reducer, carries_exact=True), board
        handshake.check_plain(joining)
        inquiry = joining.prefixed("cgx inquiry")
        ledger = StoreLedger(inquiry, self.gloo, rank, joining.global_ranks, joining.timeout)
        threads = thread_count(settings.num_threads, members.ranks_here(rank))
        engine = PlainEngine(self.gloo, default_kernels(settings.simd, threads), rank)
        return CpuSide(self.gloo, PlainReducer(engine, ledger, context), carries_exact=False), ledger

    def _open_native(self, joining: Joining) -> SharedGroup:
        """Open the native group, over shared memory if all ranks share some, else over links."""
        if joining.members.one_host and joining.settings.inner_communicator == "SHM":
            shared = handshake.open_shared_group(joining, "cgx")
            if shared is not None:
                self.carrier = "SHM"
                return shared
        linked, self.carrier = open_linked_group(joining)
        return linked

    # ---- while it lives ----

    def set_timeout(self, timeout: timedelta) -> None:
        self.context.timeout = timeout
        self.ledger.set_timeout(timeout)
        for side in self.sides.all():
            side.set_timeout(timeout)

    def stats(self) -> dict[str, float]:
        """Return this rank's statistics, summed over all devices."""
        found = [side.reducer.stats() for side in self.sides.all()]
        return {name: sum(each[name] for each in found) for name in no_figures()}

    def reset_stats(self) -> None:
        self.note_figures()
        for side in self.sides.all():
            side.reducer.reset_stats()

    def note_figures(self) -> None:
        """Keep the statistics that a notice at exit needs."""
        if not self.context.forked:  # the native library may be locked by a thread that the child does not have
            compressed = self.stats()["compressed_operations"]
            notices.note_group(self._world, self.context.settings.minimal_numel, compressed)

    # ---- when it ends ----

    def close(self, *, aborting: bool, at_exit: bool) -> None:
        """Leave the group, once. Peers that still wait for this rank are notified."""
        context = self.context
        with context.lock:
            if context.closed:
                return
            context.closed = True
        context.recorder.close()
        self.note_figures()
        failed = self.ledger.has_failed
        self._close_host()
        if self.cuda is not None:
            self.cuda.close(at_once=failed or aborting, at_exit=at_exit)
        context.completions.close()

    def _close_host(self) -> None:
        self.host.reducer.close()
        if not self.context.forked:
            self.ledger.close()

    def abort(self) -> None:
        """Make the peers fail at once, instead of when they next wait for this rank."""
        if not self.context.closed and not self.context.forked:
            name = f"rank {self.global_ranks[self._rank]}"
            self.ledger.abort(CGXError(f"{name} called abort(): restart all ranks"))

    def hang_up(self) -> None:
        """Close Gloo's connections, so that peers do not wait for a process that may itself have to wait."""
        if self._world > 1 and not self.context.forked:
            hang_up(self.gloo)
