"""What happens before what: on CPU tensors, where all runs in the order of the program, a missing wait shows here.

Streams, threads of the host and what goes on beside those are *actors*, each with a vector clock: of every actor how
many of its steps have surely happened. A thread that gives a stream work, an event and a host that waits join clocks;
nothing else does, so threads of the host know of each other only by these. Every step names the memory that it reads
and writes, and is compared with the earlier steps on these bytes: one of two writes, or of a write and a read, that did
not surely happen before the other is a race, whatever the bytes are this time.

Memory belongs to the stream that it was allocated on. When nobody refers to it any more, torch's allocator may give it
to the next who asks on that stream: so other streams must be done with it by then in that stream's view, or `keep`
must have told the allocator of them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Actor", "Clock", "Order", "Race", "Span", "span"]

Clock = dict["Actor", int]


class Race(AssertionError):
    """Two steps in no order, of which one writes; or memory that was given back too early."""


@dataclass(eq=False)
class Actor:
    """Does one thing after another."""

    name: str
    clock: Clock = field(default_factory=dict, repr=False)

    def step(self) -> int:
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def learn(self, clock: Clock) -> None:
        for actor, steps in clock.items():
            self.clock[actor] = max(steps, self.clock.get(actor, 0))


class Span(NamedTuple):
    """Bytes of memory, by address."""

    begin: int
    end: int

    def overlaps(self, other: Span) -> bool:
        return self.begin < other.end and other.begin < self.end

    def covers(self, other: Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end


def span(tensor: Tensor) -> Span:
    """From a tensor's first byte to its last."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return Span(begin, begin)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    numel = 1 + sum((length - 1) * stride for length, stride in steps)
    return Span(begin, begin + numel * tensor.element_size())


@dataclass(frozen=True, slots=True)
class _Access:
    actor: Actor
    step: int
    what: str
    writes: bool
    where: Span

    def __str__(self) -> str:
        return f"{self.what} on {self.actor.name}, which {'writes' if self.writes else 'reads'} it,"


@dataclass(eq=False, slots=True)
class _Block:
    """What the allocator gave at once. `owner` None: pinned memory, which torch keeps while copies use it."""

    where: Span
    owner: Actor | None
    kept: set[Actor] = field(default_factory=set)


