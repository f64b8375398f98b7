"""The contestants of `cgx bench train`. Each has a copy of the model and its own way to average gradients.

    ideal       none: the step without communication, which no contestant can beat
    gloo, nccl  uncompressed, by torch's own backend
    fp16        torch's fp16_compress_hook, over that backend
    powersgd    torch's powerSGD_hook of rank 4, over that backend
    cgx-N       cgx_hook with N bits, over the cgx backend; N = 32: uncompressed
    rotated-N   cgx_hook with N bits and the rotated quantizer
    adaptive    cgx_hook with adaptive bits

All have the same grad buckets, except powersgd, which has one. Its hook starts collectives when others end, and with
several buckets in flight nothing makes all ranks start them in the same order.
"""

# Without `from __future__ import annotations`: DDP compares the hooks' annotations with the types themselves.

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from torch_cgx import AdaptiveBits, CGXState, cgx_hook
from torch_cgx.cli.bench.train_models import Kind
from torch_cgx.cli.bench.train_report import compression_of
from torch_cgx.config import DEFAULT_QUANTIZER

__all__ = ["ADAPTIVE", "CHOOSING", "IDEAL", "POWERSGD_AFTER", "TIMEOUT_S", "Contestant", "Watch", "enter"]

IDEAL = "ideal"
ADAPTIVE = "adaptive"
POWERSGD_RANK = 4
POWERSGD_AFTER = 10
"""The number of exact steps that the hook needs before it begins."""
CHOOSING = AdaptiveBits(warmup=8, period=64)
"""Bits are chosen sooner than usual, because a benchmark is shorter than a training run."""
ONE_BUCKET_MB = 1 << 14
TIMEOUT_S = 300.0

_NAMES = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"
"""The argument's name in this torch. The statistics of batch norms would be sent at every step, with any hook."""

Future = torch.futures.Future[Tensor]
Hook = Callable[[Any, GradBucket], Future]


@dataclass(slots=True)
class Watch:
    """The times of one step, in nanoseconds, at which DDP passed each grad bucket and its average was ready."""

    handed_ns: list[int] = field(default_factory=list)
    done_ns: list[int] = field(default_factory=list)
    parameters: list[list[Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Start a step with new lists, so that a late callback of the step before cannot write into this one."""
        self.handed_ns, self.done_ns, self.parameters = [], [], []

    def settle(self, now_ns: int) -> None:
        """End the step after its backward. All averages are ready by then, even if a callback has not run yet."""
        self.done_ns[:] = [done or now_ns for done in self.done_ns]

    def busy_s(self) -> float:
        """Return the seconds in which at least one bucket was being averaged."""
        total = end = 0
        for start, stop in sorted(zip(self.handed_ns, self.done_ns, strict=True)):
            total += max(0, stop - max(start, end))
            end = max(end, stop)
        return total * 1e-9

    def over(self, state: Any, hook: Hook) -> Hook:
        """Return a hook that calls `hook` and records its times."""

        def watched(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            index = len(self.handed_ns)
            self.handed_ns.append(time.perf_counter_ns())
            self.done_ns.append(0)
            self.parameters.append(list(bucket.parameters()))
            done = self.done_ns

            def note(_: Future) -> None:
                done[index] = done[index] or time.perf_counter_ns()

            future = hook(state, bucket)
            future.add_done_callback(note)
            return future

        return watched


@dataclass(slots=True)
class Contestant:
    name: str
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    watch: Watch
    state: Any
    seconds: float = 0.0  # of training so far
    steps: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)  # seconds, and the loss on the held-out data
    step_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    in_step_s: list[float] = field(default_factory=list)  # of the ideal one, with all ranks ending each step together
    link_nbytes: list[int] = field(default_factory=lambda: [0, 0])

    def sent_nbytes(self, world: int) -> float:
        """Return the bytes that this rank sends per step: a ring's share of all payloads."""
        numel = sum(parameter.numel() for parameter in self.model.parameters())
        share = 2 * (world - 1) / world
        if self.name == IDEAL:
            return 0.0
        if isinstance(self.state, CGXState):
            return share * self.state.report().bytes_sent
        if isinstance(self.state, powerSGD_hook.PowerSGDState):
            factor = float(self.state.compression_stats()[0])  # type: ignore[no-untyped-call]
            return share * 4 * numel / max(1.0, factor)
        return share * numel * (2 if self.name == "fp16" else 4)


def enter(
    name: str, kind: Kind, *, bucket_size: int, bucket_mb: float | None, backend: str, device: torch.device
) -> Contestant:
    """Return a contestant with its own copy of the model. All ranks must call this in the same order."""
    torch.manual_seed(0)
    ours = name == ADAPTIVE or compression_of(name) is not None
    group = dist.new_group(backend="cgx" if ours else backend, timeout=timedelta(seconds=TIMEOUT_S))
    model: nn.Module = kind.build().to(device)
    ddp = DistributedDataParallel(
        model,
        process_group=group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=ONE_BUCKET_MB if name == "powersgd" else bucket_mb,
        **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
    )
    state, hook = _way(name, group, ddp, bucket_size)
    watch = Watch()
    ddp.register_comm_hook(None, watch.over(state, hook))
    return Contestant(name, ddp, kind.optimizer(model), watch, state)


def _way(name: str, group: dist.ProcessGroup, model: DistributedDataParallel, bucket_size: int) -> tuple[Any, Hook]:
    if name == IDEAL:
        return None, _leave_alone
    if name in ("gloo", "nccl"):
        return group, default_hooks.allreduce_hook
    if name == "fp16":
        return group, default_hooks.fp16_compress_hook
    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(group, POWERSGD_RANK, POWERSGD_AFTER), powerSGD_hook.powerSGD_hook
    adaptive = name == ADAPTIVE
    quantizer, bits = compression_of(name) or (DEFAULT_QUANTIZER, 4)
    params = {"bits": bits, "bucket_size": bucket_size, "quantizer": quantizer}
    state = CGXState.from_model(
        model, compression_params=params, adaptive=CHOOSING if adaptive else None, measure_every=1 << 30
    )
    return state, cgx_hook


def _leave_alone(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
