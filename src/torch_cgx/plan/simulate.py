"""A simulator that runs programs with clocks instead of values, to time an allreduce on machines that we lack.

Nothing is computed and nothing is sent, but steps, their order and the lengths of payloads are those of the executors.
Level l of slice t runs in tick t + l * lag. With `rounds` a rank sends only after all steps of a level, like
`engines.cuda`. Otherwise it sends at once, like `engines.host`. The model of time:

1. A rank has a processor. Encode, reduce, add, sum and decode occupy it for the bytes of values over the kernel's
   speed.
2. A rank has a link to the other ranks of its node. A node has a link to other nodes, which its ranks share. A link is
   full duplex: messages leave one at a time in the order in which they were sent, and enter one at a time in the order
   in which they begin to arrive. Each direction is occupied for bytes over bandwidth.
3. A message begins to arrive one wire latency after it has begun to leave. It has arrived one latency after its last
   byte has left, and once it has entered.
4. A message costs processor time at each end: a fixed time before its bytes leave and after they arrive, and a time
   per byte while they pass. With more than one core, transport has a second processor. With less than one, all work
   of a processor takes longer.
5. An operation begins on every rank with a fixed time, in which it waits to be woken up.

`simulate` runs every rank. For groups of a thousand ranks, see `simulate_classes`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.costs import Costs, Speeds
from torch_cgx.plan.layout import Slice
from torch_cgx.plan.program import Add, Compute, Decode, Encode, Join, Receive, Reduce, Send, Slot, Step, Sum
from torch_cgx.plan.programs import program_for, programs_for
from torch_cgx.plan.schedule import levels_of

__all__ = [
    "Length",
    "Operation",
    "Script",
    "Size",
    "Timing",
    "is_exact",
    "kernel_s",
    "ordered",
    "play",
    "simulate",
    "size_of",
    "together",
]


class Size(NamedTuple):
    """The lengths of one chunk, or of several together."""

    values: float  # bytes
    nbytes: float  # of its payload
    exact_nbytes: float  # of its payload when it is exact
    raw: bool  # always exact


def together(sizes: Sequence[Size]) -> Size:
    """Add up the sizes of several chunks."""
    if len(sizes) == 1:
        return sizes[0]
    values, nbytes, exact_nbytes = (sum(each) for each in zip(*(size[:3] for size in sizes), strict=True))
    return Size(values, nbytes, exact_nbytes, all(size.raw for size in sizes))


def size_of(part: Slice, chunk: int) -> Size:
    it = part.chunks[chunk]
    values = sum(piece.numel for piece in it.pieces) * it.itemsize
    return Size(values, it.nbytes, it.exact.nbytes, all(piece.is_raw for piece in it.pieces))


@dataclass(frozen=True, slots=True)
class Timing:
    """The time and bytes of a run. Times are the maximum over ranks."""

    seconds: float
    kernel_s: float  # processor time in kernels
    transport_s: float  # processor time in messages
    sent_nbytes: tuple[float, ...]  # by rank
    link_nbytes: float  # sent to other nodes by the busiest node


def kernel_s(step: Step, size: Size, speeds: Speeds, exact: bool, foreign: float = 1.0) -> float:
    """Return how long a compute step occupies the processor. `foreign`: how many inputs each input stands for."""
    raw, values = exact or size.raw, size.values
    if isinstance(step, Encode):
        seconds = values / (speeds.copy if raw else speeds.encode)
    elif isinstance(step, Reduce):
        inputs = len(step.inputs) * foreign
        if raw:
            seconds = inputs * values / speeds.sum
        elif not inputs:
            seconds = values / speeds.encode
        else:
            seconds = values / speeds.reduce + (inputs - 1) * values / speeds.more
    elif isinstance(step, Add):
        seconds = values / (speeds.sum if raw else speeds.add)
    elif isinstance(step, Sum):
        seconds = len(step.inputs) * values / (speeds.sum if raw else speeds.add)
    else:
        assert isinstance(step, Decode)
        seconds = values / (speeds.copy if raw else speeds.decode)
    return speeds.call_s + seconds


# One action of a rank. An int computes: an index in the table of durations. Four items send: (message, receiving rank,
# index in the table of lengths, whether it goes to another node). One item waits: (message,). Messages are numbers.
Operation = int | tuple[int, int, int, bool] | tuple[int]


@dataclass(slots=True)
class Script:
    """One rank's steps as operations of the clocks."""

    rank: int
    node: int
    operations: list[Operation] = field(default_factory=list)


class Length(NamedTuple):
    nbytes: float
    messages: float = 1.0  # how many it stands for


