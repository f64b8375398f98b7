"""Who speaks for a node, and which algorithm is chosen between nodes."""

from __future__ import annotations

import logging

import pytest

from torch_cgx.codecs import RAW, MaxMin
from torch_cgx.config import LinkCosts, Settings
from torch_cgx.group.bootstrap.topology import Chooser
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.costs import CUDA, HOST
from torch_cgx.plan.layout import Layer
from torch_cgx.plan.slicing import LINK_CHUNK_NBYTES

HOSTS = [f"host-{number}" for number in range(64)]
DEAR = LinkCosts(1e12, 5e-3)  # messages cost all the time
SMALL = 1 << 14  # values


def chooser(nodes: list[str], reduction: str = "AUTO", link: LinkCosts = DEAR, rank: int = 0) -> Chooser:
    return Chooser.of(nodes, Settings(cross_reduction=reduction), HOST, link, rank)


def chosen(it: Chooser, *bits: int) -> str:
    layers = [Layer(SMALL, RAW if each == 32 else MaxMin(each, 512)) for each in bits]
    return it.topology_for(layers, 4, LINK_CHUNK_NBYTES * it.topology.n_chunks).algorithm


def test_a_grid_is_chosen_where_messages_are_dear() -> None:
    assert chosen(chooser(HOSTS), 4) == "GRID"
    assert chosen(chooser(HOSTS, link=LinkCosts(1e6, 0.0)), 4) == "SRA"


def test_exact_values_of_16_bits_keep_sra_because_a_grid_would_send_them_as_float32() -> None:
    it, slice_nbytes = chooser(HOSTS), LINK_CHUNK_NBYTES * len(HOSTS)
    assert it.topology_for([Layer(SMALL, RAW)], 2, slice_nbytes).algorithm == "SRA"
    assert it.topology_for([Layer(SMALL, RAW)], 4, slice_nbytes).algorithm == "GRID"


def test_one_layer_below_4_bits_is_enough_to_keep_sra() -> None:
    it = chooser(HOSTS)
    assert [chosen(it, *bits) for bits in [(8, 3), (3,), (8, 32), (32,)]] == ["SRA", "SRA", "GRID", "GRID"]


@pytest.mark.parametrize("reduction", ["SRA", "RING", "GRID"])
def test_an_algorithm_that_was_set_is_kept_at_all_bits(reduction: str) -> None:
    it = chooser(HOSTS, reduction)
    assert {chosen(it, bits) for bits in (1, 4, 8, 32)} == {reduction}
    assert it.described == reduction


def test_all_but_the_algorithm_stays_as_it_was_set() -> None:
    nodes = [host for host in HOSTS[:9] for _ in range(2)]
    settings = Settings(intra_broadcast=False, intra_compress=False)
    it = Chooser.of(nodes, settings, CUDA, DEAR, 0)
    numbers = tuple(number for number in range(9) for _ in range(2))
    layers = [Layer(SMALL, MaxMin(4, 512))]
    expected = Topology("GRID", numbers, shares=2, compress_inside=False)
    assert it.topology_for(layers, 4, 1 << 20) == expected
    assert it.topology == Topology("SRA", numbers, shares=2, compress_inside=False)


def test_one_node_has_the_algorithm_within_nodes() -> None:
    it = Chooser.of(["here"] * 16, Settings(inner_reduction="RING"), HOST, DEAR, 0)
    assert chosen(it, 4) == "RING"


def test_only_rank_0_reports_a_grid_and_only_the_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch_cgx"):
        first, other = chooser(HOSTS), chooser(HOSTS, rank=1)
        assert [chosen(first, 32), chosen(other, 4), chosen(other, 8)] == ["GRID"] * 3
        assert not caplog.records
        assert [chosen(first, 4), chosen(first, 8)] == ["GRID"] * 2
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "a grid of 8 x 8 nodes" in record.getMessage()


def test_the_costs_are_described_for_the_flight_recorder() -> None:
    assert chooser(HOSTS, link=LinkCosts()).described == "AUTO: 10 Gbit/s and 4.5 us per message"
    assert chooser(HOSTS, link=LinkCosts(125e6, None)).described == "AUTO: 1 Gbit/s and 4.5 us per message"
