"""Proof that all ranks' programs make one allreduce, reduce-scatter, all-gather, broadcast or exchange.

Programs are run without values. The checker tracks whose contributions a slot or a chunk holds, how often each was
quantized, and from which payload its bits come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch_cgx.errors import ProgramError
from torch_cgx.plan.program import Add, Compute, Encode, Join, Program, Receive, Reduce, Send, Sum

__all__ = [
    "Message",
    "Report",
    "check",
    "check_all_gather",
    "check_broadcast",
    "check_exchange",
    "check_reduce_scatter",
]


class Message(NamedTuple):
    """A payload in flight."""

    sender: int
    receiver: int
    chunks: tuple[int, ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The cost of a set of correct programs."""

    quantizations: dict[int, int]  # by chunk: how often the most quantized contribution is quantized
    messages: tuple[int, ...]  # by rank: the number that it sends
    sent_nbytes: tuple[int, ...] | None  # by rank; None if the chunks' sizes were not given
    sent: tuple[Message, ...]  # all messages, by sender


def check(
    programs: Sequence[Program],
    chunk_nbytes: Sequence[int] | None = None,
    exact_nbytes: Sequence[int] | None = None,
) -> Report:
    """Prove that the programs of ranks 0, 1, ... make one allreduce; raise `ProgramError` if they do not.

    1. Every receive meets exactly one send, and every send one receive. A payload is coded as its receiver says, and
       sent at a lower level than it is received.
    2. Run without values, no rank waits forever, no slot is read before it is written or written twice, and the
       inputs of one step have the same coding.
    3. No sum counts a contribution twice, and none is scaled twice or added to after it is scaled.
    4. In the end every rank holds every chunk that any program touched, all from the same payload. That payload is the
       scaled sum of the contributions of all ranks.
    5. A rank quantizes a chunk at most once, so that its loss per value is one number: its residual.

    A chunk that no program touches is empty and needs nothing. `chunk_nbytes` and `exact_nbytes` are the lengths of
    the chunks' payloads, compressed and exact.
    """
    ranks = _run(programs)
    return _report(ranks, _check_allreduce(ranks), chunk_nbytes, exact_nbytes)


def check_reduce_scatter(programs: Sequence[Program], chunk_nbytes: Sequence[int] | None = None) -> Report:
    """Prove that the programs make one reduce-scatter.

    Check 1 to 3 and 5 of `check`. Also check that rank c's share ends as the scaled sum of the contributions of all
    ranks to chunk c, each quantized at most once, and that values are only read.
    """
    ranks = _run(programs)
    return _report(ranks, _check_shares(ranks), chunk_nbytes)


def check_all_gather(programs: Sequence[Program], chunk_nbytes: Sequence[int] | None = None) -> Report:
    """Prove that the programs make one all-gather.

    Check 1, 2 and 5 of `check`. Also check that in the end all ranks, rank c included, hold chunk c from the same
    payload, which rank c made from its own values.
    """
    ranks = _run(programs)
    return _report(ranks, _check_gathered(ranks), chunk_nbytes)


def check_broadcast(programs: Sequence[Program], root: int, chunk_nbytes: Sequence[int] | None = None) -> Report:
    """Prove that the programs make one broadcast.

    Check 1 and 2 of `check`. Also check that in the end all ranks but the root hold every chunk from an exact payload
    of the root's values, and that the root only reads its own.
    """
    ranks = _run(programs)
    for chunk in _touched(ranks):
        for rank in ranks:
            if (rank.rank == root) is (rank.value(chunk).origin is not None):
                raise ProgramError(f"chunk {chunk}: rank {rank.rank} ends with {rank.value(chunk).origin}")
            _check_from(rank.value(chunk), root, chunk)
    return _report(ranks, {}, chunk_nbytes, chunk_nbytes)


def check_exchange(programs: Sequence[Program], chunk_nbytes: Sequence[int] | None = None) -> Report:
    """Prove that the programs make one exchange.

    Check 1 and 2 of `check`, but let a payload be decoded over another chunk. Also check that in the end chunk c of
    rank r holds exactly the values that rank c had in chunk r.
    """
    ranks = _run(programs, moving=True)
    for rank in ranks:
        for chunk in _touched(ranks):
            _check_from(rank.value(chunk), chunk, rank.rank)
    return _report(ranks, {}, chunk_nbytes, chunk_nbytes)


