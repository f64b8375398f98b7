"""TCP links between the ranks of a group: made and authenticated here, then handed to native code as descriptors.

A link is all connections between two ranks: one for control, and `settings.streams` for data, unless MPI carries that.

1. Every rank listens on one port, chosen by the kernel, and writes its addresses and the port into the group's store.
   Rank 0 also writes a secret there.
2. The lower rank of each pair connects to the higher one, once per connection of the link.
3. Both sides prove that they know the secret, before the connection is used. Messages have fixed sizes,
   and nothing that is read is used as a length:

   - the connecting side sends a hello: both ranks, the kind of connection, and a nonce;
   - the listening side answers with its own nonce and HMAC-SHA256(secret, "listener" + hello + nonce);
   - the connecting side checks it, and sends HMAC-SHA256(secret, "connector" + hello + nonce);
   - the listening side checks that, and sends one byte.

4. When a rank has all its links, it stops listening.

Connecting and accepting take place at the same time, in one thread: every connection is a generator that yields
whenever it has to wait. A silent stranger therefore delays no rank.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import json
import logging
import math
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from torch_cgx.config import shortened
from torch_cgx.errors import CGXTimeoutError, MismatchError, TransportError
from torch_cgx.group.bootstrap.handshake import Joining
from torch_cgx.group.bootstrap.store_json import check_fields, parse_answer, strange_entry

__all__ = ["PeerSockets", "open_links"]

MAGIC = b"CGXLINK1"
HELLO = struct.Struct("!8sIII16s")  # MAGIC, connecting rank, listening rank, kind, nonce
NONCE_NBYTES = 16
PROOF_NBYTES = 32
SECRET_NBYTES = 32
WELCOME = b"\x01"  # ends the handshake
CONTROL = 0  # a connection's kind; stream i is 1 + i

_HANDSHAKE_LIMIT_S = 10.0  # per connection
_CONNECT_LIMIT_S = 5.0  # per address, before the next one is tried
_PAUSE_S, _MOST_PAUSE_S = 0.02, 0.5  # before all addresses are tried again
_LOOK_S = 0.05  # between two checks of the clock
_MOST_POLL_S = 0.05  # between two checks of the store
_MOST_ADDRESSES = 32
_MOST_TEXT = 2000  # characters of a peer's mistake
_MOST_INTERFACES_NAMED = 64
_MOST_STRANGERS = 64  # connections that may be in their handshake at once, beyond those that are expected
_MOST_PORTS_TRIED = 16
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 10, 10, 6
_MOST_USER_TIMEOUT_S = 60.0
_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address
_LOOPBACK = ["127.0.0.1", "::1"]
_REMEDY = "Open this port in the firewall, or name an interface with CGX_SOCKET_IFNAME. Then restart all ranks."

_log = logging.getLogger("torch_cgx")


@dataclass(frozen=True, slots=True)
class PeerSockets:
    """Connected, authenticated, non-blocking sockets to one peer."""

    control: socket.socket
    streams: tuple[socket.socket, ...]

    def close(self) -> None:
        for sock in (self.control, *self.streams):
            sock.close()


def open_links(joining: Joining, home: Collection[int] = (), by_mpi: Collection[int] = ()) -> dict[int, PeerSockets]:
    """Connect this rank to all ranks of the group outside `home`, and return the sockets by group rank.

    Ranks in `by_mpi` get only a control connection. All ranks of the group call it. The caller closes the sockets.
    """
    if joining.world == 1:
        return {}
    links = _Links(joining, home, by_mpi)
    try:
        return links.open()
    finally:
        links.close()


@dataclass(frozen=True, slots=True)
class _Listening:
    """The addresses and the port that a rank listens on."""

    addresses: tuple[str, ...]
    port: int

    def __str__(self) -> str:
        return f"{', '.join(self.addresses)}, port {self.port}"


@dataclass(frozen=True, slots=True)
class _Wait:
    """The event that a task waits for: a socket that is ready before `until` or, without a socket, that moment."""

    until: float  # of time.monotonic
    sock: socket.socket | None = None
    events: int = 0


_Task = Generator[_Wait, None, None]


class _RefusedError(Exception):
    """An error of a connection whose other side is not the expected rank."""


class _Tasks:
    """A runner of generators in this thread. Each runs until it waits."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waits: dict[_Task, _Wait] = {}

    def resume(self, task: _Task, error: Exception | None = None) -> None:
        """Start a task, or continue a waiting one. An error is raised at the place where the task waits."""
        wait = self._waits.pop(task, None)
        if wait is not None and wait.sock is not None:
            self._selector.unregister(wait.sock)
        try:
            wait = next(task) if error is None else task.throw(error)
        except StopIteration:
            return
        if wait.sock is not None:
            self._selector.register(wait.sock, wait.events, task)
        self._waits[task] = wait

    def run(self, finished: Callable[[], bool], deadline: float) -> None:
        looked = time.monotonic()
        while not finished() and (now := time.monotonic()) < deadline:
            for key, _ in self._selector.select(_LOOK_S):
                if key.data in self._waits:  # another task may have ended it
                    self.resume(key.data)
            if now - looked < _LOOK_S:
                continue
            looked = now
            for task, wait in list(self._waits.items()):
                if now >= wait.until and self._waits.get(task) is wait:
                    self.resume(task, TimeoutError("it said nothing for too long") if wait.sock is not None else None)

    def close(self) -> None:
        for task in self._waits:
            task.close()
        self._selector.close()


