"""The handshake of a new group's ranks: they compare versions and settings, and find out who shares memory.

Everything goes through the group's store, as JSON, never as pickles. At the end either every rank knows the same facts,
or every rank raises the same error.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from torch_cgx import _native, launchers
from torch_cgx.config import (
    NOTHING_KNOWN,
    VARIABLES,
    LinkCosts,
    Settings,
    compression_from_environ,
    shared_variables,
    shortened,
)
from torch_cgx.engines.host.native import SharedGroup
from torch_cgx.errors import CGXTimeoutError, MismatchError, SharedMemoryError, TransportError
from torch_cgx.group.bootstrap.carriers import check_choice
from torch_cgx.group.bootstrap.mpi_process import problem_here
from torch_cgx.group.bootstrap.store_json import check_fields, parse_answer
from torch_cgx.group.calls import NAMES
from torch_cgx.kernels.native import available, means, thread_count
from torch_cgx.version import __version__

__all__ = [
    "Joining",
    "Membership",
    "agree",
    "check_plain",
    "join",
    "naming_the_absent",
    "open_shared_group",
    "read_entry",
]

SHM_FOLDER = "/dev/shm"
SEGMENT_LIMIT_NBYTES = 192 << 20  # the most that a group takes of /dev/shm, even if more is free
SEGMENT_FLOOR_NBYTES = 1 << 20  # with less than this, connections are the better choice

_MEMBER = {
    "version": str,
    "settings": dict,
    "variables": dict,
    "node": str,
    "pids": str,
    "native": bool,
    "cuda_problem": str,
    "mpi": bool,
    "link_costs": str,
}
_MOST_RANKS_NAMED = 8  # in an error
_SEGMENT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,63}")  # a file's name, not a path
_MOST_PAUSE_S = 0.05  # between two checks whether a peer has joined

_log = logging.getLogger("torch_cgx")


@dataclass(frozen=True, slots=True)
class Membership:
    """The facts that all ranks of a group know about each other."""

    nodes: tuple[str, ...]  # by rank: a name for the ranks that share memory
    pid_namespaces: tuple[str, ...]  # by rank: ranks in different ones cannot see whether the other lives
    native: tuple[bool, ...]  # by rank: whether it has the native library, with shared memory
    cuda_problems: tuple[str, ...]  # by rank: why it cannot have CUDA tensors, or ""
    all_have_mpi: bool = False  # an MPI launcher started all ranks, and they have mpi4py
    link_costs: LinkCosts = NOTHING_KNOWN  # rank 0's

    @property
    def one_host(self) -> bool:
        return len(set(self.nodes)) == 1 and len(set(self.pid_namespaces)) == 1

    @property
    def all_have_cuda(self) -> bool:
        return not any(self.cuda_problems)

    @property
    def some_have_cuda(self) -> bool:
        return not all(self.cuda_problems)

    def without_cuda(self, global_ranks: Sequence[int]) -> str:
        """Return the ranks without CUDA, with their reasons, as text."""
        found = zip(global_ranks, self.cuda_problems, strict=True)
        return ", ".join(f"rank {rank} ({problem})" for rank, problem in found if problem)

    def ranks_here(self, rank: int) -> int:
        """Return the number of ranks on this rank's node."""
        return self.nodes.count(self.nodes[rank])


@dataclass(frozen=True, slots=True)
class Joining:
    """The facts that one rank knows while its group is being made."""

    prefixed: Callable[[str], Store]  # returns a part of the group's store, by name
    rank: int
    world: int
    timeout: timedelta
    global_ranks: tuple[int, ...]
    settings: Settings
    members: Membership


