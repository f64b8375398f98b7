"""The TCP goodput of a link between two test hosts, which limits every benchmark over it.

Also the goodput of an address of this host to itself, for `cgx doctor`.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from torch_cgx.cli.hosts import Node

__all__ = ["count_link_nbytes", "measure_goodput", "measure_loopback"]

WARM_UP_S = 0.5
TIMEOUT_S = 10.0
PART_NBYTES = 1 << 18


def measure_goodput(first: Node, second: Node, seconds: float = 2.0) -> tuple[float, float]:
    """Return the bits per second from the first node to the second and back, both at once as in an all_reduce.

    Each direction has one plain TCP connection. Received bytes are counted after a warm-up: until then the connection
    is finding its window, and the token buckets still have saved tokens.
    """
    with ExitStack() as stack:
        pairs = [_connect(stack, *nodes) for nodes in ((first, second), (second, first))]
        pool = stack.enter_context(ThreadPoolExecutor(4))
        for sender, _ in pairs:
            stack.callback(sender.shutdown, socket.SHUT_RDWR)  # ends its thread, for which the pool waits
            pool.submit(_send, sender)
        readers = [pool.submit(_receive, reader, seconds) for _, reader in pairs]
        there, back = (reader.result() for reader in readers)
    return there, back


def measure_loopback(address: str, seconds: float) -> float:
    """Return the bits per second over one TCP connection from an address of this host to itself.

    The kernel copies these bytes: no wire and no other host is involved. Raises `OSError` if there is no connection.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(
        address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    with ExitStack() as stack:
        server, sending = (stack.enter_context(socket.socket(family, kind, protocol)) for _ in range(2))
        for each in (server, sending):
            each.settimeout(TIMEOUT_S)
            each.bind(place)
        server.listen(1)
        sending.connect(server.getsockname())
        reading = stack.enter_context(server.accept()[0])
        reading.settimeout(TIMEOUT_S)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(sending.shutdown, socket.SHUT_RDWR)  # ends its thread, for which the pool waits
        pool.submit(_send, sending)
        return _receive(reading, seconds, warm_up_s=seconds / 5)


def count_link_nbytes(interface: str) -> tuple[int, int]:
    """Return the bytes that a device of the caller's network has sent and received so far, including headers."""
    with open("/proc/thread-self/net/dev") as file:
        for line in file:
            name, _, figures = line.partition(":")
            if name.strip() == interface:
                fields = figures.split()
                return int(fields[8]), int(fields[0])
    raise ValueError(f"there is no network device {interface!r} here")


def _connect(stack: ExitStack, sender: Node, reader: Node) -> tuple[socket.socket, socket.socket]:
    with reader.call(lambda: socket.create_server((reader.address, 0))) as server:
        server.settimeout(TIMEOUT_S)
        there = server.getsockname()
        sending = stack.enter_context(sender.call(lambda: socket.create_connection(there, TIMEOUT_S)))
        reading = stack.enter_context(server.accept()[0])
        reading.settimeout(TIMEOUT_S)
        return sending, reading


def _send(connection: socket.socket) -> None:
    part = memoryview(bytes(PART_NBYTES))
    with suppress(OSError):  # ends the loop
        while True:
            connection.send(part)


def _receive(connection: socket.socket, seconds: float, warm_up_s: float = WARM_UP_S) -> float:
    part = memoryview(bytearray(PART_NBYTES))
    begin = time.perf_counter() + warm_up_s
    while time.perf_counter() < begin:
        connection.recv_into(part)
    begin = time.perf_counter()
    nbytes, now = 0, begin
    while now < begin + seconds:
        got = connection.recv_into(part)
        if got == 0:
            raise ConnectionError("the other end of the link closed the connection")
        nbytes, now = nbytes + got, time.perf_counter()
    return 8 * nbytes / (now - begin)