def _check_from(content: _Content, source: int, chunk: int) -> None:
    """Raise unless these are one rank's values of a chunk, never quantized."""
    if content.quantizations != {source: 0} or content.chunk != chunk:
        held = f"chunk {content.chunk} of {content.quantizations}"
        raise ProgramError(f"chunk {chunk}: expected the values of rank {source}, exactly, got {held}")


def _run(programs: Sequence[Program], *, moving: bool = False) -> list[_Rank]:
    """Run the programs without values. `moving`: whether a payload may be decoded over a chunk other than its own."""
    _check_messages(programs)
    ranks = [_Rank(rank, program, moving) for rank, program in enumerate(programs)]
    _simulate(ranks)
    return ranks


def _report(
    ranks: Sequence[_Rank],
    quantizations: dict[int, int],
    chunk_nbytes: Sequence[int] | None,
    exact_nbytes: Sequence[int] | None = None,
) -> Report:
    for rank in ranks:
        for chunk, times in rank.quantized.items():
            if times > 1:
                raise ProgramError(f"chunk {chunk}: rank {rank.rank} quantizes it {times} times, expected one at most")
    sent_nbytes = None
    if chunk_nbytes is not None:
        if exact_nbytes is None and any(message.exact for rank in ranks for message in rank.sent):
            raise ValueError(
                "exact_nbytes: expected the lengths of exact payloads, which these programs send, got None"
            )
        sizes = (chunk_nbytes, exact_nbytes or ())
        sent_nbytes = tuple(
            sum(sizes[message.exact][chunk] for message in rank.sent for chunk in message.chunks) for rank in ranks
        )
    sent = tuple(message for rank in ranks for message in rank.sent)
    return Report(quantizations, tuple(len(rank.sent) for rank in ranks), sent_nbytes, sent)


class _Origin(NamedTuple):
    """The payload that the bits of values come from, named by the rank that made it. Equal origins mean equal bits."""

    rank: int
    slot: str

    def __str__(self) -> str:
        return f"the payload of slot {self.slot} of rank {self.rank}"


@dataclass(frozen=True, slots=True)
class _Content:
    """The meaning of a chunk's values, encoded or not: a sum of contributions."""

    chunk: int
    quantizations: dict[int, int]  # by contributing rank: how often its share was quantized
    origin: _Origin | None = None  # None: a rank's own values
    scaled: bool = False
    exact: bool = False  # how the payload is coded


