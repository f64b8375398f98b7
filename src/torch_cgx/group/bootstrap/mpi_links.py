"""Set up MPI as a carrier: hand the MPI library to native code, and give each group its own message tags.

Ranks use communicators of our own, so that their messages never mix with the user's. There is one communicator per set
of ranks, made on first use and kept, because MPI has few of them. Groups of the same ranks divide its tags among them.
"""

from __future__ import annotations

import ctypes
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from torch_cgx import _native
from torch_cgx.errors import TransportError
from torch_cgx.group.bootstrap import mpi_process
from torch_cgx.group.bootstrap.handshake import Joining, read_entry
from torch_cgx.group.bootstrap.store_json import check_fields

__all__ = ["MpiLinks", "open_mpi"]

_CREATION_TAGS = 1 << 15  # MPI guarantees no more
_TAGS_PER_STREAM = 2
_FUNCTIONS = ("Isend", "Issend", "Irecv", "Test", "Cancel", "Finalized")


@dataclass(slots=True)
class _Communicator:
    """A communicator that all groups of the same ranks share."""

    library: _native.Mpi
    most_tags: int
    next_tag: int = 0


_communicators: dict[tuple[int, ...], _Communicator] = {}  # by the ranks of MPI_COMM_WORLD, in the group's order


@dataclass(frozen=True, slots=True)
class MpiLinks:
    """One group's use of MPI. `tags` has the first tag of each stream."""

    library: _native.Mpi
    tags: tuple[int, ...]


def open_mpi(joining: Joining) -> MpiLinks:
    """Set up MPI between all ranks of a group. All ranks call this.

    They tell each other through the store:

    1. whether MPI may be initialised at all, because doing so in the wrong place aborts the process;
    2. which rank of MPI_COMM_WORLD each of them is, because the group may number them differently;
    3. which tags are free.

    If one rank has a problem, all raise the same `TransportError`.
    """
    mine: dict[str, Any] = {"problem": mpi_process.problem_before(), "process": mpi_process.launched_rank()}
    facts = _exchange(joining, "launched", mine)
    if len({str(theirs.get("process")) for theirs in facts}) < joining.world:
        facts[-1]["problem"] = "several ranks share one process of mpirun's: let mpirun start all ranks itself"
    _raise_first_problem(joining, facts)

    mine = {"problem": mpi_process.initialise(joining.world), "name": secrets.randbits(63)}
    if not mine["problem"]:
        mine |= {"rank": mpi_process.load().COMM_WORLD.Get_rank(), "job": mpi_process.job_name()}
    facts = _exchange(joining, "initialised", mine)
    _raise_first_problem(joining, facts)
    for other, theirs in enumerate(facts):
        check_fields(theirs, f"initialised/{other}", {"name": int, "rank": int, "job": str})
    if len({theirs["job"] for theirs in facts}) > 1 or len({theirs["rank"] for theirs in facts}) < joining.world:
        facts[0]["problem"] = "the ranks are of more than one mpirun: start all of them with one"
        _raise_first_problem(joining, facts)

    members = tuple(theirs["rank"] for theirs in facts)
    known = _exchange(joining, "known", {"problem": "", "known": members in _communicators})
    if not all(theirs.get("known") for theirs in known):
        mine = {"problem": _make_communicator(members, facts[0]["name"])}
        made = _exchange(joining, "made", mine)
        if any(theirs["problem"] for theirs in made):
            _communicators.pop(members, None)  # on all ranks, so that none keeps a communicator that others lack
        _raise_first_problem(joining, made)
    communicator = _communicators[members]
    tags_needed = _TAGS_PER_STREAM * joining.settings.streams
    mine = {"problem": "", "tag": communicator.next_tag}
    if communicator.next_tag + tags_needed > communicator.most_tags:
        mine["problem"] = (
            f"MPI has {communicator.most_tags} tags, and the groups of this process have used them up: make fewer "
            "groups, or set CGX_CROSS_COMMUNICATOR_TYPE=TCP"
        )
    facts = _exchange(joining, "tags", mine)
    _raise_first_problem(joining, facts)
    for other, theirs in enumerate(facts):
        check_fields(theirs, f"tags/{other}", {"tag": int})
    first = max(theirs["tag"] for theirs in facts)
    communicator.next_tag = first + tags_needed
    return MpiLinks(communicator.library, tuple(range(first, first + tags_needed, _TAGS_PER_STREAM)))


def _make_communicator(members: tuple[int, ...], name: int) -> str:
    """Make the communicator of these ranks. Return what went wrong, or ""."""
    _communicators.pop(members, None)
    try:
        _communicators[members] = _new_communicator(members, name)
    except Exception as error:
        return f"MPI cannot make a communicator: {error}"
    return ""


def _new_communicator(members: tuple[int, ...], name: int) -> _Communicator:
    mpi = mpi_process.load()
    group = mpi.COMM_WORLD.Get_group().Incl(members)
    communicator = mpi.COMM_WORLD.Create_group(group, name % _CREATION_TAGS)
    group.Free()
    communicator.Set_errhandler(mpi.ERRORS_RETURN)
    functions = ctypes.CDLL(mpi.__file__)  # also finds functions of the library that it was linked with
    library = _native.Mpi(
        *(ctypes.cast(getattr(functions, f"MPI_{name}"), ctypes.c_void_p) for name in _FUNCTIONS),
        communicator=_handle(mpi, communicator),
        byte=_handle(mpi, mpi.BYTE),
    )
    mpi_process.libraries.append(library)
    return _Communicator(library, int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)) + 1)


def _handle(mpi: Any, thing: Any) -> int:
    """Return a handle as the library's functions take it: a pointer, or an int."""
    kind = {4: ctypes.c_uint32, 8: ctypes.c_uint64}[mpi._sizeof(thing)]
    return int(kind.from_address(mpi._addressof(thing)).value)


def _exchange(joining: Joining, key: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Publish this rank's entry and return the entries of all ranks."""
    store = joining.prefixed("cgx mpi")
    store.set(f"{key}/{joining.rank}", json.dumps(mine))
    deadline = time.monotonic() + joining.timeout.total_seconds()
    names = [f"rank {each}" for each in joining.global_ranks]
    fields = {"problem": str}
    return [
        read_entry(store, f"{key}/{other}", names[joining.rank], names[other], deadline, fields)
        for other in range(joining.world)
    ]


def _raise_first_problem(joining: Joining, facts: list[dict[str, Any]]) -> None:
    """Raise the first problem that a rank reports. All ranks raise the same error."""
    for other, theirs in enumerate(facts):
        if theirs["problem"]:
            raise TransportError(f"MPI cannot be used: rank {joining.global_ranks[other]} reports: {theirs['problem']}")
