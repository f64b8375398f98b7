"""Test hosts on one machine: network namespaces joined by a switch, at a given rate; for tests and `cgx bench`.

    node 0: 10.77.0.1 [node0] ---- [port0] switch [port1] ---- [node1] 10.77.0.2 :node 1

A node is a network namespace that holds one end of a veth pair. The other ends are ports of a bridge, in a namespace of
its own, so that the real host's network is not touched. With a rate, there is a token bucket at both ends of every
pair, like on a full-duplex link: node0 shapes what the node sends, port0 what it receives. The bucket is small
(128 KB), so that small transfers are shaped too.

Each node has the same number of cores for itself, because hosts do not share processors. Commands that are started on
a node run only on its cores. With fewer cores than nodes, everything runs on any core.

Nothing is left, however this process ends. The namespaces have no names and no mounts: this process keeps each one
alive with a file descriptor, and the kernel removes a namespace, with all devices in it, when the last descriptor and
the last process that refer to it are gone. So there is nothing to clean up even after SIGKILL.

This module does not know what the links carry; link.py measures them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

__all__ = ["MAX_NODES", "Hosts", "HostsUnavailable", "Node", "parse_rate", "share_cores"]

MAX_NODES = 64
BURST_NBYTES = 128 * 1024
QUEUE_NBYTES = 4 << 20
"""The queue of a token bucket before it drops. Like a switch's buffer, it serves several nodes sending to one."""
END_S = 5.0
_CLONE_NEWNET = 0x40000000
_PERMISSION = (
    "permission to make network namespaces and devices: run as root, or under `unshare --user --map-root-user`; "
    "in a container, start that with --privileged, or with --cap-add SYS_ADMIN --cap-add NET_ADMIN"
)
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "taskset": "util-linux",
}
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit", re.IGNORECASE)
_FACTOR = {"k": 10**3, "m": 10**6, "g": 10**9}

T = TypeVar("T")


class HostsUnavailable(Exception):
    """This machine cannot make test hosts. The text names what is missing."""


def parse_rate(text: str) -> int:
    """Return a rate such as `1gbit` in bits per second, 1000000000. The notation is that of `tc`."""
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) * _FACTOR[match[2].lower()] if match else 0.0
    if not 10**6 <= rate <= 10**11:
        raise ValueError(f"{text!r} is not a rate: allowed are 1mbit to 100gbit, as in 100mbit, 2.5gbit")
    return int(rate)


@dataclass(frozen=True, slots=True)
class Node:
    """One host. It is only data, so that it can be passed to another process of this machine."""

    index: int
    namespace: str  # a path that setns and nsenter take
    switch: str  # the path of the switch's namespace
    cores: tuple[int, ...] = ()  # for its commands; empty means any

    @property
    def address(self) -> str:
        return _address(self.index)

    @property
    def interface(self) -> str:
        return f"node{self.index}"

    @property
    def port(self) -> str:
        """Return the switch's end of this node's link."""
        return f"port{self.index}"

    def environ(self) -> dict[str, str]:
        """Return the variables that put a rank on a node of its own, and let it find the others through its link."""
        return {
            "CGX_NODE_ID": self.interface,
            "GLOO_SOCKET_IFNAME": self.interface,
            "MASTER_ADDR": _address(0),
        }

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return a command that runs `arguments` in this node, and is killed when the thread that starts it ends.

        It asks the kernel for that signal before it enters the node. If the maker of the hosts dies before the request,
        there is no signal, but the namespace's path is gone too, so the command fails instead of staying behind.
        """
        cores = ["taskset", "--cpu-list", ",".join(map(str, self.cores))] if self.cores else []
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={self.namespace}", *cores, *arguments]

    def run(self, arguments: Sequence[str]) -> str:
        """Run a command here until it ends and return its stdout. Raises `subprocess.CalledProcessError` on failure."""
        return subprocess.run(self.command(arguments), check=True, capture_output=True, text=True).stdout

    def enter(self) -> None:
        """Move the calling thread, and everything that it starts later, to this node. Open sockets stay in theirs."""
        fd = os.open(self.namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc().setns(fd, _CLONE_NEWNET), "setns")
        finally:
            os.close(fd)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a thread in this node, so that a socket that it makes belongs to this node."""

        def inside() -> T:
            self.enter()
            return function()

        return _on_a_thread(inside)

    def set_link(self, up: bool) -> None:
        """Disconnect this node from the switch, or connect it again. Packets stop without any notice."""
        state = "up" if up else "down"
        subprocess.run(
            ["nsenter", f"--net={self.switch}", "ip", "link", "set", self.port, state], check=True, capture_output=True
        )


