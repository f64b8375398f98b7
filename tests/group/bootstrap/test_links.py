"""TCP links between ranks: real sockets; the ranks are threads of this process, over one store."""

from __future__ import annotations

import gc
import hashlib
import hmac
import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from torch_cgx.config import Settings
from torch_cgx.errors import CGXError, CGXTimeoutError, MismatchError
from torch_cgx.group.bootstrap import links
from torch_cgx.group.bootstrap.handshake import Joining, Membership
from torch_cgx.group.bootstrap.links import CONTROL, HELLO, MAGIC, NONCE_NBYTES, PROOF_NBYTES, PeerSockets, open_links

LONG_S = 60.0
SHORT_S = 1.0  # for what cannot succeed
SECRET = "5a" * 32


class Group:
    """Ranks as threads; what they open is closed at the end of a test."""

    def __init__(
        self, world: int, streams: int = 1, timeout_s: float = LONG_S, interface: str | None = None, store: Any = None
    ) -> None:
        self.world, self.streams, self.timeout_s, self.interface = world, streams, timeout_s, interface
        self.store = HashStore() if store is None else store
        self.entries = PrefixStore("cgx links", self.store)
        self.nodes: tuple[str, ...] = ("node",) * world
        self.links: dict[int, dict[int, PeerSockets]] = {}
        self.errors: dict[int, Exception] = {}
        self._threads: dict[int, threading.Thread] = {}

    def joining(self, rank: int) -> Joining:
        same = (True,) * self.world
        return Joining(
            prefixed=lambda name: PrefixStore(name, self.store),
            rank=rank,
            world=self.world,
            timeout=timedelta(seconds=self.timeout_s),
            global_ranks=tuple(10 + other for other in range(self.world)),
            settings=Settings(streams=self.streams, socket_interface=self.interface),
            members=Membership(self.nodes, ("pids",) * self.world, same, ("",) * self.world),
        )

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            self._threads[rank] = threading.Thread(target=self._run, args=(rank,), daemon=True)
            self._threads[rank].start()

    def _run(self, rank: int) -> None:
        try:
            self.links[rank] = open_links(self.joining(rank))
        except Exception as error:
            self.errors[rank] = error

    def finish(self) -> None:
        for thread in self._threads.values():
            thread.join(LONG_S)
        assert not any(thread.is_alive() for thread in self._threads.values())

    def open(self) -> dict[int, dict[int, PeerSockets]]:
        self.start(*range(self.world))
        self.finish()
        assert not self.errors, self.errors
        return self.links

    def read(self, key: str) -> dict[str, Any]:
        """What a rank has written into the store, which is waited for."""
        deadline = time.monotonic() + LONG_S
        while not self.entries.check([key]):
            assert time.monotonic() < deadline, key
            time.sleep(0.005)
        answer: dict[str, Any] = json.loads(self.entries.get(key))
        return answer

    def reach(self, rank: int) -> socket.socket:
        """A connection of a stranger to a rank."""
        where = self.read(f"address/{rank}")
        sock = socket.create_connection((where["addresses"][0], where["port"]), LONG_S)
        sock.settimeout(LONG_S)
        return sock

    def say_hello(self, sock: socket.socket, rank: int, listening: int, kind: int, secret: str) -> bytes:
        """The connecting side's part of the handshake; what comes at its end, b"" where the connection is closed."""
        hello = HELLO.pack(MAGIC, rank, listening, kind, b"n" * NONCE_NBYTES)
        try:
            sock.sendall(hello)
            answer = b""
            while len(answer) < NONCE_NBYTES + PROOF_NBYTES:
                part = sock.recv(NONCE_NBYTES + PROOF_NBYTES - len(answer))
                if not part:
                    return b""
                answer += part
            message = b"connector" + hello + answer[:NONCE_NBYTES]
            sock.sendall(hmac.new(bytes.fromhex(secret), message, hashlib.sha256).digest())
            return sock.recv(1)
        except ConnectionError:
            return b""

    def close(self) -> None:
        for peers in self.links.values():
            for sockets in peers.values():
                sockets.close()


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture
def groups() -> Iterator[type[Group]]:
    made: list[Group] = []

    class Closed(Group):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

    yield Closed
    for group in made:
        group.close()


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def all_of(sockets: PeerSockets) -> list[socket.socket]:
    return [sockets.control, *sockets.streams]


