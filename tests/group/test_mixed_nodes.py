"""Groups of nodes with several ranks: memory within a node, links between nodes, one engine for both.

Ranks get a CGX_NODE_ID each, which is all that a host is to a group. tests/group/test_nodes.py has real test hosts.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_cgx
from tests.support.gradients import BITS, digest, noise
from tests.support.harness import Rank, names, needs_native, observe_ranks, raised, run_ranks
from torch_cgx.codecs import RAW, Codec, MaxMin, family, make_codec
from torch_cgx.config import QUANTIZER_VARIABLE
from torch_cgx.engines import memory
from torch_cgx.kernels import Rounding
from torch_cgx.kernels.native import default_kernels
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.layout import Layer
from torch_cgx.plan.programs import layout_for
from torch_cgx.plan.slicing import LINK_CHUNK_NBYTES

pytestmark = [pytest.mark.ranks, needs_native]

SOON_S = 10.0
SEED = 11

# The node of each rank, and the topology that these settings ask for.
HIERARCHIES = [
    ("0011", {}, Topology("SRA", (0, 0, 1, 1))),
    ("0011", {"CGX_INTRA_BROADCAST": "0"}, Topology("SRA", (0, 0, 1, 1), shares=2)),
    ("00122", {"CGX_INTRA_COMPRESS": "0"}, Topology("SRA", (0, 0, 1, 2, 2), compress_inside=False)),
    ("0100", {"CGX_CROSS_REDUCTION_TYPE": "RING"}, Topology("RING", (0, 1, 0, 0))),
    (
        "010101",
        {"CGX_INTRA_BROADCAST": "0", "CGX_INTRA_COMPRESS": "0", "CGX_CROSS_REDUCTION_TYPE": "RING"},
        Topology("RING", (0, 1, 0, 1, 0, 1), shares=3, compress_inside=False),
    ),
    ("0123", {"CGX_CROSS_REDUCTION_TYPE": "GRID"}, Topology.flat("GRID", 4)),
    (
        "001233",
        {"CGX_INTRA_COMPRESS": "0", "CGX_CROSS_REDUCTION_TYPE": "GRID"},
        Topology("GRID", (0, 0, 1, 2, 3, 3), compress_inside=False),
    ),
    pytest.param("012345", {"CGX_CROSS_REDUCTION_TYPE": "GRID"}, Topology.flat("GRID", 6), marks=pytest.mark.matrix),
    pytest.param(
        "00112233",
        {"CGX_INTRA_BROADCAST": "0", "CGX_CROSS_REDUCTION_TYPE": "GRID"},
        Topology("GRID", (0, 0, 1, 1, 2, 2, 3, 3), shares=2),
        marks=pytest.mark.matrix,
    ),
]


def on_nodes(nodes: str) -> dict[int, dict[str, str]]:
    return {rank: {"CGX_NODE_ID": f"host-{node}"} for rank, node in enumerate(nodes)}


def group_of(nodes: str) -> Any:
    group: Any = dist.group.WORLD
    assert group.carrier == "TCP" and group._parts.native.nodes == tuple(map(int, nodes))
    return group


# ---- sums ----


def expected_sum(
    topology: Topology, numel: int, quantizer: Codec, dtype: torch.dtype, scale: float, rounding: Rounding
) -> Tensor:
    """Return what the in-memory engine makes of all ranks' noise. 16-bit values are summed in a float32 copy."""
    values = [noise(rank, numel, dtype).float() for rank in range(topology.world)]
    layout = layout_for(topology, (Layer(numel, quantizer),), 4, LINK_CHUNK_NBYTES * topology.n_chunks)
    kernels = [default_kernels()] * topology.world
    memory.allreduce(values, layout, kernels, topology=topology, scale=scale, rounding=rounding)
    return values[0].to(dtype)


def sums(me: Rank, nodes: str, topology: Topology) -> list[str]:
    assert group_of(nodes)._parts.host.reducer.topology == topology
    cases = [("maxmin", bits, numel) for bits in (1, 4, 8, 32) for numel in (16, 700, 40_001)]
    cases += [("rotated", 1, 700), ("rotated", 2, 40_001), ("rotated", 3, 16), ("rotated", 4, 3000)]
    cases += [("maxmin", 4, 900_001), ("rotated", 2, 900_001)]  # several slices
    digests = []
    for number, (name, bits, numel) in enumerate(cases):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        os.environ[BITS], os.environ[QUANTIZER_VARIABLE] = str(bits), name
        x = noise(me.rank, numel, dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG if number % 2 else dist.ReduceOp.SUM)
        if me.rank == number % me.world:
            codec = make_codec(name, bits, family(name).default_block)
            scale = 1 / me.world if number % 2 else 1.0
            rounding = Rounding(True, SEED, op=number + 1)
            expected = expected_sum(topology, numel, codec, dtype, scale, rounding)
            assert digest(x) == digest(expected), (name, bits, numel, dtype)
        digests.append(digest(x))
    return digests


