"""Network interfaces as `cgx doctor` sees them, and its guess of what Gloo takes against what Gloo does."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from torch_cgx.cli import link
from torch_cgx.cli.doctor import interfaces
from torch_cgx.cli.doctor.interfaces import Interface, find_gloo, find_interfaces, loopback_bit_per_s

Patch = pytest.MonkeyPatch

LOOPBACK = Interface("lo", True, ("127.0.0.1", "::1"), None)
ETHERNET = Interface("eth0", True, ("192.0.2.2", "fe80::1"), 10_000)
BARE = Interface("ifb0", False, (), None)


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: Patch) -> None:
    monkeypatch.delenv(interfaces.GLOO_VARIABLE, raising=False)


def has_address(monkeypatch: Patch, address: str | None) -> None:
    monkeypatch.setattr(interfaces, "_own_address", lambda host: address)


def test_the_loopback_is_among_them_and_up() -> None:
    (found,) = (each for each in find_interfaces() if each.is_loopback)
    assert found.up and "127.0.0.1" in found.addresses and not found.reaches_others
    assert [each.name for each in find_interfaces()] == [name for _, name in socket.if_nameindex()]


def test_without_proc_and_sys_the_kernel_is_asked_alone(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(interfaces, "_SYS", tmp_path / "none")
    monkeypatch.setattr(interfaces, "_INET6", tmp_path / "none")
    (found,) = (each for each in find_interfaces() if each.is_loopback)
    assert found.addresses == ("127.0.0.1",) and found.speed_mbit_per_s is None


def test_where_nothing_answers_names_remain(monkeypatch: Patch, tmp_path: Path) -> None:
    def refuse(name: str, request: int) -> bytes:
        raise OSError("Operation not permitted")

    monkeypatch.setattr(interfaces, "_ask", refuse)
    monkeypatch.setattr(interfaces, "_INET6", tmp_path / "none")
    found = find_interfaces()
    assert found and all(each.up is None and not each.addresses for each in found)
    assert find_gloo(found).interfaces == ()


@pytest.mark.parametrize(("text", "speed"), [("10000\n", 10_000), ("-1\n", None), ("", None), (None, None)])
def test_a_speed_is_what_the_driver_names(
    text: str | None, speed: int | None, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setattr(interfaces, "_SYS", tmp_path)
    if text is not None:
        (tmp_path / "eth0").mkdir()
        (tmp_path / "eth0" / "speed").write_text(text)
    assert interfaces._speed("eth0") == speed


def test_addresses_of_ipv6_are_read_from_proc(monkeypatch: Patch, tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\nfd000000000000000000000000000002 04 40 00 82     eth0\n"
    )
    monkeypatch.setattr(interfaces, "_INET6", table)
    assert interfaces._ipv6_addresses() == {"eth0": ["fe80::fc:ff:fe00:1", "fd00::2"]}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_bytes_go_from_an_address_to_itself(address: str) -> None:
    try:
        assert link.measure_loopback(address, 0.02) > 1e6
    except OSError:
        assert ":" in address, "only IPv6 may be missing"


def test_an_address_of_another_host_is_not_measured() -> None:
    assert loopback_bit_per_s(Interface("eth9", True, ("192.0.2.200",), None)) is None
    assert loopback_bit_per_s(Interface("lo", False, ("127.0.0.1",), None)) is None


def test_gloo_takes_what_its_variable_names(monkeypatch: Patch) -> None:
    monkeypatch.setenv(interfaces.GLOO_VARIABLE, "eth0")
    found = find_gloo([LOOPBACK, ETHERNET, BARE])
    assert (found.interfaces, found.address, found.problem, found.advice) == (("eth0",), "192.0.2.2", "", "")


@pytest.mark.parametrize("name", ["eth7", "ifb0", "eth0,eth7"])
def test_a_name_without_address_is_a_problem_that_names_those_with(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv(interfaces.GLOO_VARIABLE, name)
    problem = find_gloo([LOOPBACK, ETHERNET, BARE]).problem
    assert f"GLOO_SOCKET_IFNAME={name}" in problem and "(lo, eth0)" in problem
    assert problem.endswith(f"got {name.rpartition(',')[2]}")


def test_gloo_takes_the_interface_of_the_hosts_name(monkeypatch: Patch) -> None:
    has_address(monkeypatch, "192.0.2.2")
    found = find_gloo([LOOPBACK, ETHERNET])
    assert found.interfaces == ("eth0",) and not found.advice


@pytest.mark.parametrize("address", ["127.0.1.1", None])
def test_a_host_that_others_cannot_reach_is_advice_only_where_there_is_another_way(
    address: str | None, monkeypatch: Patch
) -> None:
    has_address(monkeypatch, address)
    found = find_gloo([LOOPBACK, ETHERNET])
    assert found.interfaces == ("lo",)
    assert "set GLOO_SOCKET_IFNAME=eth0" in found.advice
    assert not find_gloo([LOOPBACK, BARE]).advice


def listeners() -> dict[str, str]:
    """Addresses of this process's internet sockets, by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                found[name] = str(duplicate.getsockname()[0])
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sockets are found in /proc")
def test_gloo_listens_where_we_say() -> None:
    before = listeners()
    device = dist.ProcessGroupGloo.create_default_device()
    opened = [address for name, address in listeners().items() if before.get(name) != address]
    assert opened == [find_gloo(find_interfaces()).address]
    del device


def test_a_host_reaches_itself() -> None:
    assert interfaces.loopback_problem() == ""


def test_a_host_that_does_not_is_told_what_to_do(monkeypatch: Patch) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert (
        "Network is unreachable" in interfaces.loopback_problem()
        and "ip link set lo up" in interfaces.loopback_problem()
    )
