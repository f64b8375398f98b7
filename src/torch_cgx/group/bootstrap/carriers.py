"""What carries payloads between ranks that share no memory: which choices there are, and whether they can be had."""

from __future__ import annotations

from dataclasses import dataclass

from torch_cgx import _native
from torch_cgx.config import Settings
from torch_cgx.group.bootstrap import mpi_process

__all__ = ["Carriers", "check_choice", "describe"]

_SYNONYMS = {"TCP": "TCP", "GLOO": "TCP", "MPI": "MPI"}


@dataclass(frozen=True, slots=True)
class Carriers:
    """What carries payloads between two ranks that share no memory: TCP or MPI."""

    within: str  # a node
    between: str

    @classmethod
    def of(cls, settings: Settings, all_have_mpi: bool) -> Carriers:
        """Return what was chosen. By default MPI, where it started the ranks, and TCP elsewhere."""
        inner = None if settings.inner_communicator == "SHM" else _SYNONYMS.get(settings.inner_communicator)
        cross = _SYNONYMS.get(settings.cross_communicator or "")
        default = "MPI" if all_have_mpi else "TCP"
        # Who chooses TCP within nodes and nothing between them means connections throughout.
        between = cross or (inner if inner == "TCP" else default)
        return cls(inner or between, between)

    def name(self, one_host: bool) -> str:
        """Return what the group's payloads go over, in a word."""
        return self.within if one_host else self.between


def check_choice(variable: str, name: str | None) -> None:
    """Raise a `ValueError` where this process cannot have that carrier, as far as can be told without starting it."""
    if name == "MPI":
        problem = mpi_process.problem_here()
        if problem:
            raise ValueError(f"{variable}=MPI: {problem}; or set {variable}=TCP")
    if name in ("TCP", "MPI") and not _native.shares_memory():
        raise ValueError(f"{variable}={name} needs the native library: reinstall torch_cgx where a C++ compiler is")


def describe() -> dict[str, str]:
    """Return, by name, what `cgx doctor` says of each carrier in a process like this one."""
    tcp = "available" if _native.shares_memory() else "needs the native library"
    return {"TCP": tcp, "GLOO": "another name for TCP", "MPI": mpi_process.describe()}
