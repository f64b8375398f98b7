"""Runs programs over a transport, from a Python thread: where ranks share no memory or there is no native library.

Operations run in the order of submission on one thread a group. Before each, all ranks tell each other what they are
about to do, so that ranks that have lost step find out instead of adding up each other's bytes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from torch_cgx.errors import CGXError, MismatchError
from torch_cgx.executors.programs import programs_for
from torch_cgx.kernels import Kernels, Piece, Rounding
from torch_cgx.layout import Layout, Slice
from torch_cgx.program import Decode, Encode, Receive, Reduce, Send
from torch_cgx.transports import Pending, Transport

__all__ = ["Job", "MessageExecutor"]

_TAGS = 1 << 30
_CLOSE_S = 5.0
_PHASES = ("encode", "wait", "reduce", "decode")


class Job:
    """One operation in the queue."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._ended = threading.Event()
        self._error: CGXError | None = None

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time; raises what it failed with."""
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def run(self) -> None:
        try:
            self._run()
        except CGXError as error:
            self._error = error
        except Exception as error:
            self._error = CGXError(f"the operation failed: {error}")
            self._error.__cause__ = error
        finally:
            self._ended.set()

    def fail(self, error: CGXError) -> None:
        self._error = error
        self._ended.set()

    @property
    def error(self) -> CGXError | None:
        return self._error


class MessageExecutor:
    """Runs jobs in order; most of them are programs."""

    def __init__(
        self, transport: Transport, kernels: Kernels, rank: int, world: int, algorithm: str, global_ranks: Sequence[int]
    ) -> None:
        self._transport = transport
        self._kernels = kernels
        self._rank = rank
        self._world = world
        self._algorithm = algorithm
        self._global_ranks = tuple(global_ranks)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._failure: CGXError | None = None
        self._next_tag = 0
        self.reset_stats()
        self._thread = threading.Thread(target=self._work, name="cgx-messages", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], None]) -> Job:
        job = Job(run)
        self._jobs.put(job)
        return job

    def allreduce(self, values: Tensor, layout: Layout, scale: float, rounding: Rounding, agreed: int) -> Job:
        """Queue the reduction of a flat tensor. `agreed`: a hash of the call, which must be the same on all ranks."""
        return self.submit(lambda: self._allreduce(values, layout, scale, rounding, agreed))

    def stats(self) -> dict[str, float]:
        """Bytes sent, and seconds by phase."""
        return dict(self._figures)

    def reset_stats(self) -> None:
        self._figures: dict[str, float] = dict.fromkeys(("bytes_sent", *(f"{phase}_s" for phase in _PHASES)), 0)

    def close(self) -> None:
        """End the thread, once what is queued is done. One that outlives the interpreter would abort the process."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_CLOSE_S)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._figures[phase] += time.perf_counter() - start

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._failure is not None:
                job.fail(self._failure)
            else:
                job.run()
                self._failure = job.error
            del job

    def _allreduce(self, values: Tensor, layout: Layout, scale: float, rounding: Rounding, agreed: int) -> None:
        self._agree(torch.tensor([rounding.op, agreed], dtype=torch.int64))
        for part in layout.slices:
            self._run_slice(values, part, scale, rounding)

    def _agree(self, mine: Tensor) -> None:
        """Compare with every peer what this rank is about to do, before any payload is on its way."""
        peers = [peer for peer in range(self._world) if peer != self._rank]
        tag = self._next_tags(1)
        leaving = [self._transport.send(mine.view(torch.uint8), peer, tag) for peer in peers]
        theirs = {peer: torch.empty_like(mine) for peer in peers}
        arriving = [self._transport.receive(theirs[peer].view(torch.uint8), peer, tag) for peer in peers]
        for message in arriving:
            with self._timed("wait_s"):
                message.wait()
        for peer in peers:
            self._compare(theirs[peer], mine, peer)
        for sent in leaving:
            sent.wait()

    def _next_tags(self, count: int) -> int:
        first = self._next_tag
        self._next_tag = (first + count) % _TAGS
        return first

    def _run_slice(self, values: Tensor, part: Slice, scale: float, rounding: Rounding) -> None:
        nonempty = tuple(chunk.nbytes > 0 for chunk in part.chunks)
        programs, slots = programs_for(self._algorithm, nonempty, self._world)
        program = programs[self._rank]
        messages = {
            slot: torch.empty(part.chunks[slots[slot].chunk].nbytes, dtype=torch.uint8)
            for slot in {step.slot for step in program}
        }
        first_tag = self._next_tags(len(slots))
        tags = {slot: first_tag + slots[slot].index for slot in messages}

        # All receives are posted first, so that no message waits for its reader.
        arriving = {
            step.slot: self._transport.receive(messages[step.slot], step.peer, tags[step.slot])
            for step in program
            if isinstance(step, Receive)
        }
        leaving: list[Pending] = []
        for step in program:
            if isinstance(step, Send):
                leaving.append(self._transport.send(messages[step.slot], step.peer, tags[step.slot]))
                self._figures["bytes_sent"] += messages[step.slot].numel()
            elif isinstance(step, Receive):
                with self._timed("wait_s"):
                    arriving[step.slot].wait()
            else:
                self._run_kernel(step, part.chunks[step.chunk].pieces, values, messages, scale, rounding)
        for message in leaving:
            message.wait()

    def _run_kernel(
        self,
        step: Encode | Reduce | Decode,
        pieces: Sequence[Piece],
        values: Tensor,
        messages: dict[str, Tensor],
        scale: float,
        rounding: Rounding,
    ) -> None:
        if isinstance(step, Encode):
            how = replace(rounding, rank=self._rank, stage=0)
            with self._timed("encode_s"):
                self._kernels.encode(pieces, values, messages[step.slot], how)
        elif isinstance(step, Reduce):
            how = replace(rounding, rank=self._rank, stage=1)
            inputs = [messages[slot] for slot in step.inputs]
            with self._timed("reduce_s"):
                self._kernels.reduce(pieces, values, inputs, messages[step.slot], scale, how)
        else:
            with self._timed("decode_s"):
                self._kernels.decode(pieces, messages[step.slot], values)

    def _compare(self, theirs: Tensor, mine: Tensor, peer: int) -> None:
        if not torch.equal(theirs, mine):
            raise MismatchError(
                f"rank {self._global_ranks[self._rank]} and rank {self._global_ranks[peer]} have lost step: their "
                f"compressed all_reduces number {int(mine[0])} and {int(theirs[0])} differ in shape, type, "
                "reduction, bits, bucket size or layers. All ranks must make the same calls, in one order."
            )
