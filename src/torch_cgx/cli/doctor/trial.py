"""The trial of `cgx doctor`: a checked, compressed all_reduce between two processes of this host, over each transport.

The ranks have the user's settings, except those that would skip the tried path. All ways are tried in the same two
processes, one after the other. If one fails, the remaining ones get new processes. Nothing waits longer than `LIMIT_S`.
"""

from __future__ import annotations

import logging
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from torch_cgx.cli.processes import Message, RankFailed, Report, TooSlow, join_world, run_ranks
from torch_cgx.config import Compression

__all__ = ["SHARED", "WAYS", "Attempt", "try_ways"]

NPROC = 2
NBYTES = 4 << 20
BITS = 4
"""The bits to use if the settings in force do not compress."""
OPS = 5
LIMIT_S, TIMEOUT_S = 120.0, 60.0
"""The limits of the parent and of the ranks. Ranks time out first, so that they can tell what they waited for."""

_INNER, _CROSS = "CGX_INNER_COMMUNICATOR_TYPE", "CGX_CROSS_COMMUNICATOR_TYPE"
SHARED, SOCKETS = "shared memory", "TCP"
WAYS: dict[str, dict[str, str]] = {
    SHARED: {_INNER: "SHM", _CROSS: ""},
    SOCKETS: {_INNER: "TCP", _CROSS: ""},
}
_FOR_ALL = {
    "CGX_COMPRESSION_MINIMAL_SIZE": "",
    "CGX_INTRA_COMPRESS": "",
    "CGX_TRACE_DIR": "",
    "CUDA_VISIBLE_DEVICES": "",  # GPUs have their own check
}
_HINTS = {
    -4: "an instruction that this processor lacks: set CGX_SIMD=scalar, and please report it",
    -7: "/dev/shm ran full: make it larger",
    -9: "something killed it, often for want of memory",
    -11: "it crashed: please report it",
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way, and the result of trying it."""

    over: str
    bits: int
    nbytes: int
    error: str = ""  # empty if it succeeded
    note: str = ""  # the reason why it used another way than requested
    relative_error: float | None = None
    same_bits: bool | None = None
    median_s: float | None = None
    sent_nbytes: float | None = None  # by one rank


def try_ways(
    compression: Compression, on_way: Callable[[str], None], ways: Sequence[str] = tuple(WAYS)
) -> list[Attempt]:
    """Try an all_reduce over each of these ways. `on_way` is called with each way when it begins."""
    asked = {
        "bits": BITS if compression.is_exact else compression.bits,
        "bucket_size": compression.block,
        "quantizer": compression.quantizer,
        "dtype": "float32",
        "nbytes": NBYTES,
    }
    done: list[Attempt] = []
    while len(done) < len(ways):
        done += _try_together(asked, ways[len(done) :], on_way)
    return done


def _try_together(asked: Message, ways: Sequence[str], on_way: Callable[[str], None]) -> list[Attempt]:
    """Try these ways up to the first failure. An error before the first way begins counts as the failure of all."""
    begun: list[str] = []
    told: list[Message] = []
    error = ""

    def hear(rank: int, message: Message) -> None:
        if "begun" in message:
            begun.append(message["begun"])
            on_way(begun[-1])
        else:
            told.append(message)

    try:
        run_ranks("torch_cgx.cli.doctor.trial:run", {**asked, "ways": list(ways)}, NPROC, hear, limit_s=LIMIT_S)
    except (RankFailed, TooSlow, OSError, RuntimeError) as failure:
        error = in_words(failure)
    attempts = [Attempt(way, asked["bits"], NBYTES, **message) for way, message in zip(ways, told, strict=False)]
    failed = list(ways[len(told) :] if not begun else ways[len(told) : len(begun)]) if error else []
    if error and not failed:  # the ranks had finished all ways, or were between two of them
        failed = [attempts.pop().over]
    return attempts + [Attempt(way, asked["bits"], NBYTES, error=error) for way in failed]


def in_words(error: Exception) -> str:
    if isinstance(error, TooSlow):
        return f"{error}, and was given up"
    if isinstance(error, OSError):
        return f"no process can be started ({error}): allow more of them, or leave this out with --quick"
    told = str(error).partition("\n")[0]
    ended = re.search(r"exit code (-\d+)", told)
    hint = _HINTS.get(int(ended[1])) if ended else None
    return f"{told}: {hint}" if hint else told


def run(arguments: Message, report: Report) -> Message:
    """Run one rank. Rank 0 reports when a way begins, and its result."""
    import torch.distributed as dist

    from torch_cgx import _native

    ways = arguments.pop("ways")
    nbytes = arguments.pop("nbytes")
    warnings = _Warnings()
    os.environ.update(_FOR_ALL)
    join_world(TIMEOUT_S)
    for way in ways:
        if dist.get_rank() == 0:
            report({"begun": way})
        os.environ.update(WAYS[way])
        if way == SOCKETS and not _native.shares_memory():
            os.environ[_INNER] = "GLOO"  # needs no native library
        carrier, told = _try(nbytes, arguments)
        if way == SHARED and carrier != "SHM":
            told = {"note": " ".join(warnings.said) or "the native library is missing"}
        if dist.get_rank() == 0:
            report(told)
    dist.barrier()
    dist.destroy_process_group()
    return {}


def _try(nbytes: int, arguments: Message) -> tuple[str, Message]:
    """Try an all_reduce on a new group, which reads the variables as they are now. Return its carrier and result."""
    import torch
    import torch.distributed as dist

    from torch_cgx.cli.bench.allreduce_ranks import Plan, check_cgx

    plan = Plan(**arguments, sizes=(nbytes,), against=(), seconds=0.0, busy=False, timeout_s=TIMEOUT_S)
    check, ours = check_cgx(plan)
    values = torch.randn(nbytes // 4)
    samples = []
    for _ in range(OPS):
        reduced = values.clone()
        begin = time.perf_counter()
        ours.all_reduce(reduced)
        samples.append(time.perf_counter() - begin)
    facts = asdict(check)
    told = {name: facts[name] for name in ("relative_error", "same_bits", "sent_nbytes")}
    carrier: str = ours.group.carrier  # type: ignore[attr-defined]
    dist.destroy_process_group(ours.group)
    return carrier, told | {"median_s": statistics.median(samples)}


class _Warnings(logging.Handler):
    """A handler that collects the library's warnings instead of printing them on stderr."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        logger = logging.getLogger("torch_cgx")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
