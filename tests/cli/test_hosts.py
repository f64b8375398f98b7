"""The test hosts themselves: they carry at their rate, they are apart, and they go, however their maker ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.witness import Witness
from torch_cgx.cli import hosts as hosts_module
from torch_cgx.cli.hosts import Hosts, HostsUnavailable, parse_rate, share_cores
from torch_cgx.cli.link import measure_goodput

MakeHosts = Callable[..., Hosts]
PATIENCE_S = 60.0

pytestmark = [pytest.mark.ranks, pytest.mark.alone]

# The module by itself, without the package: importing torch would take seconds.
MAKER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("hosts", sys.argv[1])
hosts = sys.modules["hosts"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hosts)
with hosts.Hosts(2) as made:
    print(*sorted({path for node in made.nodes for path in (node.namespace, node.switch)}), flush=True)
    made.nodes[0].run(["sleep", "100"])
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start_maker(*prefix: str, path: str | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", MAKER, str(hosts_module.__file__)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": path or os.environ["PATH"]},
    )


def test_both_directions_carry_what_the_rate_allows(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2, rate="100mbit")
    for _ in range(3):  # a machine that pauses moves what it measures into another second
        found = measure_goodput(*hosts.nodes, seconds=1.0)
        if all(60e6 < bits < 100e6 for bits in found):
            return
    pytest.fail(f"expected 60 to 100 Mbit/s both ways in one of three tries, got {found} at last")


def test_nodes_reach_each_other_and_nothing_else(make_hosts: MakeHosts) -> None:
    before = subprocess.check_output(["ip", "-o", "link"])
    hosts = make_hosts(3)
    assert subprocess.check_output(["ip", "-o", "link"]) == before
    for node in hosts.nodes:
        devices = [
            line.split()[1].rstrip(":").partition("@")[0] for line in node.run(["ip", "-o", "link"]).splitlines()
        ]
        assert devices == ["lo", node.interface]
        assert node.run(["ip", "route"]).split()[0] == "10.77.0.0/24"
        assert len(node.run(["ip", "route"]).splitlines()) == 1
    assert len({node.address for node in hosts.nodes}) == 3
    assert min(measure_goodput(hosts.nodes[2], hosts.nodes[0], seconds=0.1)) > 0


def test_each_node_has_cores_of_its_own_where_there_are_enough(make_hosts: MakeHosts) -> None:
    ours = os.sched_getaffinity(0)
    hosts = make_hosts(2)
    show = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
    first, second = ({int(core) for core in node.run(show).split()} for node in hosts.nodes)
    assert first | second <= ours
    if len(ours) > 1:
        assert len(first) == len(second) == len(ours) // 2
        assert not first & second
    else:
        assert first == second == ours


def test_cores_are_shared_out_evenly_or_not_at_all() -> None:
    assert share_cores([2, 3, 5, 8, 9], 2) == [(2, 3), (5, 8)]
    assert share_cores([2, 3], 2) == [(2,), (3,)]
    assert share_cores([2, 3], 3) == [(), (), ()]


def test_a_cable_can_be_pulled_and_put_back(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    carrier = ["ip", "-o", "link", "show", "node1"]
    assert "LOWER_UP" in hosts.nodes[1].run(carrier)
    hosts.nodes[1].set_link(up=False)
    assert "NO-CARRIER" in hosts.nodes[1].run(carrier)
    hosts.nodes[1].set_link(up=True)
    assert "LOWER_UP" in hosts.nodes[1].run(carrier)
    assert min(measure_goodput(*hosts.nodes, seconds=0.1)) > 0


def test_after_an_exception_nothing_is_left(make_hosts: MakeHosts) -> None:
    make_hosts(1)  # skips where hosts cannot be
    with pytest.raises(KeyError), Hosts(2) as hosts:
        witness = Witness.of(hosts)
        sleeper = subprocess.Popen(hosts.nodes[1].command(["sleep", "100"]))
        inside = os.stat(hosts.nodes[1].namespace).st_ino
        until(lambda: os.stat(f"/proc/{sleeper.pid}/ns/net").st_ino == inside)
        assert witness.holders(0.0)
        raise KeyError
    with witness:
        assert len(witness) == 3
        assert sleeper.wait(PATIENCE_S) == -signal.SIGKILL
        assert witness.holders() == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_after_a_signal_to_their_maker_nothing_is_left(how: signal.Signals, make_hosts: MakeHosts) -> None:
    make_hosts(1)
    maker = start_maker()
    assert maker.stdout is not None
    with Witness(maker.stdout.readline().split()) as witness:
        assert len(witness) == 3
        assert witness.holders(0.0)
        maker.send_signal(how)
        maker.communicate(timeout=PATIENCE_S)
        assert maker.returncode == -how
        assert witness.holders() == []


def test_a_command_whose_starter_dies_before_it_can_ask_to_be_killed_is_not_left(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    make_hosts(1)
    reached, real = tmp_path / "reached", shutil.which("setpriv")
    late = tmp_path / "setpriv"  # which comes to its request only when nobody is there any more
    late.write_text(
        f'#!/bin/sh\n: > {reached}\nwhile kill -0 "$PPID" 2> /dev/null; do sleep 0.01; done\nexec {real} "$@"\n'
    )
    late.chmod(0o700)
    maker = start_maker(path=f"{tmp_path}:{os.environ['PATH']}")
    assert maker.stdout is not None
    with Witness(maker.stdout.readline().split()) as witness:
        assert len(witness) == 3
        until(reached.exists)
        maker.kill()
        maker.communicate(timeout=PATIENCE_S)
        assert witness.holders() == []


@pytest.mark.parametrize(
    ("tool", "package"), [("tc", "iproute2"), ("nsenter", "util-linux"), ("taskset", "util-linux")]
)
def test_a_missing_command_is_named_with_its_package(
    tool: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in {"ip", "tc", "nsenter", "setpriv", "taskset"} - {tool}:
        (tmp_path / other).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostsUnavailable, match=rf"command {tool} .*apt-get install {package}"), Hosts(2):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="gives up what only root has")
@pytest.mark.parametrize("without", ["-sys_admin", "-net_admin"])
def test_a_missing_permission_is_named(without: str, make_hosts: MakeHosts) -> None:
    make_hosts(1)
    maker = start_maker("setpriv", f"--bounding-set={without}")
    _, error = maker.communicate(timeout=PATIENCE_S)
    assert maker.returncode == 1
    assert "HostsUnavailable: test hosts need permission" in error
    assert "run as root" in error


def test_a_kernel_that_lacks_the_token_bucket_is_named_and_nothing_is_left(
    make_hosts: MakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hosts(1)
    monkeypatch.setattr(hosts_module, "BURST_NBYTES", -1)  # the nearest to it: a bucket that tc refuses
    hosts = Hosts(1, rate="1gbit")
    with pytest.raises(HostsUnavailable, match="kernel with tbf"), hosts:
        pass
    assert hosts.inodes() == set()


@pytest.mark.parametrize("text", ["", "1", "1gb", "1 gbit s", "-1gbit", "999kbit", "101gbit", "1tbit"])
def test_a_wrong_rate_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"1mbit to 100gbit"):
        parse_rate(text)


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 10**9), ("100mbit", 10**8), ("2.5Gbit", 25 * 10**8)])
def test_rates_are_written_as_tc_writes_them(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("nodes", [0, 65])
def test_a_wrong_number_of_nodes_is_refused(nodes: int) -> None:
    with pytest.raises(ValueError, match="1 to 64"):
        Hosts(nodes)
