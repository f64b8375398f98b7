"""Every algorithm is right, at the promised cost: flat ones on every world, the hierarchy on every shape of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_cgx.errors import ProgramError
from torch_cgx.plan.algorithms import (
    ALGORITHMS,
    IN_SHARES,
    Topology,
    all_gather,
    exchange,
    grid,
    hierarchical,
    reduce_scatter,
    ring,
    scatter_reduce_allgather,
)
from torch_cgx.plan.algorithms.hierarchical import CROSS, most_shares
from torch_cgx.plan.checker import (
    Report,
    check,
    check_all_gather,
    check_broadcast,
    check_exchange,
    check_reduce_scatter,
)
from torch_cgx.plan.program import Add, Decode, Encode, Program, Receive, Reduce, Send, Sum
from torch_cgx.plan.programs import programs_for

NBYTES, EXACT_NBYTES = 1000, 8000  # of every chunk's payload
CHECKS = {"REDUCE_SCATTER": check_reduce_scatter, "ALL_GATHER": check_all_gather}


def programs(topology: Topology, nonempty: list[bool] | None = None) -> list[Program]:
    chunks = [True] * topology.n_chunks if nonempty is None else nonempty
    return [topology.program(chunks, rank) for rank in range(topology.world)]


def checked(topology: Topology) -> Report:
    return check(programs(topology), [NBYTES] * topology.n_chunks, [EXACT_NBYTES] * topology.n_chunks)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of so many positive ones, in order."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in compositions(total - first, parts - 1))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any ranks on any nodes, called anything."""
    names = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True))
    nodes = tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=12)))
    algorithm = draw(st.sampled_from(["SRA", "RING"]))
    return Topology(algorithm, nodes, draw(st.integers(1, most_shares(nodes))), draw(st.booleans()))


@pytest.mark.parametrize("world", range(2, 13))
def test_a_ring_quantizes_a_contribution_once_a_rank_and_sends_to_one_neighbour(world: int) -> None:
    report = checked(Topology.flat("RING", world))
    assert report.quantizations == dict.fromkeys(range(world), world)
    assert report.messages == (2 * (world - 1),) * world
    assert report.sent_nbytes == (2 * (world - 1) * NBYTES,) * world
    assert {(message.sender, message.receiver) for message in report.sent} == {
        (rank, (rank + 1) % world) for rank in range(world)
    }


@pytest.mark.parametrize("world", range(2, 13))
def test_only_the_owner_of_a_chunk_scales_its_sum(world: int) -> None:
    for rank, steps in enumerate(programs(Topology.flat("RING", world))):
        reduces = [step for step in steps if isinstance(step, Reduce)]
        assert [step.chunk for step in reduces if step.final] == [rank] and len(reduces) == world - 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_only_rank_of_a_world_does_nothing(algorithm: str) -> None:
    assert programs(Topology.flat(algorithm, 1)) == [()]


# ---- reduce-scatter and all-gather ----


@pytest.mark.parametrize("world", range(1, 13))
def test_a_reduce_scatter_quantizes_once_and_sends_every_peer_its_share(world: int) -> None:
    """Each rank sends all of the payload but its own share of it: (N - 1) / N."""
    sizes = [NBYTES + rank for rank in range(world)]
    report = check_reduce_scatter(programs(Topology.flat("REDUCE_SCATTER", world)), sizes)
    assert report.quantizations == ({} if world == 1 else dict.fromkeys(range(world), 1))
    assert report.messages == (world - 1,) * world
    assert report.sent_nbytes == tuple(sum(sizes) - sizes[rank] for rank in range(world))
    assert all((message.receiver,) == message.chunks for message in report.sent)


