"""Programs: the steps of one rank in one collective, as data.

A program is a tuple of steps over named payload slots. Slot names are local to each rank. A payload keeps its name
when it is sent, so that a receive meets the send of the same slot by that peer. A send never waits. A receive waits
for its send. A payload is either compressed, or exact: raw values. The step that writes or receives a slot says
which, and the steps that read it follow. So a rank's program alone holds all that the rank must know about other
nodes. `algorithms` makes programs, `checker` proves them right, and engines run them. Nothing here touches values or
carries bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "Add",
    "Compute",
    "Decode",
    "Encode",
    "Join",
    "Program",
    "Receive",
    "Reduce",
    "Send",
    "Slot",
    "Step",
    "Sum",
    "format_program",
]


class Slot(str):
    """The name of a payload: what it is, the rank if it comes from one alone, and the chunk."""

    what: str
    source: int | None
    chunk: int

    def __new__(cls, what: str, chunk: int, source: int | None = None) -> Slot:
        """Return the name. It is text, because text keeps its hash, and because programs print it."""
        slot = super().__new__(cls, f"{what}:{chunk}" if source is None else f"{what}:{source}>{chunk}")
        slot.what, slot.source, slot.chunk = what, source, chunk
        return slot


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode my values of a chunk, and of any chunks in `more`, into one slot."""

    chunk: int
    slot: Slot
    exact: bool = False
    more: tuple[int, ...] = ()

    @property
    def chunks(self) -> tuple[int, ...]:
        return (self.chunk, *self.more)

    def __str__(self) -> str:
        return f"encode  {_named(self.chunks)} into {self.slot}{_exactly(self.exact)}"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a slot's payload to a peer."""

    slot: Slot
    peer: int

    def __str__(self) -> str:
        return f"send    {self.slot} to {self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a peer's payload of this slot. The level (see `schedule`) is above that of the send."""

    slot: Slot
    peer: int
    level: int = 1
    exact: bool = False

    def __str__(self) -> str:
        return f"receive {self.slot} from {self.peer}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Add the decoded inputs to my values of a chunk, in order. Scale the sum if it is final.

    The sum is encoded into a slot, and my values become the decoded slot. The inputs are coded as the slot is.
    """

    inputs: tuple[Slot, ...]
    chunk: int
    slot: Slot
    final: bool = True
    exact: bool = False

    @property
    def chunks(self) -> tuple[int, ...]:
        return (self.chunk,)

    def __str__(self) -> str:
        what = f"chunk {self.chunk} with {', '.join(self.inputs) or 'nothing'} into {self.slot}"
        return f"reduce  {what}{_exactly(self.exact)}{'' if self.final else ', unscaled'}"


@dataclass(frozen=True, slots=True)
class Add:
    """Decode a slot and add it to my values of its chunks."""

    slot: Slot
    chunk: int
    more: tuple[int, ...] = ()

    @property
    def chunks(self) -> tuple[int, ...]:
        return (self.chunk, *self.more)

    def __str__(self) -> str:
        return f"add     {self.slot} to {_named(self.chunks)}"


@dataclass(frozen=True, slots=True)
class Sum:
    """Set my share to my values of a chunk plus the decoded inputs, in order, scaled and rounded once.

    No other rank needs the sum, so it is not encoded.
    """

    inputs: tuple[Slot, ...]
    chunk: int

    @property
    def chunks(self) -> tuple[int, ...]:
        return (self.chunk,)

    def __str__(self) -> str:
        return f"sum     chunk {self.chunk} with {', '.join(self.inputs) or 'nothing'}"


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode a slot over my values of its chunks."""

    slot: Slot
    chunk: int
    more: tuple[int, ...] = ()

    @property
    def chunks(self) -> tuple[int, ...]:
        return (self.chunk, *self.more)

    def __str__(self) -> str:
        return f"decode  {self.slot} over {_named(self.chunks)}"


@dataclass(frozen=True, slots=True)
class Join:
    """Concatenate the payloads of these slots, one chunk each, into another slot."""

    inputs: tuple[Slot, ...]
    chunks: tuple[int, ...]
    slot: Slot

    def __str__(self) -> str:
        return f"join    {', '.join(self.inputs)} into {self.slot}"


Compute: TypeAlias = Encode | Reduce | Add | Sum | Decode  # the steps that touch values
Step: TypeAlias = Send | Receive | Join | Compute
Program: TypeAlias = tuple[Step, ...]


def _named(chunks: tuple[int, ...]) -> str:
    return f"chunk{'s' * (len(chunks) > 1)} {', '.join(map(str, chunks))}"


def _exactly(exact: bool) -> str:
    return ", exact" if exact else ""


def format_program(program: Program) -> str:
    """Return the program as text, one numbered line per step."""
    width = len(str(len(program)))
    return "\n".join(f"{number:>{width}}  {step}" for number, step in enumerate(program, start=1))
