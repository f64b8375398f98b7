"""MPI in this process: its availability, its initialisation, its end.

mpi4py is imported, and MPI initialised, when a group first asks for it, never before.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch_cgx import _native

__all__ = [
    "describe",
    "finalises_at_exit",
    "initialise",
    "job_name",
    "launched_rank",
    "libraries",
    "load",
    "problem_before",
    "problem_here",
]

INSTALL = "pip install '.[mpi]' in a checkout of torch_cgx"

# The variables that an MPI launcher sets for each process. srun sets one of the last two if it serves MPI.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")

_initialised_by: int | None = None  # the process in which we initialised MPI, and therefore must finalise it
libraries: list[_native.Mpi] = []  # passed to native code, one per communicator; never freed


def problem_here(environ: Mapping[str, str] = os.environ) -> str:
    """Return why this process cannot use MPI and what to do, as far as known without loading it; "" if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {INSTALL}"
    if launched_rank(environ) is None:
        return "no MPI launcher started this process: start it with mpirun (or srun --mpi=pmix)"
    if "TORCHELASTIC_RUN_ID" in environ or multiprocessing.parent_process() is not None:
        starter = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "multiprocessing"
        return f"{starter} started this process: let mpirun start all ranks itself"
    return ""


def describe() -> str:
    """Return the text for `cgx doctor`: the MPI that mpi4py has found, or what is missing."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"not installed: {INSTALL}"
    try:
        vendor, version = load().get_vendor()
    except Exception as error:
        return _no_library(error)
    library = f"{vendor} {'.'.join(map(str, version))}"
    return f"available under mpirun, mpi4py {importlib.metadata.version('mpi4py')} with {library}"


def problem_before() -> str:
    """Load the library. Return why this process must not initialise MPI, which could abort the process, or ""."""
    problem = problem_here()
    if problem:
        return problem
    try:
        vendor = load().get_vendor()[0]
    except Exception as error:
        return _no_library(error)
    launcher = "Open MPI" if "OMPI_COMM_WORLD_RANK" in os.environ else "MPICH"
    if launcher == "MPICH" and "MPI_LOCALRANKID" not in os.environ:
        return ""  # some other launcher, which may serve any MPI
    if (launcher == "Open MPI") != (vendor == "Open MPI"):
        return _another_mpi(launcher, vendor)
    return ""


def initialise(world: int) -> str:
    """Initialise MPI if necessary. Return why a group of `world` ranks cannot use it, or ""."""
    global _initialised_by
    mpi = load()
    if not mpi.Is_initialized():
        try:
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
        except Exception as error:
            return f"MPI cannot be initialised: {error}"
        _initialised_by = os.getpid()
    if mpi.Is_finalized():
        return "MPI has been finalised already"
    if not libraries:  # MPI_Finalize runs this first, also when the user calls it
        mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=_stop_progress), None)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return (
            "MPI was initialised without MPI_THREAD_MULTIPLE: leave mpi4py.rc.thread_level at 'multiple', "
            "or import mpi4py.MPI only after init_process_group"
        )
    size = mpi.COMM_WORLD.Get_size()
    if size < world:
        other = _another_mpi("the launcher's MPI", mpi.get_vendor()[0])
        return f"MPI_COMM_WORLD has {size} ranks, the group {world}. {other}"
    return ""


def load() -> Any:
    """Return mpi4py's module, which has loaded the MPI library. The import does not initialise MPI."""
    if "mpi4py.MPI" in sys.modules:
        return sys.modules["mpi4py.MPI"]
    rc = import_module("mpi4py").rc
    initialize, rc.initialize = rc.initialize, False
    try:
        return import_module("mpi4py.MPI")
    finally:
        rc.initialize = initialize


def launched_rank(environ: Mapping[str, str] = os.environ) -> str | None:
    return next((environ[name] for name in _RANK_VARIABLES if name in environ), None)


def job_name() -> str:
    """Return a name that is identical in all ranks of one launcher's job."""
    return f"{os.environ.get('PMIX_NAMESPACE', '')} {load().COMM_WORLD.Get_size()}"


def _another_mpi(launcher: str, library: str) -> str:
    return (
        f"mpi4py uses {library}, but {launcher} started this process. Start it with the mpirun of {library}, or set "
        f"MPI4PY_LIBMPI to the folder of libmpi.so that belongs to this mpirun"
    )


def _no_library(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return f"mpi4py finds no MPI library ({first}): {INSTALL}, or set MPI4PY_LIBMPI to the folder of libmpi.so"


def finalises_at_exit() -> bool:
    """Return whether this process will call MPI_Finalize, in which ranks wait for each other.

    It will if torch_cgx initialised MPI, but not after an exception: the launcher then ends the other ranks, which may
    be waiting for this one.
    """
    raised = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    stranded = any(library.stranded for library in libraries)
    return _initialised_by == os.getpid() and not raised and not stranded and not load().Is_finalized()


def _stop_progress(*_: object) -> None:
    """Stop the native progress thread, because no thread may call MPI during MPI_Finalize."""
    library = _native.library() if libraries else None
    if library is not None:
        library.cgx_mpi_stop()


def _end() -> None:
    _stop_progress()
    if finalises_at_exit():
        load().Finalize()


# Registered at import, not when MPI is initialised: the first registered runs last, after all groups are closed.
atexit.register(_end)