class _Links:
    """One rank's links while they are made. It owns every socket until `open` returns them."""

    def __init__(self, joining: Joining, home: Collection[int], by_mpi: Collection[int]) -> None:
        self._joining = joining
        self._rank = joining.rank
        self._store = joining.prefixed("cgx links")
        self._started = time.monotonic()
        self._deadline = self._started + joining.timeout.total_seconds()
        self._peers = [rank for rank in range(joining.world) if rank != joining.rank and rank not in home]
        self._kinds = {peer: 1 if peer in by_mpi else 1 + joining.settings.streams for peer in self._peers}
        self._expected = sum(self._kinds.values())
        self._secret = b""
        self._sockets: set[socket.socket] = set()  # to be closed here
        self._made: dict[tuple[int, int], socket.socket] = {}  # by peer and kind
        self._unproven: dict[socket.socket, _Task] = {}  # accepted connections in their handshake, oldest first
        self._problems: dict[int, str] = {}  # by peer: why the last attempt to connect failed
        self._tasks = _Tasks()

    def open(self) -> dict[int, PeerSockets]:
        with self._telling_peers():
            own, listeners = self._listen()
        self._store.set(f"address/{self._rank}", json.dumps({"addresses": list(own.addresses), "port": own.port}))
        if self._rank == 0:
            self._store.set("secret", json.dumps({"secret": secrets.token_hex(SECRET_NBYTES)}))
        # Every rank reads all entries before it connects, so that all can name an absent rank or report a mistake.
        where = {peer: self._read_listening(peer) for peer in self._peers}
        self._secret = self._read_secret()
        for listener in listeners:
            self._tasks.resume(self._accept(listener))
        for peer in self._peers:
            if peer > self._rank:
                self._tasks.resume(self._connect(peer, where[peer]))
        self._tasks.run(lambda: len(self._made) == self._expected, self._deadline)
        for task in list(self._unproven.values()):
            self._tasks.resume(task, _RefusedError("had not finished the handshake when this rank stopped listening"))
        if len(self._made) < self._expected:
            raise self._absence(own, where)
        for (_, kind), sock in self._made.items():
            self._set_options(sock, kind)
        links = {peer: self._peer_sockets(peer) for peer in self._peers}
        self._sockets.difference_update(self._made.values())
        return links

    def close(self) -> None:
        """Close everything that was not returned."""
        self._tasks.close()
        for sock in self._sockets:
            sock.close()

    def _peer_sockets(self, peer: int) -> PeerSockets:
        streams = tuple(self._made[peer, kind] for kind in range(1, self._kinds[peer]))
        return PeerSockets(self._made[peer, CONTROL], streams)

    def _set_options(self, sock: socket.socket, kind: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if kind != CONTROL:
            return  # on a data connection, a peer that takes nothing for a long time is not a failure
        timeout_s = min(_MOST_USER_TIMEOUT_S, self._joining.timeout.total_seconds())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * timeout_s)))

    # The listening side.

    def _listen(self) -> tuple[_Listening, list[socket.socket]]:
        """Listen on one port of all addresses of this rank that can be bound."""
        addresses = _own_addresses(self._joining)[:_MOST_ADDRESSES]
        problem = "no address"
        for _ in range(_MOST_PORTS_TRIED):
            listeners: dict[str, socket.socket] = {}
            port = 0
            for address in addresses:
                try:
                    listener = self._new_socket(address)
                    listener.bind((address, port))
                    listener.listen(self._expected + _MOST_STRANGERS)
                except OSError as error:
                    problem = f"{address}: {error}"
                    if port and error.errno == errno.EADDRINUSE:
                        break  # another program has this port on this address
                    continue
                port = listener.getsockname()[1]
                listeners[address] = listener
            else:
                if listeners:
                    return _Listening(tuple(listeners), port), list(listeners.values())
            for listener in listeners.values():
                self._drop(listener)
        raise TransportError(f"{self._name(self._rank)} cannot listen for TCP connections of its peers: {problem}")

    def _accept(self, listener: socket.socket) -> _Task:
        while True:
            yield _Wait(math.inf, listener, selectors.EVENT_READ)
            try:
                sock, address = listener.accept()
            except OSError as error:
                _log.warning("%s cannot accept a TCP connection: %s", self._name(self._rank), error)
                yield _Wait(time.monotonic() + _PAUSE_S)
                continue
            self._sockets.add(sock)
            sock.setblocking(False)
            if len(self._unproven) >= self._expected + _MOST_STRANGERS:
                oldest = next(iter(self._unproven.values()))
                self._tasks.resume(oldest, _RefusedError("had not finished the handshake, and too many others came"))
            self._unproven[sock] = self._admit(sock, f"{address[0]}, port {address[1]}")
            self._tasks.resume(self._unproven[sock])

    def _admit(self, sock: socket.socket, sender: str) -> _Task:
        """Keep an accepted connection if this rank waits for it, else close it."""
        try:
            yield from self._examine(sock)
        except (OSError, _RefusedError) as error:
            _log.warning("%s refused a TCP connection from %s: %s", self._name(self._rank), sender, error)
            self._drop(sock)
        finally:
            self._unproven.pop(sock, None)

    def _examine(self, sock: socket.socket) -> Generator[_Wait, None, None]:
        """Do the listening side's part of the handshake."""
        limit = time.monotonic() + _HANDSHAKE_LIMIT_S
        magic = yield from _receive(sock, len(MAGIC), limit)
        if magic != MAGIC:
            raise _RefusedError(f"expected a hello of torch_cgx, got {shortened(magic)}")
        hello = magic + (yield from _receive(sock, HELLO.size - len(MAGIC), limit))
        _, peer, listening, kind, _ = HELLO.unpack(hello)
        kinds = self._kinds.get(peer, 0)
        if listening != self._rank or peer >= self._rank or kind >= kinds:
            raise _RefusedError(
                f"unexpected hello: from rank {peer} of the group to rank {listening}, connection {kind}. This is rank "
                f"{self._rank}, to which that rank makes {kinds} connections"
            )
        self._refuse_duplicate(peer, kind)
        nonce = secrets.token_bytes(NONCE_NBYTES)
        yield from _send(sock, nonce + self._prove(b"listener", hello + nonce), limit)
        proof = yield from _receive(sock, PROOF_NBYTES, limit)
        if not hmac.compare_digest(proof, self._prove(b"connector", hello + nonce)):
            raise _RefusedError(f"it says that it is {self._name(peer)}, but does not know the group's secret")
        self._refuse_duplicate(peer, kind)  # a second connection may have reached this point first
        sock.send(WELCOME)  # one byte into an empty buffer, which does not block
        self._made[peer, kind] = sock

    def _refuse_duplicate(self, peer: int, kind: int) -> None:
        if (peer, kind) in self._made:
            raise _RefusedError(
                f"duplicate hello: {self._name(peer)} has made its {_kind_name(kind)} connection before"
            )

    # The connecting side.

    def _connect(self, peer: int, where: _Listening) -> _Task:
        """Make all connections to one peer, one after another. Try its addresses in turn, repeatedly."""
        addresses = list(where.addresses)
        for kind in range(self._kinds[peer]):
            pause_s = _PAUSE_S
            while (peer, kind) not in self._made:
                for address in tuple(addresses):
                    try:
                        self._made[peer, kind] = yield from self._reach(address, where.port, peer, kind)
                    except (OSError, _RefusedError) as error:
                        self._problems[peer] = f"{address}: {error}"
                        continue
                    addresses.remove(address)
                    addresses.insert(0, address)  # the next connection tries it first
                    break
                else:
                    yield _Wait(time.monotonic() + pause_s)
                    pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _reach(self, address: str, port: int, peer: int, kind: int) -> Generator[_Wait, None, socket.socket]:
        """Return a connection to a peer at this address, after a handshake."""
        sock = self._new_socket(address)
        try:
            yield from _finish_connecting(sock, (address, port))
            yield from self._introduce(sock, peer, kind)
        except (OSError, _RefusedError):
            self._drop(sock)
            raise
        return sock

    def _introduce(self, sock: socket.socket, peer: int, kind: int) -> Generator[_Wait, None, None]:
        """Do the connecting side's part of the handshake."""
        limit = time.monotonic() + _HANDSHAKE_LIMIT_S
        hello = HELLO.pack(MAGIC, self._rank, peer, kind, secrets.token_bytes(NONCE_NBYTES))
        yield from _send(sock, hello, limit)
        nonce = yield from _receive(sock, NONCE_NBYTES, limit)
        proof = yield from _receive(sock, PROOF_NBYTES, limit)
        if not hmac.compare_digest(proof, self._prove(b"listener", hello + nonce)):
            raise _RefusedError("something answers there that does not know the group's secret")
        yield from _send(sock, self._prove(b"connector", hello + nonce), limit)
        # No shorter limit here: once the peer has counted this connection, another one would be a duplicate.
        if (yield from _receive(sock, len(WELCOME), math.inf)) != WELCOME:
            raise _RefusedError("the peer did not end the handshake as expected")

    # Both sides.

    def _prove(self, role: bytes, message: bytes) -> bytes:
        return hmac.new(self._secret, role + message, hashlib.sha256).digest()

    def _new_socket(self, address: str) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        self._sockets.add(sock)
        sock.setblocking(False)
        return sock

    def _drop(self, sock: socket.socket) -> None:
        self._sockets.discard(sock)
        sock.close()

    def _name(self, rank: int) -> str:
        return f"rank {self._joining.global_ranks[rank]}"

    # The store.

    @contextmanager
    def _telling_peers(self) -> Iterator[None]:
        """Tell the peers about this rank's mistake before it is raised here, so that they do not wait."""
        try:
            yield
        except (ValueError, TransportError) as error:
            self._store.set(f"address/{self._rank}", json.dumps({"mistake": str(error)}))
            raise

    def _read_listening(self, peer: int) -> _Listening:
        key = f"address/{peer}"
        entry = self._read(key, peer)
        if "mistake" in entry:
            raise MismatchError(f"{self._name(peer)} could not join the group: {str(entry['mistake'])[:_MOST_TEXT]}")
        check_fields(entry, key, {"addresses": list, "port": int})
        addresses, port = entry["addresses"], entry["port"]
        if not 1 <= len(addresses) <= _MOST_ADDRESSES or not all(map(_can_be_reached, addresses)):
            raise strange_entry(key, f"expected 1 to {_MOST_ADDRESSES} IP addresses, got {shortened(addresses)}")
        if not 1 <= port <= 65535:
            raise strange_entry(key, f"expected a port from 1 to 65535, got {port}")
        return _Listening(tuple(addresses), port)

    def _read_secret(self) -> bytes:
        text = self._read("secret", 0, {"secret": str})["secret"]
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            secret = b""
        if len(secret) != SECRET_NBYTES:
            raise strange_entry("secret", f"expected {SECRET_NBYTES} bytes in hexadecimal digits")
        return secret

    def _read(self, key: str, peer: int, fields: Mapping[str, type] | None = None) -> dict[str, Any]:
        """Wait for a peer's entry under `key`, by polling so that Ctrl-C works, and parse it."""
        pause_s = 1e-3
        while not self._store.check([key]):
            if time.monotonic() > self._deadline:
                raise CGXTimeoutError(
                    f"{self._name(self._rank)}: Timed out after {self._waited_s():.1f} s waiting for "
                    f"{self._name(peer)} to write where it listens for TCP connections. Look at that rank's output: "
                    "it has not called init_process_group, or has failed there. Then restart all ranks."
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _MOST_POLL_S)
        return parse_answer(bytes(self._store.get(key)), key, fields)

    def _waited_s(self) -> float:
        return time.monotonic() - self._started

    def _absence(self, own: _Listening, where: Mapping[int, _Listening]) -> CGXTimeoutError:
        """Return the error that names the first peer without a complete link."""
        missing = sorted(
            {(peer, kind) for peer in self._peers for kind in range(self._kinds[peer])} - self._made.keys()
        )
        peer, kind = missing[0]
        what = f"{_kind_name(kind)} connection"
        if peer > self._rank:
            problem = self._problems.get(peer, "no answer")
            how = f"connecting to {self._name(peer)} at {where[peer]} ({what}; last error: {problem})"
        else:
            how = f"waiting for {self._name(peer)} to connect to this rank at {own} ({what})"
        others = len({other for other, _ in missing}) - 1
        more = f" {others} more peers are not linked either." if others else ""
        return CGXTimeoutError(
            f"{self._name(self._rank)}: Timed out after {self._waited_s():.1f} s {how}.{more} {_REMEDY}"
        )


