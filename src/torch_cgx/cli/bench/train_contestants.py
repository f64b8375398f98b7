"""Who takes part in `cgx bench train`: a copy of the model each, whose gradients travel in one particular way.

    ideal       not at all: the step with communication left out, which nobody can beat
    gloo, nccl  exactly, by torch's own backend
    fp16        torch's fp16_compress_hook, over that backend
    powersgd    torch's powerSGD_hook of rank 4, over that backend
    cgx-N       cgx_hook with N bits, over the cgx backend; N = 32: exactly
    rotated-N   the same with the rotated quantizer
    adaptive    cgx_hook with bits that choose themselves

All have the same grad buckets, but for powersgd, which has one: its hook starts collectives when others end, and with
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
"""Steps that are exact: the hook wants some before it begins."""
CHOOSING = AdaptiveBits(warmup=8, period=64)
"""A benchmark is shorter than a training, so bits are chosen sooner."""
ONE_BUCKET_MB = 1 << 14
TIMEOUT_S = 300.0

_NAMES = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"
"""By its name in this torch; the statistics of batch norms would be sent at every step, whatever the hook does."""

Future = torch.futures.Future[Tensor]
Hook = Callable[[Any, GradBucket], Future]


@dataclass(slots=True)
class Watch:
    """When DDP handed each grad bucket over, and when its average was there: nanoseconds, of one step."""

    handed_ns: list[int] = field(default_factory=list)
    done_ns: list[int] = field(default_factory=list)
    parameters: list[list[Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Forget the step before. In lists of its own: a late callback of that step must not write into this one."""
        self.handed_ns, self.done_ns, self.parameters = [], [], []

    def settle(self, now_ns: int) -> None:
        """The step's backward has ended: all averages are there, also those whose callback has not run yet."""
        self.done_ns[:] = [done or now_ns for done in self.done_ns]

    def busy_s(self) -> float:
        """Seconds in which at least one bucket was on its way."""
        total = end = 0
        for start, stop in sorted(zip(self.handed_ns, self.done_ns, strict=True)):
            total += max(0, stop - max(start, end))
            end = max(end, stop)
        return total * 1e-9

    def over(self, state: Any, hook: Hook) -> Hook:
        """The same hook, watched."""

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
    seconds: float = 0.0  # it has trained
    steps: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)  # seconds, and the loss on what was held out
    step_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    in_step_s: list[float] = field(default_factory=list)  # of the ideal one: with all ranks ending each step together
    link_nbytes: list[int] = field(default_factory=lambda: [0, 0])

    def sent_nbytes(self, world: int) -> float:
        """What this rank sends a step: a ring's share of all payloads."""
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
    """A copy of the model, the same for all; called on all ranks in the same order."""
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
