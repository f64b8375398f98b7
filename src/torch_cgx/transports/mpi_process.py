"""MPI in this process: whether it can be had, its initialisation, its progress while nobody calls it, its end.

mpi4py is imported, and MPI initialised, when a group first asks for it, never before.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

__all__ = [
    "describe",
    "finalises_at_exit",
    "initialise",
    "job_name",
    "launched_rank",
    "load",
    "problem_before",
    "problem_here",
    "progress",
    "stranded",
]

INSTALL = "pip install '.[mpi]' in a checkout of torch_cgx"

# What an MPI launcher sets for each process that it starts; srun sets one of the last two where it serves MPI.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")

_initialised_by: int | None = None  # the process in which we initialised MPI, and so have to finalise it
stranded: list[object] = []  # messages that were given up, but whose memory MPI may still read and write


def problem_here(environ: Mapping[str, str] = os.environ) -> str:
    """What keeps this process from MPI, as far as can be told without loading it, and what to do; "" if nothing."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {INSTALL}"
    if launched_rank(environ) is None:
        return "no MPI launcher started this process: start it with mpirun (or srun --mpi=pmix)"
    if "TORCHELASTIC_RUN_ID" in environ or multiprocessing.parent_process() is not None:
        starter = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "multiprocessing"
        return f"{starter} started this process: let mpirun start all ranks itself"
    return ""


def describe() -> str:
    """What `cgx doctor` says: which MPI mpi4py has found, or what is missing."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"not installed: {INSTALL}"
    try:
        vendor, version = load().get_vendor()
    except Exception as error:
        return _no_library(error)
    library = f"{vendor} {'.'.join(map(str, version))}"
    return f"available under mpirun, mpi4py {importlib.metadata.version('mpi4py')} with {library}"


def problem_before() -> str:
    """What keeps this process from initialising MPI, which in the wrong place would abort it; loads the library."""
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


def initialise(world: int, tags: int) -> str:
    """Initialise MPI, if nobody has; what is wrong with it for so many ranks and tags, or ""."""
    global _initialised_by
    mpi = load()
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        _initialised_by = os.getpid()
    if mpi.Is_finalized():
        return "MPI has been finalised already"
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return (
            "MPI was initialised without MPI_THREAD_MULTIPLE: leave mpi4py.rc.thread_level at 'multiple', "
            "or import mpi4py.MPI only after init_process_group"
        )
    size, largest_tag = mpi.COMM_WORLD.Get_size(), mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
    if size < world:
        other = _another_mpi("the launcher's MPI", mpi.get_vendor()[0])
        return f"MPI_COMM_WORLD has {size} ranks, the group {world}. {other}"
    if largest_tag < tags:
        return (
            f"{mpi.get_vendor()[0]} has tags up to {largest_tag}, {tags} are needed: set CGX_*_COMMUNICATOR_TYPE=GLOO"
        )
    progress.start(mpi)
    return ""


def load() -> Any:
    """mpi4py's module with its MPI library, not initialised by the import."""
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
    """The same in all ranks of one launcher's job."""
    return f"{os.environ.get('PMIX_NAMESPACE', '')} {load().COMM_WORLD.Get_size()}"


def _another_mpi(launcher: str, library: str) -> str:
    return (
        f"mpi4py uses {library}, but {launcher} started this process. Start it with the mpirun of {library}, or set "
        f"MPI4PY_LIBMPI to the folder of libmpi.so that belongs to this mpirun"
    )


def _no_library(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return f"mpi4py finds no MPI library ({first}): {INSTALL}, or set MPI4PY_LIBMPI to the folder of libmpi.so"


class Progress:
    """Calls MPI now and then while nobody else does.

    MPI moves bytes only inside its calls. A rank that is through with its messages may still owe its peers something:
    the rest of a message that lies in MPI's buffers, or word that one has arrived. At first there is a burst of calls
    every millisecond; later the pauses are a tenth of the time since `seen` was called last, so that whoever waits for
    that waits hardly longer.
    """

    BURST = 8  # MPICH does one small thing a call
    LEAST_S, MOST_S = 1e-3, 50e-3
    AT_FIRST_S = 50e-3

    def __init__(self) -> None:
        self._last_s = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, mpi: Any) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(mpi,), name="cgx-mpi-progress", daemon=True)
            self._thread.start()

    def seen(self) -> None:
        """Somebody has just called MPI."""
        self._last_s = time.monotonic()

    def stop(self) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()

    def _run(self, mpi: Any) -> None:
        # Whatever the library, to test what never comes is to let it work. The communicator is a copy: ours alone.
        alone = mpi.COMM_SELF.Dup()
        never = alone.Irecv(bytearray(1), 0)
        while not self._ended.wait(self._pause_s()):
            for _ in range(self.BURST):
                if mpi.Is_finalized():
                    return
                never.Test()
        never.Cancel()
        never.Wait()
        alone.Free()

    def _pause_s(self) -> float:
        idle_s = time.monotonic() - self._last_s
        return self.LEAST_S if idle_s < self.AT_FIRST_S else min(idle_s / 10, self.MOST_S)


progress = Progress()


def finalises_at_exit() -> bool:
    """Whether this process will call MPI_Finalize, in which ranks wait for each other.

    It does where it was we who initialised MPI; but not when it ends with an exception: its launcher then ends the
    others, who may be waiting for this rank.
    """
    raised = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    return _initialised_by == os.getpid() and not raised and not stranded and not load().Is_finalized()


def _end() -> None:
    if _initialised_by == os.getpid():
        progress.stop()
    if finalises_at_exit():
        load().Finalize()


# Here and not where MPI is initialised: what is registered first runs last, after all groups have been closed.
atexit.register(_end)
