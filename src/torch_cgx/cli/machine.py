"""Facts about this machine and this installation, for `cgx doctor` and at the head of every benchmark.

Every call looks the fact up again. Nothing raises: an unavailable fact is None.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from importlib import import_module
from pathlib import Path
from typing import TypedDict

SHARED_MEMORY = Path("/dev/shm")
STAT = Path("/proc/stat")


class Machine(TypedDict):
    cpu: str
    cores: int
    os: str
    python: str
    torch: str
    torch_cgx: str | None
    native: bool
    simd: str | None


def facts() -> Machine:
    import torch

    native, simd = native_facts()
    return Machine(
        cpu=cpu_model(),
        cores=cores(),
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cgx=getattr(import_module("torch_cgx"), "__version__", None),
        native=native,
        simd=simd,
    )


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def cores() -> int:
    """Return the number of cores that this process may use, not the host's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float:
    """Return the load average of the last minute."""
    return os.getloadavg()[0]


def busy_cores(seconds: float = 0.5) -> float | None:
    """Return how many cores are busy now, neighbours on the host included, or None if Linux does not tell."""
    try:
        before, start = _busy_s(), time.monotonic()
        time.sleep(seconds)
        return (_busy_s() - before) / (time.monotonic() - start)
    except (OSError, ValueError, IndexError):
        return None


def _busy_s() -> float:
    """Return the seconds since boot in which cores were not idle, over all cores together."""
    user, nice, system, _idle, _waiting, irq, soft, stolen = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


def native_facts() -> tuple[bool, str | None]:
    """Return whether the native library is there, and the SIMD level that a group created now would use."""
    try:
        from torch_cgx.config import Settings
        from torch_cgx.kernels import native

        if not native.available():
            return False, None
    except Exception:  # a broken library must not keep `cgx doctor` from saying so
        return False, None
    try:
        return True, native.simd_level(Settings.from_environ().simd)
    except ValueError:  # a level that this processor or this version does not have
        return True, None


def shared_memory_nbytes() -> tuple[int, int] | None:
    """Return the size and the free bytes of /dev/shm, or None if it does not exist."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return None
    return usage.total, usage.free
