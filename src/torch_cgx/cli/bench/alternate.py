"""The timing of several cases in turn in one run, so that other work on the machine affects all of them equally.

1. Warm up every case and estimate its time. The estimates set the operations of a batch (short ones are timed several
   at a time) and the number of rounds.
2. Rounds: one batch of every case, every other round in reverse order. A batch first restores the case's input. If
   operations are short, it then runs one that is not timed, so that caches hold this case's data and not that of the
   case before. Then it times its operations together.

This module does not know what a case does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

BATCH_S = 0.002
MAX_OPS = 1000
MIN_ROUNDS, MAX_ROUNDS = 5, 60


class Timed(Protocol):
    """An operation to time, and a function that restores its input, because it may change that."""

    @property
    def run(self) -> Callable[[], object]: ...

    @property
    def restore(self) -> Callable[[], object] | None: ...


@dataclass(frozen=True, slots=True)
class Samples:
    ops_per_batch: int
    batch_ns: list[int]


def alternate(cases: Sequence[Timed], seconds: float, progress: Callable[[float], None]) -> list[Samples]:
    """Return samples of every case, in the cases' order, after about `seconds` per case."""
    estimates = [_estimate(case) for case in cases]
    ops = [max(1, min(math.ceil(BATCH_S / estimate), MAX_OPS)) for estimate in estimates]
    round_s = sum(estimate * count for estimate, count in zip(estimates, ops, strict=True))
    rounds = max(MIN_ROUNDS, min(int(seconds * len(cases) / round_s), MAX_ROUNDS))
    samples = [Samples(count, []) for count in ops]
    for index in range(rounds):
        order = range(len(cases))
        for which in order if index % 2 == 0 else reversed(order):
            samples[which].batch_ns.append(_batch(cases[which], ops[which]))
        progress((index + 1) / rounds)
    return samples


def _estimate(case: Timed) -> float:
    """Return the seconds of one operation. The first ones, which touch new memory, do not count."""
    _batch(case, 1)
    return min(_batch(case, 2) / 2, _batch(case, 2) / 2) * 1e-9


def _batch(case: Timed, ops: int) -> int:
    """Return the nanoseconds of `ops` consecutive operations."""
    run = case.run
    if case.restore is not None:
        case.restore()
    if ops > 1:
        run()
    start = time.perf_counter_ns()
    for _ in range(ops):
        run()
    return time.perf_counter_ns() - start