@pytest.mark.parametrize(("nodes", "env", "topology"), HIERARCHIES, ids=lambda value: str(value)[:60])
def test_every_hierarchy_has_the_bits_of_the_in_memory_engine(
    nodes: str, env: dict[str, str], topology: Topology
) -> None:
    rounding = {"CGX_COMPRESSION_STOCHASTIC": "1", "CGX_COMPRESSION_SEED": str(SEED)}
    env = {**env, **rounding}
    first, *others = run_ranks(sums, len(nodes), "cgx", nodes, topology, env=env, rank_env=on_nodes(nodes))
    assert len(set(first)) == len(first) and all(other == first for other in others)


def automatic_sums(me: Rank, nodes: str) -> tuple[list[str], list[str]]:
    """Check that every sum has the bits of the algorithm that the cost model shall choose at these bits."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch_cgx").addHandler(handler)
    logging.getLogger("torch_cgx").setLevel(logging.INFO)
    group = group_of(nodes)
    numbers = tuple(map(int, nodes))
    digests = []
    for number, (bits, algorithm) in enumerate([(2, "SRA"), (3, "SRA"), (4, "GRID"), (8, "GRID"), (32, "GRID")]):
        os.environ[BITS] = str(bits)
        x = noise(me.rank, 40_001)
        dist.all_reduce(x)
        quantizer = RAW if bits == 32 else MaxMin(bits, 512)
        rounding = Rounding(True, SEED, op=number + 1)
        expected = expected_sum(Topology(algorithm, numbers), 40_001, quantizer, torch.float32, 1.0, rounding)
        assert digest(x) == digest(expected), (bits, algorithm)
        digests.append(digest(x))
    assert group._parts.context.recorder.as_dict()["reduction"] == "AUTO: 1e+05 Gbit/s and 5000 us per message"
    return digests, [text for text in told if "grid" in text]


@pytest.mark.parametrize("nodes", ["0123", pytest.param("001233", marks=pytest.mark.matrix)])
def test_by_default_rank_0_s_costs_choose_a_grid_where_messages_are_dear_and_bits_are_4_or_more(nodes: str) -> None:
    rounding = {"CGX_COMPRESSION_STOCHASTIC": "1", "CGX_COMPRESSION_SEED": str(SEED)}
    rank_env = on_nodes(nodes)
    rank_env[0] |= {"CGX_LINK_COSTS": "100tbit,5000us"}
    rank_env[1] |= {"CGX_LINK_COSTS": "1mbit"}  # rank 0's counts
    first, *others = run_ranks(automatic_sums, len(nodes), "cgx", nodes, env=rounding, rank_env=rank_env)
    assert all(digests == first[0] and told == [] for digests, told in others)
    (told,) = first[1]
    assert "a grid of 2 x 2 nodes" in told and "at 4 bits" in told and "CGX_CROSS_REDUCTION_TYPE=SRA" in told


def all_kinds(me: Rank, nodes: str) -> list[str]:
    """Make operations of many kinds and sizes, some of them under way together, and check every one."""
    group_of(nodes)
    digests: list[str] = []
    for turn in range(12):
        numel = (16, 5_000, 300_000)[turn % 3]
        torch_cgx.set_default(bits=(4, 32)[turn % 2])
        reduced, gathered = noise(me.rank, numel), torch.empty(me.world * numel)
        scattered = torch.empty(numel)
        root = turn % me.world
        told = torch.full((numel,), me.rank)
        works = [
            dist.all_reduce(reduced, async_op=True),
            dist.all_gather_into_tensor(gathered, noise(me.rank, numel), async_op=True),
            dist.reduce_scatter_tensor(scattered, noise(me.rank, me.world * numel), async_op=True),
            dist.broadcast(told, root, async_op=True),
            dist.barrier(async_op=True),
        ]
        for work in works[:: 1 if turn % 2 else -1]:
            work.wait()
        assert (told == root).all()
        exact = torch.stack([noise(rank, me.world * numel) for rank in range(me.world)]).sum(0).view(me.world, -1)
        assert (scattered - exact[me.rank]).abs().max() < 1e-4  # exact, unless `compressed` asks for bits
        assert torch.equal(gathered, torch.cat([noise(rank, numel) for rank in range(me.world)]))
        digests.append(digest(reduced))
    return digests


def test_operations_of_all_kinds_are_right_beside_each_other() -> None:
    first, *others = run_ranks(all_kinds, 5, "cgx", "00101", rank_env=on_nodes("00101"), timeout_s=180.0)
    assert all(other == first for other in others)


def several_groups(me: Rank) -> list[float]:
    """Groups within a node, across nodes and of all, with operations in flight on each."""
    within = dist.new_group([0, 1], backend="cgx"), dist.new_group([2, 3], backend="cgx")
    across = dist.new_group([1, 2, 3], backend="cgx")
    found = []
    for turn in range(20):
        groups = [dist.group.WORLD, within[me.rank // 2], *([across] if me.rank else [])]
        tensors = [torch.full((1000 + 3000 * turn,), float(me.rank + turn)) for _ in groups]
        works = [dist.all_reduce(x, group=g, async_op=True) for x, g in zip(tensors, groups, strict=True)]
        for work in works[::-1]:
            work.wait()
        found += [float(x.sum() / x.numel()) for x in tensors]
    return found


def test_groups_within_and_across_nodes_work_beside_each_other() -> None:
    found = run_ranks(several_groups, 4, "cgx", rank_env=on_nodes("0011"))
    for rank, values in enumerate(found):
        expected = []
        for turn in range(20):
            pair = (0, 1) if rank < 2 else (2, 3)
            members = [(0, 1, 2, 3), pair, *([(1, 2, 3)] if rank else [])]
            expected += [float(sum(member + turn for member in ranks)) for ranks in members]
        assert values == expected


def in_inference_mode(me: Rank) -> None:
    with torch.inference_mode():
        x = torch.full((5_000,), 1.0 + me.rank, dtype=torch.float16)
        work = dist.all_reduce(x, async_op=True)
    work.wait()  # outside of it, where the sum of 16-bit values is copied back
    assert (x == 6.0).all()


def test_a_tensor_of_inference_mode_gets_its_sum() -> None:
    run_ranks(in_inference_mode, 3, "cgx", rank_env=on_nodes("001"))


# ---- what goes wrong ----


def reduce_until_one_dies(me: Rank, victim: int) -> None:
    for turn in range(100_000):
        if me.rank == victim and turn == 5:
            me.mark()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(noise(me.rank, 50_000))


@pytest.mark.parametrize("victim", [0, 1], ids=["the speaker of a node", "another rank of a node"])
def test_all_ranks_of_all_nodes_are_told_who_was_killed(victim: int) -> None:
    outcomes = observe_ranks(reduce_until_one_dies, 4, "cgx", victim, env={BITS: "4"}, rank_env=on_nodes("0011"))
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            raised(outcome, "PeerLostError")
            names(outcome, f"lost rank {victim}")


def one_never_calls(me: Rank, absent: int) -> None:
    dist.all_reduce(torch.ones(1000))
    if me.rank != absent:
        dist.all_reduce(torch.ones(1000))
    else:
        time.sleep(4.0)


@pytest.mark.parametrize("absent", [1, 2], ids=["of a node of two", "the speaker of the other"])
def test_all_ranks_of_all_nodes_are_told_who_never_called(absent: int) -> None:
    outcomes = observe_ranks(
        one_never_calls, 4, "cgx", absent, env={BITS: "4"}, rank_env=on_nodes("0011"), group_timeout_s=1.5, grace_s=20.0
    )
    for rank, outcome in enumerate(outcomes):
        if rank != absent:
            assert not outcome.ok
            names(
                outcome,
                f"Timed out after .* waiting for rank {absent} in operation 2, all_reduce",
                "called operation 1",
            )


def call_differently(me: Rank) -> None:
    dist.all_reduce(torch.ones(1000))
    dist.all_reduce(torch.ones(2000 if me.rank == 3 else 1000))
    dist.all_reduce(torch.ones(1000))


def test_ranks_out_of_step_are_told_both_calls_on_all_nodes() -> None:
    outcomes = observe_ranks(call_differently, 4, "cgx", env={BITS: "4"}, rank_env=on_nodes("0011"))
    for outcome in outcomes:
        raised(outcome, "MismatchError")
        names(outcome, r"float32\[2000\]", r"float32\[1000\]", "operation 2")
