"""A test host's link that delays, loses and reorders packets, on any kernel: most have TAP devices, not all have netem.

The two ends of the link become TAP devices, and threads of this process carry the frames between them.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch_cgx.cli.hosts import HostsUnavailable, Node

__all__ = ["rough_link"]

DELAY_S, JITTER_S = 0.010, 0.003
LOST, REORDERED = 0.01, 0.05  # of all frames; what is reordered overtakes those before it
LONGEST_FRAME_NBYTES = 1 << 16
LOOK_S = 0.1
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000


@contextlib.contextmanager
def rough_link(node: Node) -> Iterator[Counter[str]]:
    """Make the link of a host rough, before anything runs there. The counts say what became of the frames."""
    counts: Counter[str] = Counter()
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        _run(node.namespace, "link", "delete", node.interface)  # and so its other end
        inside = node.call(lambda: _new_tap(node.interface, stack))
        outside = replace(node, namespace=node.switch).call(lambda: _new_tap(node.port, stack))
        _run(node.namespace, "address", "add", f"{node.address}/24", "dev", node.interface)
        _run(node.namespace, "link", "set", node.interface, "up")
        _run(node.switch, "link", "set", node.port, "master", "switch", "up")
        ways = ((inside, outside), (outside, inside))
        threads = [threading.Thread(target=_carry, args=(*way, counts, ended)) for way in ways]
        for thread in threads:
            thread.start()
        try:
            yield counts
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def _new_tap(name: str, stack: contextlib.ExitStack) -> int:
    """Make a device in the namespace of this thread; return the file of its frames."""
    try:
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, file)
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    except OSError as error:
        raise HostsUnavailable(f"rough links need TAP devices: {error}") from error
    return file


def _run(namespace: str, *arguments: str) -> None:
    subprocess.run(["nsenter", f"--net={namespace}", "ip", *arguments], check=True, capture_output=True)


def _carry(source: int, destination: int, counts: Counter[str], ended: threading.Event) -> None:
    """Carry frames from one end to the other until told to end."""
    chance = random.Random(source)
    under_way: list[tuple[float, int, bytes]] = []  # a heap, by when they arrive
    number = 0
    while not ended.is_set():
        until_next_s = under_way[0][0] - time.monotonic() if under_way else LOOK_S
        if select.select([source], [], [], min(max(until_next_s, 0.0), LOOK_S))[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(source, LONGEST_FRAME_NBYTES)
                    number += 1
                    if chance.random() < LOST:
                        counts["lost"] += 1
                        continue
                    overtakes = chance.random() < REORDERED
                    counts["reordered"] += overtakes
                    delay_s = 0.0 if overtakes else max(0.0, chance.gauss(DELAY_S, JITTER_S))
                    heapq.heappush(under_way, (time.monotonic() + delay_s, number, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, frame = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # the device is full or down: one more that is lost
                os.write(destination, frame)