@pytest.mark.parametrize("world", range(1, 13))
def test_an_all_gather_quantizes_once_and_sends_its_share_to_every_peer(world: int) -> None:
    """Each rank sends N - 1 times its own payload."""
    sizes = [NBYTES + rank for rank in range(world)]
    report = check_all_gather(programs(Topology.flat("ALL_GATHER", world)), sizes)
    assert report.quantizations == ({} if world == 1 else dict.fromkeys(range(world), 1))
    assert report.messages == (world - 1,) * world
    assert report.sent_nbytes == tuple((world - 1) * sizes[rank] for rank in range(world))
    assert all((message.sender,) == message.chunks for message in report.sent)


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("algorithm", IN_SHARES)
def test_with_any_shares_empty_the_others_are_right_and_nothing_is_sent_of_the_empty_ones(
    algorithm: str, world: int
) -> None:
    sizes = [NBYTES + rank for rank in range(world)]
    for nonempty in product((False, True), repeat=world):
        report = CHECKS[algorithm](programs(Topology.flat(algorithm, world), list(nonempty)), sizes)
        full = [rank for rank in range(world) if nonempty[rank]] if world > 1 else []
        assert report.quantizations == dict.fromkeys(full, 1)
        of_each = [sizes[rank] if rank in full else 0 for rank in range(world)]
        if algorithm == "ALL_GATHER":
            assert report.sent_nbytes == tuple((world - 1) * nbytes for nbytes in of_each)
        else:
            assert report.sent_nbytes == tuple(sum(of_each) - of_each[rank] for rank in range(world))


@pytest.mark.parametrize("world", range(2, 9))
def test_shares_are_summed_in_the_order_of_ranks_and_gathered_into_their_places(world: int) -> None:
    """So the bits of a sum do not depend on who came first; and every rank decodes each share once."""
    for rank, steps in enumerate(programs(Topology.flat("REDUCE_SCATTER", world))):
        senders = {step.slot: step.peer for step in steps if isinstance(step, Receive)}
        (total,) = [step for step in steps if isinstance(step, Sum)]
        assert total.chunk == rank
        assert [senders[slot] for slot in total.inputs] == [peer for peer in range(world) if peer != rank]
    for steps in programs(Topology.flat("ALL_GATHER", world)):
        assert sorted(step.chunk for step in steps if isinstance(step, Decode)) == list(range(world))


@pytest.mark.parametrize("algorithm", IN_SHARES)
@pytest.mark.parametrize("world", range(2, 13))
def test_at_no_moment_do_all_ranks_write_to_the_same_one(algorithm: str, world: int) -> None:
    """The n-th sends of all ranks go to as many different ones, and are the n-th that these receive."""
    made = programs(Topology.flat(algorithm, world))
    sends = [[step.peer for step in steps if isinstance(step, Send)] for steps in made]
    receives = [[step.peer for step in steps if isinstance(step, Receive)] for steps in made]
    for turn in range(world - 1):
        assert {peers[turn] for peers in sends} == set(range(world))
        assert all(receives[sends[rank][turn]][turn] == rank for rank in range(world))


@pytest.mark.parametrize("algorithm", IN_SHARES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_no_step_of_a_program_in_shares_can_be_left_out(algorithm: str, world: int) -> None:
    made = programs(Topology.flat(algorithm, world))
    CHECKS[algorithm](made)
    for rank, steps in enumerate(made):
        for left_out in range(len(steps)):
            broken = list(made)
            broken[rank] = steps[:left_out] + steps[left_out + 1 :]
            with pytest.raises(ProgramError):
                CHECKS[algorithm](broken)


@pytest.mark.parametrize("algorithm", IN_SHARES)
def test_shares_are_of_ranks_not_of_nodes(algorithm: str) -> None:
    """Where several ranks are on one node the programs are the same: there is no hierarchy of shares."""
    with pytest.raises(ValueError, match=f"expected SRA, RING, GRID, got {algorithm}"):
        Topology(algorithm, (0, 0, 1))


# ---- broadcast and exchange: values are only moved ----

PLACES = [(0,), (0, 1), (0, 0), (0, 1, 2, 3, 4), (0, 0, 1, 1), (0, 1, 0, 2, 1), (3, 3, 3, 1), (0, 1, 1, 1, 2, 2)]


@pytest.mark.parametrize("nodes", PLACES, ids=str)
def test_a_broadcast_reaches_all_ranks_and_sends_each_node_every_value_once(nodes: tuple[int, ...]) -> None:
    for root in range(len(nodes)):
        topology = Topology.broadcast(nodes, root)
        for nonempty in product((False, True), repeat=topology.n_chunks):
            report = check_broadcast(programs(topology, list(nonempty)), root, [NBYTES] * topology.n_chunks)
            across = [m for m in report.sent if nodes[m.sender] != nodes[m.receiver]]
            assert len(across) == sum(nonempty) * (len(set(nodes)) - 1)
            assert all(nodes[message.receiver] != nodes[root] for message in across)
            assert len(report.sent) == sum(nonempty) * (len(nodes) - 1)
            # Between nodes nobody sends more than all chunks.
            assert all(sum(m.sender == rank for m in across) <= topology.n_chunks for rank in range(len(nodes)))


@pytest.mark.parametrize("world", range(1, 13))
def test_an_exchange_sends_every_peer_its_share_alone(world: int) -> None:
    report = check_exchange(programs(Topology.flat("EXCHANGE", world)), [NBYTES] * world)
    assert report.sent_nbytes == ((world - 1) * NBYTES,) * world
    assert all((message.receiver,) == message.chunks and message.exact for message in report.sent)


def test_an_exchange_of_nothing_does_nothing_and_shares_of_different_lengths_are_refused() -> None:
    assert exchange.program([False, False], 0, 2) == ()
    with pytest.raises(ValueError, match="expected all of one length"):
        exchange.program([True, False], 0, 2)


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0), (0, 0, 1, 1), (0, 1, 2)], ids=str)
def test_no_step_that_moves_values_can_be_left_out(nodes: tuple[int, ...]) -> None:
    for topology in (Topology.broadcast(nodes, 1), Topology.flat("EXCHANGE", len(nodes))):
        made = programs(topology)
        for rank, steps in enumerate(made):
            for left_out in range(len(steps)):
                broken = list(made)
                broken[rank] = steps[:left_out] + steps[left_out + 1 :]
                with pytest.raises(ProgramError):
                    check_exchange(broken) if topology.root is None else check_broadcast(broken, 1)


