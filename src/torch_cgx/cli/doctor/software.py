"""The third-party software that `cgx doctor` looks for: MPI, NCCL, Triton. Nothing here raises or initialises MPI."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TypedDict

import torch

from torch_cgx.cli.gpus import Gpus
from torch_cgx.group.bootstrap import mpi_process
from torch_cgx.version import version_of

__all__ = ["Mpi", "describe_mpirun", "find_mpi", "find_nccl", "find_triton"]


class Mpi(TypedDict):
    mpi4py: str | None  # its version
    library: str | None  # name and version of the library that mpi4py has found
    mpirun: str | None  # on the PATH, or next to this Python
    on_path: bool
    told: str  # the transport's description, in words


def find_mpi() -> Mpi:
    library = None
    version = version_of("mpi4py")
    if version is not None:
        try:
            vendor, numbers = mpi_process.load().get_vendor()
            library = f"{vendor} {'.'.join(map(str, numbers))}"
        except Exception:  # a loader may raise anything; `told` has the reason
            pass
    on_path = shutil.which("mpirun") or shutil.which("mpiexec")
    beside = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    return Mpi(
        mpi4py=version,
        library=library,
        mpirun=on_path or beside,
        on_path=on_path is not None,
        told=mpi_process.describe(),
    )


def describe_mpirun(found: Mpi) -> str:
    if found["mpirun"] is None:
        return "not found"
    return found["mpirun"] if found["on_path"] else f"{found['mpirun']}, which is not on the PATH"


def find_nccl(gpus: Gpus) -> str:
    """Return NCCL (or RCCL) with its version, or the reason why there is none."""
    try:
        library = gpus.library()
    except Exception as error:  # from a driver
        return f"cannot be asked: {type(error).__name__}: {error}"
    if library is None:
        return "not in this torch, which was built " + ("without it" if _for_gpus() else "for CPUs alone")
    return library if gpus.count() else f"{library}, but torch sees no GPU"


def find_triton() -> str:
    version = version_of("triton") or version_of("pytorch-triton") or version_of("pytorch-triton-rocm")
    return version or "not installed, and needed for CUDA tensors alone"


def _for_gpus() -> bool:
    return torch.version.cuda is not None or torch.version.hip is not None