def received(sock: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        assert select.select([sock], [], [], LONG_S)[0], "nothing came"
        part = sock.recv(nbytes - len(found))
        assert part
        found += part
    return found


def check_every_connection(opened: dict[int, dict[int, PeerSockets]], world: int, streams: int) -> None:
    assert sorted(opened) == list(range(world))
    for rank, peers in opened.items():
        assert sorted(peers) == [other for other in range(world) if other != rank]
        for peer, sockets in peers.items():
            assert len(sockets.streams) == streams
            for kind, sock in enumerate(all_of(sockets)):
                sock.sendall(bytes([rank, peer, kind]))
    for rank, peers in opened.items():
        for peer, sockets in peers.items():
            for kind, sock in enumerate(all_of(sockets)):
                assert received(sock, 3) == bytes([peer, rank, kind])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "torch_cgx"]


def wait_for_warning(caplog: pytest.LogCaptureFixture, text: str) -> str:
    deadline = time.monotonic() + LONG_S
    while True:
        warning = next((each for each in warnings_of(caplog) if text in each), None)
        if warning is not None:
            return warning
        assert time.monotonic() < deadline, warnings_of(caplog)
        time.sleep(0.01)


@pytest.mark.parametrize(("world", "streams"), [(2, 1), (2, 4), (4, 1), (4, 3)])
def test_every_pair_of_ranks_gets_its_own_connections(groups: type[Group], world: int, streams: int) -> None:
    check_every_connection(groups(world, streams).open(), world, streams)


def test_a_group_of_one_rank_has_no_links(groups: type[Group]) -> None:
    assert groups(1).open() == {0: {}}


