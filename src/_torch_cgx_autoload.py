"""What `import torch` runs of ours: makes the backend name "cgx" known, and takes the rank from a launcher.

torch calls `register` through the entry point group `torch.backends`, in the middle of its own import. So
this module imports nothing heavy, stands outside the package (importing the package would run all of it),
and never raises: what is broken shows when somebody asks for a group, not in every program that uses torch.
Not here: the backend itself, which is imported when the first group is created.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

# A process that has none of them was started by no launcher that we translate, and saves itself the rest.
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

_log = logging.getLogger("torch_cgx")


def register() -> None:
    """Registers the backend "cgx" and adopts the launcher's rank. Twice is the same as once."""
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
    from torch_cgx.backend import create

    return create(dist_backend_opts, backend_options)


def _adopt_launcher() -> None:
    # By path, because `import torch_cgx.launchers` would run the package while torch is half imported.
    path = Path(__file__).with_name("torch_cgx") / "launchers.py"
    spec = importlib.util.spec_from_file_location("torch_cgx.launchers", path)
    assert spec is not None and spec.loader is not None
    launchers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launchers)
    launchers.adopt_process()
