"""One rank's part of `cgx bench allreduce`: check every backend's result, then time all of them in turn.

All backends are measured in the same processes, each on a group of its own, so that conditions on the machine are the
same for all. The parent prints, writes files and starts processes (allreduce.py, processes.py).

Per size of tensor:
1. Check: one all_reduce of random values on every backend, against the sum in float64, and bit for bit between ranks.
   A wrong sum ends the run: the speed of a wrong answer does not matter.
2. Warm up, and estimate the time of one operation. All ranks use the slowest rank's estimate to set the length of a
   batch and the number of batches.
3. Batches, with the backends in turn and every other round in reverse order. A batch restores the values (growing sums
   would overflow), runs one operation that is not timed (it synchronizes the ranks), then times `ops_per_batch`
   operations one after the other. There is no barrier between operations: it would measure its own skew. Between nodes
   a batch begins with empty token buckets: tokens saved by an idle link would let the first operations exceed its rate.
4. With busy: the same operation asynchronously, while the main thread is quiet or busy (busy.py).

The time of a batch is its slowest rank's. The median is over batches, divided by their operations. p95 is over single
operations on rank 0.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

import torch_cgx
from torch_cgx.cli import gpus, hosts
from torch_cgx.cli.bench import busy
from torch_cgx.cli.bench.rotated_error import rotated_error_allowed
from torch_cgx.cli.gpus import Place
from torch_cgx.cli.link import count_link_nbytes
from torch_cgx.cli.processes import Message, Report, join_world
from torch_cgx.cli.registry import CommandFailed
from torch_cgx.codecs import RAW, Rotated
from torch_cgx.config import DEFAULT_QUANTIZER, Compression

TIMEOUT_S = 120.0
BATCH_S = 0.020
SLOW_S = 0.5
"""If an operation takes this long, as on a slow link, allocations on first use hardly matter."""
MIN_OPS, MIN_BATCHES, MAX_BATCHES = 2, 5, 50
DRAIN_NBYTES = 4 * hosts.BURST_NBYTES
PROGRESS_EVERY_S = 0.25
"""The shortest time between reports: on a small machine the parent's bar would take time from the ranks."""
CHECK_NUMEL = 1 << 20
"""The number of values to check at a time, which keeps the float64 copies small."""

EXPONENTS = {torch.float32: (-100, 110), torch.bfloat16: (-100, 110), torch.float16: (-8, 13)}
"""The powers of two between which values may grow in a batch, without denormals at the start or infinity at the end."""


class WrongResult(CommandFailed):
    """A backend's sum is wrong."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements to make, identical on all ranks."""

    bits: int
    bucket_size: int
    dtype: str
    sizes: tuple[int, ...]  # bytes of the tensor
    against: tuple[str, ...]  # backends other than cgx
    seconds: float  # to spend per size and backend
    busy: bool
    nodes: int = 1
    device: str = "cpu"
    quantizer: str = DEFAULT_QUANTIZER
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Contestant:
    backend: str
    group: dist.ProcessGroup
    place: Place

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)
        self.place.finish()


@dataclass(frozen=True, slots=True)
class Check:
    relative_error: float  # |result - exact| / |exact|, Euclidean norms
    relative_error_allowed: float | None  # for rotated values; other values are judged one by one
    max_error: float
    max_error_allowed: float | None
    same_bits: bool  # on all ranks
    sent_nbytes: float | None  # by this rank for one operation, if known


def run(arguments: Message, report: Report) -> Message:
    plan = Plan(**{**arguments, "sizes": tuple(arguments["sizes"]), "against": tuple(arguments["against"])})
    join_world(TIMEOUT_S)
    contestants = _contestants(plan)
    cells: list[Message] = []
    busy_cells: list[Message] = []
    for index, nbytes in enumerate(plan.sizes):
        progress = _SizeProgress(report, index, len(plan.sizes), nbytes)
        progress.at(0.0)
        cells += _measure(plan, contestants, nbytes, progress)
        if plan.busy:
            source = _source(plan, nbytes)
            for contestant in contestants:
                progress.at(1.0)
                cell = busy.measure(contestant.group, source, agree=_agree, seconds=plan.seconds)
                busy_cells.append({"nbytes": nbytes, "backend": contestant.backend, **cell})
    dist.barrier()
    dist.destroy_process_group()
    return {"cells": cells, "busy": busy_cells}


def check(arguments: Message, report: Report) -> Message:
    """Run only the check of cgx, on one size: for `cgx doctor`. Raises `WrongResult`."""
    sizes = (arguments.pop("nbytes"),)
    plan = Plan(**arguments, sizes=sizes, against=(), seconds=0.0, busy=False)
    join_world(TIMEOUT_S)
    found, _ = check_cgx(plan)
    dist.barrier()
    dist.destroy_process_group()
    return asdict(found)


