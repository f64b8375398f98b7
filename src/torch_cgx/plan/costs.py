"""The cost of messages and kernels, and the choice of the fastest algorithm between nodes.

`estimate` is a closed form, so that a group can afford it for every new shape: 10 us, where the simulator takes
milliseconds. `cgx plan` also chooses with it, and simulates its choice. The model, per rank that speaks for a node:

    seconds = start + max(processor, link) + hops * latency

- *processor*: kernels by bytes of values, a fixed time per kernel and per message, and bytes that are sent or received;
- *link*: bytes that leave / bandwidth. All three algorithms have the same, 2 (M - 1) / M of the payload for M nodes;
- *hops*: messages that wait for each other, which the overlap of slices does not hide.

Work within a node is the same for all three, and left out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch_cgx.plan.algorithms import grid

__all__ = ["CUDA", "ETHERNET", "GAIN", "HOST", "LEAST_BITS", "Costs", "Speeds", "Wire", "choose", "estimate"]

_INF = float("inf")


@dataclass(frozen=True, slots=True)
class Wire:
    """The path that carries messages between two ranks."""

    bytes_per_s: float = _INF  # each way
    latency_s: float = 0.0
    message_s: float = 0.0  # processor time per message, at each end
    byte_s: float = 0.0  # processor time per byte, at each end

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: expected more than 0, got {self.bytes_per_s}")
        if not min(self.latency_s, self.message_s, self.byte_s) >= 0:
            raise ValueError(f"a wire's seconds: expected 0 or more, got {self}")


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of kernels, in bytes of values per second, at any number of bits."""

    encode: float = _INF
    decode: float = _INF
    add: float = _INF  # decode, and add to the values
    reduce: float = _INF  # with one input
    more: float = _INF  # per further input of a reduce
    copy: float = _INF  # raw values into a payload, or out of it
    sum: float = _INF  # raw values added to others, per input
    call_s: float = 0.0  # per call, before the first value


@dataclass(frozen=True, slots=True)
class Costs:
    """All constants of the model."""

    within: Wire = Wire()  # per rank, to the other ranks of its node
    between: Wire = Wire()  # per node, to other nodes
    speeds: Speeds = Speeds()
    cores: float = 2.0  # per rank, for kernels and transport: see rule 4 of `simulate`
    start_s: float = 0.0  # per operation, before its first step

    def with_link(self, bytes_per_s: float | None, message_s: float | None) -> Costs:
        """Return these costs with the known figures of the link between nodes."""
        known = {"bytes_per_s": bytes_per_s, "message_s": message_s}
        changes = {name: value for name, value in known.items() if value is not None}
        return replace(self, between=replace(self.between, **changes))


ETHERNET = 1448 / 1514
"""The share of an Ethernet link's rate that is left for TCP's payload."""

# The engine's constants on an AMD EPYC (AVX2) with one core per node: kernels at 4 bits, one thread, and the figures
# that benchmarks/plan_validation.py calibrates on two nodes at 10 Gbit/s. One thread per rank computes and moves bytes.
HOST = Costs(
    within=Wire(_INF, 2e-6, 1e-6),
    between=Wire(10e9 / 8 * ETHERNET, 50e-6, 4.5e-6, 0.58e-9),
    speeds=Speeds(
        encode=9.9e9, decode=12.2e9, add=8.4e9, reduce=6.6e9, more=12.2e9, copy=6.9e9, sum=5.2e9, call_s=1e-6
    ),
    cores=1.0,
    start_s=135e-6,
)

# NCCL's constants: usual figures, not measured by us. GPU kernels are so much faster than links that only launches
# count.
CUDA = Costs(
    within=Wire(_INF, 10e-6, 2e-6),
    between=Wire(10e9 / 8 * ETHERNET, 20e-6, 2e-6),
    speeds=Speeds(call_s=5e-6),
)