def test_links_go_over_ipv6_where_the_store_is_there(groups: type[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv("MASTER_ADDR", "::1")
    group = groups(3)
    opened = group.open()
    check_every_connection(opened, 3, 1)
    assert group.read("address/2")["addresses"] == ["::1"]
    assert opened[0][2].control.family == socket.AF_INET6


def test_the_address_is_the_one_that_leads_to_the_store(groups: type[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = groups(2, store=PrefixStore("outer", store))
    check_every_connection(group.open(), 2, 1)
    assert group.read("address/0")["addresses"] == ["127.0.0.1"]


def test_without_any_host_there_is_still_an_address(groups: type[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setattr(socket, "gethostname", lambda: "no such host")
    group = groups(2)
    check_every_connection(group.open(), 2, 1)
    assert "127.0.0.1" in group.read("address/0")["addresses"]


def test_a_name_that_means_loopback_here_is_not_all_that_other_nodes_are_told(
    groups: type[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "master")
    monkeypatch.setattr(links, "_addresses_toward", lambda host: ["127.0.0.1"])
    monkeypatch.setattr(links, "_addresses_of", lambda name: ["127.0.0.1", "127.0.0.5"])
    group = groups(2)
    group.nodes = ("a", "b")
    check_every_connection(group.open(), 2, 1)
    assert set(group.read("address/0")["addresses"]) == {"127.0.0.1", "127.0.0.5"}
    one_node = groups(2)
    one_node.open()
    assert one_node.read("address/0")["addresses"] == ["127.0.0.1"]


def test_an_address_that_refuses_is_passed_over(groups: type[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_own_addresses", lambda joining: ["127.0.0.1"])
    group = groups(2, streams=2)
    group.start(1)
    where = group.read("address/1")
    told = {"addresses": ["127.0.0.9", *where["addresses"]], "port": where["port"]}
    group.entries.set("address/1", json.dumps(told))
    group.start(0)
    group.finish()
    assert not group.errors
    check_every_connection(group.links, 2, 2)


def test_a_named_interface_is_where_a_rank_listens(groups: type[Group]) -> None:
    names = [name for _, name in socket.if_nameindex()]
    if "lo" not in names:
        pytest.skip("no interface named lo")
    group = groups(2, interface="lo")
    check_every_connection(group.open(), 2, 1)
    assert group.read("address/1")["addresses"][0] == "127.0.0.1"


def test_an_interface_that_does_not_exist_is_told_here_and_to_the_peers(groups: type[Group]) -> None:
    group = groups(2)
    group.start(0)
    group.read("secret")
    group.interface = "nope0"
    group.start(1)
    group.finish()
    own, other = group.errors[1], group.errors[0]
    assert isinstance(own, ValueError) and isinstance(other, MismatchError)
    for text in (str(own), str(other)):
        assert "CGX_SOCKET_IFNAME" in text and "'nope0'" in text and "does not exist" in text
        assert all(name in text for _, name in socket.if_nameindex()[:8])
    assert "rank 11" in str(other)


def test_an_interface_without_an_address_is_refused(groups: type[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_addresses_of", lambda name: [])
    group = groups(2, interface=socket.if_nameindex()[0][1])
    with pytest.raises(ValueError, match="has no address"):
        open_links(group.joining(0))


def test_strangers_are_refused_with_a_warning_and_the_links_are_made(
    groups: type[Group], caplog: pytest.LogCaptureFixture
) -> None:
    group = groups(2)
    group.start(1)
    noisy, silent, liar, lost = (group.reach(1) for _ in range(4))
    with noisy, silent, liar, lost:
        noisy.sendall(b"GET / HTTP/1.0\r\n\r\n")
        addresses = {name: sock.getsockname()[1] for name, sock in (("noisy", noisy), ("silent", silent))}
        addresses |= {"liar": liar.getsockname()[1], "lost": lost.getsockname()[1]}
        lying = threading.Thread(target=group.say_hello, args=(liar, 0, 1, CONTROL, "00" * 32), daemon=True)
        lying.start()
        lost.sendall(HELLO.pack(MAGIC, 0, 7, CONTROL, b"n" * NONCE_NBYTES))
        # Rank 1 accepts in the order of arrival: all four come before rank 0's own connections.
        group.start(0)
        group.finish()
        lying.join(LONG_S)
    assert not group.errors
    check_every_connection(group.links, 2, 1)
    warnings = warnings_of(caplog)
    for name, text in {
        "noisy": "expected a hello of torch_cgx, got b'GET / HT'",
        "silent": "had not finished the handshake",
        "lost": "unexpected hello",
    }.items():
        assert any(f"127.0.0.1, port {addresses[name]}:" in each and text in each for each in warnings), warnings
    assert any(f"port {addresses['liar']}:" in each for each in warnings), warnings
    assert all("rank 11 refused a TCP connection" in each for each in warnings)
    assert {record.levelno for record in caplog.records if record.name == "torch_cgx"} == {logging.WARNING}


def test_a_wrong_secret_and_a_duplicate_are_refused_while_others_are_waited_for(
    groups: type[Group], caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 is played by the test, until rank 1 comes."""
    group = groups(3)
    group.entries.set("secret", json.dumps({"secret": SECRET}))
    for rank in (0, 1):
        group.entries.set(f"address/{rank}", json.dumps({"addresses": ["127.0.0.1"], "port": 9}))
    group.start(2)
    with group.reach(2) as liar, group.reach(2) as first, group.reach(2) as second, group.reach(2) as stream:
        assert group.say_hello(liar, 0, 2, CONTROL, "00" * 32) == b""
        assert "does not know the group's secret" in wait_for_warning(caplog, f"port {liar.getsockname()[1]}:")
        assert group.say_hello(first, 0, 2, CONTROL, SECRET) == links.WELCOME
        assert group.say_hello(second, 0, 2, CONTROL, SECRET) == b""
        duplicate = wait_for_warning(caplog, f"port {second.getsockname()[1]}:")
        assert "duplicate" in duplicate and "rank 10" in duplicate and "control" in duplicate
        assert group.say_hello(stream, 0, 2, CONTROL + 1, SECRET) == links.WELCOME
        with group.reach(2) as control_of_1, group.reach(2) as stream_of_1:
            assert group.say_hello(control_of_1, 1, 2, CONTROL, SECRET) == links.WELCOME
            assert group.say_hello(stream_of_1, 1, 2, CONTROL + 1, SECRET) == links.WELCOME
            group.finish()
            assert not group.errors
            first.sendall(b"to 2")
            assert received(group.links[2][0].control, 4) == b"to 2"
            group.links[2][1].streams[0].sendall(b"to 1")
            assert received(stream_of_1, 4) == b"to 1"
    assert len(warnings_of(caplog)) == 2


def test_two_hellos_at_once_are_not_both_taken(groups: type[Group], caplog: pytest.LogCaptureFixture) -> None:
    group = groups(2)
    group.entries.set("secret", json.dumps({"secret": SECRET}))
    group.entries.set("address/0", json.dumps({"addresses": ["127.0.0.1"], "port": 9}))
    group.start(1)
    hello = HELLO.pack(MAGIC, 0, 1, CONTROL, b"n" * NONCE_NBYTES)
    with group.reach(1) as first, group.reach(1) as second, group.reach(1) as stream:
        answers = []
        for sock in (first, second):
            sock.sendall(hello)
            answers.append(received(sock, NONCE_NBYTES + PROOF_NBYTES))
        ends = []
        for sock, answer in zip((first, second), answers, strict=True):
            message = b"connector" + hello + answer[:NONCE_NBYTES]
            sock.sendall(hmac.new(bytes.fromhex(SECRET), message, hashlib.sha256).digest())
            ends.append(sock.recv(1))
        assert ends == [links.WELCOME, b""]
        assert "duplicate" in wait_for_warning(caplog, f"port {second.getsockname()[1]}:")
        assert group.say_hello(stream, 0, 1, CONTROL + 1, SECRET) == links.WELCOME
        group.finish()
    assert not group.errors


def test_a_silent_stranger_is_closed_after_a_while(
    groups: type[Group], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_HANDSHAKE_LIMIT_S", 0.2)
    group = groups(2)
    group.entries.set("secret", json.dumps({"secret": SECRET}))
    group.entries.set("address/0", json.dumps({"addresses": ["127.0.0.1"], "port": 9}))
    group.start(1)
    with group.reach(1) as silent:
        assert silent.recv(1) == b""
        wait_for_warning(caplog, f"port {silent.getsockname()[1]}: it said nothing for too long")
    for kind in (CONTROL, CONTROL + 1):
        # Where this machine is so slow that the limit is too short, a rank would try again.
        while True:
            sock = group.reach(1)
            if group.say_hello(sock, 0, 1, kind, SECRET) == links.WELCOME:
                break
            sock.close()
        group.links.setdefault(0, {})[kind] = PeerSockets(sock, ())
    group.finish()
    assert not group.errors


def test_many_silent_strangers_hold_up_nobody(
    groups: type[Group], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_MOST_STRANGERS", 2)
    group = groups(2)
    group.entries.set("secret", json.dumps({"secret": SECRET}))
    group.entries.set("address/0", json.dumps({"addresses": ["127.0.0.1"], "port": 9}))
    group.start(1)
    with ExitStack() as open_sockets:
        strangers = [open_sockets.enter_context(group.reach(1)) for _ in range(8)]
        for kind in (CONTROL, CONTROL + 1):
            sock = open_sockets.enter_context(group.reach(1))
            assert group.say_hello(sock, 0, 1, kind, SECRET) == links.WELCOME
        group.finish()
        assert not group.errors
        assert all(stranger.recv(1) == b"" for stranger in strangers)
    wait_for_warning(caplog, "too many others came")


def test_a_listener_that_does_not_know_the_secret_gets_no_proof(groups: type[Group]) -> None:
    group = groups(2, timeout_s=SHORT_S)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]
        group.entries.set("address/1", json.dumps({"addresses": ["127.0.0.1"], "port": port}))
        group.start(0)
        impostor.settimeout(LONG_S)
        sock, _ = impostor.accept()
        with sock:
            sock.settimeout(LONG_S)
            received(sock, HELLO.size)
            sock.sendall(bytes(NONCE_NBYTES + PROOF_NBYTES))
            with suppress(ConnectionError):
                assert sock.recv(1) == b""
        group.finish()
    assert isinstance(group.errors[0], CGXTimeoutError)


def test_a_rank_that_never_comes_is_named_in_time_and_nothing_leaks(groups: type[Group]) -> None:
    groups(2).open()  # what is made once only
    before, threads = descriptors(), threading.active_count()
    group = groups(3, timeout_s=SHORT_S)
    started = time.monotonic()
    group.start(0, 1)
    group.finish()
    assert SHORT_S <= time.monotonic() - started < LONG_S
    for rank in (0, 1):
        error = group.errors[rank]
        assert isinstance(error, CGXTimeoutError)
        assert f"rank {10 + rank}: Timed out after" in str(error) and "waiting for rank 12" in str(error)
    assert descriptors() == before and threading.active_count() <= threads


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_does_not_connect_is_named_with_port_and_remedy(groups: type[Group], silent: int) -> None:
    """Its address is in the store, and nothing listens there, or it never connects."""
    groups(2).open()
    before = descriptors()
    group = groups(2, timeout_s=SHORT_S)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, and does not listen: every connection is refused
        port = reserved.getsockname()[1]
        group.entries.set("secret", json.dumps({"secret": SECRET}))
        group.entries.set(f"address/{silent}", json.dumps({"addresses": ["127.0.0.1"], "port": port}))
        group.start(1 - silent)
        group.finish()
    error = group.errors[1 - silent]
    assert isinstance(error, CGXTimeoutError)
    text = str(error)
    assert f"rank {11 - silent}: Timed out after" in text and f"rank {10 + silent}" in text and "control" in text
    assert "in the firewall" in text and "CGX_SOCKET_IFNAME" in text
    if silent == 1:
        assert f"127.0.0.1, port {port}" in text and "Connection refused" in text
    else:
        assert f"127.0.0.1, port {group.read('address/1')['port']}" in text
    assert descriptors() == before


def test_an_interrupt_leaves_nothing_open(groups: type[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    groups(2).open()

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    group = groups(2)
    group.entries.set("address/1", json.dumps({"addresses": ["127.0.0.1"], "port": 9}))
    before = descriptors()
    monkeypatch.setattr(links.selectors.DefaultSelector, "select", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_links(group.joining(0))
    assert descriptors() == before


@pytest.mark.parametrize(
    "entry",
    [
        b"nonsense",
        b"[]",
        b'{"port": 80}',
        b'{"addresses": "127.0.0.1", "port": 80}',
        b'{"addresses": [], "port": 80}',
        b'{"addresses": [5], "port": 80}',
        b'{"addresses": ["localhost"], "port": 80}',
        b'{"addresses": ["0.0.0.0"], "port": 80}',
        b'{"addresses": ["fe80::1%lo"], "port": 80}',
        b'{"addresses": ["127.0.0.1"], "port": true}',
        b'{"addresses": ["127.0.0.1"], "port": 0}',
        b'{"addresses": ["127.0.0.1"], "port": 65536}',
        json.dumps({"addresses": ["127.0.0.1"] * 33, "port": 80}).encode(),
        b" " * 70000,
    ],
    ids=lambda entry: entry[:40].decode(),
)
def test_a_malformed_address_in_the_store_is_refused(groups: type[Group], entry: bytes) -> None:
    group = groups(2)
    group.entries.set("address/1", entry)
    with pytest.raises(MismatchError, match=r"entry 'address/1' in the store is not what torch_cgx"):
        open_links(group.joining(0))


@pytest.mark.parametrize("entry", [b"{}", b'{"secret": 5}', b'{"secret": "xy"}', b'{"secret": "00ff"}'])
def test_a_malformed_secret_in_the_store_is_refused(groups: type[Group], entry: bytes) -> None:
    group = groups(2)
    group.entries.set("address/0", json.dumps({"addresses": ["127.0.0.1"], "port": 80}))
    group.entries.set("secret", entry)
    with pytest.raises(CGXError, match=r"entry 'secret' in the store is not what torch_cgx"):
        open_links(group.joining(1))


def test_only_control_sockets_watch_whether_the_peer_lives(groups: type[Group]) -> None:
    tcp = socket.IPPROTO_TCP
    for peers in groups(2, streams=2, timeout_s=30).open().values():
        for sockets in peers.values():
            for sock in all_of(sockets):
                is_control = sock is sockets.control
                assert sock.getsockopt(tcp, socket.TCP_NODELAY)
                assert not sock.getblocking() and not sock.get_inheritable()
                assert bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) == is_control
                assert sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == (30000 if is_control else 0)
            keepalive = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            assert [sockets.control.getsockopt(tcp, option) for option in keepalive] == [10, 10, 6]
    control = groups(2, timeout_s=600).open()[0][1].control
    assert control.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 60000


def test_nobody_listens_any_more_and_nothing_else_is_open_afterwards(groups: type[Group]) -> None:
    groups(2).open()
    before = descriptors()
    group = groups(3, streams=2)
    opened = group.open()
    assert descriptors() == before + 3 * 2 * 3
    for rank in range(3):
        where = group.read(f"address/{rank}")
        with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
            probe.connect((where["addresses"][0], where["port"]))
    for peers in opened.values():
        for sockets in peers.values():
            sockets.close()
    assert descriptors() == before
