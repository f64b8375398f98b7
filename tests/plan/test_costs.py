"""The cost model: near the simulator, monotone, and careful in what it chooses."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_cgx.codecs import RAW, Codec, MaxMin
from torch_cgx.plan.algorithms.hierarchical import CROSS
from torch_cgx.plan.costs import CUDA, GAIN, HOST, LEAST_BITS, Costs, choose, estimate
from torch_cgx.plan.simulate import Size
from torch_cgx.plan.simulate_classes import Cluster, simulate_cluster
from torch_cgx.plan.slicing import LINK_CHUNK_NBYTES, link_lag

MEGABYTE = 1 << 20
NODES = st.integers(2, 1024)
SIZES = st.integers(64, 1 << 30)  # bytes of values
RATES = st.floats(1e6, 1e11)  # bytes a second


def quantizer_of(bits: int) -> Codec:
    return RAW if bits == 32 else MaxMin(bits, 1024)


def at_rate(bytes_per_s: float, costs: Costs = HOST) -> Costs:
    return costs.with_link(bytes_per_s, None)


def estimated(algorithm: str, nodes: int, nbytes: int, costs: Costs, bits: int = 4) -> float:
    payload = quantizer_of(bits).payload_nbytes(nbytes // 4, 4)
    return estimate(algorithm, nodes, nbytes, payload, LINK_CHUNK_NBYTES * nodes, costs)


def chosen(nodes: int, nbytes: int, costs: Costs, bits: int = 4) -> str:
    payload = quantizer_of(bits).payload_nbytes(nbytes // 4, 4)
    return choose(nodes, nbytes, payload, bits, LINK_CHUNK_NBYTES * nodes, costs)


def simulated(algorithm: str, nodes: int, nbytes: int, costs: Costs, bits: int = 4) -> float:
    cluster = Cluster(nodes, 1, algorithm)
    slices = -(-nbytes // (LINK_CHUNK_NBYTES * nodes))
    values = nbytes / slices / nodes
    payload = quantizer_of(bits).payload_nbytes(nbytes // 4, 4) / slices / nodes
    size = Size(values, payload, values, bits == 32)
    return simulate_cluster(cluster, size, slices, costs, lag=link_lag(cluster.depth)).seconds


CASES = list(product((2, 4, 8, 16, 64, 256, 1024), (64 << 10, MEGABYTE, 25 * MEGABYTE), (1e8 / 8, 1e9 / 8, 1e10 / 8)))


@pytest.mark.parametrize("algorithm", CROSS)
def test_the_estimate_is_near_the_simulation(algorithm: str) -> None:
    for nodes, nbytes, rate in CASES:
        for bits in (4, 32):
            costs = at_rate(rate)
            ratio = estimated(algorithm, nodes, nbytes, costs, bits) / simulated(algorithm, nodes, nbytes, costs, bits)
            assert 0.7 < ratio < (1.5 if algorithm == "RING" else 1.25), (nodes, nbytes, rate, bits, ratio)


@pytest.mark.parametrize("bits", [1, 4, 32])
def test_what_is_chosen_is_in_the_simulation_nearly_as_fast_as_anything_that_is_allowed(bits: int) -> None:
    for nodes, nbytes, rate in CASES:
        costs = at_rate(rate)
        allowed = [name for name, least in LEAST_BITS.items() if bits >= least]
        times = {name: simulated(name, nodes, nbytes, costs, bits) for name in allowed}
        name = chosen(nodes, nbytes, costs, bits)
        assert times[name] <= 1.1 * GAIN * min(times.values()), (nodes, nbytes, rate, name, times)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 8), SIZES, RATES, st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 32]), st.sampled_from([HOST, CUDA]))
def test_few_nodes_have_sra_whatever_the_size_and_the_network(
    nodes: int, nbytes: int, rate: float, bits: int, costs: Costs
) -> None:
    """So results of groups of up to 8 nodes do not depend on the cost model."""
    assert chosen(nodes, nbytes, at_rate(rate, costs), bits) == "SRA"


@settings(max_examples=300, deadline=None)
@given(NODES, SIZES, RATES, st.integers(1, 8), st.floats(0, 1e-2))
def test_a_grid_is_never_chosen_below_4_bits_and_a_ring_never(
    nodes: int, nbytes: int, rate: float, bits: int, message_s: float
) -> None:
    name = chosen(nodes, nbytes, HOST.with_link(rate, message_s), bits)
    assert name == "SRA" if bits < 4 else name in ("SRA", "GRID")


@settings(max_examples=300, deadline=None)
@given(NODES, SIZES, RATES, st.floats(1, 100), st.sampled_from(sorted(CROSS)), st.sampled_from([4, 32]))
def test_more_bytes_and_slower_links_are_never_estimated_to_be_faster(
    nodes: int, nbytes: int, rate: float, factor: float, algorithm: str, bits: int
) -> None:
    seconds = estimated(algorithm, nodes, nbytes, at_rate(rate), bits)
    assert estimated(algorithm, nodes, nbytes, at_rate(rate * factor), bits) <= seconds * (1 + 1e-9)
    # Whole slices: a last one that is short has as many messages as the others.
    whole = LINK_CHUNK_NBYTES * nodes
    few, many = (estimated(algorithm, nodes, count * whole, at_rate(rate), bits) for count in (2, 2 + int(factor)))
    assert few <= many


@settings(max_examples=300, deadline=None)
@given(NODES, SIZES, RATES, st.floats(0, 1e-2), st.floats(1, 100))
def test_costlier_messages_never_speak_against_a_grid(
    nodes: int, nbytes: int, rate: float, message_s: float, factor: float
) -> None:
    if chosen(nodes, nbytes, HOST.with_link(rate, message_s)) == "GRID":
        assert chosen(nodes, nbytes, HOST.with_link(rate, message_s * factor)) == "GRID"


@settings(max_examples=100, deadline=None)
@given(NODES, SIZES, RATES)
def test_nothing_is_lost_by_never_choosing_a_ring(nodes: int, nbytes: int, rate: float) -> None:
    ring, sra = (estimated(name, nodes, nbytes, at_rate(rate)) for name in ("RING", "SRA"))
    assert sra <= 1.05 * ring


@pytest.mark.parametrize("nodes", [61, 257])
def test_a_prime_number_of_nodes_has_no_grid(nodes: int) -> None:
    assert chosen(nodes, 64 << 10, HOST) == "SRA"
    assert chosen(nodes - 1, 64 << 10, HOST) == "GRID"


def test_one_node_costs_nothing() -> None:
    assert estimated("SRA", 1, MEGABYTE, HOST) == 0
    assert chosen(1, MEGABYTE, HOST) == "SRA"