def check_cgx(plan: Plan) -> tuple[Check, Contestant]:
    """Check cgx on the first size, in ranks that have joined. Return the check and its contestant."""
    (ours,) = _contestants(plan)
    return _check(plan, ours, plan.sizes[0]), ours


def _contestants(plan: Plan) -> list[Contestant]:
    torch_cgx.set_default(bits=plan.bits, bucket_size=plan.bucket_size, quantizer=plan.quantizer)
    place = gpus.place_of(plan.device)
    place.put(torch.empty(1))  # makes this rank's device the current one, which NCCL needs
    timeout = timedelta(seconds=plan.timeout_s)
    return [
        Contestant(backend, dist.new_group(backend=backend, timeout=timeout), place)
        for backend in ("cgx", *plan.against)
    ]


def _measure(plan: Plan, contestants: list[Contestant], nbytes: int, progress: _SizeProgress) -> list[Message]:
    checks = [_check(plan, contestant, nbytes) for contestant in contestants]
    source = _source(plan, nbytes)
    tensor = source.clone()
    estimates = [_estimate(plan, contestant, tensor, source) for contestant in contestants]
    most = _most_ops(source.dtype)
    ops = [max(MIN_OPS, min(math.ceil(BATCH_S / seconds), most - 1)) for seconds in estimates]
    round_s = sum(seconds * (count + 1) for seconds, count in zip(estimates, ops, strict=True))
    batches = max(MIN_BATCHES, min(int(plan.seconds * len(contestants) / round_s), MAX_BATCHES))
    samples: list[list[list[int]]] = [[] for _ in contestants]
    on_link = [[0, 0] for _ in contestants]
    for batch in range(batches):
        order = range(len(contestants))
        for which in order if batch % 2 == 0 else reversed(order):
            op_ns, nbytes_of_link = _batch(plan, contestants[which], tensor, source, ops[which])
            samples[which].append(op_ns)
            on_link[which] = [total + more for total, more in zip(on_link[which], nbytes_of_link, strict=True)]
        progress.at((batch + 1) / batches)
    return [
        {
            "nbytes": nbytes,
            "numel": source.numel(),
            "backend": contestant.backend,
            "check": asdict(checks[which]),
            "ops_per_batch": ops[which],
            "op_ns": samples[which],
            "link_nbytes": [total / (batches * ops[which]) for total in on_link[which]],
        }
        for which, contestant in enumerate(contestants)
    ]


def _batch(
    plan: Plan, contestant: Contestant, tensor: torch.Tensor, source: torch.Tensor, ops: int
) -> tuple[list[int], tuple[int, int]]:
    """Return the nanoseconds of each of `ops` consecutive operations, and the bytes on this node's link, both ways."""
    tensor.copy_(source)
    if plan.nodes > 1:
        dist.all_reduce(torch.zeros(DRAIN_NBYTES, dtype=torch.uint8))
    contestant.all_reduce(tensor)
    sent, received = _link_nbytes(plan)
    now = time.perf_counter_ns
    stamps = [now()]
    for _ in range(ops):
        contestant.all_reduce(tensor)
        stamps.append(now())
    sent_after, received_after = _link_nbytes(plan)
    return [after - before for before, after in pairwise(stamps)], (sent_after - sent, received_after - received)


def _link_nbytes(plan: Plan) -> tuple[int, int]:
    """Return the bytes that this node has sent and received so far, or zeros if all ranks are on one host."""
    return count_link_nbytes(os.environ["GLOO_SOCKET_IFNAME"]) if plan.nodes > 1 else (0, 0)


