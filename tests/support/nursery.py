"""The process that real-process tests fork their ranks from.

Importing torch takes seconds, forking a process that has imported it takes milliseconds. So one nursery a
test session imports everything once and then, for each job that `harness` sends it, forks the ranks, waits
for them no longer than the job allows, and answers with what became of each. It knows nothing of pytest and
asserts nothing.

The nursery itself never runs a collective and never starts a thread: a fork would carry over only half of
them. The store that ranks meet at lives in a process of its own, so that any rank may be killed.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import warm

if TYPE_CHECKING:
    from torch_cgx.cli.hosts import Node

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed._functional_collectives",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch._dynamo",
    "pytest",
    "torch_cgx",
    # What `init_process_group("cgx")` and the hooks import: half a second per rank if each does it after the fork.
    "torch_cgx.group.process_group",
    "torch_cgx.ddp",
    "torch_cgx.fsdp",
)
WITHOUT_ENGINE = "TEST_WITHOUT_ENGINE"  # set: groups find no native engine, and go over Gloo
STACKS_SIGNAL = signal.SIGUSR1
POLL_S = 0.004
STACKS_S = 5.0  # how long a rank may take to write down where it hangs before it is killed
LOG_TAIL_NBYTES = 20_000
END_S = 30.0  # a rank that is stopped never ends


@dataclass(frozen=True)
class Job:
    """What N ranks shall do. `function_*` names a module-level function: code is never sent."""

    function_file: str
    function_module: str
    function_name: str
    arguments: tuple[Any, ...]
    world: int
    backend: str | None  # None: the function starts its group itself
    timeout_s: float
    group_timeout_s: float
    environ: dict[str, str]
    rank_environ: dict[int, dict[str, str]]
    destroy: bool  # destroy the group after the function has returned
    real_exit: bool  # leave through the interpreter's own shutdown, not os._exit
    grace_s: float  # how long the others may go on after a rank has failed
    nodes: tuple[Node, ...] = ()  # by rank: the test host it lives on; empty: all on this one
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))


@dataclass(frozen=True)
class Serve:
    """Fork whole programs for those who run the script of this folder (see `warm`)."""

    folder: Path


@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    rank: int
    exit_code: int  # negative: killed by that signal, as in subprocess
    timed_out: bool  # the nursery had to kill it
    seconds: float
    result: bytes | None  # the pickled return value
    error_kinds: tuple[str, ...]  # names of the raised exception's class and of its bases
    message: str
    trace: str
    after_mark_s: float | None  # from `Rank.mark` (its own, else anyone's) to the exception
    log: str  # the end of what it wrote to stdout and stderr

    @property
    def ok(self) -> bool:
        return self.result is not None and self.exit_code == 0 and not self.timed_out

    @property
    def value(self) -> Any:
        return None if self.result is None else pickle.loads(self.result)


@dataclass(frozen=True)
class Rank:
    """What a test function gets to know about itself."""

    rank: int
    world: int
    backend: str | None
    group_timeout_s: float
    store: Any  # a torch.distributed.Store of this job, for tests that must agree outside the group
    scratch: Path

    def start_group(self, backend: str | None = None, name: str = "group", timeout_s: float = 0.0) -> None:
        """init_process_group, as a launcher's script would call it; `name` keeps repeated starts apart."""
        import torch.distributed as dist

        backend = backend or self.backend
        if backend == "cgx":
            importlib.import_module("torch_cgx")
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(name, self.store),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=timeout_s or self.group_timeout_s),
        )

    def meet(self, name: str, timeout_s: float = 60.0) -> None:
        """Wait for all ranks through the store alone, leaving the group untouched."""
        self.store.set(f"meet/{name}/{self.rank}", "")
        self.store.wait([f"meet/{name}/{r}" for r in range(self.world)], timedelta(seconds=timeout_s))

    def end(self, wait: bool) -> None:
        """Say that this rank's function has ended and, if asked, wait until all have, however they ended.

        A gloo group that is destroyed while a peer still reads from it can reset the connection under it.
        """
        (self.scratch / f"{self.rank}.ended").touch()
        deadline = time.monotonic() + END_S
        while wait and len(list(self.scratch.glob("*.ended"))) < self.world and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def mark(self) -> None:
        """Note the time of what is about to happen, so that ranks' errors can be timed from it."""
        partial = self.scratch / f"{self.rank}.marking"
        partial.write_text(str(time.monotonic()))  # one clock for all processes of a host
        partial.rename(self.scratch / f"{self.rank}.mark")

    def since_mark(self) -> float | None:
        now = time.monotonic()
        own = self.scratch / f"{self.rank}.mark"
        marks = [own] if own.exists() else list(self.scratch.glob("*.mark"))
        return now - max(float(mark.read_text()) for mark in marks) if marks else None


