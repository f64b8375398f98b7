"""Rank and world size from the launcher that started this process: mpirun (Open MPI, MPICH) or srun.

torchrun sets RANK, WORLD_SIZE and MASTER_ADDR; these launchers have variables of their own for the same facts. If
RANK and WORLD_SIZE are both absent, `adopt` translates. What a user has set is never changed. Nothing raises at
import, because a script may still set the rest itself; the rendezvous reports what is missing then.

This module does not start processes, nor choose a host to meet on if there are several. It uses only the standard
library, because `import torch` runs it (see `_torch_cgx_autoload`).
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

# Below Linux's range for outgoing connections (from 32768), so that no passing connection holds the port.
_FIRST_PORT, _PORTS = 20000, 10000

# Slurm gives these ids to steps that the user did not start with srun: the batch script, an interactive shell.
_SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0


class Place(NamedTuple):
    """A process's place in its job, as the launcher describes it."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None  # None: the launcher does not tell
    local_world_size: int | None
    job: str | None  # the same string in all ranks of one job, and in no other job
    rank_variable: str  # set only in ranks and in what they start
    example: str  # how this launcher hands an address to all ranks
    passing: tuple[str, str] | None = None  # a command, and what each variable adds to it; None: not known

    @property
    def one_host(self) -> bool:
        return self.local_world_size == self.world_size


def detect(environ: Mapping[str, str]) -> Place | None:
    """Return what the launcher's variables say, or None if there are none or they make no sense."""
    for read in _LAUNCHERS:
        try:
            place = read(environ)
        except (KeyError, ValueError):
            continue  # a variable is missing or not a number: not this launcher
        if 0 <= place.rank < place.world_size:
            return place
    return None


def adopt(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Set RANK, WORLD_SIZE and related variables from the launcher's variables.

    Return the launcher's name. If RANK or WORLD_SIZE was set or no launcher is recognized, return None and change
    nothing.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return None
    place = detect(environ)
    if place is None:
        return None
    environ["RANK"] = str(place.rank)
    environ["WORLD_SIZE"] = str(place.world_size)
    if place.local_rank is not None:
        environ.setdefault("LOCAL_RANK", str(place.local_rank))
    if place.local_world_size is not None:
        environ.setdefault("LOCAL_WORLD_SIZE", str(place.local_world_size))
    if place.one_host and not environ.get("MASTER_ADDR"):
        environ["MASTER_ADDR"] = "127.0.0.1"
    if not environ.get("MASTER_PORT"):
        job = place.job
        if job is None and place.one_host:
            job = f"{place.launcher} {launcher_pid(place.rank_variable)}"
        if job is not None:
            environ["MASTER_PORT"] = str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS)
    return place.launcher


def missing_address(environ: Mapping[str, str]) -> str | None:
    """Return a sentence on what to set so that ranks on several hosts can meet, or None if nothing is missing."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    place = detect(environ) if missing else None
    if place is None or place.one_host:
        return None
    hosts = "perhaps on several hosts" if place.local_world_size is None else "on several hosts"
    return (
        f"{place.launcher} started {place.world_size} ranks {hosts}, this one as rank {place.rank}, but "
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. Set MASTER_ADDR to the "
        "host of rank 0 and MASTER_PORT to a free port there, on all ranks, in the environment or in the "
        f"script before init_process_group; for example: {place.example}"
    )


def how_to_pass(names: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return a sentence on how this process's launcher passes these variables to all ranks."""
    place = detect(environ)
    which = "it" if len(names) == 1 else "them"
    if place is None or place.passing is None:
        return (
            f"Set {which} to the same value on every host, before the ranks are started: torchrun hands its own "
            "environment to the ranks it starts"
        )
    command, option = place.passing
    return f"Hand {which} to all ranks: {command}{''.join(option.format(name) for name in names)} ..."


def adopt_process() -> None:
    """Call `adopt` for this process; if its ranks cannot meet yet, let the env:// rendezvous say why."""
    if adopt(os.environ) is not None and missing_address(os.environ) is not None:
        _report_at_rendezvous()


def _report_at_rendezvous() -> None:
    # torch has no public way to replace a handler. Should its table change, torch's own, shorter error stays:
    # "environment variable MASTER_ADDR expected, but not set".
    rendezvous = import_module("torch.distributed.rendezvous")
    handlers: dict[str, Callable[..., Any]] = getattr(rendezvous, "_rendezvous_handlers", {})
    torch_handler = handlers.get("env")
    if torch_handler is None:
        return

    def env_handler(url: str, **options: Any) -> Any:
        problem = missing_address(os.environ)
        if problem is not None:
            raise ValueError(problem)
        return torch_handler(url, **options)

    handlers["env"] = env_handler