@contextmanager
def naming_the_absent(rank: int, global_ranks: Sequence[int]) -> Iterator[None]:
    """Translate store timeouts during setup into CGXTimeoutError, naming the missing rank."""
    started = time.monotonic()
    try:
        yield
    except DistStoreError as error:
        found = re.search(r"keys: \S*/(\d+)$", str(error).partition("\n")[0])
        known = found is not None and int(found[1]) < len(global_ranks)
        peer = f"rank {global_ranks[int(found[1])]}" if found is not None and known else "another rank"
        raise CGXTimeoutError(_absence(f"rank {global_ranks[rank]}", peer, started) + f" ({error})") from None


def agree(store: Store, rank: int, world: int, read_settings: Callable[[], Settings]) -> Settings:
    """Return this rank's settings. A mistake in them is reported to the peers before it is raised here."""
    try:
        settings = read_settings()
        compression_from_environ()
        if available():
            means(settings.simd)  # raises if this processor lacks the level
        if world > 1:
            check_choice("CGX_INNER_COMMUNICATOR_TYPE", settings.inner_communicator)
            check_choice("CGX_CROSS_COMMUNICATOR_TYPE", settings.cross_communicator)
        return settings
    except ValueError as error:
        store.set(f"member/{rank}", json.dumps({"mistake": str(error)}))
        raise


def join(
    store: Store,
    rank: int,
    world: int,
    settings: Settings,
    global_ranks: Sequence[int],
    cuda_problem: str,
    timeout: timedelta = timedelta(minutes=30),
) -> Membership:
    """Publish this rank's facts and return those of all ranks. Raise `MismatchError` if they cannot work together."""
    mine = {
        "version": f"{__version__} (protocol {_native.ABI_VERSION})",
        # Bits and bucket size may change with every call, and calls are compared. Comparing them here as well
        # distinguishes a variable that only some ranks have from a script whose calls differ.
        "settings": {**asdict(compression_from_environ()), **settings.fingerprint()},
        "variables": shared_variables(),
        "node": settings.node_id or _node_name(),
        "pids": _pid_namespace(),
        "native": _native.shares_memory(),
        "cuda_problem": cuda_problem,
        "mpi": not problem_here(),
        "link_costs": settings.link_costs or "",
    }
    store.set(f"member/{rank}", json.dumps(mine))
    names = [f"rank {each}" for each in global_ranks]
    deadline = time.monotonic() + timeout.total_seconds()
    members = [read_entry(store, f"member/{other}", names[rank], names[other], deadline) for other in range(world)]
    for other, theirs in enumerate(members):
        if "mistake" in theirs:
            raise MismatchError(f"rank {global_ranks[other]} could not join the group: {theirs['mistake']}")
    check_fields(members[0], "member/0", _MEMBER)
    for other, theirs in enumerate(members):
        _compare_versions(members[0], theirs, global_ranks[0], global_ranks[other])
    _compare_settings(members, global_ranks)
    found = Membership(
        tuple(str(m["node"]) for m in members),
        tuple(str(m["pids"]) for m in members),
        tuple(bool(m["native"]) for m in members),
        tuple(str(m["cuda_problem"]) for m in members),
        all(bool(m["mpi"]) for m in members),
        LinkCosts.parse(members[0]["link_costs"]),
    )
    if rank == 0 and found.some_have_cuda and not found.all_have_cuda:
        without = found.without_cuda(global_ranks)
        _log.warning("torch_cgx serves CPU tensors alone on this group; without CUDA: %s", without)
    return found


