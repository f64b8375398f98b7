"""Write the flight recorder's file on SIGUSR2, even while the main thread hangs in native code.

The native library's handler only adds to an eventfd, on whichever thread gets the signal. A thread of ours reads the
eventfd and writes the file. Without the native library a Python handler is used. It runs only when the main thread
executes Python, which it does in our waits. A handler that the user has set, or sets later, is left alone.
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

_listening: list[int] = []  # the process that listens


def listen(write: Callable[[str], object]) -> None:
    """Call `write` whenever the signal arrives. Does nothing in a process that is already listening."""
    if os.getpid() in _listening:
        return
    lib = _native.library()
    if lib is None or not hasattr(os, "eventfd"):
        # Python sets handlers from the main thread only.
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