class Hosts:
    """`with Hosts(2, rate="1gbit") as hosts: hosts.nodes[1].run(["ip", "address"])`. Needs root."""

    def __init__(self, nodes: int, rate: str | None = None) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"nodes: expected 1 to {MAX_NODES}, got {nodes}")
        self.rate = None if rate is None else parse_rate(rate)
        self.nodes: tuple[Node, ...] = ()
        self._count = nodes
        self._descriptors: list[int] = []

    def __enter__(self) -> Hosts:
        """Make the hosts, or raise `HostsUnavailable`."""
        _check_tools()
        try:
            switch = self._new_namespace()
            self.nodes = tuple(
                Node(index, self._new_namespace(), switch, cores)
                for index, cores in enumerate(share_cores(sorted(os.sched_getaffinity(0), key=_place), self._count))
            )
            self._wire(switch)
            if self.rate is not None:
                self._shape(switch, self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes that still run in the nodes, and let the kernel remove the namespaces."""
        try:
            _kill_all_in(self.inodes())
        finally:
            self.nodes = ()
            while self._descriptors:
                os.close(self._descriptors.pop())

    def inodes(self) -> set[int]:
        """Return the inodes of all namespaces, including the switch's."""
        return {os.fstat(fd).st_ino for fd in self._descriptors}

    def _new_namespace(self) -> str:
        def make() -> int:
            _check(_libc().unshare(_CLONE_NEWNET), "unshare")
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        try:
            fd = _on_a_thread(make)
        except PermissionError as error:
            raise HostsUnavailable(f"test hosts need {_PERMISSION}") from error
        except OSError as error:
            raise HostsUnavailable(f"test hosts need a kernel with network namespaces: {error}") from error
        self._descriptors.append(fd)
        return f"/proc/{os.getpid()}/fd/{fd}"

    def _wire(self, switch: str) -> None:
        _batch(switch, "ip", ["link add switch type bridge", "link set switch up"], "a kernel with bridges")
        for node in self.nodes:
            _batch(
                switch,
                "ip",
                [
                    f"link add {node.port} type veth peer name {node.interface} netns {node.namespace}",
                    f"link set {node.port} master switch",
                    f"link set {node.port} up",
                ],
                "a kernel with veth devices",
            )
            # An IPv6 address of the link would take seconds to become usable. Without IPv6 there is none to turn off.
            with contextlib.suppress(HostsUnavailable):
                _batch(node.namespace, "ip", [f"link set {node.interface} addrgenmode none"], "")
            _batch(
                node.namespace,
                "ip",
                [
                    "link set lo up",
                    f"address add {node.address}/24 dev {node.interface}",
                    f"link set {node.interface} up",
                ],
                "permission to set addresses",
            )

    def _shape(self, switch: str, rate: int) -> None:
        for node in self.nodes:
            for namespace, device in ((node.namespace, node.interface), (switch, node.port)):
                bucket = f"tbf rate {rate}bit burst {BURST_NBYTES} limit {QUEUE_NBYTES}"
                _batch(
                    namespace, "tc", [f"qdisc add dev {device} root {bucket}"], "a kernel with tbf (modprobe sch_tbf)"
                )


def share_cores(cores: Sequence[int], nodes: int) -> list[tuple[int, ...]]:
    """Return each node's cores: the same number for each, none shared. With fewer cores than nodes, all get none."""
    each = len(cores) // nodes
    return [tuple(cores[each * index : each * (index + 1)]) for index in range(nodes)]


def _place(core: int) -> tuple[int, int, int]:
    """Return a sort key that keeps the threads of one core together, and the cores of one socket."""

    def read(name: str) -> int:
        try:
            return int(Path(f"/sys/devices/system/cpu/cpu{core}/topology/{name}").read_text())
        except (OSError, ValueError):
            return 0

    return read("physical_package_id"), read("core_id"), core


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _check_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise HostsUnavailable(f"test hosts need Linux; this is {sys.platform}")
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise HostsUnavailable(f"test hosts need the command {tool} (Debian, Ubuntu: apt-get install {package})")


def _batch(namespace: str, tool: str, lines: Sequence[str], needs: str) -> None:
    done = subprocess.run(
        ["nsenter", f"--net={namespace}", tool, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        needs = _PERMISSION if "not permitted" in said else needs
        raise HostsUnavailable(f"test hosts need {needs}: {tool} {'; '.join(lines)}: {said}")


def _kill_all_in(inodes: set[int]) -> None:
    """Kill every process whose network namespace is one of these, and wait until they have ended."""
    deadline = time.monotonic() + END_S
    while inodes and time.monotonic() < deadline:
        pids = [pid for pid in _all_pids() if pid != os.getpid() and _network_of(pid) in inodes]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                held = os.pidfd_open(pid)
                try:
                    if _network_of(pid) in inodes:  # the pid still belongs to that process
                        signal.pidfd_send_signal(held, signal.SIGKILL)
                finally:
                    os.close(held)
        if not pids:
            return
        time.sleep(0.01)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _network_of(pid: int) -> int | None:
    """Return the inode of a process's network namespace, or None if the process has ended, reaped or not."""
    with contextlib.suppress(OSError):
        return os.stat(Path("/proc", str(pid), "ns", "net")).st_ino
    return None


def _on_a_thread(function: Callable[[], T]) -> T:
    """Call a function on a new thread. Namespaces belong to threads, so nothing stays changed after the call."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)  # os.setns and os.unshare came with Python 3.12


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
