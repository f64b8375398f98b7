"""The state of other processes on this host, from the kernel. This module does not know ranks."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["GONE", "place", "stat", "state_of", "who_am_i"]

GONE = "is gone"


def who_am_i() -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "place": place(), "started": stat(pid)[1]}


def place() -> str:
    """Return a name that is identical for processes that can see each other."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown {os.getpid()}"


def stat(pid: int) -> tuple[str, str]:
    """Return a process's state and its start time; two empty strings if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            words = file.read().rpartition(")")[2].split()
        return words[0], words[19]
    except (OSError, IndexError):
        return "", ""


def state_of(pid: int, started: str) -> str:
    state, began = stat(pid)
    if began != started or state in ("Z", "X"):
        return f"{GONE}: its process (pid {pid}) was killed, crashed or ran out of memory"
    if state in ("T", "t"):
        return f"does not answer: its process (pid {pid}) is stopped (SIGSTOP, or a debugger)"
    return ""