def test_a_broadcast_of_chunks_or_from_a_root_that_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="chunks: expected 2, got 1"):
        Topology.broadcast((0, 1, 2), 0).program([True], 0)
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
        Topology.broadcast((0, 1), 2).program([True], 0)


def expected_quantizations(topology: Topology, sizes: list[int]) -> dict[int, int]:
    """Of the contribution that suffers most: inside, if its rank has company, and once a step across nodes."""
    n_nodes = len(sizes)
    if n_nodes == 1:
        return dict.fromkeys(range(topology.shares), 2 if topology.compress_inside else 0)
    within = [int(topology.compress_inside and size > 1) for size in sizes]
    worst = {}
    for chunk in range(topology.n_chunks):
        owner = chunk % n_nodes
        if topology.algorithm == "SRA":
            across = [1 if node == owner else 2 for node in range(n_nodes)]
        else:
            across = [(owner - node) % n_nodes + 1 for node in range(n_nodes)]
        worst[chunk] = max(map(sum, zip(within, across, strict=True)))
    return worst


def check_cost(topology: Topology, sizes: list[int]) -> None:
    """`sizes`: ranks by node, in the order of nodes' first ranks."""
    report = checked(topology)
    n_nodes, shares, nodes = len(sizes), topology.shares, topology.nodes
    assert report.quantizations == expected_quantizations(topology, sizes)
    crossing = [message for message in report.sent if nodes[message.sender] != nodes[message.receiver]]
    # Each node's link carries 2 (M - 1) / M of the whole payload, compressed, however many ranks a node has.
    assert not any(message.exact for message in crossing)
    by_node = Counter(nodes[message.sender] for message in crossing)
    assert by_node == (dict.fromkeys(set(nodes), 2 * (n_nodes - 1) * shares) if n_nodes > 1 else {})
    # Within a node every rank but the speaker sends and gets every chunk once.
    within = [message for message in report.sent if nodes[message.sender] == nodes[message.receiver]]
    assert len(within) == 2 * topology.n_chunks * (topology.world - n_nodes)
    exact = sum(message.exact for message in within)
    assert exact == (0 if topology.compress_inside else len(within) // (1 if n_nodes == 1 else 2))
    assert sum(report.sent_nbytes or ()) == NBYTES * (len(report.sent) - exact) + EXACT_NBYTES * exact


@pytest.mark.parametrize("cross", ["SRA", "RING"])
@pytest.mark.parametrize("n_nodes", [1, 2, 3, 4])
def test_every_shape_of_nodes_is_right_at_its_cost(n_nodes: int, cross: str) -> None:
    for world in range(n_nodes + 1, 13):
        for sizes in compositions(world, n_nodes):
            nodes = tuple(node for node, size in enumerate(sizes) for _ in range(size))
            for shares in {1, min(sizes)}:
                for compress_inside in (True, False):
                    check_cost(Topology(cross, nodes, shares, compress_inside), list(sizes))


@pytest.mark.parametrize("shares", [1, 2])
def test_nodes_of_company_quantize_three_times_or_two(shares: int) -> None:
    nodes = (0, 0, 1, 1, 2, 2, 2)
    assert set(checked(Topology("SRA", nodes, shares, True)).quantizations.values()) == {3}
    assert set(checked(Topology("SRA", nodes, shares, False)).quantizations.values()) == {2}
    assert set(checked(Topology("RING", nodes, shares, True)).quantizations.values()) == {4}
    assert set(checked(Topology("RING", nodes, shares, False)).quantizations.values()) == {3}


@given(topology=topologies(), data=st.data())
def test_scrambled_nodes_and_empty_chunks_are_right(topology: Topology, data: st.DataObject) -> None:
    if not topology.is_flat:
        check_cost(topology, list(Counter(topology.nodes).values()))
    nonempty = data.draw(st.lists(st.booleans(), min_size=topology.n_chunks, max_size=topology.n_chunks))
    report = check(programs(topology, nonempty))
    full = [chunk for chunk, some in enumerate(nonempty) if some]
    assert list(report.quantizations) == (full if topology.world > 1 else [])
    assert {chunk for message in report.sent for chunk in message.chunks} <= set(full)


@given(topology=topologies(), data=st.data())
def test_unequal_chunks_cross_as_often_as_equal_ones(topology: Topology, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 99), min_size=topology.n_chunks, max_size=topology.n_chunks))
    nodes = topology.nodes
    report = check(programs(topology))
    crossing = [sizes[message.chunks[0]] for message in report.sent if nodes[message.sender] != nodes[message.receiver]]
    assert sum(crossing) == 2 * (topology.n_nodes - 1) * sum(sizes)


