"""Programs: what one rank does in one collective, as data; and the checker that proves them right.

A program is a tuple of steps over named payload slots. Slot names are each rank's own; a payload keeps its
name when it is sent, so that a receive meets the send of the same slot by that peer. A send never waits, a
receive waits for its send. `algorithms` makes programs and `executors` run them; nothing here touches values
or carries bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch_cgx.errors import ProgramError

__all__ = [
    "Decode",
    "Encode",
    "Program",
    "Receive",
    "Reduce",
    "Report",
    "Send",
    "Step",
    "check",
    "format_program",
]


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode my values of a chunk into a slot."""

    chunk: int
    slot: str

    def __str__(self) -> str:
        return f"encode  chunk {self.chunk} into {self.slot}"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a slot's payload to a peer."""

    slot: str
    peer: int

    def __str__(self) -> str:
        return f"send    {self.slot} to {self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a peer's payload of this slot."""

    slot: str
    peer: int

    def __str__(self) -> str:
        return f"receive {self.slot} from {self.peer}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum up a chunk: my values, then the inputs, decoded, in this order; scaled.

    The sum is encoded into a slot, and what that decodes to becomes my values.
    """

    inputs: tuple[str, ...]
    chunk: int
    slot: str

    def __str__(self) -> str:
        return f"reduce  chunk {self.chunk} with {', '.join(self.inputs) or 'nothing'} into {self.slot}"


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode a slot over my values of a chunk."""

    slot: str
    chunk: int

    def __str__(self) -> str:
        return f"decode  {self.slot} over chunk {self.chunk}"


Step: TypeAlias = Encode | Send | Receive | Reduce | Decode
Program: TypeAlias = tuple[Step, ...]


def format_program(program: Program) -> str:
    """One numbered line a step."""
    width = len(str(len(program)))
    return "\n".join(f"{number:>{width}}  {step}" for number, step in enumerate(program, start=1))


@dataclass(frozen=True, slots=True)
class Report:
    """What a set of correct programs costs."""

    quantizations: dict[int, int]  # by chunk: how often the contribution that suffers most is quantized
    messages: tuple[int, ...]  # by rank: how many it sends
    sent_nbytes: tuple[int, ...] | None  # by rank; None where the chunks' sizes were not told


def check(programs: Sequence[Program], chunk_nbytes: Sequence[int] | None = None) -> Report:
    """Prove that the programs of ranks 0, 1, ... make one allreduce; raise `ProgramError` if they do not.

    1. Every receive meets exactly one send, and every send one receive.
    2. Run without values, no rank waits for ever, and no slot is read before it is written or written twice.
    3. No sum counts a contribution twice.
    4. In the end every rank holds every chunk that anybody touched, all from the same payload, and that
       payload sums the contributions of all ranks.

    A chunk that no program touches is empty and needs nothing.
    """
    _check_messages(programs)
    ranks = [_Rank(rank, program) for rank, program in enumerate(programs)]
    _simulate(ranks)
    quantizations = _check_results(ranks)
    sent_nbytes = None
    if chunk_nbytes is not None:
        sent_nbytes = tuple(sum(chunk_nbytes[chunk] for chunk in rank.sent_chunks) for rank in ranks)
    return Report(quantizations, tuple(len(rank.sent_chunks) for rank in ranks), sent_nbytes)


@dataclass(frozen=True, slots=True)
class _Content:
    """What values of a chunk, encoded or not, stand for: a sum of contributions."""

    chunk: int
    quantizations: dict[int, int]  # by contributing rank: how often its share was quantized
    origin: tuple[int, str] | None  # the rank and slot that first held the payload; None: not encoded


@dataclass(slots=True)
class _Rank:
    """One rank in the simulation."""

    rank: int
    program: Program
    position: int = 0
    slots: dict[str, _Content] = field(default_factory=dict)
    values: dict[int, _Content] = field(default_factory=dict)
    sent_chunks: list[int] = field(default_factory=list)

    def fail(self, problem: str) -> ProgramError:
        step = self.program[self.position]
        return ProgramError(f"rank {self.rank}, step {self.position + 1} ({step}): {problem}")

    def read(self, slot: str) -> _Content:
        if slot not in self.slots:
            raise self.fail(f"slot {slot} is read before it is written")
        return self.slots[slot]

    def read_chunk(self, slot: str, chunk: int) -> _Content:
        content = self.read(slot)
        if content.chunk != chunk:
            raise self.fail(f"slot {slot} holds chunk {content.chunk}, not {chunk}")
        return content

    def write(self, slot: str, content: _Content) -> None:
        if slot in self.slots:
            raise self.fail(f"slot {slot} is written twice")
        self.slots[slot] = content

    def value(self, chunk: int) -> _Content:
        return self.values.get(chunk) or _Content(chunk, {self.rank: 0}, None)

    def encoded(self, contents: Iterable[_Content], chunk: int, slot: str) -> _Content:
        """The sum of these, quantized once more."""
        quantizations: dict[int, int] = {}
        for content in contents:
            for contributor, times in content.quantizations.items():
                if contributor in quantizations:
                    raise self.fail(f"the contribution of rank {contributor} is summed twice")
                quantizations[contributor] = times + 1
        return _Content(chunk, quantizations, (self.rank, slot))


