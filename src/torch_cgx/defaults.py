"""What this process has asked for at run time: `set_default` and `uncompressed`.

Process-wide on purpose, because the all_reduces of a training come from autograd's threads as well as from the
caller's. What a hook asks for comes with its all_reduces; only `uncompressed` holds for them too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

from torch_cgx.config import Compression, compression_from_environ

__all__ = ["asked", "asked_compression", "compression", "is_uncompressed", "set_default", "uncompressed"]

_lock = threading.Lock()
_bits: int | None = None
_block: int | None = None
_exact_depth = 0

_EXACT = Compression(bits=32)


def set_default(*, bits: int | None = None, bucket_size: int | None = None) -> None:
    """Compress the all_reduces of this process from now on. All ranks must call it between the same two operations.

    Args:
        bits: 1 to 8, or 32: exact. None: as CGX_COMPRESSION_QUANTIZATION_BITS says.
        bucket_size: how many values share a smallest value and a step. None: as CGX_COMPRESSION_BUCKET_SIZE says.
    """
    global _bits, _block
    found = Compression(32 if bits is None else bits, 512 if bucket_size is None else bucket_size)  # raises if it must
    with _lock:
        _bits = None if bits is None else found.bits
        _block = None if bucket_size is None else found.block


@contextmanager
def uncompressed() -> Iterator[None]:
    """All all_reduces that this process issues meanwhile are exact, on all its groups and from all its threads.

    That includes those of a backward pass that autograd's threads issue while the block lasts. An operation counts as
    issued when it is called, not when it is waited for. All ranks must enter and leave between the same two
    operations.
    """
    global _exact_depth
    with _lock:
        _exact_depth += 1
    try:
        yield
    finally:
        with _lock:
            _exact_depth -= 1


def compression() -> Compression:
    """What holds for an all_reduce that is called now, without a hook."""
    if _exact_depth:
        return _EXACT
    return _combined(compression_from_environ(), _bits, _block)


def asked_compression() -> Compression:
    """The same without regard to the variable for bits: what `set_default` asked for."""
    return compression() if _bits is not None else _EXACT


def asked() -> Mapping[str, int]:
    """What `set_default` was last given, by the names that `Compression` has."""
    with _lock:
        return {name: value for name, value in (("bits", _bits), ("block", _block)) if value is not None}


def is_uncompressed() -> bool:
    """Whether an `uncompressed` block lasts."""
    return _exact_depth > 0


@lru_cache(maxsize=64)
def _combined(found: Compression, bits: int | None, block: int | None) -> Compression:
    return Compression(found.bits if bits is None else bits, found.block if block is None else block)
