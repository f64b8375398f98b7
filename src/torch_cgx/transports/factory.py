"""Makes transports by name: GLOO, MPI, or the better of the two for how the ranks were started."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import Store

from torch_cgx import _native
from torch_cgx.errors import TransportError
from torch_cgx.transports import Transport, mpi_process
from torch_cgx.transports.agreement import exchange
from torch_cgx.transports.gloo import GlooTransport
from torch_cgx.transports.mpi import open_mpi

__all__ = ["check_choice", "describe", "open_transport"]

_log = logging.getLogger("torch_cgx")


class _Open(Protocol):
    def __call__(
        self, store: Store, rank: int, world: int, timeout: timedelta, global_ranks: Sequence[int]
    ) -> Transport: ...


_OPEN: dict[str, _Open] = {"GLOO": GlooTransport, "MPI": open_mpi}


def check_choice(variable: str, name: str | None) -> None:
    """A `ValueError` where this process cannot have that transport, as far as can be told without starting it."""
    if name == "MPI":
        problem = mpi_process.problem_here()
        if problem:
            raise ValueError(f"{variable}=MPI: {problem}; or set {variable}=TCP")
    if name == "TCP" and not _native.shares_memory():
        raise ValueError(f"{variable}=TCP needs the native library: reinstall torch_cgx where a C++ compiler is")


def open_transport(
    name: str | None, store: Store, rank: int, world: int, timeout: timedelta, global_ranks: Sequence[int]
) -> Transport:
    """The transport of that name, between exactly these ranks, all of which call this with a store of their own.

    None stands for MPI where an MPI launcher started all ranks and they have mpi4py, else GLOO. Where it cannot be
    made, all ranks raise the same `TransportError`.
    """
    if name is not None:
        return _OPEN[name](store, rank, world, timeout, global_ranks)
    facts = exchange(store, "default", rank, world, {"problem": mpi_process.problem_here()})
    if not any(theirs["problem"] for theirs in facts):
        try:
            return open_mpi(store, rank, world, timeout, global_ranks)
        except TransportError as error:
            if rank == 0:
                _log.warning("torch_cgx goes over Gloo, though the ranks were started by MPI: %s", error)
    return GlooTransport(store, rank, world, timeout, global_ranks)


def describe() -> dict[str, str]:
    """By name, what `cgx doctor` says of each transport in a process like this one."""
    tcp = "available" if _native.shares_memory() else "needs the native library"
    return {"TCP": tcp, "GLOO": "available", "MPI": mpi_process.describe()}
