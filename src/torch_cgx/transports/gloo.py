"""Messages over Gloo groups of our own, so that they never meet the user's.

Gloo moves bytes on threads of its own. Its handles cannot be polled, and a wait that times out closes every
connection of the group. So `done` has a thread wait, and `close` lets a wait time out where messages are under way.

While a send writes to its connection, Gloo's thread cannot read from it and turns round and round instead, which at
10 Gbit/s took a third of all processor time. So there are two groups, one for each direction.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroupGloo

from torch_cgx.errors import CGXError, CGXTimeoutError, PeerLostError
from torch_cgx.transports import Pending

__all__ = ["GlooTransport", "hang_up"]

_CLOSING_TAG = (1 << 31) - 1
_CLOSE_S = 5.0


class _Watchers:
    """Threads that wait for the messages whose end somebody polls; as many as there are such messages at once."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def watch(self, message: _Message) -> None:
        with self._lock:
            self._messages.put(message)
            if self._idle > 0:
                self._idle -= 1
                return
            thread = threading.Thread(target=self._run, name="cgx-gloo-watcher", daemon=True)
            self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """A thread that outlived the interpreter would abort the process."""
        deadline = time.monotonic() + _CLOSE_S
        for _ in self._threads:
            self._messages.put(None)
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            message.finish()
            del message
            with self._lock:
                self._idle += 1


class _What(NamedTuple):
    """A message, as errors tell of it."""

    sends: bool
    peer: int
    tag: int
    nbytes: int


class _Message:
    def __init__(self, transport: GlooTransport, work: Any, payload: Tensor, what: _What, watchers: _Watchers) -> None:
        self._transport = transport
        self._work = work
        self._payload = payload  # Gloo works on its memory
        self._what = what  # told in words only where it fails
        self._watchers = watchers
        self._watched: threading.Event | None = None
        self._ended = False
        self._error: CGXError | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    def wait(self) -> None:
        if self._watched is not None:
            self._watched.wait()  # no longer than the watcher's own wait, which has the transport's timeout
        elif not self._ended:
            self.finish()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        if not self._ended and self._watched is None:
            self._watched = threading.Event()
            self._watchers.watch(self)
        return self._ended

    def finish(self) -> None:
        started = time.monotonic()
        try:
            self._work.wait(self._transport.timeout)
        except RuntimeError as error:
            self._error = self._translated(error, time.monotonic() - started)
        self._ended = True
        self._transport.forget(self)
        if self._watched is not None:
            self._watched.set()

    def _translated(self, error: RuntimeError, waited_s: float) -> CGXError:
        # After one message's time-out, which closes all connections, the others say "Application timeout".
        is_timeout = "imed out" in str(error) or "timeout" in str(error)
        kind, ended = (CGXTimeoutError, "Timed out") if is_timeout else (PeerLostError, "gave up")
        ours = kind(
            f"{self._transport.in_words(self._what)}: {ended} after {waited_s:.1f} s. Look at that rank's output, "
            f"then restart all ranks. Gloo says: {error}"
        )
        ours.__cause__ = error
        return ours


class GlooTransport:
    """Implements `torch_cgx.transports.Transport`."""

    def __init__(self, store: Store, rank: int, world: int, timeout: timedelta, global_ranks: Sequence[int]) -> None:
        self._upward: Any = ProcessGroupGloo(PrefixStore("upward", store), rank, world, timeout)
        self._downward: Any = ProcessGroupGloo(PrefixStore("downward", store), rank, world, timeout)
        self.timeout = timeout
        self.tags = _CLOSING_TAG
        self._rank = rank
        self._me = global_ranks[rank]
        self._global_ranks = tuple(global_ranks)
        self._messages: set[_Message] = set()  # under way: Gloo would stop reading where nobody holds a receive
        self._watchers = _Watchers()
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()

    def send(self, payload: Tensor, peer: int, tag: int) -> Pending:
        return self._start(payload, _What(True, peer, tag, payload.numel()))

    def receive(self, payload: Tensor, peer: int, tag: int) -> Pending:
        return self._start(payload, _What(False, peer, tag, payload.numel()))

    def in_words(self, what: _What) -> str:
        message = f"message {what.tag} of {what.nbytes} bytes"
        peer = self._global_ranks[what.peer]
        done = f"could not send {message} to rank {peer}" if what.sends else f"waited for {message} from rank {peer}"
        return f"rank {self._me} {done}"

    def close(self) -> None:
        if os.getpid() != self._pid:  # a forked child has no threads and must not touch connections
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            upward, downward = self._upward, self._downward
            self._upward = self._downward = None
            under_way = any(not message.ended for message in self._messages)
            self._messages.clear()
        if under_way:
            hang_up(upward)
            hang_up(downward)
        self._watchers.close()  # connections close with the last reference to their group

    def _start(self, payload: Tensor, what: _What) -> Pending:
        upward = (self._rank < what.peer) == what.sends
        with self._lock:
            if self._closed:
                raise CGXError(f"{self.in_words(what)}: the group has been destroyed")
            group = self._upward if upward else self._downward
            try:
                start = group.send if what.sends else group.recv
                work = start([payload], what.peer, what.tag)
            except RuntimeError as error:  # the connection is gone already
                raise PeerLostError(
                    f"{self.in_words(what)}: {error}. Look at that rank's output, then restart all ranks."
                ) from error
            message = _Message(self, work, payload, what, self._watchers)
            self._messages.add(message)
        return message

    def forget(self, message: _Message) -> None:
        """It has ended."""
        with self._lock:
            self._messages.discard(message)


def hang_up(group: Any) -> None:
    """Close all connections of a Gloo group at once: whoever waits, here or on a peer, raises.

    The first wait that times out closes them all; one for a peer that is gone already raises, and closes nothing.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([nothing], peer, _CLOSING_TAG).wait(timedelta(milliseconds=1))
