"""The network interfaces of this host, and the ones that Gloo would use: for `cgx doctor`.

Names come from the C library, states and IPv4 addresses from the kernel (Linux, macOS), IPv6 addresses from /proc and
speeds from /sys (Linux). Unavailable facts are left out, and nothing here raises.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from torch_cgx.cli.link import measure_loopback

__all__ = ["Gloo", "Interface", "find_gloo", "find_interfaces", "loopback_bit_per_s", "loopback_problem"]

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
MEASURED_S = 0.3
CONNECT_S = 5.0

_SYS, _INET6 = Path("/sys/class/net"), Path("/proc/net/if_inet6")
_GET_FLAGS, _GET_ADDRESS = (0xC0206911, 0xC0206921) if sys.platform == "darwin" else (0x8913, 0x8915)
_UP = 1


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    up: bool | None  # None: unknown
    addresses: tuple[str, ...]  # the first IPv4 address, and all IPv6 addresses
    speed_mbit_per_s: int | None  # according to the driver

    @property
    def is_loopback(self) -> bool:
        return any(ip_address(each).is_loopback for each in self.addresses)

    @property
    def reaches_others(self) -> bool:
        """Return whether another host may know one of its addresses."""
        return self.up is not False and any(
            not (ip_address(each).is_loopback or ip_address(each).is_link_local) for each in self.addresses
        )

    def holds(self, address: str) -> bool:
        """Return whether the address belongs to this interface. All of 127.0.0.0/8 belongs to the loopback."""
        return address in self.addresses or (self.is_loopback and ip_address(address).is_loopback)


@dataclass(frozen=True, slots=True)
class Gloo:
    """The interfaces and the address that Gloo would use for a group created now."""

    interfaces: tuple[str, ...]  # names; empty if no known interface has the address
    address: str | None
    reason: str
    problem: str = ""
    advice: str = ""


def find_interfaces() -> list[Interface]:
    try:
        names = [name for _, name in socket.if_nameindex()]
    except (OSError, AttributeError):
        names = []
    of_v6 = _ipv6_addresses()
    return [Interface(name, _is_up(name), (*_ipv4_address(name), *of_v6.get(name, ())), _speed(name)) for name in names]


def loopback_bit_per_s(interface: Interface) -> float | None:
    """Return the bits per second from one of its addresses to itself, through the kernel, or None if that fails."""
    if interface.up is False:
        return None
    for address in sorted(interface.addresses, key=lambda each: ip_address(each).is_link_local):
        scoped = f"{address}%{interface.name}" if ":" in address and ip_address(address).is_link_local else address
        with suppress(OSError):
            return measure_loopback(scoped, MEASURED_S)
    return None


def loopback_problem() -> str:
    """Return the reason why processes of this host cannot reach each other, or ""."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_S).close()
    except OSError as error:
        return f"127.0.0.1 cannot be reached from this host itself ({error}): ip link set lo up"
    return ""


def find_gloo(interfaces: Sequence[Interface]) -> Gloo:
    """Return Gloo's choice: the interfaces in its variable, else an address of the host's name, else the loopback."""
    asked = os.environ.get(GLOO_VARIABLE, "")
    names = tuple(filter(None, asked.split(",")))
    if names:
        there = {each.name: each.addresses for each in interfaces}
        lacking = [name for name in names if not there.get(name)]
        problem = ""
        if lacking and there:
            usable = ", ".join(name for name, addresses in there.items() if addresses)
            problem = f"{GLOO_VARIABLE}={asked}: expected interfaces with an address ({usable}), got {lacking[0]}"
        address = None if lacking else there[names[0]][0]
        return Gloo(names, address, f"{GLOO_VARIABLE}={asked}", problem)

    host = socket.gethostname()
    address = _own_address(host)
    reason = f"this host's name, {host}, is {address}"
    if address is None:
        address, reason = "127.0.0.1", f"this host's name, {host}, is no address of it"
    taken = tuple(each.name for each in interfaces if each.holds(address))
    others = [each.name for each in interfaces if each.reaches_others]
    advice = ""
    if ip_address(address).is_loopback and others:
        advice = f"{reason}, so Gloo reaches this host alone: for several hosts set {GLOO_VARIABLE}={others[0]}" + (
            f" (there is {', '.join(others)})" if len(others) > 1 else ""
        )
    return Gloo(taken, address, reason, advice=advice)


def _own_address(host: str) -> str | None:
    """Return the first address of that name to which a socket here can be bound."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return str(place[0]).partition("%")[0]
    return None


def _ask(name: str, request: int) -> bytes:
    """Return a `struct ifreq` that the kernel has filled in: the name in 16 bytes, then the requested data."""
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return ioctl(any_socket.fileno(), request, struct.pack("16s48x", os.fsencode(name)[:15]))


def _is_up(name: str) -> bool | None:
    try:
        (flags,) = struct.unpack_from("H", _ask(name, _GET_FLAGS), 16)
    except (OSError, ImportError):
        return None
    return bool(flags & _UP)


def _ipv4_address(name: str) -> list[str]:
    try:
        return [socket.inet_ntoa(_ask(name, _GET_ADDRESS)[20:24])]
    except (OSError, ImportError):
        return []


def _ipv6_addresses() -> dict[str, list[str]]:
    """Return the IPv6 addresses by interface."""
    found: dict[str, list[str]] = {}
    with suppress(OSError, ValueError):
        for line in _INET6.read_text().splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, []).append(str(ip_address(bytes.fromhex(digits))))
    return found


def _speed(name: str) -> int | None:
    try:
        speed = int((_SYS / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None
