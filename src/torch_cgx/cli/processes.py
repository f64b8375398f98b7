"""The ranks of a benchmark as separate processes: starts them, collects their messages, and leaves none behind.

The parent starts `python -m torch_cgx.cli.processes module:function` once per rank. Parent and child exchange lines of
JSON: the arguments go to the child's stdin, and progress and one result (or one error) come back on a separate pipe, so
that output printed by libraries cannot disturb them. This module does not know what the ranks measure.

No process is left behind. A child whose stdin ends exits at once, because its parent is gone for whatever reason. A
parent that is interrupted or sees a rank fail ends all its children. Children run in sessions of their own, so Ctrl-C
reaches only the parent, and only the parent ends them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from torch_cgx.cli.hosts import Node
from torch_cgx.cli.registry import CommandFailed

Message = dict[str, Any]
Report = Callable[[Message], None]
"""The callback with which a rank reports progress to its parent."""

MASTER_ADDR = "127.0.0.1"
GRACE_S = 2.0
"""The time in which the other ranks may raise their own errors after one failed, and may end after SIGTERM."""


class TooSlow(Exception):
    """Ranks did not finish within the limit and were ended."""


class RankFailed(Exception):
    """A rank raised, or ended without a result."""

    def __init__(self, rank: int, message: str, details: str = "") -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.details = details


def run_ranks(
    target: str,
    arguments: Mapping[str, object],
    nproc: int,
    on_progress: Callable[[int, Message], None],
    nodes: Sequence[Node] = (),
    limit_s: float | None = None,
) -> list[Message]:
    """Call `module:function` with (arguments, report) on `nproc` ranks, and return each rank's result.

    With `nodes`, run `nproc` ranks on each of them, numbered node by node like torchrun. Raises `TooSlow` if that takes
    longer than `limit_s`.
    """
    from torch._C._distributed_c10d import TCPStore

    def make_store() -> TCPStore:
        timeout = timedelta(minutes=5) if limit_s is None else timedelta(seconds=limit_s)
        return TCPStore(MASTER_ADDR, 0, is_master=True, wait_for_workers=False, timeout=timeout)

    # The parent holds the store, so there is no port to guess and no race for it.
    store = nodes[0].call(make_store) if nodes else make_store()
    ranks: list[_Rank] = []
    try:
        for node in nodes or (None,):
            for local_rank in range(nproc):
                place = _Place(len(ranks), local_rank, nproc, max(1, len(nodes)) * nproc, store.port, node)
                ranks.append(_Rank(target, arguments, place))
        failed = _listen(ranks, on_progress, limit_s)
        if failed is not None:
            raise failed.failure()
        return [child.result for child in ranks if child.result is not None]
    finally:
        _end(ranks)


@dataclass(frozen=True, slots=True)
class _Place:
    """The node and numbers of a rank, and the store where it meets the others."""

    rank: int
    local_rank: int
    nproc: int  # on its node
    world: int
    store_port: int
    node: Node | None

    def command(self, arguments: list[str]) -> list[str]:
        return arguments if self.node is None else self.node.command(arguments)

    def environ(self) -> dict[str, str]:
        import torch_cgx

        # The parent may have found the package by means other than its environment.
        package_root = str(Path(str(torch_cgx.__file__)).resolve().parents[1])
        search_path = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "OMP_NUM_THREADS": "1",  # as torchrun does; the user's own value wins
            # Nodes have no name service, and torch would warn about that on every rank.
            **({} if self.node is None else {"TORCH_CPP_LOG_LEVEL": "ERROR"}),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(search_path),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "MASTER_ADDR": MASTER_ADDR,
            "MASTER_PORT": str(self.store_port),
            **({} if self.node is None else self.node.environ()),
        }


class _Rank:
    """The parent's view of one child."""

    def __init__(self, target: str, arguments: Mapping[str, object], place: _Place) -> None:
        self.rank = place.rank
        self.result: Message | None = None
        self.error: Message | None = None
        read_fd, write_fd = os.pipe()
        self.messages: IO[bytes] = os.fdopen(read_fd, "rb", buffering=0)
        self.unread = b""
        try:
            self.process = subprocess.Popen(
                place.command([sys.executable, "-m", __spec__.name, target, str(write_fd)]),
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=(write_fd,),
                env=place.environ(),
                start_new_session=True,
            )
        finally:
            os.close(write_fd)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments).encode() + b"\n")
        self.process.stdin.flush()

    def read(self) -> list[Message] | None:
        """Return the messages that have arrived, or None once the child has closed its end."""
        data = os.read(self.messages.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self.unread = (self.unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def failure(self) -> RankFailed:
        if self.error is not None:
            return RankFailed(self.rank, self.error["message"], self.error["details"])
        try:
            code: int | None = self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        return RankFailed(self.rank, f"it ended with exit code {code} and no result")


def _listen(
    ranks: list[_Rank], on_progress: Callable[[int, Message], None], limit_s: float | None = None
) -> _Rank | None:
    """Read messages until every rank has closed its pipe, or the grace period after a failure is over.

    Return the first rank that failed: its error tells the cause, while the others only lost a peer.
    """
    failed: _Rank | None = None
    deadline = None if limit_s is None else time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for child in ranks:
            selector.register(child.messages, selectors.EVENT_READ, child)
        while selector.get_map():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                if failed is None:
                    raise TooSlow(f"no result within {limit_s:g} s")
                break
            for key, _ in selector.select(left):
                child = key.data
                messages = child.read()
                for message in messages or ():
                    if message["kind"] == "result":
                        child.result = message["value"]
                    elif message["kind"] == "error":
                        child.error = message
                    else:
                        on_progress(child.rank, message["value"])
                if messages is None:
                    selector.unregister(child.messages)
                lost = messages is None and child.result is None
                if failed is None and (child.error is not None or lost):
                    failed, deadline = child, time.monotonic() + GRACE_S
    return failed


def _end(ranks: list[_Rank]) -> None:
    """Give finished ranks the grace period to exit on their own, then end the remaining ones."""
    deadline = time.monotonic() + (GRACE_S if all(child.result is not None for child in ranks) else 0.0)
    for end in (lambda process: None, subprocess.Popen.terminate, subprocess.Popen.kill):
        for child in ranks:
            if child.process.poll() is None:
                end(child.process)
        for child in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + GRACE_S
    for child in ranks:
        child.messages.close()
        assert child.process.stdin is not None
        child.process.stdin.close()


def join_world(timeout_s: float) -> None:
    """Make the default group of a rank, over gloo, for the benchmark's own coordination. It is not measured."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def _exit_with_parent() -> None:
    # os.read, not sys.stdin: a thread that is blocked in a buffered read would block the exit.
    while os.read(0, 1):
        pass
    os._exit(1)


def _read_line(fd: int) -> bytes:
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _child(target: str, fd: int) -> int:
    arguments = json.loads(_read_line(0))
    threading.Thread(target=_exit_with_parent, daemon=True, name="exit-with-parent").start()
    with os.fdopen(fd, "w", encoding="utf-8") as pipe:

        def send(kind: str, **fields: object) -> None:
            pipe.write(json.dumps({"kind": kind, **fields}) + "\n")
            pipe.flush()

        try:
            module, _, function = target.partition(":")
            run = getattr(importlib.import_module(module), function)
            send("result", value=run(arguments, lambda value: send("progress", value=value)))
        except CommandFailed as error:
            send("error", message=str(error), details="")
            return 1
        except Exception as error:
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            send("error", message=message, details=traceback.format_exc())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(_child(sys.argv[1], int(sys.argv[2])))
