"""Our part of `import torch`: it registers the backend name "cgx" and takes the rank from a launcher.

torch calls `register` through the entry point group `torch.backends`, in the middle of its own import. So this
module imports nothing heavy, stays outside the package (importing the package would run all of it), and never
raises: errors show when a group is created, not in every program that uses torch. The backend itself is
imported when the first group is created.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import multiprocessing.util
import os
import sys
from pathlib import Path
from typing import Any

# A process without any of these was not started by a launcher that we translate, and skips the rest.
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

in_command = False
"""True if this process is the command `cgx`, for which `import torch_cgx` must not import torch."""

_log = logging.getLogger("torch_cgx")
_notices_are_due = True  # at exit, once; not in a child that was forked from a process with a group


def command() -> int:
    """Run the command `cgx`, which imports torch only when it needs it."""
    global in_command
    in_command = True
    from torch_cgx.cli import main

    return main()


def register() -> None:
    """Register the backend "cgx" and adopt the launcher's rank. A second call changes nothing."""
    try:
        _register_backend()
    except Exception:
        _log.warning('the backend "cgx" could not be registered', exc_info=True)
    if any(variable in os.environ for variable in LAUNCHER_VARIABLES):
        try:
            _adopt_launcher()
        except Exception:
            _log.warning("the launcher's rank and world size could not be taken", exc_info=True)


def _register_backend() -> None:
    import torch.distributed as dist

    # Some builds of torch have no distributed package at all.
    if dist.is_available() and "cgx" not in dist.Backend.backend_list:
        dist.Backend.register_backend("cgx", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(dist_backend_opts: Any, backend_options: Any) -> Any:
    from torch_cgx.group.process_group import create

    return create(dist_backend_opts, backend_options)


def _adopt_launcher() -> None:
    # By path, because `import torch_cgx.launchers` would run the package while torch is half imported.
    path = Path(__file__).with_name("torch_cgx") / "launchers.py"
    spec = importlib.util.spec_from_file_location("torch_cgx.launchers", path)
    assert spec is not None and spec.loader is not None
    launchers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launchers)
    launchers.adopt_process()


def _end() -> None:
    """Warn at exit if bits were asked for in a process that used torch.distributed but compressed nothing."""
    global _notices_are_due
    due, _notices_are_due = _notices_are_due, False
    backend = _backend_of_this_process()
    asked = "CGX_COMPRESSION_QUANTIZATION_BITS" in os.environ or "torch_cgx" in sys.modules  # which has set_default
    if not due or backend is None or not asked or _is_rank_of_cli():
        return
    try:
        from torch_cgx.group.notices import warn_of_unused_bits

        warn_of_unused_bits(backend)
    except Exception:  # a notice must not spoil a clean exit
        _log.debug("no notice at exit", exc_info=True)


def _backend_of_this_process() -> str | None:
    """Return the backend of the last default group, which torch remembers after destroy_process_group, or None."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    backend: str | None = getattr(c10d, "_backend", None)
    return backend


def _is_rank_of_cli() -> bool:
    """Return whether the command cgx started this process, which compares backends on purpose."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(spec, "name", "").startswith("torch_cgx.cli.")


def _after_fork() -> None:
    global _notices_are_due
    _notices_are_due = _notices_are_due and _backend_of_this_process() is None


def _end_with_multiprocessing(_: object) -> None:
    multiprocessing.util.Finalize(None, _end, exitpriority=0)


# Forked children of multiprocessing end without atexit, and forget their parent's finalizers.
atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork)
multiprocessing.util.register_after_fork(_end, _end_with_multiprocessing)