def _kind_name(kind: int) -> str:
    return "control" if kind == CONTROL else f"stream {kind - 1}"


def _finish_connecting(sock: socket.socket, target: tuple[str, int]) -> Generator[_Wait, None, None]:
    try:
        sock.connect(target)
    except BlockingIOError:
        yield _Wait(time.monotonic() + _CONNECT_LIMIT_S, sock, selectors.EVENT_WRITE)
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, os.strerror(problem)) from None


def _receive(sock: socket.socket, nbytes: int, until: float) -> Generator[_Wait, None, bytes]:
    received = b""
    while len(received) < nbytes:
        try:
            part = sock.recv(nbytes - len(received))
        except BlockingIOError:
            yield _Wait(until, sock, selectors.EVENT_READ)
            continue
        if not part:
            raise ConnectionError("the other side closed the connection during the handshake")
        received += part
    return received


def _send(sock: socket.socket, message: bytes, until: float) -> Generator[_Wait, None, None]:
    while message:
        try:
            message = message[sock.send(message) :]
        except BlockingIOError:
            yield _Wait(until, sock, selectors.EVENT_WRITE)


def _can_be_reached(address: object) -> bool:
    """Tell whether this is an IP address, as text, of one machine."""
    try:
        parsed = ipaddress.ip_address(address if isinstance(address, str) else "")
    except ValueError:
        return False
    return "%" not in str(address) and not parsed.is_unspecified and not parsed.is_multicast