def simulate(
    topology: Topology,
    slices: Sequence[Slice],
    costs: Costs,
    nodes: Sequence[int] | None = None,
    *,
    rounds: bool = False,
    lag: int = 1,
) -> Timing:
    """Time one allreduce of these slices by all ranks, from the moment when all of them begin.

    `nodes` holds each rank's node, for algorithms that ignore nodes. None means the nodes of the topology. With a
    `lag` of 0, slices do not overlap.
    """
    nodes = topology.nodes if nodes is None else nodes
    messages: dict[tuple[int, int, int, str], int] = {}
    durations: dict[float, int] = {}
    lengths: dict[Length, int] = {}
    scripts = [Script(rank, nodes[rank]) for rank in range(topology.world)]
    sizes = [[size_of(part, chunk) for chunk in range(len(part.chunks))] for part in slices]
    patterns = [tuple(chunk.nbytes > 0 for chunk in part.chunks) for part in slices]
    slots = [programs_for(topology, nonempty)[1] for nonempty in patterns]
    written = [{name: (slot.chunks, slot.exact) for name, slot in each.items()} for each in slots]
    for rank, script in enumerate(scripts):
        for number, step in ordered(topology, patterns, rank, rounds, lag):
            known = written[number]
            if isinstance(step, Send):
                chunks, exact = known[step.slot]
                size = together([sizes[number][chunk] for chunk in chunks])
                message = messages.setdefault((number, rank, step.peer, step.slot), len(messages))
                length = lengths.setdefault(Length(size.exact_nbytes if exact else size.nbytes), len(lengths))
                script.operations.append((message, step.peer, length, nodes[step.peer] != script.node))
            elif isinstance(step, Receive):
                message = messages.setdefault((number, step.peer, rank, step.slot), len(messages))
                script.operations.append((message,))
            elif not isinstance(step, Join):
                size = together([sizes[number][chunk] for chunk in step.chunks])
                seconds = kernel_s(step, size, costs.speeds, is_exact(step, known))
                script.operations.append(durations.setdefault(seconds, len(durations)))
    return play(scripts, list(durations), list(lengths), costs)


def is_exact(step: Compute, known: Mapping[Slot, tuple[object, bool]]) -> bool:
    if isinstance(step, Encode | Reduce):
        return step.exact
    return known[step.inputs[0] if isinstance(step, Sum) else step.slot][1]


def ordered(
    topology: Topology, patterns: Sequence[tuple[bool, ...]], rank: int, rounds: bool, lag: int = 1
) -> Iterator[tuple[int, Step]]:
    """Yield the steps of a rank with their slices, in the order in which the executors run them.

    `patterns` tells for each slice which chunks are not empty.
    """
    by_level: dict[tuple[bool, ...], list[list[Step]]] = {}
    depth = topology.depth + 1
    for nonempty in set(patterns):
        program = program_for(topology, nonempty, rank)
        steps = by_level[nonempty] = [[] for _ in range(depth)]
        for step, level in zip(program, levels_of(program), strict=True):
            steps[level].append(step)
        if rounds:
            for of_level in steps:
                of_level.sort(key=lambda step: 0 if isinstance(step, Receive) else 2 if isinstance(step, Send) else 1)
    for tick in range(len(patterns) + depth * lag):
        for level in range(depth):
            number = tick - level * lag
            if 0 <= number < len(patterns):
                yield from ((number, step) for step in by_level[patterns[number]][level])


def play(
    scripts: Sequence[Script],
    durations: Sequence[float],
    lengths: Sequence[Length],
    costs: Costs,
    serial: bool = False,
) -> Timing:
    """Run the clocks. Events are processed in the order of time, so that links are shared fairly.

    `serial`: a message that stands for several has as many latencies, because each of them waits for the one before.
    """
    return _Play(scripts, durations, lengths, costs, serial).run()


class _Passing(NamedTuple):
    """The times of a message. If it stands for several that do not wait for each other, `fixed_s` is that of one."""

    link_s: float
    latency_s: float
    fixed_s: float  # processor time at each end
    beside_s: float  # processor time at each end while its bytes pass


# A message in flight: its number, its times, whether it comes from another node, and the earliest time at which its end
# can arrive.
_Coming = tuple[int, _Passing, bool, float]


