"""Times several cases in one run, in turn, so that what else happens on the machine hits all of them alike.

1. Warm up every case and estimate its time; from that the operations of a batch (short ones are timed several
   at a time) and the number of rounds.
2. Rounds: one batch of every case, every other round in reverse order. A batch first restores what the case
   changes, does one operation that is not timed where operations are short (so that caches hold what this case
   needs, not what the one before it left), then times its operations together.

What a case does is not known here.
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
    """What is timed, and what must be put back before: an operation may change its own input."""

    @property
    def run(self) -> Callable[[], object]: ...

    @property
    def restore(self) -> Callable[[], object] | None: ...


@dataclass(frozen=True, slots=True)
class Samples:
    ops_per_batch: int
    batch_ns: list[int]


def alternate(cases: Sequence[Timed], seconds: float, progress: Callable[[float], None]) -> list[Samples]:
    """Samples of every case, in the cases' order, after about `seconds` for each of them."""
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
    """Seconds of one operation; the first ones, which touch new memory, do not count."""
    _batch(case, 1)
    return min(_batch(case, 2) / 2, _batch(case, 2) / 2) * 1e-9


def _batch(case: Timed, ops: int) -> int:
    """Nanoseconds of `ops` consecutive operations."""
    run = case.run
    if case.restore is not None:
        case.restore()
    if ops > 1:
        run()
    start = time.perf_counter_ns()
    for _ in range(ops):
        run()
    return time.perf_counter_ns() - start