@dataclass(slots=True)
class _Rank:
    """One rank in the simulation."""

    rank: int
    program: Program
    moving: bool = False
    position: int = 0
    level: int = 0
    slots: dict[str, tuple[_Content, ...]] = field(default_factory=dict)  # by chunk
    values: dict[int, _Content] = field(default_factory=dict)
    shares: dict[int, _Content] = field(default_factory=dict)  # the outputs of `Sum`, separate from the values
    sent: list[Message] = field(default_factory=list)
    quantized: Counter[int] = field(default_factory=Counter)  # how often, by chunk

    def fail(self, problem: str) -> ProgramError:
        step = self.program[self.position]
        return ProgramError(f"rank {self.rank}, step {self.position + 1} ({step}): {problem}")

    def read(self, slot: str) -> tuple[_Content, ...]:
        if slot not in self.slots:
            raise self.fail(f"slot {slot} is read before it is written")
        return self.slots[slot]

    def read_chunks(self, slot: str, chunks: tuple[int, ...]) -> tuple[_Content, ...]:
        contents = self.read(slot)
        held = tuple(content.chunk for content in contents)
        if len(held) != len(chunks) or (held != chunks and not self.moving):
            raise self.fail(f"slot {slot} holds chunk {_listed(held)}, not {_listed(chunks)}")
        return contents

    def write(self, slot: str, contents: tuple[_Content, ...]) -> None:
        if slot in self.slots:
            raise self.fail(f"slot {slot} is written twice")
        self.slots[slot] = contents

    def value(self, chunk: int) -> _Content:
        return self.values.get(chunk) or _Content(chunk, {self.rank: 0})

    def share(self, chunk: int) -> _Content:
        """Return this rank's share of a chunk, at first a copy of its own values."""
        return self.shares.get(chunk) or _Content(chunk, {self.rank: 0})

    def inputs(self, slots: Iterable[str], chunk: int, exact: bool) -> list[_Content]:
        contents = []
        for slot in slots:
            (content,) = self.read_chunks(slot, (chunk,))
            if content.exact != exact:
                raise self.fail(f"slot {slot} is {_coding(content.exact)}, and the others are {_coding(exact)}")
            contents.append(content)
        return contents

    def total(self, contents: Iterable[_Content], chunk: int, scaled: bool) -> _Content:
        """Return the sum of these contents, not encoded."""
        quantizations: dict[int, int] = {}
        parts = list(contents)
        for content in parts:
            for contributor, times in content.quantizations.items():
                if contributor in quantizations:
                    raise self.fail(f"the contribution of rank {contributor} is summed twice")
                quantizations[contributor] = times
        if any(content.scaled for content in parts):
            raise self.fail("what is summed up was scaled already")
        return _Content(chunk, quantizations, scaled=scaled)

    def write_encoded(self, contents: Iterable[_Content], slot: str, exact: bool) -> tuple[_Content, ...]:
        """Write contents into a slot, quantized once more unless `exact`."""
        coded = []
        for content in contents:
            quantizations = {rank: times + (not exact) for rank, times in content.quantizations.items()}
            coded.append(_Content(content.chunk, quantizations, _Origin(self.rank, slot), content.scaled, exact))
            self.quantized[content.chunk] += not exact
        self.write(slot, tuple(coded))
        return tuple(coded)


def _listed(chunks: tuple[int, ...]) -> str:
    return ", ".join(map(str, chunks))


def _coding(exact: bool) -> str:
    return "exact" if exact else "compressed"


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
    """Run every rank until it waits for a message, again and again, until all ranks are done."""
    messages: dict[tuple[int, int, str], tuple[tuple[_Content, ...], int]] = {}  # and the level of the send
    waiting_for: dict[tuple[int, int, str], _Rank] = {}
    runnable = list(reversed(ranks))
    while runnable:
        rank = runnable.pop()
        while rank.position < len(rank.program):
            step = rank.program[rank.position]
            if isinstance(step, Send):
                message = (rank.rank, step.peer, step.slot)
                contents = rank.read(step.slot)
                messages[message] = contents, rank.level
                chunks = tuple(content.chunk for content in contents)
                rank.sent.append(Message(rank.rank, step.peer, chunks, contents[0].exact))
                if message in waiting_for:
                    runnable.append(waiting_for.pop(message))
            elif isinstance(step, Receive):
                message = (step.peer, rank.rank, step.slot)
                if message not in messages:
                    waiting_for[message] = rank
                    break
                contents, level = messages[message]
                if step.level <= level:
                    raise rank.fail(f"expected a level above {level}, at which it is sent, got {step.level}")
                if step.exact != contents[0].exact:
                    raise rank.fail(f"expected {_coding(step.exact)}, got {_coding(contents[0].exact)}")
                rank.level = max(rank.level, step.level)
                rank.write(step.slot, contents)
            elif isinstance(step, Join):
                joined = [
                    rank.read_chunks(slot, (chunk,)) for slot, chunk in zip(step.inputs, step.chunks, strict=True)
                ]
                rank.write(step.slot, tuple(content for (content,) in joined))
            else:
                _compute(rank, step)
            rank.position += 1
    if waiting_for:
        raise _circular_wait(list(waiting_for.values()))