def preload() -> None:
    """Import what ranks need, before anything waits for them: it can take longer than a group's time-out."""
    for name in PRELOADED:
        # What is missing or broken must fail in the rank that needs it, not here.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def main(command_fd: int) -> int:
    # A shell's background jobs ignore it, and Python then leaves it ignored; some tests are about Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    preload()
    imported = _finalizers_at_exit()
    for finalizer in imported:
        finalizer.atexit = False
    nursery_pid = os.getpid()
    store_pid, store_port = _start_store()
    # A collection in a forked rank would touch, and so copy, every page of every imported module.
    gc.collect()
    gc.freeze()
    connection = Connection(command_fd)
    connection.send_bytes(b"ready")
    try:
        while True:
            try:
                job: Job | Serve = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return 0
            if isinstance(job, Serve):
                program = _serve(job.folder, connection)
                if program is not None:
                    program()
                    return 0
                continue
            scratch = Path(tempfile.mkdtemp(prefix="cgx-test-"))
            # Test hosts reach nothing but each other, so their store is in the first of them.
            job_store = _start_store(job.nodes[0]) if job.nodes else None
            pids: dict[int, int] = {}
            for rank in range(job.world):
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    if job.real_exit:
                        for finalizer in imported:
                            finalizer.atexit = True
                    code = _live(job, rank, job_store[1] if job_store else store_port, scratch)
                    if not job.real_exit:
                        _leave(code)
                    return code
                pids[rank] = pid
            outcomes = _watch(job, pids, scratch, connection)
            if job_store:
                _end_store(job_store[0])
            shutil.rmtree(scratch, ignore_errors=True)
            connection.send_bytes(pickle.dumps(outcomes))
    finally:
        if os.getpid() == nursery_pid:
            _end_store(store_pid)


