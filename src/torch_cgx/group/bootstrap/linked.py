"""Opening of native groups of several nodes: shared memory within a node, TCP or MPI between nodes."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence

from torch_cgx.config import Settings
from torch_cgx.engines.host.native import SharedGroup
from torch_cgx.errors import SharedMemoryError, TransportError
from torch_cgx.group.bootstrap.carriers import Carriers
from torch_cgx.group.bootstrap.handshake import SHM_FOLDER, Joining, Membership, open_shared_group, read_entry
from torch_cgx.group.bootstrap.links import open_links
from torch_cgx.group.bootstrap.mpi_links import open_mpi

__all__ = ["open_linked_group"]

_BELL_NAME = re.compile("cgx-[0-9a-f]{32}")

_log = logging.getLogger("torch_cgx")


def open_linked_group(joining: Joining) -> tuple[SharedGroup, str]:
    """Connect this rank to all others of the group, and return the group and its carrier. All ranks call it.

    If MPI is only the default choice and cannot be used, the group falls back to TCP, and rank 0 warns.
    """
    _say_that_gloo_is_tcp(joining)
    nodes = _nodes_that_share(joining.settings, joining.members)
    group = open_shared_group(joining, "cgx nodes", nodes)
    if group is None:  # on all ranks
        nodes = range(joining.world)
        group = open_shared_group(joining, "cgx ranks", nodes)
    assert group is not None
    try:
        return group, _link(joining, group, nodes)
    except BaseException:
        group.close()
        raise


def _link(joining: Joining, group: SharedGroup, nodes: Sequence[int]) -> str:
    """Link this rank to the ranks that share no memory with it, and return the group's carrier."""
    members, settings = joining.members, joining.settings
    carriers = Carriers.of(settings, members.all_have_mpi)
    home = [peer for peer in range(joining.world) if nodes[peer] == nodes[joining.rank]]
    mpi = None
    if "MPI" in (carriers.within, carriers.between):
        try:
            mpi = open_mpi(joining)
        except TransportError as error:
            if "MPI" in (settings.inner_communicator, settings.cross_communicator):
                raise
            if joining.rank == 0:
                _log.warning("torch_cgx goes over TCP, though the ranks were started by MPI: %s", error)
            carriers = Carriers.of(settings, all_have_mpi=False)
    group.by_sockets = mpi is None
    here = members.nodes[joining.rank]
    by_mpi = [
        peer
        for peer in range(joining.world)
        if peer not in home and (carriers.within if members.nodes[peer] == here else carriers.between) == "MPI"
    ]
    for peer, sockets in open_links(joining, home, by_mpi).items():
        if peer in by_mpi:
            assert mpi is not None
            group.link_by_mpi(peer, mpi.library, mpi.tags)
        group.link(peer, sockets.control.detach(), [stream.detach() for stream in sockets.streams])
    if len(home) > 1:
        group.hang_bells(_open_bells(joining, home))
    return carriers.name(one_host=len(set(members.nodes)) == 1)


def _say_that_gloo_is_tcp(joining: Joining) -> None:
    chosen = (joining.settings.inner_communicator, joining.settings.cross_communicator)
    if "GLOO" in chosen and joining.global_ranks[joining.rank] == 0:
        _log.warning(
            "GLOO is another name for TCP, in CGX_CROSS_COMMUNICATOR_TYPE and CGX_INNER_COMMUNICATOR_TYPE: torch_cgx "
            "has TCP connections of its own. Set TCP, or leave the variable out."
        )


def _nodes_that_share(settings: Settings, members: Membership) -> Sequence[int]:
    """Return a number per rank, equal for ranks that share memory. They must also see each other's processes.

    On a single node, shared memory has failed before, or the ranks do not see each other. Then no ranks share it.
    """
    facts = list(zip(members.nodes, members.pid_namespaces, strict=True))
    if settings.inner_communicator != "SHM" or len(set(members.nodes)) == 1:
        return range(len(facts))
    numbers = {fact: number for number, fact in enumerate(dict.fromkeys(facts))}
    return [numbers[fact] for fact in facts]


def _open_bells(joining: Joining, home: Sequence[int]) -> dict[int, int]:
    """Return the descriptors that wake the ranks of a node, by rank. This rank sleeps on its own.

    A bell is a named pipe, because a rank sleeps on it and on its sockets at once. Every end is also open for reading,
    so that writing to the bell of a process that has died does no harm. The names are gone when this returns.
    """
    store, rank = joining.prefixed("cgx bells"), joining.rank
    deadline = time.monotonic() + joining.timeout.total_seconds()
    names = [f"rank {each}" for each in joining.global_ranks]
    own = f"cgx-{secrets.token_hex(16)}"
    bells: dict[int, int] = {}
    problem = ""
    try:
        try:
            os.mkfifo(f"{SHM_FOLDER}/{own}", 0o600)
            bells[rank] = _open_bell(own)
        except OSError as error:
            problem = f"{names[rank]} cannot make a named pipe in {SHM_FOLDER}: {error}"
        store.set(f"bell/{rank}", json.dumps({"name": own, "problem": problem}))
        for peer in home:
            entry = read_entry(store, f"bell/{peer}", names[rank], names[peer], deadline, {"name": str, "problem": str})
            if entry["problem"]:
                raise SharedMemoryError(
                    f"{entry['problem']}. Make room there, or set CGX_INNER_COMMUNICATOR_TYPE=TCP on all ranks."
                )
            if peer != rank:
                bells[peer] = _open_bell(entry["name"])
        store.set(f"opened/{rank}", "{}")
        for peer in home:
            read_entry(store, f"opened/{peer}", names[rank], names[peer], deadline)
    except BaseException:
        for file in bells.values():
            os.close(file)
        raise
    finally:
        if os.path.lexists(f"{SHM_FOLDER}/{own}"):
            os.unlink(f"{SHM_FOLDER}/{own}")
    return bells


def _open_bell(name: str) -> int:
    if not _BELL_NAME.fullmatch(name):
        raise SharedMemoryError(f"a rank of this node announced an invalid pipe: {name[:100]!r}")
    file = os.open(f"{SHM_FOLDER}/{name}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    facts = os.fstat(file)
    if not stat.S_ISFIFO(facts.st_mode) or facts.st_uid != os.geteuid():
        os.close(file)
        raise SharedMemoryError(f"{SHM_FOLDER}/{name} is not a pipe that belongs to this process's user")
    return file