class Order:
    """One rank's device and host. `races` has what was found, raised or not: what was freed too early is only noted."""

    def __init__(self, caller: Actor) -> None:
        self._caller = caller  # who has allocated what nobody was seen to allocate
        self._lock = threading.RLock()
        self._here = threading.local()
        self._accesses: list[_Access] = []
        self._blocks: dict[int, _Block] = {}
        self._freed: deque[tuple[_Block, Clock]] = deque()
        self.races: list[str] = []

    @property
    def host(self) -> Actor:
        """The calling thread."""
        if not hasattr(self._here, "host"):
            self._here.host = Actor(f"the host's {threading.current_thread().name}")
        host: Actor = self._here.host
        return host

    def check(self) -> None:
        """Raise if anything was found so far."""
        with self._lock:
            self._settle()
            if self.races:
                raise Race(self.races[0])

    # ---- what orders ----

    def record(self, stream: Actor) -> Clock:
        with self._lock:
            self._settle()
            stream.learn(self.host.clock)
            return dict(stream.clock)

    def hold_back(self, stream: Actor, event: Clock) -> None:
        with self._lock:
            self._settle()
            stream.learn(event)

    def host_waits(self, event: Clock) -> None:
        with self._lock:
            self._settle()
            self.host.learn(event)

    def keep(self, tensor: Tensor, stream: Actor) -> None:
        with self._lock:
            self._settle()
            block = self._block_of(tensor)
            if block is not None:
                block.kept.add(stream)

    # ---- what uses memory ----

    def enqueue(
        self, stream: Actor, what: str, reads: Iterable[Tensor | Span] = (), writes: Iterable[Tensor | Span] = ()
    ) -> None:
        """The calling thread gives a stream something to do."""
        with self._lock:
            stream.learn(self.host.clock)
            self._step(stream, what, reads, writes)

    def on_host(self, what: str, writes: Iterable[Tensor | Span]) -> Callable[[], None]:
        """The host begins something that goes on beside it and is done when the result is called."""
        with self._lock:
            begun = Actor("the host", dict(self.host.clock))
            self._step(begun, what, (), writes)
            return partial(self.host_waits, begun.clock)

    def _step(self, actor: Actor, what: str, reads: Iterable[Tensor | Span], writes: Iterable[Tensor | Span]) -> None:
        self._settle()
        step = actor.step()
        for things, is_write in ((reads, False), (writes, True)):
            for thing in things:
                if isinstance(thing, Tensor):
                    self._block_of(thing)
                    thing = span(thing)
                if thing.begin < thing.end:
                    self._access(_Access(actor, step, what, is_write, thing))
        if self.races:
            raise Race(self.races[0])

    def _access(self, new: _Access) -> None:
        known, kept = new.actor.clock, []
        for old in self._accesses:
            if not old.where.overlaps(new.where):
                kept.append(old)
                continue
            ordered = known.get(old.actor, 0) >= old.step
            if not ordered and (old.writes or new.writes):
                self.races.append(
                    f"{old} and {new} have {min(old.where.end, new.where.end) - max(old.where.begin, new.where.begin)} "
                    f"bytes in common, and nothing makes {new.actor.name} wait for {old.actor.name}"
                )
            # Whoever comes after this step comes after the older one, too.
            if not (ordered and new.where.covers(old.where) and (new.writes or not old.writes)):
                kept.append(old)
        self._accesses = [*kept, new]

    # ---- whose memory it is ----

    def allocated(self, tensor: Tensor, owner: Actor | None) -> Tensor:
        with self._lock:
            self._settle()
            self._block_of(tensor, owner)
        return tensor

    def memory_at(self, address: int) -> Span:
        """All that was allocated there, for those who have but a pointer."""
        with self._lock:
            self._settle()
            return self._blocks[address].where

    def _block_of(self, tensor: Tensor, *owners: Actor | None) -> _Block | None:
        """Its block; new if it has not been seen, of this owner."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        if not storage.nbytes():
            return None
        if begin not in self._blocks:
            (owner,) = owners or (self._caller,)
            block = self._blocks[begin] = _Block(Span(begin, begin + storage.nbytes()), owner)
            self._accesses = [old for old in self._accesses if not old.where.overlaps(block.where)]
            weakref.finalize(storage, self._note_freed, block).atexit = False
        return self._blocks[begin]

    def _note_freed(self, block: _Block) -> None:
        """On whatever thread, with whatever locks: looked at before anything else happens."""
        self._freed.append((block, dict(self.host.clock)))

    def _settle(self) -> None:
        while self._freed:
            block, known = self._freed.popleft()
            if self._blocks.get(block.where.begin) is block:
                del self._blocks[block.where.begin]
            owner = block.owner
            if owner is not None:
                known = {actor: max(known.get(actor, 0), owner.clock.get(actor, 0)) for actor in {*known, *owner.clock}}
            for old in self._accesses:
                late = old.where.overlaps(block.where) and known.get(old.actor, 0) < old.step
                if late and old.actor is not owner and old.actor not in block.kept:
                    if owner is not None:
                        self.races.append(
                            f"memory of {owner.name} was freed while {old} may still use it: {owner.name} does not "
                            f"wait for {old.actor.name}, and keep was not told of it"
                        )
                    elif old.actor.name == "the host":
                        self.races.append(f"pinned memory was freed while {old} may still use it")
            self._accesses = [old for old in self._accesses if not old.where.overlaps(block.where)]

    # ---- torch's own operations ----

    @contextmanager
    def watching(self, current: Callable[[], Actor]) -> Iterator[None]:
        """Meanwhile what the calling thread asks of torch is a step of the stream that is current then."""
        if getattr(self._here, "watched", False):
            yield
            return
        self._here.watched = True
        try:
            with _Watch(self, current):
                yield
        finally:
            self._here.watched = False

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Meanwhile torch's operations on this thread are the stand-in's own."""
        before = getattr(self._here, "unseen", False)
        self._here.unseen = True
        try:
            yield
        finally:
            self._here.unseen = before

    @property
    def is_unseen(self) -> bool:
        return getattr(self._here, "unseen", False)


class _Watch(TorchDispatchMode):
    def __init__(self, order: Order, current: Callable[[], Actor]) -> None:
        super().__init__()
        self._order, self._current = order, current

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._order.is_unseen:
            return result
        with self._order.unseen():
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Before or after it ran is the same, as nothing else ran meanwhile."""
        stream = self._current()
        reads, writes = [], []
        for number, argument in enumerate(func._schema.arguments):
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(each for each in tree_leaves(given) if _has_memory(each))
        there = {each.untyped_storage().data_ptr() for each in (*reads, *writes)}
        results = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        fresh = [e for e in results if _has_memory(e) and e.untyped_storage().data_ptr() not in there]
        for each in fresh:
            self._order.allocated(each, stream)
        if writes or fresh or not (results and func.is_view):  # all others are views
            self._order.enqueue(stream, str(func), reads, [*writes, *fresh])


def _has_memory(thing: Any) -> bool:
    """On the device. Tensors without dimensions are numbers of the host here, which travel with the launch."""
    return isinstance(thing, Tensor) and thing.layout is torch.strided and thing.dim() > 0 and thing.numel() > 0