def _compute(rank: _Rank, step: Compute) -> None:
    chunk = step.chunk
    if isinstance(step, Encode):
        rank.write_encoded(map(rank.value, step.chunks), step.slot, step.exact)
    elif isinstance(step, Reduce):
        inputs = rank.inputs(step.inputs, chunk, step.exact)
        total = rank.total([rank.value(chunk), *inputs], chunk, step.final)
        (rank.values[chunk],) = rank.write_encoded([total], step.slot, step.exact)
    elif isinstance(step, Add):
        for chunk, content in zip(step.chunks, rank.read_chunks(step.slot, step.chunks), strict=True):
            rank.values[chunk] = rank.total([rank.value(chunk), content], chunk, scaled=False)
    elif isinstance(step, Sum):
        if chunk != rank.rank:
            raise rank.fail(f"chunk {chunk} is not in this rank's share")
        if not step.inputs:
            raise rank.fail("expected at least one slot")
        inputs = rank.inputs(step.inputs, chunk, rank.read(step.inputs[0])[0].exact)
        rank.shares[chunk] = rank.total([rank.share(chunk), *inputs], chunk, scaled=True)
    else:
        for chunk, content in zip(step.chunks, rank.read_chunks(step.slot, step.chunks), strict=True):
            rank.values[chunk] = content


def _circular_wait(stuck: Sequence[_Rank]) -> ProgramError:
    """Return an error that names the circle of waiting ranks.

    Every receive has its send, so a stuck rank waits for another stuck rank. Follow them until the circle closes.
    """
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


def _touched(ranks: Sequence[_Rank]) -> list[int]:
    """Return the chunks that are not empty."""
    steps = (step for rank in ranks for step in rank.program)
    return sorted({chunk for step in steps if not isinstance(step, (Send, Receive)) for chunk in step.chunks})


def _check_allreduce(ranks: Sequence[_Rank]) -> dict[int, int]:
    quantizations: dict[int, int] = {}
    for chunk in _touched(ranks):
        results = [rank.value(chunk) for rank in ranks]
        for number, result in enumerate(results):
            if result.origin is None:
                raise ProgramError(f"chunk {chunk}: rank {number} ends with its own values, not with the sum")
        _check_same_bits(chunk, results)
        quantizations[chunk] = _check_sum(chunk, results[0], len(ranks))
    return quantizations


def _check_shares(ranks: Sequence[_Rank]) -> dict[int, int]:
    quantizations: dict[int, int] = {}
    for chunk in _touched(ranks):
        if chunk >= len(ranks):
            raise ProgramError(f"chunk {chunk}: expected one in the share of one of the {len(ranks)} ranks")
        times = quantizations[chunk] = _check_sum(chunk, ranks[chunk].share(chunk), len(ranks))
        if times > 1:
            raise ProgramError(f"chunk {chunk}: a contribution is quantized {times} times, expected one at most")
    for rank in ranks:
        for chunk in rank.values:
            raise ProgramError(f"chunk {chunk}: rank {rank.rank} writes over its values, which are only to be read")
    return quantizations


def _check_gathered(ranks: Sequence[_Rank]) -> dict[int, int]:
    quantizations: dict[int, int] = {}
    for chunk in _touched(ranks):
        results = [rank.value(chunk) for rank in ranks]
        _check_same_bits(chunk, results)
        if results[0].origin is None or results[0].quantizations.keys() != {chunk}:
            raise ProgramError(f"chunk {chunk}: expected what rank {chunk} encoded, got {results[0].origin}")
        quantizations[chunk] = results[0].quantizations[chunk]
    return quantizations


def _check_same_bits(chunk: int, results: Sequence[_Content]) -> None:
    for number, result in enumerate(results):
        if result.origin != results[0].origin:
            raise ProgramError(
                f"chunk {chunk}: the bits differ: rank 0 ends with {results[0].origin}, "
                f"rank {number} with {result.origin}"
            )


def _check_sum(chunk: int, result: _Content, world: int) -> int:
    """Check that the sum is complete and scaled. Return how often its most quantized contribution is quantized."""
    missing = sorted(set(range(world)) - result.quantizations.keys())
    if missing:
        raise ProgramError(f"chunk {chunk}: the sum misses the contributions of ranks {missing}")
    if not result.scaled:
        raise ProgramError(f"chunk {chunk}: the sum is never scaled: expected a final reduce or a sum")
    return max(result.quantizations.values())