class _Play:
    def __init__(
        self,
        scripts: Sequence[Script],
        durations: Sequence[float],
        lengths: Sequence[Length],
        costs: Costs,
        serial: bool,
    ) -> None:
        self.scripts = scripts
        self.apart = costs.cores > 1  # transport has a processor of its own
        slower = 1 / min(1.0, costs.cores)
        self.durations = [seconds * slower for seconds in durations]
        self.nbytes = [length.nbytes for length in lengths]
        self.passing = [  # by wire and length
            [
                _Passing(
                    nbytes / wire.bytes_per_s,
                    wire.latency_s * (messages if serial else 1.0),
                    wire.message_s * (messages if serial else 1.0) * slower,
                    (wire.message_s * (0.0 if serial else messages - 1.0) + nbytes * wire.byte_s) * slower,
                )
                for nbytes, messages in lengths
            ]
            for wire in (costs.within, costs.between)
        ]
        count = len(scripts)
        self.index = {script.rank: place for place, script in enumerate(scripts)}
        self.clock = [costs.start_s] * count
        self.position = [0] * count
        # The times at which each direction of a link, and of a second core, is free. Ranks come first, then nodes.
        nodes = {node: count + place for place, node in enumerate(dict.fromkeys(script.node for script in scripts))}
        self.port = [nodes[script.node] for script in scripts]
        self.leaves = [0.0] * (count + len(nodes))
        self.enters = [0.0] * (count + len(nodes))
        self.carrier_out = [0.0] * count
        self.carrier_in = [0.0] * count
        self.kernel = [0.0] * count
        self.transport = [0.0] * count
        self.sent = [0.0] * count
        self.link = [0.0] * (count + len(nodes))
        self.arrived: dict[int, tuple[float, float, _Passing]] = {}  # when it begins to arrive, when it has arrived
        self.waiting: dict[int, int] = {}
        self.heap: list[tuple[float, int, int, _Coming | None]] = []
        self.events = 0

    def run(self) -> Timing:
        for place in range(len(self.scripts)):
            self._push(self.clock[place], place)
        while self.heap:
            now, _, place, message = heapq.heappop(self.heap)
            if message is None:
                self._go_on(place, now)
            else:
                self._arrive(now, place, message)
        stuck = [
            script.rank
            for script, position in zip(self.scripts, self.position, strict=True)
            if position < len(script.operations)
        ]
        assert not stuck, f"ranks {stuck} wait for ever"
        return Timing(
            max(self.clock, default=0.0),
            max(self.kernel, default=0.0),
            max(self.transport, default=0.0),
            tuple(self.sent),
            max(self.link, default=0.0),
        )

    def _push(self, when: float, place: int, message: _Coming | None = None) -> None:
        self.events += 1
        heapq.heappush(self.heap, (when, self.events, place, message))

    def _go_on(self, place: int, now: float) -> None:
        """Run this rank until it has to wait, or is about to send a message later than now."""
        operations, durations, arrived = self.scripts[place].operations, self.durations, self.arrived
        clock, position, kernel = self.clock[place], self.position[place], 0.0
        while position < len(operations):
            operation = operations[position]
            if isinstance(operation, int):
                clock += durations[operation]
                kernel += durations[operation]
            elif len(operation) == 1:
                message = operation[0]
                if message not in arrived:
                    self.waiting[message] = place
                    break
                begins, there, passing = arrived.pop(message)
                if self.apart:
                    clock = max(clock, there)
                else:
                    clock = max(there, max(clock, begins) + passing.beside_s) + passing.fixed_s
            else:
                if clock > now:
                    self._push(clock, place)
                    break
                clock = self._send(place, operation, clock)
            position += 1
        self.clock[place], self.position[place] = clock, position
        self.kernel[place] += kernel

    def _send(self, place: int, operation: tuple[int, int, int, bool], clock: float) -> float:
        message, peer, length, apart = operation
        nbytes = self.nbytes[length]
        passing = self.passing[apart][length]
        begins = (max(clock, self.carrier_out[place]) if self.apart else clock) + passing.fixed_s
        ends = self.carrier_out[place] = begins + passing.beside_s
        link = self.port[place] if apart else place
        starts = max(begins, self.leaves[link])
        self.leaves[link] = starts + passing.link_s
        there = max(starts + passing.link_s, ends) + passing.latency_s
        self._push(starts + passing.latency_s, self.index[peer], (message, passing, apart, there))
        self.transport[place] += passing.fixed_s + passing.beside_s
        self.sent[place] += nbytes
        if apart:
            self.link[link] += nbytes
        return clock if self.apart else ends

    def _arrive(self, now: float, place: int, it: _Coming) -> None:
        message, passing, apart, there = it
        link = self.port[place] if apart else place
        begins = max(now, self.enters[link])
        self.enters[link] = begins + passing.link_s
        there = max(begins + passing.link_s, there)
        if self.apart:
            handled = max(self.carrier_in[place], begins) + passing.beside_s
            self.carrier_in[place] = handled + passing.fixed_s
            there = max(there, handled) + passing.fixed_s
        self.transport[place] += passing.fixed_s + passing.beside_s
        self.arrived[message] = (begins, there, passing)
        if message in self.waiting:
            place = self.waiting.pop(message)
            self._push(self.clock[place], place)