def launcher_pid(rank_variable: str, *, pid: int | None = None, proc: Path = Path("/proc")) -> int:
    """Return the process that started all ranks of this host: the nearest ancestor without a rank of its own.

    Our parent may not be it, because each rank may have a wrapper script.
    """
    prefix = f"{rank_variable}=".encode()
    pid = os.getppid() if pid is None else pid
    for ancestor in _ancestors(pid, proc):
        pid = ancestor
        try:
            variables = (proc / str(ancestor) / "environ").read_bytes().split(b"\0")
        except OSError:
            break  # no /proc, or another user's process, which is no wrapper of ours
        if not any(variable.startswith(prefix) for variable in variables):
            break
    return pid


def _ancestors(pid: int, proc: Path) -> Iterator[int]:
    """Yield `pid`, its parent, and so on, up to the first process of all."""
    while pid > 0:
        yield pid
        try:
            status = (proc / str(pid) / "status").read_text()
        except OSError:
            return
        parent = re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)
        pid = int(parent[1]) if parent else 0


def _open_mpi(environ: Mapping[str, str]) -> Place:
    return Place(
        launcher="Open MPI",
        rank=int(environ["OMPI_COMM_WORLD_RANK"]),
        world_size=int(environ["OMPI_COMM_WORLD_SIZE"]),
        local_rank=int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]),
        local_world_size=int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        job=environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid"),
        rank_variable="OMPI_COMM_WORLD_RANK",
        example="mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ...",
        passing=("mpirun", " -x {}"),
    )


def _mpich(environ: Mapping[str, str]) -> Place:
    return Place(
        launcher="MPICH",
        rank=int(environ["PMI_RANK"]),
        world_size=int(environ["PMI_SIZE"]),
        local_rank=int(environ["MPI_LOCALRANKID"]),
        local_world_size=int(environ["MPI_LOCALNRANKS"]),
        job=environ.get("PMIX_NAMESPACE"),
        rank_variable="PMI_RANK",
        example="mpirun -genv MASTER_ADDR node1 -genv MASTER_PORT 29500 ...",
        passing=("mpirun", " -genv {} VALUE"),
    )


def _slurm(environ: Mapping[str, str]) -> Place:
    # SLURM_PROCID and SLURM_NTASKS are also set in a batch script, which is one process. Only the step's variables
    # tell how many processes there are.
    step, world_size = int(environ["SLURM_STEP_ID"]), int(environ["SLURM_STEP_NUM_TASKS"])
    if step >= _SLURM_FIRST_SPECIAL_STEP or world_size < 2:
        raise ValueError("not an srun step of several tasks")
    tasks_per_node = _slurm_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(environ.get("SLURM_NODEID", "0"))
    local_world_size = None
    if sum(tasks_per_node) == world_size and node < len(tasks_per_node):
        local_world_size = tasks_per_node[node]
    return Place(
        launcher="Slurm",
        rank=int(environ["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world_size=local_world_size,
        job=f"{environ['SLURM_JOB_ID']}.{step}",
        rank_variable="SLURM_PROCID",
        example="export MASTER_ADDR=$(scontrol show hostnames $SLURM_NODELIST | head -n 1) MASTER_PORT=29500",
        passing=("srun --export=ALL", ",{}=VALUE"),
    )


def _slurm_tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's "2(x3),1" as [2, 2, 2, 1]; return [] for anything else."""
    tasks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            return []
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _pmi(environ: Mapping[str, str]) -> Place:
    return Place(
        launcher="A PMI launcher",
        rank=int(environ["PMI_RANK"]),
        world_size=int(environ["PMI_SIZE"]),
        local_rank=None,
        local_world_size=None,
        job=environ.get("PMIX_NAMESPACE"),
        rank_variable="PMI_RANK",
        example="export MASTER_ADDR=node1 MASTER_PORT=29500",
    )


# mpirun before srun: inside a Slurm job mpirun starts its daemons with srun, whose variables ranks inherit.
# Plain PMI last: `srun --mpi=pmi2` sets it too, and says less with it.
_LAUNCHERS: tuple[Callable[[Mapping[str, str]], Place], ...] = (_open_mpi, _mpich, _slurm, _pmi)
