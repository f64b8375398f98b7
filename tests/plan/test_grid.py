"""The grid: an allreduce whose messages grow like the root of the number of ranks."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_cgx.codecs import RAW, MaxMin
from torch_cgx.engines import memory
from torch_cgx.kernels.native import default_kernels
from torch_cgx.plan.algorithms import ALGORITHMS, Topology, grid
from torch_cgx.plan.algorithms.hierarchical import most_shares
from torch_cgx.plan.checker import check
from torch_cgx.plan.layout import Layer
from torch_cgx.plan.program import Program
from torch_cgx.plan.programs import layout_for

NBYTES = 1000  # of every chunk's payload
GRIDS = {4: 2, 6: 2, 8: 2, 9: 3, 10: 2, 12: 3, 15: 3, 16: 4, 30: 5, 36: 6, 64: 8}  # ranks and rows


def programs(topology: Topology, nonempty: tuple[bool, ...] | None = None) -> list[Program]:
    return [topology.program(nonempty or (True,) * topology.n_chunks, rank) for rank in range(topology.world)]


@pytest.mark.parametrize(("world", "rows"), GRIDS.items())
def test_every_grid_is_an_allreduce_of_few_messages_and_no_more_bytes(world: int, rows: int) -> None:
    columns = world // rows
    report = check(programs(Topology.flat("GRID", world)), [NBYTES] * world)
    assert report.quantizations == dict.fromkeys(range(world), 3)
    assert report.messages == (2 * (rows - 1) + 2 * (columns - 1),) * world
    assert report.sent_nbytes == (2 * (world - 1) * NBYTES,) * world
    for message in report.sent:
        (sender_column, sender_row), (receiver_column, receiver_row) = (
            divmod(rank, rows) for rank in (message.sender, message.receiver)
        )
        assert (sender_column == receiver_column) != (sender_row == receiver_row)
        assert len(message.chunks) == (1 if sender_column == receiver_column else rows)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7, 11, 13])
def test_where_there_is_no_grid_it_is_scatter_reduce_allgather(world: int) -> None:
    assert grid.n_rows(world) == 1
    for rank in range(world):
        chunks = [True] * world
        made, expected = (ALGORITHMS[name].program(chunks, rank, world) for name in ("GRID", "SRA"))
        assert made == expected


@given(data=st.data(), world=st.sampled_from([4, 6, 8, 9, 10, 12]))
def test_so_it_is_where_chunks_are_empty(data: st.DataObject, world: int) -> None:
    nonempty = data.draw(st.tuples(*[st.booleans()] * world))
    report = check(programs(Topology.flat("GRID", world), nonempty), [NBYTES] * world)
    assert report.quantizations.keys() == {chunk for chunk, full in enumerate(nonempty) if full}


@given(data=st.data(), nodes=st.lists(st.integers(0, 5), min_size=6, max_size=12))
def test_so_it_is_between_nodes(data: st.DataObject, nodes: list[int]) -> None:
    shares = data.draw(st.integers(1, most_shares(nodes)))
    topology = Topology("GRID", tuple(nodes), shares, data.draw(st.booleans()))
    nonempty = data.draw(st.tuples(*[st.booleans()] * topology.n_chunks))
    check(programs(topology, nonempty))


@pytest.mark.parametrize("topology", [Topology.flat("GRID", 6), Topology("GRID", (0, 0, 1, 2, 3, 3), 1)], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 40, 3_000, 100_003])
def test_exact_sums_are_exact_and_compressed_ones_near_in_any_order(topology: Topology, numel: int) -> None:
    torch.manual_seed(numel)
    given_values = [torch.randint(-8, 9, (numel,)).float() for _ in range(topology.world)]
    exact = torch.stack(given_values).sum(0)
    kernels = [default_kernels()] * topology.world
    for quantizer in (RAW, MaxMin(8, 64)):
        layout = layout_for(topology, [Layer(numel, quantizer)], 4, 1 << 14)
        results = []
        for order in (None, Random(1)):
            values = [value.clone() for value in given_values]
            memory.allreduce(values, layout, kernels, topology=topology, order=order)
            assert all(torch.equal(value, values[0]) for value in values)
            results.append(values[0])
        assert torch.equal(*results)
        if quantizer.bits == 32:
            assert torch.equal(results[0], exact)
        else:
            assert (results[0] - exact).abs().max() <= 2.0 if numel else True