@given(topology=topologies())
def test_what_nodes_are_called_does_not_matter(topology: Topology) -> None:
    assert programs(topology) == programs(replace(topology, nodes=tuple(-3 * node for node in topology.nodes)))


@given(names=st.permutations(range(7)), world=st.integers(1, 7), cross=st.sampled_from(["SRA", "RING"]))
def test_ranks_each_on_a_node_of_its_own_run_the_flat_algorithm(names: list[int], world: int, cross: str) -> None:
    for rank in range(world):
        flat = ALGORITHMS[cross].program([True] * world, rank, world)
        assert Topology(cross, tuple(names[:world])).program([True] * world, rank) == flat
        for compress_inside in (True, False):
            made = hierarchical.program(
                *([True] * world, rank, names[:world]), shares=1, cross=cross, compress_inside=compress_inside
            )
            assert made == flat


@given(topology=topologies())
def test_no_rank_draws_the_same_random_numbers_twice(topology: Topology) -> None:
    """They depend on rank, stage (0: encode, 1: reduce) and value, so each stage may see a chunk only once."""
    for steps in programs(topology):
        drawn = Counter((type(step), step.chunk) for step in steps if isinstance(step, Encode | Reduce))
        assert not drawn or max(drawn.values()) == 1


@given(topology=topologies())
def test_speakers_add_their_node_in_the_order_of_ranks(topology: Topology) -> None:
    for rank, steps in enumerate(programs(topology)):
        sources: dict[int, list[int]] = {}
        senders = {step.slot: step.peer for step in steps if isinstance(step, Receive)}
        for step in steps:
            if isinstance(step, Add):
                sources.setdefault(step.chunk, []).append(senders[step.slot])
        for added in sources.values():
            home = [peer for peer, node in enumerate(topology.nodes) if node == topology.nodes[rank]]
            assert added == [peer for peer in home if peer != rank]


@pytest.mark.parametrize("compress_inside", [True, False])
@pytest.mark.parametrize("cross", ["SRA", "RING"])
def test_one_node_alone_with_all_its_ranks_speaking_is_scatter_reduce_allgather(
    cross: str, compress_inside: bool
) -> None:
    """The same reductions, of the same contributions in the same order, and exact ones where asked."""
    for world in range(2, 7):
        made = programs(Topology(cross, (0,) * world, world, compress_inside))
        for rank, steps in enumerate(made):
            assert not any(isinstance(step, Add) for step in steps)
            (reduce,) = [step for step in steps if isinstance(step, Reduce)]
            inputs = tuple(f"inside:{peer}>{rank}" for peer in range(world) if peer != rank)
            assert reduce == Reduce(inputs, rank, f"sum:{rank}", exact=not compress_inside)