def open_shared_group(joining: Joining, prefix: str, nodes: Sequence[int] | None = None) -> SharedGroup | None:
    """Open a native group whose ranks share memory within these nodes (None: all ranks do).

    The segments have no names when this returns. Return None, after one warning, if some node cannot share memory.
    """
    store, rank, world = joining.prefixed(prefix), joining.rank, joining.world
    nodes = [0] * world if nodes is None else nodes
    global_ranks = joining.global_ranks
    names = [f"rank {each}" for each in global_ranks]
    deadline = time.monotonic() + joining.timeout.total_seconds()
    creator = nodes.index(nodes[rank])
    is_alone = nodes.count(nodes[rank]) == 1
    created = _create_control(world) if rank == creator and not is_alone else {}
    here, facts = names[rank], {"name": str, "limit": int, "problem": str}
    try:
        if created:
            store.set(f"control/{rank}", json.dumps(created))
        if is_alone:
            control: dict[str, Any] = {"name": None, "limit": SEGMENT_LIMIT_NBYTES, "problem": ""}
        else:
            control = read_entry(store, f"control/{creator}", here, names[creator], deadline, facts)
        group, problem = _open_control(control, joining, nodes)
        store.set(f"opened/{rank}", json.dumps({"limit": control["limit"], "problem": problem}))
        fields = {"limit": int, "problem": str}
        opened = [read_entry(store, f"opened/{other}", here, names[other], deadline, fields) for other in range(world)]
    finally:
        if created.get("name"):
            lib = _native.library()
            assert lib is not None
            lib.cgx_control_unlink(str(created["name"]).encode())
    first = next((other for other, theirs in enumerate(opened) if theirs["problem"]), None)
    if first is None:
        assert group is not None
        # All ranks cut operations identically, even if their own node could take more.
        group.limit_nbytes = min(theirs["limit"] for theirs in opened)
        return group
    if group is not None:
        group.close()
    if rank == 0:
        _log.warning(
            "torch_cgx uses connections within a host instead of shared memory, which are several times slower: rank "
            "%d reports: %s",
            global_ranks[first],
            opened[first]["problem"],
        )
    return None


def check_plain(joining: Joining) -> None:
    """Refuse carriers that need the native engine on all ranks. Rank 0 warns that Gloo replaces the engine."""
    without = ", ".join(str(joining.global_ranks[peer]) for peer, has in enumerate(joining.members.native) if not has)
    settings = joining.settings
    for variable, chosen in (
        ("CGX_INNER_COMMUNICATOR_TYPE", settings.inner_communicator),
        ("CGX_CROSS_COMMUNICATOR_TYPE", settings.cross_communicator),
    ):
        if chosen in ("TCP", "MPI"):
            raise TransportError(
                f"{variable}={chosen} needs the native library on all ranks, which these lack: rank {without}. Install "
                f"a C++ compiler there and reinstall torch_cgx, or leave {variable} out."
            )
    if joining.rank == 0:
        _log.warning(
            "torch_cgx has no native engine on rank %s, so this group's compressed CPU tensors go over Gloo, by SRA "
            "and from rank to rank, whatever else was chosen. That is many times slower. Install a C++ compiler there "
            "and reinstall torch_cgx.",
            without,
        )


def _open_control(control: dict[str, Any], joining: Joining, nodes: Sequence[int]) -> tuple[SharedGroup | None, str]:
    """Return the group, or None and the problem."""
    if control["problem"]:
        return None, str(control["problem"])
    rank, settings = joining.rank, joining.settings
    how = means(settings.simd, thread_count(settings.num_threads, joining.members.ranks_here(rank)))
    name, limit_nbytes = control["name"], int(control["limit"])
    is_named = name is None or _SEGMENT_NAME.fullmatch(name)
    if not is_named or not SEGMENT_FLOOR_NBYTES <= limit_nbytes <= SEGMENT_LIMIT_NBYTES:
        creator = joining.global_ranks[nodes.index(nodes[rank])]
        return None, f"rank {creator} announced an invalid segment: {shortened(name)}, {limit_nbytes} bytes"
    try:
        return SharedGroup(name, rank, nodes, joining.global_ranks, NAMES, how, limit_nbytes), ""
    except SharedMemoryError as error:
        return None, str(error)


