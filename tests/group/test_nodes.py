"""Groups over more than one node: test hosts with a link each, instead of a second machine."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from tests.support.gradients import BITS, DTYPES, digest, is_exact, noise, within_bound
from tests.support.harness import Rank, describe, observe_ranks, run_ranks
from tests.support.launching import bench, start_long_bench
from tests.support.training import flat, loss_of, make_net, train, train_alone
from tests.support.witness import Witness
from torch_cgx.cli import main
from torch_cgx.cli.hosts import Hosts, Node
from torch_cgx.cli.link import count_link_nbytes
from torch_cgx.plan.algorithms import Topology

pytestmark = pytest.mark.ranks

MakeHosts = Callable[..., Hosts]

SIZES = (16, 513, 20_001)
LARGE = 1 << 18
GROUP_TIMEOUT_S = 5.0
SLACK_S = 10.0
WORLDS = [(0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 0, 1)]
TRAINED_STEPS = 20

# The nodes of ranks; CGX_INTRA_BROADCAST, CGX_INTRA_COMPRESS, CGX_CROSS_REDUCTION_TYPE; how many ranks of a node speak
# for it, and how often a contribution is quantized: within a node, if there, and across.
HIERARCHIES = [
    ((0, 0, 1, 1), ("1", "1", "SRA"), 1, 1 + 2),
    ((0, 0, 1, 1), ("0", "1", "RING"), 2, 1 + 2),
    ((0, 0, 1, 1), ("0", "0", "SRA"), 2, 2),
    ((0, 0, 0, 1, 2, 2), ("1", "1", "RING"), 1, 1 + 3),
    ((0, 0, 0, 1, 2, 2), ("1", "0", "SRA"), 1, 2),
    ((0, 2, 0, 1, 2, 0), ("0", "0", "RING"), 1, 3),
]


def named(world: tuple[int, ...]) -> str:
    return "ranks on nodes " + "".join(map(str, world))


def how(choice: tuple[str, str, str]) -> dict[str, str]:
    names = ("CGX_INTRA_BROADCAST", "CGX_INTRA_COMPRESS", "CGX_CROSS_REDUCTION_TYPE")
    return dict(zip(names, choice, strict=True))


def compressed_sums(me: Rank, quantizations: int | None) -> list[str]:
    digests = []
    for bits in range(1, 9):
        os.environ[BITS] = str(bits)
        for index, numel in enumerate(SIZES):
            average = (bits + index) % 2 == 0
            x = noise(me.rank, numel, DTYPES[(bits + index) % 3])
            dist.all_reduce(x, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
            within_bound(x, me.world, bits, average=average, quantizations=quantizations)
            digests.append(digest(x))
    return digests


@pytest.mark.parametrize("world", WORLDS, ids=named)
def test_compressed_sums_have_the_same_bits_on_all_ranks_of_all_nodes(
    world: tuple[int, ...], make_hosts: MakeHosts
) -> None:
    hosts = make_hosts(max(world) + 1, rate="1gbit")
    nodes = [hosts.nodes[node] for node in world]
    quantizations = None if len(set(world)) == len(world) else 3
    first, *others = run_ranks(compressed_sums, len(world), "cgx", quantizations, nodes=nodes)
    assert len(first) == 8 * len(SIZES)
    assert all(other == first for other in others)


def hierarchical_sums(me: Rank, quantizations: int) -> tuple[Topology, list[str]]:
    """Few widths and sizes, the largest of them in several slices."""
    cases = [
        (bits, numel, DTYPES[(bits + index) % 3], (bits + index) % 2 == 0)
        for index, numel in enumerate((17, 513, 100_003))
        for bits in (1, 4, 8)
    ]
    cases += [(4, 700_001, torch.float32, True), (8, 700_001, torch.bfloat16, False)]
    digests: list[str] = []
    for bits, numel, dtype, average in cases:
        os.environ[BITS] = str(bits)
        x = noise(me.rank, numel, dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        if me.rank == len(digests) % me.world:
            within_bound(x, me.world, bits, average=average, quantizations=quantizations)
        digests.append(digest(x))
    group: Any = dist.group.WORLD
    return group._parts.host.reducer.topology, digests


@pytest.mark.parametrize(("world", "choice", "shares", "quantizations"), HIERARCHIES)
def test_every_hierarchy_ends_with_the_same_bits_within_its_bound(
    world: tuple[int, ...], choice: tuple[str, str, str], shares: int, quantizations: int, make_hosts: MakeHosts
) -> None:
    hosts = make_hosts(max(world) + 1)
    nodes = [hosts.nodes[node] for node in world]
    first, *others = run_ranks(hierarchical_sums, len(world), "cgx", quantizations, nodes=nodes, env=how(choice))
    topology, digests = first
    assert (topology.shares, topology.compress_inside, topology.algorithm) == (shares, choice[1] == "1", choice[2])
    assert topology.n_nodes == len(set(world)) and len(set(digests)) == 11
    assert all(other == first for other in others)


def trained(me: Rank) -> tuple[Tensor, float, float]:
    net = DistributedDataParallel(make_net(), bucket_cap_mb=0.005)
    before = sum(loss_of(net.module, step, me.rank).item() for step in range(TRAINED_STEPS))
    train(net, me.rank, TRAINED_STEPS)
    after = sum(loss_of(net.module, step, me.rank).item() for step in range(TRAINED_STEPS))
    return flat(net), before, after


@pytest.mark.parametrize("broadcast", ["1", "0"])
def test_ddp_trains_on_two_nodes_of_two_ranks_and_all_stay_together(broadcast: str, make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    nodes = [hosts.nodes[node] for node in (0, 0, 1, 1)]
    env = {BITS: "4", "CGX_INTRA_BROADCAST": broadcast}
    (first, before, after), *others = run_ranks(trained, 4, "cgx", nodes=nodes, env=env)
    assert all(torch.equal(first, other) for other, *_ in others)
    alone = train_alone(4, TRAINED_STEPS)
    exactly = sum(loss_of(alone, step, 0).item() for step in range(TRAINED_STEPS))
    assert not torch.equal(first, flat(alone))
    assert before - after > 0.8 * (before - exactly) > 0


def exact_operations(me: Rank) -> list[str]:
    digests = []
    for dtype in (*DTYPES, torch.float64):
        x = noise(me.rank, 20_001, dtype)
        dist.all_reduce(x)
        assert is_exact(x, me.world), dtype
        digests.append(digest(x))
    largest = torch.tensor([me.rank, -me.rank])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert largest.tolist() == [me.world - 1, 0]
    told = torch.full((100,), float(me.rank))
    dist.broadcast(told, src=me.world - 1)
    assert (told == me.world - 1).all()
    gathered = torch.empty(me.world)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(me.rank)]))
    assert gathered.tolist() == list(range(me.world))
    dist.barrier()
    return digests


@pytest.mark.parametrize("world", WORLDS[:3], ids=named)
def test_exact_operations_are_right_on_all_nodes(world: tuple[int, ...], make_hosts: MakeHosts) -> None:
    hosts = make_hosts(max(world) + 1)
    first, *others = run_ranks(exact_operations, len(world), "cgx", nodes=[hosts.nodes[node] for node in world])
    assert all(other == first for other in others)


def place_and_link_bytes(me: Rank) -> tuple[str, str, int]:
    """Where this rank is, and what its node sends over its link for one compressed all_reduce."""
    os.environ[BITS] = "4"
    x = noise(me.rank, LARGE)
    dist.all_reduce(x)  # the first brings up connections
    found = []
    for turn in range(3):  # who waits long asks through the store, which is bytes on the link too
        me.meet(f"connected {turn}")
        before, _ = count_link_nbytes(os.environ["GLOO_SOCKET_IFNAME"])
        dist.all_reduce(x)
        me.meet(f"done {turn}")
        found.append(count_link_nbytes(os.environ["GLOO_SOCKET_IFNAME"])[0] - before)
    return os.environ["CGX_NODE_ID"], os.environ["LOCAL_RANK"], min(found)


@pytest.mark.parametrize(
    ("world", "choice"),
    [
        ((0, 1), ("1", "1", "SRA")),
        ((0, 0, 1, 1), ("1", "1", "SRA")),
        ((0, 0, 1, 1), ("0", "0", "RING")),
        ((0, 0, 0, 1, 2, 2), ("1", "0", "SRA")),
    ],
)
def test_a_node_s_sum_crosses_its_link_once_however_many_ranks_it_has(
    world: tuple[int, ...], choice: tuple[str, str, str], make_hosts: MakeHosts
) -> None:
    n_nodes = max(world) + 1
    hosts = make_hosts(n_nodes)
    nodes = [hosts.nodes[node] for node in world]
    places = run_ranks(place_and_link_bytes, len(world), "cgx", nodes=nodes, env=how(choice))
    assert [place[0] for place in places] == [f"node{node}" for node in world]
    payload = torch_cgx.payload_nbytes(LARGE, torch.float32, 4, 512)
    crossing = 2 * (n_nodes - 1) / n_nodes * payload
    for *_, nbytes in places:
        assert 0.99 * crossing < nbytes < 1.1 * crossing


def test_local_ranks_are_counted_on_each_node(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    nodes = [hosts.nodes[index] for index in (0, 0, 1)]
    places = run_ranks(place_and_link_bytes, 3, "cgx", nodes=nodes)
    assert [place[:2] for place in places] == [("node0", "0"), ("node0", "1"), ("node1", "0")]


def reduce_until_cut_off(me: Rank, victim: Node) -> None:
    os.environ[BITS] = "4"
    for step in range(1_000_000):
        if step == 20 and me.rank == 0:
            me.mark()
            victim.set_link(up=False)
        dist.all_reduce(noise(me.rank, 20_001))


@pytest.mark.alone
@pytest.mark.parametrize("world", [pytest.param((0, 1), marks=pytest.mark.matrix), (0, 0, 1, 2)], ids=named)
def test_a_node_cut_off_makes_all_ranks_raise_within_the_timeout(world: tuple[int, ...], make_hosts: MakeHosts) -> None:
    hosts = make_hosts(max(world) + 1)
    nodes = [hosts.nodes[node] for node in world]
    outcomes = observe_ranks(
        reduce_until_cut_off,
        len(world),
        "cgx",
        nodes[-1],
        nodes=nodes,
        group_timeout_s=GROUP_TIMEOUT_S,
        real_exit=True,
    )
    for outcome in outcomes:
        assert not outcome.timed_out, describe(outcomes)
        assert outcome.exit_code == 1, describe(outcomes)
        assert "CGXError" in outcome.error_kinds, describe(outcomes)
        assert re.search(rf"\brank {outcome.rank}\b", outcome.message), outcome.message
        assert outcome.after_mark_s is not None
        assert outcome.after_mark_s < GROUP_TIMEOUT_S + SLACK_S, describe(outcomes)
    with Witness.of(hosts) as witness:
        hosts.nodes[max(world)].set_link(up=True)
        assert run_ranks(exact_operations, len(world), "cgx", nodes=nodes)
        hosts.close()
        assert witness.holders() == []


@pytest.mark.matrix
@pytest.mark.alone
def test_bench_measures_the_link_first_and_prints_the_share_of_its_limit(make_hosts: MakeHosts, tmp_path: Path) -> None:
    make_hosts(1, rate="1gbit")
    output = tmp_path / "out.json"
    for _ in range(3):  # a machine that pauses moves what it measures into another second
        done = bench("--nodes", "2", "--rate", "100mbit", "--sizes", "64K", "--json", str(output))
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(output.read_text())
        undisturbed = all(60e6 < bits < 100e6 for bits in report["link"]["goodput_bit_per_s"])
        if undisturbed and all(cell["limit_share"] < 1.25 for cell in report["cells"]):
            break
    assert (report["settings"]["nodes"], report["settings"]["nproc"]) == (2, 1)
    assert report["link"]["rate"] == "100mbit"
    assert all(60e6 < bits < 100e6 for bits in report["link"]["goodput_bit_per_s"])
    ours, gloo = report["cells"]
    assert gloo["limit_nbytes"] == 65536
    assert ours["limit_nbytes"] == pytest.approx(ours["check"]["sent_nbytes"], rel=0.01)
    for cell in report["cells"]:
        assert cell["limit_nbytes"] <= cell["link_nbytes"] < 2 * cell["limit_nbytes"]
        assert 0 < cell["limit_share"] < 1.25
    first, *_, last = done.stdout.splitlines()[:-1]
    assert first.startswith("link of 100mbit: TCP goodput ")
    assert "on 2 nodes of 1 process, links of 100mbit" in done.stdout
    assert done.stdout.count(" %") >= 2, last


@pytest.mark.matrix
@pytest.mark.alone
def test_ctrl_c_ends_a_bench_on_nodes_and_leaves_nothing(make_hosts: MakeHosts) -> None:
    make_hosts(1)
    parent, ranks = start_long_bench("--nodes", "2")
    with Witness(f"/proc/{rank}/ns/net" for rank in ranks) as witness:
        assert len(witness) == 2
        parent.send_signal(signal.SIGINT)
        _, error = parent.communicate(timeout=240.0)
        assert parent.returncode == 130
        assert "Traceback" not in error
        assert witness.holders() == []


def test_where_nodes_cannot_be_made_the_bench_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "allreduce", "--nodes", "2"]) == 1
    assert capsys.readouterr().err == (
        "cgx bench allreduce: test hosts need the command ip (Debian, Ubuntu: apt-get install iproute2)\n"
    )
