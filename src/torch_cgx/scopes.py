"""The requests of this process at run time: `set_default`, `compressed` and `uncompressed`.

They are process-wide on purpose, because a training run's all_reduces come from autograd's threads as well as from the
caller's. A hook's requests come with its all_reduces; only `uncompressed` applies to them too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from torch_cgx.config import EXACT, Asked, Compression, asked_from_environ

__all__ = [
    "asked",
    "asked_compression",
    "compressed",
    "compression",
    "in_block",
    "is_uncompressed",
    "set_default",
    "share_compression",
    "uncompressed",
]

_NOTHING = Asked()

_lock = threading.Lock()
_default = _NOTHING  # what `set_default` was last given
_blocks: list[Asked] = []  # what `compressed` and `uncompressed` ask for; the innermost counts


def set_default(*, bits: int | None = None, bucket_size: int | None = None, quantizer: str | None = None) -> None:
    """Compress the all_reduces of this process from now on. All ranks must call it between the same two operations.

    Args:
        bits: 1 to 8, or 32: exact. None: as CGX_COMPRESSION_QUANTIZATION_BITS says.
        bucket_size: how many values share a header. None: as CGX_COMPRESSION_BUCKET_SIZE says.
        quantizer: "maxmin", or "rotated" (1 to 4 bits). None: as CGX_COMPRESSION_QUANTIZER says.
    """
    global _default
    asked = _checked(bits, bucket_size, quantizer)
    with _lock:
        _default = asked


def _checked(bits: int | None, bucket_size: int | None, quantizer: str | None) -> Asked:
    """Return the request with whole numbers, or raise ValueError if it is invalid whatever else is asked."""
    found = Asked(bits, bucket_size, quantizer).compression()
    return Asked(None if bits is None else found.bits, None if bucket_size is None else found.block, quantizer)


@contextmanager
def uncompressed() -> Iterator[None]:
    """Send the all_reduces that this process issues inside the block uncompressed.

    This applies to all its groups and all its threads, unless a `compressed` block begins inside.

    It includes a backward pass's all_reduces that autograd's threads issue while the block lasts. An operation counts
    as issued when it is called, not when it is waited for. All ranks must enter and leave between the same two
    operations.
    """
    with _block_of(Asked(EXACT.bits)):
        yield


@contextmanager
def compressed(bits: int, bucket_size: int | None = None, quantizer: str | None = None) -> Iterator[None]:
    """Compress what this process issues inside the block on groups with backend "cgx".

    This applies to all_reduces, reduce_scatters and all_gathers from all its threads, with a tensor or with lists of
    tensors (lists of CUDA tensors stay exact).

    Nothing else compresses reduce_scatters and all_gathers: sharded optimizers that call them opt in with it. Each
    rank's contribution is quantized once; the sums of a reduce_scatter are not. Gathered values are identical on all
    ranks, this rank's own part included, so keep exact values in memory outside of the output. All ranks must enter
    and leave between the same two operations.

    Args:
        bits: 1 to 8, or 32: exact.
        bucket_size: how many values share a header. None: as without this block.
        quantizer: "maxmin", or "rotated" (1 to 4 bits). None: as without this block.
    """
    found = Asked(bits, bucket_size, quantizer).over(_usual()).compression()
    with _block_of(Asked(found.bits, found.block, found.quantizer)):
        yield


@contextmanager
def _block_of(asked: Asked) -> Iterator[None]:
    with _lock:
        _blocks.append(asked)
    try:
        yield
    finally:
        with _lock:  # threads may leave theirs in any order
            del _blocks[max(place for place, block in enumerate(_blocks) if block is asked)]


def _usual() -> Asked:
    """Return the request of the innermost block that compresses, else the default; `uncompressed` ones are ignored."""
    within = [block for block in _blocks if block.bits != EXACT.bits]
    return within[-1] if within else _default.over(asked_from_environ())


def compression() -> Compression:
    """Return the compression of an all_reduce that is called now, without a hook."""
    block = _innermost()
    return _resolved(_default.over(asked_from_environ())) if block is None else block


def asked_compression() -> Compression:
    """Return what `compression` returns if `set_default` or a block asked for bits, else EXACT."""
    return compression() if _default.bits is not None or _blocks else EXACT


def share_compression() -> Compression:
    """Return the compression of a reduce_scatter or an all_gather that is called now."""
    return _innermost() or EXACT


def asked() -> Asked:
    """Return the request that `set_default` was last given."""
    return _default


def in_block() -> bool:
    """Return whether a `compressed` or an `uncompressed` block is active."""
    return bool(_blocks)


def is_uncompressed() -> bool:
    """Return whether an `uncompressed` block is active, without a `compressed` one inside it."""
    block = _innermost()
    return block is not None and block.is_exact


def _innermost() -> Compression | None:
    blocks = _blocks[-1:]  # in one read, because another thread may leave its own
    return _resolved(blocks[0]) if blocks else None


@lru_cache(maxsize=64)
def _resolved(asked: Asked) -> Compression:
    return asked.compression()
