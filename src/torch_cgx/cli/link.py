"""What a link between two test hosts carries: the TCP goodput that is the limit of every benchmark over it."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from torch_cgx.cli.hosts import Node

__all__ = ["count_link_nbytes", "measure_goodput"]

WARM_UP_S = 0.5
TIMEOUT_S = 10.0
PART_NBYTES = 1 << 18


def measure_goodput(first: Node, second: Node, seconds: float = 2.0) -> tuple[float, float]:
    """Bits a second from the first node to the second, and back, both at once, as an all_reduce uses a link.

    One plain TCP connection each. Counted are bytes that the reader has got, after a warm-up: until then the connection
    is finding its window, and the token buckets are spending what they had saved.
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


def count_link_nbytes(interface: str) -> tuple[int, int]:
    """Bytes that a device of the caller's network has sent and received so far, headers included."""
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
    with suppress(OSError):  # the end of it
        while True:
            connection.send(part)


def _receive(connection: socket.socket, seconds: float) -> float:
    part = memoryview(bytearray(PART_NBYTES))
    begin = time.perf_counter() + WARM_UP_S
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
