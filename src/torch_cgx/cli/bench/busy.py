"""The time of an asynchronous all_reduce while the main thread is quiet, and while it computes in Python.

Python threads share one lock, so an engine that needs it for every step stops while the main thread works. The
duration comes from the operation's native time stamps if the Work has them (`native_seconds`, backend cgx), else from a
callback on its future. That callback must wait for the lock, so the busy figure of such a backend is an upper bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_cgx.cli.processes import Message

MIN_SAMPLES, MAX_SAMPLES = 5, 40
LOOPS = 500
"""Steps of Python between two checks whether the operation has ended: some tens of microseconds."""


def measure(
    group: dist.ProcessGroup, source: torch.Tensor, *, agree: Callable[[float], float], seconds: float
) -> Message:
    """Time quiet and busy operations in turn. `agree` makes a number identical on all ranks."""
    tensor = source.clone()
    first_s, clock = _operation(group, tensor, source, busy=False)
    samples = int(seconds / (4 * agree(first_s)))  # quiet, busy, and one untimed operation before each
    quiet_ns: list[int] = []
    busy_ns: list[int] = []
    for _ in range(max(MIN_SAMPLES, min(samples, MAX_SAMPLES))):
        quiet_ns.append(round(_operation(group, tensor, source, busy=False)[0] * 1e9))
        busy_ns.append(round(_operation(group, tensor, source, busy=True)[0] * 1e9))
    return {"clock": clock, "quiet_ns": quiet_ns, "busy_ns": busy_ns}


def _operation(
    group: dist.ProcessGroup, tensor: torch.Tensor, source: torch.Tensor, *, busy: bool
) -> tuple[float, str]:
    """Return the seconds from submission to completion, and the clock that they come from."""
    tensor.copy_(source)
    dist.all_reduce(tensor, group=group)  # synchronizes the ranks
    start = time.perf_counter()
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    native = hasattr(work, "native_seconds")
    ended = threading.Event()
    stamps: list[float] = []

    def stamp(_: object) -> None:
        stamps.append(time.perf_counter())
        ended.set()

    if not native:
        work.get_future().add_done_callback(stamp)
    if busy:
        value = 1
        while not work.is_completed():
            for _ in range(LOOPS):
                value = (value * 1103515245 + 12345) % 2147483648
    work.wait()
    if native:
        return float(work.native_seconds()), "native"
    ended.wait()
    return stamps[0] - start, "callback"