def _serve(folder: Path, connection: Connection) -> Callable[[], None] | None:
    """Fork a server of whole programs and answer with its script; in each program, return what runs it."""
    address = folder / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(str(address))
            listener.listen(64)
        except OSError:  # a path may have 107 characters
            connection.send_bytes(sys.executable.encode())
            return None
        script = warm.write_script(folder, address)
        if os.fork() == 0:
            connection.close()
            given = ("", str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
            return warm.serve(listener, [path for path in sys.path if path not in given], str(script))
    connection.send_bytes(str(script).encode())
    return None


def _finalizers_at_exit() -> list[weakref.finalize[..., Any]]:
    """Return the finalizers that imported modules want to run at exit.

    Nearly all of them unregister torch's operators, one by one: eight thousand page faults and 50 ms of processor time
    per rank, for memory that the process gives back anyway. Ranks that take the interpreter's own way out run them.
    """
    registry: dict[weakref.finalize[..., Any], Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    return [finalizer for finalizer in registry if finalizer.atexit]


def _start_store(node: Node | None = None) -> tuple[int, int]:
    """Fork the process that serves the store, here or on a test host; return its pid and port."""
    read, write = os.pipe()
    nursery_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        import torch.distributed as dist

        if node is not None:
            node.enter()
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        while os.getppid() == nursery_pid:
            time.sleep(0.5)
        os._exit(0)
    os.close(write)
    port = int(os.read(read, 16))
    os.close(read)
    return pid, port


def _end_store(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _live(job: Job, rank: int, store_port: int, scratch: Path) -> int:
    """One rank's life, in the forked process, up to its exit; returns the exit code."""
    os.setpgid(0, 0)  # so that whatever it starts can be killed with it
    log = os.open(scratch / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.world), LOCAL_RANK=str(rank))
    if job.nodes:
        os.environ.update(job.nodes[rank].environ(), LOCAL_RANK=str(job.nodes[:rank].count(job.nodes[rank])))
    os.environ.update(job.environ)
    os.environ.update(job.rank_environ.get(rank, {}))
    sys.path[:] = job.path
    result: bytes | None = None
    kinds: tuple[str, ...] = ()
    message = trace = ""
    after_mark_s: float | None = None
    me: Rank | None = None
    try:
        import torch
        import torch.distributed as dist

        if os.environ.get(WITHOUT_ENGINE):
            from torch_cgx import _native

            _native.shares_memory = lambda: False
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        address = "127.0.0.1"
        if job.nodes:
            job.nodes[rank].enter()
            address = job.nodes[0].address
        store = dist.TCPStore(address, store_port, None, timeout=timedelta(seconds=job.timeout_s))
        own = dist.PrefixStore(scratch.name, store)
        me = Rank(rank, job.world, job.backend, job.group_timeout_s, own, scratch)
        function = _find_function(job)
        if job.backend is not None:
            me.meet("all are here")  # before the group's time-out, which may be short, begins
            me.start_group()
        result = pickle.dumps(function(me, *job.arguments))
        destroy = job.destroy and dist.is_initialized()
        me.end(wait=destroy)
        if destroy:
            dist.destroy_process_group()
    except BaseException as error:
        if me is not None:
            after_mark_s = me.since_mark()
            me.end(wait=False)
        result = None
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        message = str(error)
        trace = traceback.format_exc()
    partial = scratch / f"{rank}.partial"
    partial.write_bytes(pickle.dumps((result, kinds, message, trace, after_mark_s)))
    partial.rename(scratch / f"{rank}.result")
    return 0 if result is not None else 1


def _find_function(job: Job) -> Callable[..., Any]:
    module = sys.modules.get(job.function_module)
    if module is None:
        spec = importlib.util.spec_from_file_location(job.function_module, job.function_file)
        if spec is None or spec.loader is None:
            raise ImportError(f"no module in {job.function_file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.function_module] = module
        spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, job.function_name)
    return function


def _leave(code: int) -> None:
    """Exit as the interpreter does as far as users' code can see, without tearing down every module."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _watch(job: Job, pids: dict[int, int], scratch: Path, connection: Connection) -> list[Outcome]:
    """Wait for all ranks, at most until the deadline; nothing that they started outlives this call."""
    started = time.monotonic()
    deadline = started + job.timeout_s
    exits: dict[int, tuple[int, float]] = {}
    timed_out: set[int] = set()
    while len(exits) < job.world:
        for rank, pid in pids.items():
            if rank in exits:
                continue
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # Still a zombie, so its process group cannot have been given to anyone else.
            _kill_group(pid)
            _, status = os.waitpid(pid, 0)
            exits[rank] = (os.waitstatus_to_exitcode(status), time.monotonic() - started)
            (scratch / f"{rank}.ended").touch()  # one that was killed did not say so itself
            if exits[rank][0] != 0:
                deadline = min(deadline, time.monotonic() + job.grace_s)
        # Nobody speaks during a job: readable means that the test session is gone.
        gone = connection.poll(POLL_S)
        if (gone or time.monotonic() > deadline) and not timed_out:
            timed_out = set(pids) - set(exits)
            for rank in timed_out:
                os.kill(pids[rank], STACKS_SIGNAL)
            time.sleep(STACKS_S)
            for rank in timed_out:
                _kill_group(pids[rank])
    return [_outcome(rank, *exits[rank], rank in timed_out, scratch) for rank in range(job.world)]


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group may not be there yet, the rank itself always is
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _outcome(rank: int, exit_code: int, seconds: float, timed_out: bool, scratch: Path) -> Outcome:
    told: Any = (None, (), "", "", None)  # a rank that was killed has told nothing
    with contextlib.suppress(FileNotFoundError):
        told = pickle.loads((scratch / f"{rank}.result").read_bytes())
    log = b""
    with contextlib.suppress(FileNotFoundError):
        log = (scratch / f"{rank}.log").read_bytes()[-LOG_TAIL_NBYTES:]
    result, kinds, message, trace, after_mark_s = told
    text = log.decode(errors="replace")
    return Outcome(rank, exit_code, timed_out, seconds, result, kinds, message, trace, after_mark_s, text)
