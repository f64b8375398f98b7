"""Messages over MPI (mpi4py), on a communicator of our own, so that they never meet the user's.

MPI moves bytes only while someone calls it, so whoever waits drives all messages of the process, by polling.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store

from torch_cgx.errors import CGXError, CGXTimeoutError, MismatchError, PeerLostError
from torch_cgx.group.bootstrap.store_json import check_fields
from torch_cgx.transports import TAGS, Pending, mpi_process
from torch_cgx.transports.agreement import exchange, raise_first_problem

__all__ = ["MpiTransport", "open_mpi"]

_PART_NBYTES = 1 << 30  # counts of MPI are 32 bits wide, so larger messages go in parts
_EAGER_S = 200e-6  # so long a wait only yields; then it sleeps between polls, ever longer
_NAP_S = (20e-6, 100e-6)
_GIVE_UP_S = 0.2
_LOOK_S = 0.05  # how often a wait looks whether its peer has left
_LEFT_GRACE_S = 1.0  # what a peer sent before it left has this long to arrive
_LEAVING_TAG = TAGS
_CREATION_TAGS = 1 << 15  # MPI promises no more
_ADVICE = "Look at that rank's output, then restart all ranks."


def open_mpi(store: Store, rank: int, world: int, timeout: timedelta, global_ranks: Sequence[int]) -> MpiTransport:
    """Open a transport between exactly these ranks of MPI_COMM_WORLD.

    They tell each other through the store:

    1. whether MPI may be initialised at all, since doing so in the wrong place aborts the process;
    2. which rank of MPI_COMM_WORLD each of them is, for the group may number them otherwise.

    A problem of one rank is raised by all.
    """
    mine: dict[str, Any] = {"problem": mpi_process.problem_before(), "process": mpi_process.launched_rank()}
    facts = exchange(store, "launched", rank, world, mine)
    if len({str(theirs.get("process")) for theirs in facts}) < world:
        facts[-1]["problem"] = "several ranks share one process of mpirun's: let mpirun start all ranks itself"
    raise_first_problem("MPI", facts, global_ranks)

    mine = {"problem": mpi_process.initialise(world, _LEAVING_TAG), "name": secrets.randbits(63)}
    mpi = mpi_process.load()
    if not mine["problem"]:
        mine |= {"rank": mpi.COMM_WORLD.Get_rank(), "job": mpi_process.job_name()}
    facts = exchange(store, "initialised", rank, world, mine)
    raise_first_problem("MPI", facts, global_ranks)
    for other, theirs in enumerate(facts):
        check_fields(theirs, f"initialised/{other}", {"name": int, "rank": int, "job": str})
    if len({theirs["job"] for theirs in facts}) > 1 or len({theirs["rank"] for theirs in facts}) < world:
        facts[0]["problem"] = "the ranks are of more than one mpirun: start all of them with one"
        raise_first_problem("MPI", facts, global_ranks)

    _free_communicators()
    name = facts[0]["name"]
    members = mpi.COMM_WORLD.Get_group().Incl([theirs["rank"] for theirs in facts])
    communicator = mpi.COMM_WORLD.Create_group(members, name % _CREATION_TAGS)
    members.Free()
    communicator.Set_errhandler(mpi.ERRORS_RETURN)  # mpi4py makes exceptions of them
    return MpiTransport(mpi, communicator, timeout, global_ranks)


class _Message:
    def __init__(
        self,
        transport: MpiTransport,
        requests: list[tuple[Any, int]],
        payload: Tensor,
        peer: int,
        receives: bool,
        what: str,
    ) -> None:
        self._transport = transport
        self._requests = requests
        self._payload = payload  # MPI works on its memory
        self._receives = receives
        self.peer = peer
        self.what = what
        self._error: CGXError | None = None

    def done(self) -> bool:
        return self._transport.is_released(self) or self._error is not None

    def wait(self) -> None:
        started = time.monotonic()
        nap_s, look_s = 0.0, _LOOK_S
        while not self.done():
            waited_s = time.monotonic() - started
            if waited_s > self._transport.timeout.total_seconds():
                self._give_up(CGXTimeoutError, f"Timed out after {waited_s:.1f} s")
            elif waited_s > look_s:
                look_s = waited_s + _LOOK_S
                if self._transport.has_left(self.peer):
                    self._give_up(PeerLostError, f"that rank has left the group, noticed after {waited_s:.1f} s")
            if waited_s > _EAGER_S:
                nap_s = min(max(_NAP_S[0], 1.25 * nap_s), _NAP_S[1])
            time.sleep(nap_s)
        if self._error is not None:
            raise self._error

    def _give_up(self, kind: type[CGXError], why: str) -> None:
        self._transport.give_up(self, kind(f"{self.what}: {why}. {_ADVICE}"))

    # What follows is called by the transport, under its lock.

    def test(self, mpi: Any) -> bool:
        while self._requests and self._error is None:
            status = mpi.Status()
            request, nbytes = self._requests[-1]
            try:
                if not request.Test(status):
                    return False
                arrived = status.Get_count(mpi.BYTE) if self._receives else nbytes
                problem = f"{arrived} bytes came instead of {nbytes}" if arrived != nbytes else ""
                kind: type[CGXError] = MismatchError
            except mpi.Exception as error:
                problem = error.Get_error_string()
                kind = MismatchError if error.Get_error_class() == mpi.ERR_TRUNCATE else PeerLostError
            self._requests.pop()
            if problem:
                self.fail(kind(f"{self.what}: {problem}. {_ADVICE}"))
        return self._is_released(mpi)

    def _is_released(self, mpi: Any) -> bool:
        """Whether all requests have ended, which after a failure nobody needs to be told."""
        while self._requests:
            with contextlib.suppress(mpi.Exception):
                if not self._requests[-1][0].Test():
                    return False
            self._requests.pop()
        return True

    def fail(self, error: CGXError) -> None:
        self._error = self._error or error

    def cancel(self) -> None:
        for request, _ in self._requests if self._receives else ():  # sends cannot be
            request.Cancel()


class MpiTransport:
    """Implements `torch_cgx.transports.Transport`; made by `open_mpi`.

    A rank that closes its end says so in a last message to each peer, so that nobody waits for it any longer.
    """

    def __init__(self, mpi: Any, communicator: Any, timeout: timedelta, global_ranks: Sequence[int]) -> None:
        self.timeout = timeout
        self.tags = TAGS
        self._mpi = mpi
        self._communicator = communicator
        self._me = global_ranks[communicator.Get_rank()]
        self._peers = [peer for peer in range(len(global_ranks)) if peer != communicator.Get_rank()]
        self._farewells: list[Any] = []
        self._global_ranks = tuple(global_ranks)
        self._left_s: dict[int, float] = {}  # by peer: when it was noticed
        self._lock = threading.Lock()  # MPI allows one thread at a time to test a request
        self._under_way: set[_Message] = set()
        self._pid = os.getpid()
        self._closed = False

    def send(self, payload: Tensor, peer: int, tag: int) -> Pending:
        what = f"could not send message {tag} of {payload.numel()} bytes to rank {self._global_ranks[peer]}"
        return self._start(self._communicator.Isend, payload, peer, tag, False, what)

    def receive(self, payload: Tensor, peer: int, tag: int) -> Pending:
        what = f"waited for message {tag} of {payload.numel()} bytes from rank {self._global_ranks[peer]}"
        return self._start(self._communicator.Irecv, payload, peer, tag, True, what)

    def close(self) -> None:
        if os.getpid() != self._pid:  # MPI does not survive fork
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._mpi.Is_finalized():
            return
        deadline = time.monotonic() + _GIVE_UP_S  # for all of them together
        for message in list(self._under_way):
            if not self.is_released(message):
                self.give_up(message, CGXError(f"{message.what}: the group was destroyed meanwhile"), deadline)
        with contextlib.suppress(self._mpi.Exception):  # nobody hears it who is gone
            self._farewells = [self._communicator.Isend(bytearray(1), peer, _LEAVING_TAG) for peer in self._peers]
        _closed.append(self)
        _free_communicators()

    def free_if_all_have_left(self) -> None:
        """Free the communicator, unless a message may still come: MPI would deliver it to a later communicator.

        To free is collective by the standard, but no MPI that we know makes it wait for others.
        """
        with self._lock, contextlib.suppress(self._mpi.Exception):
            for peer in self._peers:
                self._hear_farewell(peer)
            sent = self._mpi.Request.Testall(self._farewells)
            if sent and len(self._left_s) == len(self._peers) and not self._under_way and self in _closed:
                _closed.remove(self)
                self._communicator.Free()

    def is_released(self, message: _Message) -> bool:
        """Whether MPI is through with its memory."""
        with self._lock:
            if message in self._under_way and message.test(self._mpi):
                self._under_way.remove(message)
                mpi_process.progress.seen()
            return message not in self._under_way

    def give_up(self, message: _Message, error: CGXError, deadline: float | None = None) -> None:
        """Fail it, and take its memory back from MPI where that can be done."""
        with self._lock:
            message.fail(error)
            with contextlib.suppress(self._mpi.Exception):
                message.cancel()
        if deadline is None:
            deadline = time.monotonic() + _GIVE_UP_S
        while not self.is_released(message):
            if time.monotonic() > deadline:
                mpi_process.stranded.append(message)
                return
            time.sleep(_NAP_S[1])

    def has_left(self, peer: int) -> bool:
        """Whether that peer has closed its end, and some time ago."""
        with self._lock, contextlib.suppress(self._mpi.Exception):
            self._hear_farewell(peer)
        return peer in self._left_s and time.monotonic() - self._left_s[peer] > _LEFT_GRACE_S

    def _hear_farewell(self, peer: int) -> None:
        if peer not in self._left_s:
            arrived = self._communicator.Improbe(peer, _LEAVING_TAG)
            if arrived is not None:
                arrived.Recv(bytearray(1))
                self._left_s[peer] = time.monotonic()

    def _start(
        self, start: Callable[..., Any], payload: Tensor, peer: int, tag: int, receives: bool, what: str
    ) -> Pending:
        what = f"rank {self._me} {what}"
        if self._closed:
            raise CGXError(f"{what}: the group has been destroyed")
        address, nbytes = payload.data_ptr(), payload.numel()
        requests = []
        try:
            for offset in range(0, max(1, nbytes), _PART_NBYTES):
                part_nbytes = min(_PART_NBYTES, nbytes - offset)
                part = self._mpi.buffer.fromaddress(address + offset, part_nbytes)
                requests.append((start([part, self._mpi.BYTE], peer, tag), part_nbytes))
        except self._mpi.Exception as error:
            raise PeerLostError(f"{what}: {error.Get_error_string()}. {_ADVICE}") from error
        message = _Message(self, requests, payload, peer, receives, what)
        with self._lock:
            self._under_way.add(message)
        return message


_closed: list[MpiTransport] = []  # whose communicators are not free yet


def _free_communicators() -> None:
    for transport in list(_closed):
        transport.free_if_all_have_left()
