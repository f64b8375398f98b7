"""The simulating executor: times by hand, bytes against the checker, limits, and its shortcuts against all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_cgx.codecs import RAW, Codec, MaxMin
from torch_cgx.plan import simulate_classes
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.checker import check
from torch_cgx.plan.costs import Costs, Speeds, Wire
from torch_cgx.plan.layout import Layer, Layout, make_layout
from torch_cgx.plan.simulate import Timing, simulate, size_of
from torch_cgx.plan.simulate_classes import Cluster, simulate_cluster

MIXED = Costs(
    within=Wire(4e9, 1e-5, 2e-6, 1e-11),
    between=Wire(1e9, 2e-5, 1e-5, 1e-10),
    speeds=Speeds(20e9, 30e9, 25e9, 15e9, 35e9, 40e9, 22e9, call_s=1e-6),
)


def layout_of(topology: Topology, numel: int, quantizer: Codec, slices: int = 1) -> Layout:
    return make_layout([Layer(numel, quantizer)], topology.n_chunks, 4, -(-numel * 4 // slices))


def test_two_ranks_by_hand() -> None:
    """Exact, 1600 bytes: encode 800 (8 s), send 800 (80 s + 1), reduce (40 s), send (80 s + 1), decode (8 s)."""
    topology = Topology.flat("SRA", 2)
    layout = layout_of(topology, 400, RAW)
    costs = Costs(between=Wire(10, latency_s=1), speeds=Speeds(copy=100, sum=20))
    timing = simulate(topology, layout.slices, costs)
    assert timing == Timing(8 + 81 + 40 + 81 + 8, 8 + 40 + 8, 0, (1600, 1600), 1600)


def test_a_reduce_scatter_by_hand() -> None:
    """The first half of the above: encode 800 bytes (8 s), send 800 (80 s + 1), and sum up (40 s)."""
    topology = Topology.flat("REDUCE_SCATTER", 2)
    slices = layout_of(topology, 400, RAW).slices
    costs = Costs(between=Wire(10, latency_s=1), speeds=Speeds(copy=100, sum=20))
    assert simulate(topology, slices, costs) == Timing(8 + 81 + 40, 8 + 40, 0, (800, 800), 800)


def test_a_message_costs_both_processors() -> None:
    """Two ranks by hand, without kernels: a processor is busy for 2 + 800 * 0.2 = 162 s with each message, at each end.

    With a second core the bytes begin to leave after 2 s and to arrive 1 s later, cost 160 s there beside those that
    leave, and 2 s more when all are there. With one core a rank first has to be through with its own message: 162 +
    162; and again with the sums.
    """
    topology = Topology.flat("SRA", 2)
    slices = layout_of(topology, 400, RAW).slices
    wire = Wire(10, latency_s=1, message_s=2, byte_s=0.2)
    assert simulate(topology, slices, Costs(between=wire, cores=2)).seconds == pytest.approx(2 * (2 + 1 + 160 + 2))
    assert simulate(topology, slices, Costs(between=wire, cores=1)).seconds == pytest.approx(4 * 162)
    assert simulate(topology, slices, Costs(between=wire, cores=0.5)).seconds == pytest.approx(4 * 2 * 162)


def test_an_operation_begins_late_once_however_many_slices_it_has() -> None:
    topology = Topology.flat("SRA", 2)
    for n in (1, 2):
        slices = layout_of(topology, 800, RAW, n).slices
        costs = Costs(between=Wire(10), speeds=Speeds(copy=100, sum=20))
        at_once, late = (simulate(topology, slices, each) for each in (costs, replace(costs, start_s=7)))
        assert late.seconds == pytest.approx(at_once.seconds + 7)
        assert late.kernel_s == at_once.kernel_s


def test_two_slices_overlap() -> None:
    """One slice of 3200 bytes takes 16 + 160 + 80 + 160 + 16; two overlap."""
    topology = Topology.flat("SRA", 2)
    costs = Costs(between=Wire(10), speeds=Speeds(copy=100, sum=20))
    one, two = (simulate(topology, layout_of(topology, 800, RAW, n).slices, costs) for n in (1, 2))
    assert one.seconds == pytest.approx(432)
    # 8 s, then the link is never idle: parts of both slices, and both sums; then the last is decoded.
    assert two.seconds == pytest.approx(8 + 4 * 80 + 8)
    assert one.sent_nbytes == two.sent_nbytes


def test_in_rounds_nothing_is_sent_before_all_is_encoded() -> None:
    """Three ranks, chunks of 800 bytes: 8 s to copy, 80 s on the link, 40 s to add.

    Of two sums a rank takes that of the next rank first, which sends to it last: so both are decoded in the end.
    """
    topology = Topology.flat("SRA", 3)
    slices = layout_of(topology, 600, RAW).slices
    costs = Costs(between=Wire(10), speeds=Speeds(copy=100, sum=20))
    assert simulate(topology, slices, costs).seconds == pytest.approx(8 + 160 + 80 + 160 + 16)
    assert simulate(topology, slices, costs, rounds=True).seconds == pytest.approx(16 + 160 + 80 + 160 + 16)


def test_ranks_of_a_node_share_its_link_to_others() -> None:
    nodes, topology = (0, 0, 1, 1), Topology.flat("RING", 4)
    slices = layout_of(topology, 800, RAW).slices
    wire = Wire(100)
    apart = simulate(topology, slices, Costs(between=wire))
    together = simulate(topology, slices, Costs(between=wire), nodes)
    all_to_others = simulate(Topology.flat("SRA", 4), slices, Costs(between=wire), nodes)
    assert apart.seconds == pytest.approx(2 * 3 / 4 * 3200 / 100)
    assert together.seconds == pytest.approx(apart.seconds)  # a ring leaves a node by one of its ranks
    assert all_to_others.link_nbytes == 2 * 2 * 2 * 800  # two ranks send two chunks each, twice
    assert all_to_others.seconds == pytest.approx(all_to_others.link_nbytes / 100)


TOPOLOGIES = [
    Topology.flat("SRA", 3),
    Topology.flat("RING", 5),
    Topology("SRA", (0, 0, 1, 1, 2)),
    Topology("RING", (0, 0, 1, 1, 2, 2), shares=2),
    Topology("SRA", (0, 0, 0, 1, 1), shares=2, compress_inside=False),
    Topology("SRA", (0, 0, 0), shares=2, compress_inside=False),
    Topology.flat("GRID", 6),
    Topology("GRID", (0, 0, 1, 1, 2, 2, 3)),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("numel", [100, 3000, 70_000])
def test_what_is_sent_is_what_the_checker_reports(topology: Topology, numel: int) -> None:
    layout = layout_of(topology, numel, MaxMin(3, 64), 2)
    expected = [0] * topology.world
    for part in layout.slices:
        nonempty = [chunk.nbytes > 0 for chunk in part.chunks]
        programs = [topology.program(nonempty, rank) for rank in range(topology.world)]
        sizes = [chunk.nbytes for chunk in part.chunks], [chunk.exact.nbytes for chunk in part.chunks]
        sent = check(programs, *sizes).sent_nbytes
        assert sent is not None
        expected = [before + now for before, now in zip(expected, sent, strict=True)]
    assert simulate(topology, layout.slices, MIXED).sent_nbytes == tuple(expected)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TOPOLOGIES),
    st.floats(1e5, 1e10),
    st.floats(1.0, 100.0),
    st.integers(1, 3),
    st.sampled_from([0.5, 2.0]),
)
def test_a_faster_link_is_never_slower(
    topology: Topology, rate: float, factor: float, slices: int, cores: float
) -> None:
    # Payloads of one length: where they differ, who comes first to a shared link may change for the worse.
    parts = layout_of(topology, 64 * 8 * topology.n_chunks * slices, MaxMin(4, 64), slices).slices
    slow, fast = (
        simulate(topology, parts, replace(MIXED, between=replace(MIXED.between, bytes_per_s=each), cores=cores))
        for each in (rate, rate * factor)
    )
    assert fast.seconds <= slow.seconds * (1 + 1e-9)


@pytest.mark.parametrize("topology", TOPOLOGIES[:2], ids=str)
def test_without_computing_time_is_bytes_over_bandwidth(topology: Topology) -> None:
    parts = layout_of(topology, 8 * 1000 * topology.world, RAW).slices
    timing = simulate(topology, parts, Costs(between=Wire(1e6)))
    assert timing.seconds == pytest.approx(timing.sent_nbytes[0] / 1e6)
    assert timing.sent_nbytes[0] == 2 * (topology.world - 1) * 8 * 1000 * 4


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_without_costs_there_is_no_time(topology: Topology) -> None:
    assert simulate(topology, layout_of(topology, 5000, MaxMin(4, 64)).slices, Costs()).seconds == 0


CLUSTERS = [
    Cluster(4, 1, "SRA"),
    Cluster(5, 1, "RING"),
    Cluster(1, 4, "SRA"),
    Cluster(3, 2, "SRA"),
    Cluster(3, 2, "SRA", shares=2),
    Cluster(4, 3, "RING", shares=3),
    Cluster(3, 3, "RING"),
    Cluster(3, 2, "RING", flat=True),
    Cluster(2, 3, "SRA", shares=3, compress_inside=False),
    Cluster(6, 1, "GRID"),
    Cluster(12, 1, "GRID"),
    Cluster(7, 1, "GRID"),
    Cluster(4, 2, "GRID"),
    Cluster(6, 2, "GRID", shares=2, compress_inside=False),
]


@pytest.mark.parametrize(
    ("cores", "rounds", "lag"), [(1.0, False, 1), (2.0, False, 1), (2.0, True, 1), (0.5, False, 4), (1.0, False, 0)]
)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_one_node_stands_for_all(cluster: Cluster, cores: float, rounds: bool, lag: int) -> None:
    topology, slices = cluster.topology(), 3
    parts = layout_of(topology, 1024 * 8 * cluster.n_chunks * slices, MaxMin(4, 1024), slices).slices
    assert len({chunk.nbytes for part in parts for chunk in part.chunks}) == 1
    costs = replace(MIXED, cores=cores)
    nodes = [rank // cluster.ranks for rank in range(cluster.world)]
    everyone = simulate(topology, parts, costs, nodes, rounds=rounds, lag=lag)
    one = simulate_cluster(cluster, size_of(parts[0], 0), slices, costs, rounds=rounds, lag=lag)
    assert one.seconds == pytest.approx(everyone.seconds, rel=1e-9)
    assert one.sent_nbytes == everyone.sent_nbytes[: cluster.ranks]
    assert one.link_nbytes == everyone.link_nbytes
    assert one.kernel_s == pytest.approx(everyone.kernel_s)
    assert one.transport_s == pytest.approx(everyone.transport_s)


LARGE = [
    Cluster(48, 1, "SRA"),
    Cluster(48, 1, "RING"),
    Cluster(24, 2, "SRA", shares=2),
    Cluster(24, 2, "SRA"),
    Cluster(24, 2, "RING"),
    Cluster(24, 2, "RING", flat=True),
    Cluster(100, 1, "GRID"),
    Cluster(26, 1, "GRID"),
    Cluster(64, 2, "GRID"),
    Cluster(40, 2, "GRID", shares=2),
]


@pytest.mark.parametrize("wire", [Wire(1e9), MIXED.between, Wire(1e11, 1e-4, 1e-5)], ids=["slow", "mixed", "far"])
@pytest.mark.parametrize("cluster", LARGE, ids=str)
def test_a_node_that_stands_for_several_changes_little(
    cluster: Cluster, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = size_of(layout_of(Topology.flat("SRA", 2), 1 << 15, MaxMin(4, 1024)).slices[0], 0)
    costs = replace(MIXED, between=wire)
    lumped = simulate_cluster(cluster, size, 2, costs)
    monkeypatch.setattr(simulate_classes, "_MOST_LINES", cluster.nodes)
    whole = simulate_cluster(cluster, size, 2, costs, most=cluster.nodes)
    assert lumped.seconds == pytest.approx(whole.seconds, rel=0.1)
    assert sum(lumped.sent_nbytes) == pytest.approx(sum(whole.sent_nbytes))
    assert lumped.link_nbytes == pytest.approx(whole.link_nbytes)


@pytest.mark.parametrize("cluster", [Cluster(48, 1, "SRA"), Cluster(48, 1, "RING"), Cluster(24, 2, "SRA")], ids=str)
@pytest.mark.parametrize("cores", [1.0, 2.0])
def test_messages_that_one_stands_for_cost_what_they_would_each(cluster: Cluster, cores: float) -> None:
    """Nothing but messages: in SRA the bytes of the first leave after its own fixed time, not after that of all."""
    size = size_of(layout_of(Topology.flat("SRA", 2), 1 << 15, MaxMin(4, 1024)).slices[0], 0)
    costs = Costs(within=Wire(1e15), between=Wire(1e15, 0.0, 1e-3), cores=cores)
    whole = simulate_cluster(cluster, size, 1, costs, most=cluster.nodes)
    lumped = simulate_cluster(cluster, size, 1, costs)
    assert lumped.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert lumped.transport_s == pytest.approx(whole.transport_s)


def test_a_wire_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"bytes_per_s: expected more than 0, got 0"):
        Wire(0)
    with pytest.raises(ValueError, match=r"expected 0 or more"):
        Wire(1, latency_s=-1)
    with pytest.raises(ValueError, match=r"at least one node"):
        Cluster(0, 1)