# The fewest bits at which each algorithm may be chosen automatically. GRID quantizes a contribution once more than SRA.
# Below 4 bits nobody should get that without asking. RING quantizes up to once per node, and is hardly ever faster: it
# sends the bytes and messages of SRA, and more of its messages wait for each other. So it is never chosen.
LEAST_BITS = MappingProxyType({"SRA": 1, "GRID": 4})
GAIN = 1.25  # how many times as fast as SRA another algorithm must be: its error is about 1.15 times as large


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of one speaker on one slice."""

    messages: int  # sent; it receives as many
    hops: int
    calls: int  # of kernels
    kernel_s: float


def _sra(nodes: int, values: float, speeds: Speeds) -> _Work:
    """Return the work of SRA. `values`: bytes of a chunk."""
    others = nodes - 1
    seconds = others * values * (1 / speeds.encode + 1 / speeds.decode) + _reduce_s(values, others, speeds)
    return _Work(2 * others, 2, 2 * others + 1, seconds)


def _ring(nodes: int, values: float, speeds: Speeds) -> _Work:
    others = nodes - 1
    seconds = values / speeds.encode + others * values * (1 / speeds.reduce + 1 / speeds.decode)
    return _Work(2 * others, 2 * others, 2 * others + 1, seconds)


def _grid(nodes: int, values: float, speeds: Speeds) -> _Work:
    rows = grid.n_rows(nodes)
    if rows == 1:
        return _sra(nodes, values, speeds)
    columns = nodes // rows
    column = _sra(rows, values, speeds)
    across = (columns - 1) * rows * values
    seconds = across * (1 / speeds.encode + 1 / speeds.add + 1 / speeds.decode) + column.kernel_s
    return _Work(2 * (columns - 1) + column.messages, 4, 3 * (columns - 1) + column.calls, seconds)


def _reduce_s(values: float, inputs: int, speeds: Speeds) -> float:
    return values / speeds.reduce + (inputs - 1) * values / speeds.more


_WORK = MappingProxyType({"SRA": _sra, "RING": _ring, "GRID": _grid})


def _exact(speeds: Speeds) -> Speeds:
    """Return the speeds of kernels on raw values."""
    copy, add = speeds.copy, speeds.sum
    return replace(speeds, encode=copy, decode=copy, add=add, reduce=add, more=add)


def estimate(
    algorithm: str, nodes: int, values_nbytes: float, payload_nbytes: float, slice_nbytes: float, costs: Costs
) -> float:
    """Return the seconds that an allreduce between `nodes` nodes takes, for one speaker's share of the values.

    `slice_nbytes` is the most bytes of values per slice. Values as long as their payload are exact.
    """
    if nodes == 1 or not values_nbytes:
        return 0.0
    slices = -(-values_nbytes // max(1, slice_nbytes))
    chunks = slices * nodes
    chunk_values, chunk_nbytes = values_nbytes / chunks, payload_nbytes / chunks
    speeds = _exact(costs.speeds) if payload_nbytes >= values_nbytes else costs.speeds
    work, wire = _WORK[algorithm](nodes, chunk_values, speeds), costs.between
    slower = 1 / min(1.0, costs.cores)
    sent_nbytes = 2 * (nodes - 1) * chunk_nbytes
    transport_s = 2 * work.messages * wire.message_s + 2 * sent_nbytes * wire.byte_s
    kernel_s = work.kernel_s + work.calls * speeds.call_s
    busy_s = transport_s + kernel_s if costs.cores <= 1 else max(transport_s / 2, kernel_s)
    link_s = sent_nbytes / wire.bytes_per_s
    return costs.start_s + slices * max(busy_s * slower, link_s) + work.hops * wire.latency_s


def choose(
    nodes: int,
    values_nbytes: float,
    payload_nbytes: float,
    bits: int,
    slice_nbytes: float,
    costs: Costs,
    algorithms: Collection[str] = tuple(LEAST_BITS),
) -> str:
    """Return the algorithm that `AUTO` means: SRA, unless another is allowed at these bits and fast enough to pay.

    `bits` are the lowest of any layer. All ranks of a group call this with the same arguments.
    """

    def needed_s(algorithm: str) -> float:
        seconds = estimate(algorithm, nodes, values_nbytes, payload_nbytes, slice_nbytes, costs)
        return seconds if algorithm == "SRA" else GAIN * seconds

    return min((name for name in algorithms if bits >= LEAST_BITS[name]), key=needed_s)
