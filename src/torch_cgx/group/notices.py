"""Warn, once per process and on rank 0, about variables that do not do what the user expects.

There are two warnings. When the first group is made: a CGX_* variable that does not exist. When the process ends: bits
that were set but compressed nothing (`_torch_cgx_autoload` calls this one, even if no cgx group was ever made).
Neither costs an operation anything: the calls are read from the flight recorder.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections import Counter
from functools import cache
from typing import Any

import torch.distributed as dist

from torch_cgx import scopes
from torch_cgx.config import BITS_VARIABLE, EXACT, compression_from_environ, unknown_variables
from torch_cgx.engines.recorder import OpInfo, process_recorder
from torch_cgx.group.compression import COMPRESSIBLE

__all__ = ["note_group", "warn_of_unknown_variables", "warn_of_unused_bits"]

_MOST_SHOWN = 4  # kinds of calls
_log = logging.getLogger("torch_cgx")


class _Groups:
    """Statistics of this process's groups that have ended."""

    largest_world = 0
    compressed_operations = 0
    minimal_numel = 0


@cache
def warn_of_unknown_variables() -> None:
    """Log what `unknown_variables` finds, once per process."""
    for sentence in unknown_variables():
        _log.warning(sentence)


def note_group(world: int, minimal_numel: int, compressed_operations: float) -> None:
    """Add a group's statistics to the process's, before it is closed or they are reset."""
    _Groups.largest_world = max(_Groups.largest_world, world)
    _Groups.minimal_numel = max(_Groups.minimal_numel, minimal_numel)
    _Groups.compressed_operations += int(compressed_operations)


def warn_of_unused_bits(backend: str) -> None:
    """Warn at exit if bits were requested but nothing was compressed.

    `backend` is the default group's. There is no warning after an exception, because the process then has another
    problem, nor in a world of one rank, where there is nothing to compress.
    """
    if _Groups.compressed_operations or hasattr(sys, "last_value") or _rank() != 0 or _world() == 1:
        return
    asked = _asked()
    if asked is None:
        return
    begin = f"{asked}, but this process compressed nothing"
    if not _Groups.largest_world:
        _log.warning(
            '%s: its backend is "%s", and that is for backend "cgx". Call init_process_group("cgx"), or keep '
            "the backend and compress gradients with model.register_comm_hook(CGXState.from_model(model), cgx_hook)",
            begin,
            backend,
        )
        return
    kinds = Counter(_kind(call) for call in process_recorder().calls() if call.operation != "barrier")
    if kinds:
        _log.warning(
            "%s: it called %s. That compresses an all_reduce (SUM or AVG) of at least %d values of float32, "
            "float16 or bfloat16; what FSDP sends, torch_cgx.fsdp.compress(model) does",
            begin,
            _list(kinds),
            _Groups.minimal_numel,
        )


def _asked() -> str | None:
    """Return the beginning of a sentence that names what requested compression; None if nothing did."""
    bits = scopes.asked().bits
    if bits is not None:
        return None if bits == EXACT.bits else f"torch_cgx.set_default(bits={bits}) was called"
    try:
        asked = compression_from_environ()
    except ValueError:
        return None
    return None if asked.is_exact else f"{BITS_VARIABLE}={asked.bits} is set"


def _rank() -> int | None:
    """Return this process's rank, even after its group has been destroyed; None if it cannot be determined."""
    if dist.is_initialized():
        return dist.get_rank()
    # torch drops the rank with the group. Only the prefix of its excepthook's output still has it.
    hook = sys.excepthook
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)) if _is_function(hook) else {}
    prefix = cells["excepthook_prefix"].cell_contents if "excepthook_prefix" in cells else ""
    text = prefix.removeprefix("[rank").removesuffix("]") if prefix else os.environ.get("RANK", "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def _is_function(hook: Any) -> bool:
    return isinstance(hook, type(_rank))


def _world() -> int:
    """Return the current or last number of ranks; 0 if it cannot be determined."""
    if dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "")
    return _Groups.largest_world or (int(text) if re.fullmatch("[0-9]{1,9}", text) else 0)


def _kind(info: OpInfo) -> str:
    """Return an operation's name and, for an all_reduce, the reason that it was not compressed."""
    if info.operation != "all_reduce":
        return info.operation
    if info.dtype not in COMPRESSIBLE:
        return f"all_reduce of {str(info.dtype).removeprefix('torch.')}"
    if info.reduction not in ("SUM", "AVG"):
        return f"all_reduce with {info.reduction}"
    if info.shape is None:
        return "all_reduce of a sparse tensor"
    if math.prod(info.shape) < _Groups.minimal_numel:
        return f"all_reduce of fewer than {_Groups.minimal_numel} values"
    return "all_reduce that a CGXState, set_default or uncompressed keeps exact"


def _list(kinds: Counter[str]) -> str:
    shown = [f"{count} {kind}" for kind, count in kinds.most_common(_MOST_SHOWN)]
    others = kinds.total() - sum(count for _, count in kinds.most_common(_MOST_SHOWN))
    return ", ".join([*shown, *([f"{others} others"] if others else [])])
