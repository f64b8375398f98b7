"""The loader of the native library, and the C structures of csrc/include/cgx.h as ctypes.

Nothing here depends on torch. If the library was not built (no compiler at installation), `library()` returns None and
the caller uses the plain-torch kernels. If it was built without shared memory (macOS), it has only kernels.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

__all__ = [
    "Call",
    "Means",
    "Peer",
    "Piece",
    "Record",
    "Rounding",
    "Slot",
    "Stats",
    "Step",
    "Submission",
    "library",
    "shares_memory",
]

ABI_VERSION = 12

_log = logging.getLogger("torch_cgx")


class Means(ctypes.Structure):
    _fields_ = [("simd", c_int32), ("threads", c_int32)]


class Piece(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("offset", "numel", "payload", "raw_tail", "block", "bits", "kind")]


class Rounding(ctypes.Structure):
    _fields_ = [("seed", c_uint64), ("op", c_uint64), ("rank", c_uint32), ("stage", c_uint32), ("stochastic", c_int64)]


class Step(ctypes.Structure):
    _fields_ = [
        (name, c_int64)
        for name in ("kind", "slot", "peer", "first_piece", "n_pieces", "first_input", "n_inputs", "partial")
    ]


class Slot(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("offset", "nbytes", "writer", "flag", "slice", "home")]


class Call(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("operation", "dtype", "reduction", "root", "bits", "block", "ndim", "kind")),
        ("numel", c_int64),
        ("layout", c_int64),
        ("dims", c_int64 * 6),
    ]


class Stats(ctypes.Structure):
    _fields_ = [
        (name, c_int64)
        for name in (
            "operations",
            "compressed_operations",
            "bytes_before",
            "bytes_after",
            "bytes_sent",
            "encode_ns",
            "wait_ns",
            "reduce_ns",
            "decode_ns",
        )
    ]


class Submission(ctypes.Structure):
    _fields_ = [
        ("plan", c_void_p),
        ("values", c_void_p),
        ("residual", c_void_p),
        ("share", c_void_p),
        ("scale", c_double),
        ("rounding", Rounding),
        *((name, c_int64) for name in ("timeout_ms", "bytes_before", "bytes_after", "compressed", "wake", "completed")),
        ("sequence", c_int64),
    ]


class Record(ctypes.Structure):
    _fields_ = [
        (name, c_int64)
        for name in (
            *("number", "sequence", "state", "submitted_ns", "started_ns", "finished_ns"),
            *("encode_ns", "wait_ns", "reduce_ns", "decode_ns", "bytes_before", "bytes_after", "bytes_sent"),
            *("waited_for", "waited_for_ns", "waiting_for", "waiting_since_ns"),
        )
    ]


class Mpi(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("isend", "issend", "irecv", "test", "cancel", "finalized")),
        *((name, c_uint64) for name in ("communicator", "byte")),
        ("stranded", c_int64),
    ]


class Peer(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("pid", "life", "noted", "noted_at_ns", "waits_on")]


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "cgx_abi_version": (c_int, []),
    "cgx_best_simd": (c_int, []),
    "cgx_simd_available": (c_int, [c_int]),
    "cgx_piece_payload_nbytes": (c_int64, [POINTER(Piece), c_int]),
    "cgx_encode": (
        c_int,
        [POINTER(Means), c_int, POINTER(Piece), c_int64, c_void_p, c_void_p, POINTER(Rounding), c_void_p],
    ),
    "cgx_decode": (c_int, [POINTER(Means), c_int, POINTER(Piece), c_int64, c_void_p, c_void_p, c_int]),
    "cgx_reduce": (
        c_int,
        [
            *(POINTER(Means), c_int, POINTER(Piece), c_int64, c_void_p, POINTER(c_void_p), c_int64, c_double, c_void_p),
            *(POINTER(Rounding), c_void_p),
        ],
    ),
    "cgx_sum": (
        c_int,
        [POINTER(Means), c_int, POINTER(Piece), c_int64, c_void_p, POINTER(c_void_p), c_int64, c_double],
    ),
    "cgx_signal_to_eventfd": (c_int, [c_int, c_int]),
}

_SHARED_MEMORY: dict[str, tuple[object, list[object]]] = {
    "cgx_plan_new": (
        c_void_p,
        [
            *(c_int64, c_int, POINTER(Piece), c_int64, POINTER(Slot), c_int64, POINTER(c_int64), c_int64),
            *(POINTER(Step), c_int64, c_int64, c_int64, c_int64, c_int64, POINTER(c_int)),
        ],
    ),
    "cgx_plan_free": (None, [c_void_p]),
    "cgx_control_create": (c_int, [c_int64, c_char_p, c_int64, c_char_p, c_int64]),
    "cgx_group_open": (
        c_void_p,
        [
            *(c_char_p, c_int64, c_int64, POINTER(c_int32), POINTER(c_int32), c_char_p, c_char_p, c_char_p),
            *(POINTER(Means), c_int64, c_char_p, c_int64),
        ],
    ),
    "cgx_group_link": (c_int, [c_void_p, c_int64, c_int64, c_int]),
    "cgx_group_link_mpi": (c_int, [c_void_p, c_int64, POINTER(Mpi), c_int]),
    "cgx_mpi_stop": (None, []),
    "cgx_group_bell": (c_int, [c_void_p, c_int64, c_int]),
    "cgx_control_unlink": (None, [c_char_p]),
    "cgx_group_note": (c_int64, [c_void_p, POINTER(Call)]),
    "cgx_group_submit": (c_int64, [c_void_p, POINTER(Call), POINTER(Submission)]),
    "cgx_group_wait": (c_int, [c_void_p, c_int64, c_int64]),
    "cgx_group_kick": (None, [c_void_p]),
    "cgx_group_check": (c_int, [c_void_p, c_int64, c_int]),
    "cgx_group_laggards": (None, [c_void_p, c_int64, c_char_p, c_int64]),
    "cgx_group_fail": (None, [c_void_p, c_int, c_char_p]),
    "cgx_group_error": (c_int, [c_void_p, c_char_p, c_int64]),
    "cgx_group_record": (c_int, [c_void_p, c_int64, POINTER(Record)]),
    "cgx_group_peer": (None, [c_void_p, c_int64, POINTER(Peer), c_char_p, c_int64]),
    "cgx_group_stats": (None, [c_void_p, POINTER(Stats)]),
    "cgx_group_reset_stats": (None, [c_void_p]),
    "cgx_group_close": (None, [c_void_p]),
    "cgx_group_free": (None, [c_void_p]),
}

_lock = threading.Lock()
_loaded: list[ctypes.CDLL | None] = []


def library() -> ctypes.CDLL | None:
    """Return the library with all its signatures declared, or None (logged once) if it cannot be used."""
    with _lock:
        if not _loaded:
            _loaded.append(_load(Path(__file__).with_name("libcgx.so")))
        return _loaded[0]


def shares_memory() -> bool:
    """Return whether the library is available and has the executor over shared memory."""
    lib = library()
    return lib is not None and hasattr(lib, "cgx_group_open")


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        lib = ctypes.CDLL(str(path))
        lib.cgx_abi_version.restype = c_int
        found = lib.cgx_abi_version()
        if found != ABI_VERSION:
            raise OSError(f"{path.name} has ABI {found}, this package needs {ABI_VERSION}: reinstall torch_cgx")
        shared_memory = _SHARED_MEMORY if hasattr(lib, "cgx_group_open") else {}
        for name, (restype, argtypes) in (_SIGNATURES | shared_memory).items():
            function = getattr(lib, name)
            function.restype = restype
            function.argtypes = argtypes
    except (OSError, AttributeError) as error:
        _log.warning(
            "torch_cgx has no native library (%s): using the plain-torch kernels, which are many times slower. "
            "Install a C++ compiler and reinstall torch_cgx to get it.",
            error,
        )
        return None
    return lib