def _check_messages(programs: Sequence[Program]) -> None:
    sends: Counter[tuple[int, int, str]] = Counter()
    receives: Counter[tuple[int, int, str]] = Counter()
    for rank, program in enumerate(programs):
        for step in program:
            if not isinstance(step, (Send, Receive)):
                continue
            if step.peer == rank or not 0 <= step.peer < len(programs):
                raise ProgramError(f"rank {rank} ({step}): expected another of the {len(programs)} ranks")
            if isinstance(step, Send):
                sends[rank, step.peer, step.slot] += 1
            else:
                receives[step.peer, rank, step.slot] += 1
    for sender, receiver, slot in sorted(sends.keys() | receives.keys()):
        sent, received = sends[sender, receiver, slot], receives[sender, receiver, slot]
        if sent != 1 or received != 1:
            raise ProgramError(
                f"slot {slot} from rank {sender} to rank {receiver}: expected one send and one receive, "
                f"got {sent} and {received}"
            )


def _simulate(ranks: Sequence[_Rank]) -> None:
    """Let every rank go on until it waits for a message, again and again, until all are through."""
    messages: dict[tuple[int, int, str], _Content] = {}
    waiting_for: dict[tuple[int, int, str], _Rank] = {}
    runnable = list(reversed(ranks))
    while runnable:
        rank = runnable.pop()
        while rank.position < len(rank.program):
            step = rank.program[rank.position]
            if isinstance(step, Send):
                message = (rank.rank, step.peer, step.slot)
                messages[message] = rank.read(step.slot)
                rank.sent_chunks.append(messages[message].chunk)
                if message in waiting_for:
                    runnable.append(waiting_for.pop(message))
            elif isinstance(step, Receive):
                message = (step.peer, rank.rank, step.slot)
                if message not in messages:
                    waiting_for[message] = rank
                    break
                rank.write(step.slot, messages[message])
            else:
                _compute(rank, step)
            rank.position += 1
    if waiting_for:
        raise _circular_wait(list(waiting_for.values()))


def _compute(rank: _Rank, step: Encode | Reduce | Decode) -> None:
    if isinstance(step, Encode):
        rank.write(step.slot, rank.encoded([rank.value(step.chunk)], step.chunk, step.slot))
    elif isinstance(step, Reduce):
        inputs = [rank.read_chunk(slot, step.chunk) for slot in step.inputs]
        total = rank.encoded([rank.value(step.chunk), *inputs], step.chunk, step.slot)
        rank.write(step.slot, total)
        rank.values[step.chunk] = total
    else:
        rank.values[step.chunk] = rank.read_chunk(step.slot, step.chunk)


def _circular_wait(stuck: Sequence[_Rank]) -> ProgramError:
    """Every receive has its send, so who is stuck waits for somebody stuck: follow that until it closes."""
    waits = {rank.rank: rank for rank in stuck}
    seen: list[_Rank] = []
    rank = stuck[0]
    while rank not in seen:
        seen.append(rank)
        step = rank.program[rank.position]
        assert isinstance(step, Receive)
        rank = waits[step.peer]
    circle = seen[seen.index(rank) :]
    waits_at = [f"rank {r.rank} waits at step {r.position + 1} ({r.program[r.position]})" for r in circle]
    return ProgramError(f"circular wait: {'; '.join(waits_at)}")


def _check_results(ranks: Sequence[_Rank]) -> dict[int, int]:
    everybody = set(range(len(ranks)))
    quantizations: dict[int, int] = {}
    steps = (step for rank in ranks for step in rank.program)
    touched = {step.chunk for step in steps if isinstance(step, (Encode, Reduce, Decode))}
    for chunk in sorted(touched):
        results = [rank.value(chunk) for rank in ranks]
        for rank, result in enumerate(results):
            if result.origin is None:
                raise ProgramError(f"chunk {chunk}: rank {rank} ends with its own values, not with the sum")
            if result.origin != results[0].origin:
                raise ProgramError(
                    f"chunk {chunk}: the bits differ: rank 0 ends with the payload of {_name(results[0])}, "
                    f"rank {rank} with that of {_name(result)}"
                )
        missing = sorted(everybody - results[0].quantizations.keys())
        if missing:
            raise ProgramError(f"chunk {chunk}: the sum misses the contributions of ranks {missing}")
        quantizations[chunk] = max(results[0].quantizations.values())
    return quantizations


def _name(content: _Content) -> str:
    assert content.origin is not None
    rank, slot = content.origin
    return f"slot {slot} of rank {rank}"
