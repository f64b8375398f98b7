"""SIGUSR2 writes the flight recorder's file, even while the main thread hangs inside somebody's native code.

The native library's handler only adds to an eventfd, whichever thread gets the signal; a thread of ours reads that and
writes. Where the native library is missing, Python's own handler does it, which runs only while the main thread runs
Python now and then (it does in our waits). A handler that the user has, or sets later, is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

from torch_cgx import _native

__all__ = ["SIGNAL", "listen"]

SIGNAL = signal.SIGUSR2

_listening: list[int] = []  # the process whose signals are heard


def listen(write: Callable[[str], object]) -> None:
    """From now on the signal calls `write`; said again in a process that listens already, it does nothing."""
    if os.getpid() in _listening:
        return
    lib = _native.library()
    if lib is None or not hasattr(os, "eventfd"):
        # From another thread than the main one Python sets no handlers.
        with contextlib.suppress(ValueError):
            if signal.getsignal(SIGNAL) is signal.SIG_DFL:
                signal.signal(SIGNAL, lambda *_: threading.Thread(target=write, args=("signal",)).start())
    else:
        events = os.eventfd(0, os.EFD_CLOEXEC)
        if lib.cgx_signal_to_eventfd(SIGNAL, events) != 0:
            os.close(events)
        else:
            threading.Thread(target=_read, args=(events, write), name="cgx-trace", daemon=True).start()
    _listening[:] = [os.getpid()]


def _read(events: int, write: Callable[[str], object]) -> None:
    while True:
        os.eventfd_read(events)
        write("signal")