def _estimate(plan: Plan, contestant: Contestant, tensor: torch.Tensor, source: torch.Tensor) -> float:
    """Return the seconds of one operation, the same number on all ranks."""
    for ops in (2, 3, 10):  # the first rounds pay for a backend's allocations on first use
        ops = min(ops, _most_ops(tensor.dtype) - 1)
        times = sorted(_batch(plan, contestant, tensor, source, ops)[0])
        seconds = _agree(times[len(times) // 2] * 1e-9)
        if seconds > (BATCH_S if ops > 2 else SLOW_S):
            break
    return seconds


def _most_ops(dtype: torch.dtype) -> int:
    """Return the number of operations until values, which grow with every sum, leave the dtype's range."""
    low, high = EXPONENTS[dtype]
    return int((high - low) / math.log2(dist.get_world_size()))


def _source(plan: Plan, nbytes: int) -> torch.Tensor:
    """Return this rank's values at the start of a batch."""
    dtype: torch.dtype = getattr(torch, plan.dtype)
    values = torch.cat([part for _, part in _parts(dist.get_rank(), nbytes // dtype.itemsize, dtype)])
    return gpus.place_of(plan.device).put(values.mul_(2.0 ** EXPONENTS[dtype][0]))


def _parts(rank: int, numel: int, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the random values of any rank, made without communication, in parts: (first index, values)."""
    for start in range(0, numel, CHECK_NUMEL):
        generator = torch.Generator().manual_seed(start * 1009 + rank)
        count = min(CHECK_NUMEL, numel - start)
        yield start, torch.randn(count, generator=generator).to(dtype)


def _agree(value: float) -> float:
    """Return the largest of all ranks' values."""
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)


def _check(plan: Plan, contestant: Contestant, nbytes: int) -> Check:
    """Check one all_reduce against the sum in float64. Raises `WrongResult` on all ranks or on none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype: torch.dtype = getattr(torch, plan.dtype)
    numel = nbytes // dtype.itemsize
    reduced = contestant.place.put(torch.cat([part for _, part in _parts(rank, numel, dtype)]))
    sent_before = _sent_nbytes(contestant)
    contestant.all_reduce(reduced)
    sent_after = _sent_nbytes(contestant)
    result = reduced.cpu()

    error_square = exact_square = max_error = largest = 0.0
    low = torch.full((world + 1,), math.inf, dtype=torch.float64)  # of every rank's values, and of the sum
    high = torch.full((world + 1,), -math.inf, dtype=torch.float64)
    for of_ranks in zip(*(_parts(peer, numel, dtype) for peer in range(world)), strict=True):
        start = of_ranks[0][0]
        values = torch.stack([part.double() for _, part in of_ranks])
        exact = values.sum(0)
        error = result[start : start + exact.numel()].double() - exact
        error_square += float(error.square().sum())
        exact_square += float(exact.square().sum())
        max_error = max(max_error, float(error.abs().max()))
        largest = max(largest, float(values.abs().sum(0).max()))
        both = torch.cat([values, exact[None]])
        low, high = torch.minimum(low, both.amin(1)), torch.maximum(high, both.amax(1))

    codec = Compression(plan.bits, plan.bucket_size, plan.quantizer).codec() if contestant.backend == "cgx" else RAW
    rounding = world * torch.finfo(dtype).eps  # adding in the tensor's own dtype rounds once per addition
    relative_error = math.sqrt(error_square / exact_square)
    relative_error_allowed: float | None = None
    max_error_allowed: float | None = None
    if isinstance(codec, Rotated):
        # Contributions are encoded, and then their sum; between nodes also the sums of a node and of a row of a grid.
        encodings = 2 if plan.nodes == 1 else 4
        relative_error_allowed = rounding + rotated_error_allowed(codec.bits, numel, encodings)
        off, allowed, how = relative_error, relative_error_allowed, "a relative error of"
    else:
        max_error_allowed = rounding * largest
        if not codec.is_exact:
            # A quantized value is off by less than one unit of its block, even in stochastic mode, and no block has a
            # wider range than the tensor. Contributions are quantized once, and then their sum is. Their errors may
            # have widened its range.
            levels = 2**codec.bits - 1
            units = (high - low) / levels
            contributions = float(units[:world].sum())
            max_error_allowed += contributions + float(units[world]) + 2 * contributions / levels
        off, allowed, how = max_error, max_error_allowed, "off by"
    reference = result.clone()
    dist.broadcast(reference, src=0)
    differs = not torch.equal(reference.view(torch.uint8), result.view(torch.uint8))
    check = Check(
        relative_error=relative_error,
        relative_error_allowed=relative_error_allowed,
        max_error=max_error,
        max_error_allowed=max_error_allowed,
        same_bits=_agree(float(differs)) == 0.0,
        sent_nbytes=None if sent_before is None or sent_after is None else sent_after - sent_before,
    )
    wrong = not off <= allowed  # NaN is wrong too
    if _agree(float(wrong)) or not check.same_bits:
        reason = (
            "ranks hold different bits"
            if not check.same_bits
            else f"{how} up to {_agree(off):.3g}, allowed is {allowed:.3g}"
        )
        raise WrongResult(f"all_reduce of {nbytes} bytes with backend {contestant.backend} is wrong: {reason}")
    return check


def _sent_nbytes(contestant: Contestant) -> float | None:
    """Return the bytes that this rank has sent for the group so far, or None if the backend does not count them."""
    if contestant.backend != "cgx":
        return None
    counts: dict[str, Any] = dict(torch_cgx.stats(contestant.group))
    return float(counts["bytes_sent"])


class _SizeProgress:
    """Progress within one size as a fraction of all sizes, reported by rank 0 at limited frequency."""

    def __init__(self, report: Report, index: int, count: int, nbytes: int) -> None:
        self._report, self._index, self._count, self._nbytes = report, index, count, nbytes
        self._next_s = 0.0

    def at(self, fraction: float) -> None:
        if dist.get_rank() == 0 and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PROGRESS_EVERY_S
            self._report({"fraction": (self._index + fraction) / self._count, "nbytes": self._nbytes})