@given(topology=topologies())
def test_no_reduction_is_without_inputs(topology: Topology) -> None:
    """Native kernels have none."""
    for steps in programs(topology):
        assert all(step.inputs for step in steps if isinstance(step, Reduce))


@given(topology=topologies())
def test_slots_have_one_writer_and_say_how_they_are_coded(topology: Topology) -> None:
    made, slots = programs_for(topology, (True,) * topology.n_chunks)
    assert list(made) == programs(topology)
    for rank, steps in enumerate(made):
        for step in steps:
            if isinstance(step, Encode | Reduce):
                slot = slots[step.slot]
                assert (slot.writer, slot.chunks, slot.exact) == (rank, step.chunks, step.exact)
        assert {step.slot for step in steps if isinstance(step, Send | Receive)} <= slots.keys()


SMALL = [
    Topology.flat("SRA", 3),
    Topology.flat("RING", 4),
    Topology("SRA", (0, 0, 1, 1, 1), 2, False),
    Topology("RING", (0, 1, 2, 2, 0), 1, True),
    Topology("SRA", (0, 0, 0), 1, False),
    Topology.flat("GRID", 4),
    Topology("GRID", (0, 0, 1, 2, 3), 1, True),
]


@pytest.mark.parametrize("topology", SMALL, ids=str)
def test_no_step_can_be_left_out(topology: Topology) -> None:
    made = programs(topology)
    check(made)
    for rank, steps in enumerate(made):
        for left_out in range(len(steps)):
            broken = list(made)
            broken[rank] = steps[:left_out] + steps[left_out + 1 :]
            with pytest.raises(ProgramError):
                check(broken)


@pytest.mark.parametrize("topology", SMALL, ids=str)
def test_no_reduction_can_be_scaled_otherwise(topology: Topology) -> None:
    made = programs(topology)
    mutants = 0
    for rank, steps in enumerate(made):
        for place, step in enumerate(steps):
            if not isinstance(step, Reduce):
                continue
            broken = list(made)
            broken[rank] = (*steps[:place], replace(step, final=not step.final), *steps[place + 1 :])
            mutants += 1
            with pytest.raises(ProgramError, match="scaled"):
                check(broken)
    assert mutants


def test_they_are_registered_by_the_names_that_the_variables_use() -> None:
    assert {name: cross.among for name, cross in CROSS.items()} == {
        "SRA": scatter_reduce_allgather.among,
        "RING": ring.among,
        "GRID": grid.among,
    }
    assert {name: algorithm.program for name, algorithm in ALGORITHMS.items() if name not in CROSS} == {
        "REDUCE_SCATTER": reduce_scatter.program,
        "ALL_GATHER": all_gather.program,
        "EXCHANGE": exchange.program,
    }
    assert list(ALGORITHMS)[: len(CROSS)] == list(CROSS)


@pytest.mark.parametrize("algorithm", ["RING", *IN_SHARES])
@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_its_world_is_refused(algorithm: str, rank: int) -> None:
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got"):
        ALGORITHMS[algorithm].program([True, True], rank, 2)


def test_chunks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one for each of 2 ranks, got 3"):
        ALGORITHMS["RING"].program([True] * 3, 0, 2)
    for in_shares in (reduce_scatter.program, all_gather.program):
        with pytest.raises(ValueError, match="expected one for each of 2 ranks, got 3"):
            in_shares([True] * 3, 0, 2)
    with pytest.raises(ValueError, match="chunks: expected 4, got 3"):
        Topology("SRA", (0, 0, 1, 1), 2).program([True] * 3, 0)


@pytest.mark.parametrize(
    ("algorithm", "nodes", "shares", "text"),
    [
        ("TREE", (0, 1), 1, "expected SRA, RING, GRID, REDUCE_SCATTER, ALL_GATHER, EXCHANGE, got TREE"),
        ("SRA", (), 1, "expected one for each rank, got none"),
        ("SRA", (0, 0, 1), 2, "expected 1 to 1, the ranks of the smallest node, got 2"),
        ("SRA", (0, 0, 1), 0, "expected 1 to 1, the ranks of the smallest node, got 0"),
        ("RING", (0, 1), 2, "expected 1 where every rank is a node of its own, got 2"),
        ("EXCHANGE", (0, 0, 1), 1, "expected SRA, RING, GRID, got EXCHANGE"),
    ],
)
def test_an_impossible_topology_is_refused(algorithm: str, nodes: tuple[int, ...], shares: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Topology(algorithm, nodes, shares)