def _create_control(world: int) -> dict[str, Any]:
    """Make a node's control segment, and decide how much of its /dev/shm the group may take."""
    try:
        facts = os.statvfs(SHM_FOLDER)
    except OSError as error:
        return {"name": "", "limit": 0, "problem": f"there is no {SHM_FOLDER} ({error})"}
    # Half of the free memory, so that some remains for a second group or the data loader's workers.
    limit = min(SEGMENT_LIMIT_NBYTES, facts.f_bavail * facts.f_frsize // 2)
    if limit < SEGMENT_FLOOR_NBYTES:
        free = facts.f_bavail * facts.f_frsize
        problem = f"{SHM_FOLDER} has only {free} bytes free; make it larger (docker run --shm-size=1g)"
        return {"name": "", "limit": 0, "problem": problem}
    lib = _native.library()
    assert lib is not None
    name, error_text = ctypes.create_string_buffer(64), ctypes.create_string_buffer(512)
    status = lib.cgx_control_create(world, name, len(name), error_text, len(error_text))
    if status != 0:
        return {"name": "", "limit": 0, "problem": error_text.value.decode()}
    return {"name": name.value.decode(), "limit": limit, "problem": ""}


def read_entry(
    store: Store, key: str, me: str, peer: str, deadline: float, fields: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Wait for a peer's entry until the deadline, by polling so that Ctrl-C works. Parse and check it."""
    started, pause_s = time.monotonic(), 1e-3
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise CGXTimeoutError(_absence(me, peer, started))
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MOST_PAUSE_S)
    return parse_answer(bytes(store.get(key)), key, fields)


def _absence(me: str, peer: str, started: float) -> str:
    return (
        f"{me}: Timed out after {time.monotonic() - started:.1f} s waiting for {peer} to join the group. Look at that "
        "rank's output: it has not called init_process_group, or has failed there. Then restart all ranks."
    )


def _compare_versions(first: dict[str, Any], other: dict[str, Any], first_rank: int, other_rank: int) -> None:
    if first["version"] != other.get("version"):
        raise MismatchError(
            f"all ranks need the same version of torch_cgx: rank {first_rank} has {first['version']}, "
            f"rank {other_rank} has {shortened(other.get('version'))}"
        )
    check_fields(other, f"member of rank {other_rank}", _MEMBER)


def _compare_settings(members: Sequence[dict[str, Any]], global_ranks: Sequence[int]) -> None:
    """Raise if settings differ. Name the variables, as users set them, and which ranks have which value."""
    differing: dict[str, str] = {}
    for field, name in VARIABLES.items():
        if all(member["settings"].get(field) == members[0]["settings"].get(field) for member in members):
            continue
        differing[name] = _who_has_what([_text_of(member, name) for member in members], global_ranks)
    if differing:
        shown = "; ".join(f"{name} is {who}" for name, who in differing.items())
        how = launchers.how_to_pass(list(differing), os.environ)
        raise MismatchError(f"all ranks need the same CGX_* settings: {shown}. {how}")


def _text_of(member: dict[str, Any], variable: str) -> str:
    value = member["variables"].get(variable)
    return "not set" if value is None else shortened(value)


def _who_has_what(texts: Sequence[str], global_ranks: Sequence[int]) -> str:
    """Return a text like "'4' on rank 0 and not set on ranks 1, 2"."""
    ranks_by_text: dict[str, list[int]] = {}
    for text, rank in zip(texts, global_ranks, strict=True):
        ranks_by_text.setdefault(text, []).append(rank)
    parts = []
    for text, ranks in ranks_by_text.items():
        named = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
        more = f" and {len(ranks) - _MOST_RANKS_NAMED} more" if len(ranks) > _MOST_RANKS_NAMED else ""
        parts.append(f"{text} on rank{'s' if len(ranks) > 1 else ''} {named}{more}")
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def _pid_namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "unknown"


def _node_name() -> str:
    """Return a name for the ranks that share memory and see each other's processes.

    It consists of the running kernel, the tmpfs, and the pid namespace.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}:{os.stat(SHM_FOLDER).st_dev}:{_pid_namespace()}"
    except OSError:
        # Without these facts nothing is known to be shared, so the name is this process's own.
        return f"unknown:{os.uname().nodename}:{os.getpid()}"
