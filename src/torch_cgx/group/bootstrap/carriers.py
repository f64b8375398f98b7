"""Carriers of payloads between ranks that share no memory: TCP and MPI. Choose them, and check their availability."""

from __future__ import annotations

from dataclasses import dataclass

from torch_cgx import _native
from torch_cgx.config import Settings
from torch_cgx.group.bootstrap import mpi_process

__all__ = ["Carriers", "check_choice", "describe"]

_SYNONYMS = {"TCP": "TCP", "GLOO": "TCP", "MPI": "MPI"}


@dataclass(frozen=True, slots=True)
class Carriers:
    """The carriers of one group, TCP or MPI, for pairs of ranks that share no memory."""

    within: str  # pairs on one node
    between: str  # pairs on different nodes

    @classmethod
    def of(cls, settings: Settings, all_have_mpi: bool) -> Carriers:
        """Return the carriers that the settings choose. The default is MPI under an MPI launcher, else TCP."""
        inner = None if settings.inner_communicator == "SHM" else _SYNONYMS.get(settings.inner_communicator)
        cross = _SYNONYMS.get(settings.cross_communicator or "")
        default = "MPI" if all_have_mpi else "TCP"
        # TCP within nodes, with no choice between them, means TCP everywhere.
        between = cross or (inner if inner == "TCP" else default)
        return cls(inner or between, between)

    def name(self, one_host: bool) -> str:
        """Return the carrier that users see as the group's own."""
        return self.within if one_host else self.between


def check_choice(variable: str, name: str | None) -> None:
    """Raise a `ValueError` if this process cannot use the carrier. The check starts nothing."""
    if name == "MPI":
        problem = mpi_process.problem_here()
        if problem:
            raise ValueError(f"{variable}=MPI: {problem}; or set {variable}=TCP")
    if name in ("TCP", "MPI") and not _native.shares_memory():
        raise ValueError(f"{variable}={name} needs the native library: reinstall torch_cgx where a C++ compiler is")


def describe() -> dict[str, str]:
    """Return the state of each carrier in this process, as `cgx doctor` prints it."""
    tcp = "available" if _native.shares_memory() else "needs the native library"
    return {"TCP": tcp, "GLOO": "another name for TCP", "MPI": mpi_process.describe()}