def _own_addresses(joining: Joining) -> list[str]:
    """Return the addresses at which this rank's peers can reach it."""
    if joining.settings.socket_interface is not None:
        return _addresses_of_chosen(joining.settings.socket_interface)
    hosts = (_store_host(joining.prefixed("cgx links")), os.environ.get("MASTER_ADDR"), socket.gethostname())
    ways = ((host, _addresses_toward(host)) for host in hosts if host)
    host, routed = next((way for way in ways if way[1]), ("", _LOOPBACK))
    outside = [address for address in routed if not ipaddress.ip_address(address).is_loopback]
    if outside or host in ("localhost", *routed) or len(set(joining.members.nodes)) == 1:
        return outside or routed
    # Some systems give a machine's own name a loopback address, which ranks of other nodes cannot use.
    every = [address for _, name in socket.if_nameindex() for address in _addresses_of(name)]
    return [*dict.fromkeys(address for address in every if address not in routed), *routed]


def _store_host(store: Store) -> str | None:
    """Return the name or address of the store's server, if there is one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return host if isinstance(host, str) else None


def _addresses_toward(host: str) -> list[str]:
    """Return the addresses that this machine uses to reach each address of a host."""
    try:
        infos = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    found = []
    for family, kind, _, _, target in infos:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # for a datagram socket this chooses a route and sends nothing
                found.append(str(probe.getsockname()[0]))
        except OSError:
            continue
    return [address for address in dict.fromkeys(found) if not _is_link_local(address)]


def _is_link_local(address: str) -> bool:
    return ":" in address and ipaddress.ip_address(address).is_link_local


def _addresses_of_chosen(interface: str) -> list[str]:
    """Return the addresses of the interface that the user has named."""
    names = [name for _, name in socket.if_nameindex()]
    found = _addresses_of(interface) if interface in names else []
    if not found:
        problem = "has no address (link-local ones do not count)" if interface in names else "does not exist"
        raise ValueError(
            f"CGX_SOCKET_IFNAME (or, where that is not set, GLOO_SOCKET_IFNAME): the interface {shortened(interface)} "
            f"{problem}; this machine has {', '.join(names[:_MOST_INTERFACES_NAMED])}"
        )
    return found


def _addresses_of(interface: str) -> list[str]:
    """Return an interface's IPv4 address and its IPv6 addresses, without link-local ones."""
    import fcntl  # not on every system

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:
            pass  # it has no IPv4 address
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        rows = []  # a kernel without IPv6
    found += [str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if row[-1] == interface]
    return [address for address in found if not _is_link_local(address)]
