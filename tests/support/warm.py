"""Fork whole programs from a process that has imported torch, where a test would start an interpreter for each.

To start an interpreter that imports torch takes 3 s of a core. Launchers start one per rank, and are often one
themselves. They are given a script in its place, which runs `warm_client`. It asks the server, which is a fork of the
nursery, for a fork of its own that lives as the client would have:

1. The client sends its arguments, environment, working directory and cores, and its open files.
2. The server forks. The child closes what it has, takes the client's files under their numbers, enters the client's
   network namespace, and runs the program as `__main__`, up to the interpreter's own exit.
3. The server passes on the signals that the client got, and tells it how the program has ended. If the client has
   gone, the server kills the program.

What differs from a new interpreter: modules that the nursery has imported are there already, and the program's parent
is the server. So tests of imports, and those that look for processes by their parents, start real interpreters.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import fcntl
import functools
import io
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import struct
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import warm_client

LIMIT_S = 30.0  # for a client's request to be complete
LOOK_S = 0.5  # how often it looks whether the nursery is there
CLONE_NEWNET = 0x40000000
# What C libraries read when they are loaded. Where a program would have it otherwise, it gets a new interpreter.
READ_AT_IMPORT = ("LD_PRELOAD", "ONEDNN_MAX_CPU_ISA", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_LOGS")


@dataclass(eq=False)
class Running:
    """A program that was forked, and the client that it is run for."""

    pid: int
    pidfd: int
    client: socket.socket


@functools.cache
def possible() -> bool:
    """Return whether this system has what the server needs."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # not Linux, or a container that forbids it
        return False
    return True


def write_script(folder: Path, server: Path) -> Path:
    """Write the script that stands in for `sys.executable` and has its programs forked by this server."""
    script = folder / "python"
    words = [sys.executable, "-IS", warm_client.__file__, str(server), sys.executable]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o700)
    return script


def serve(listener: socket.socket, paths: list[str], script: str) -> Callable[[], None] | None:
    """Fork programs for clients until the parent is gone. In a fork, return what runs the program.

    `paths` is `sys.path` of an interpreter that was told nothing; `script` is what programs find as `sys.executable`.
    """
    nursery = os.getppid()
    selector = selectors.PollSelector()
    selector.register(listener, selectors.EVENT_READ)
    running: list[Running] = []
    while os.getppid() == nursery:
        for key, _ in selector.select(LOOK_S):
            if key.data is None:
                program = _accept(listener, selector, running, paths, script)
                if program is not None:
                    return program
            elif key.data not in running:
                pass  # it has ended, as was read from the other of its two files just now
            elif key.fileobj is key.data.client:
                _pass_on(key.data, selector)
            else:
                running.remove(key.data)
                _tell_end(key.data, selector)
    for each in running:
        _kill(each.pid)
    os._exit(0)


def _accept(
    listener: socket.socket,
    selector: selectors.PollSelector,
    running: list[Running],
    paths: list[str],
    script: str,
) -> Callable[[], None] | None:
    client, _ = listener.accept()
    client.settimeout(LIMIT_S)
    fds: list[int] = []
    try:
        header, fds, _, _ = socket.recv_fds(client, struct.calcsize("I"), 250)
        (nbytes,) = struct.unpack("I", header)
        body = b""
        while len(body) < nbytes:
            part = client.recv(nbytes - len(body))
            if not part:
                raise OSError("the client has gone")
            body += part
        request = json.loads(body)
        if not _can_be(request):
            client.sendall(b"n")
            client.close()
            return None
        pid = os.fork()
        if pid == 0:
            taken, fds = fds, []
            for connection in (listener, client, *(each.client for each in running)):
                os.close(connection.detach())  # their numbers may become those of the program's files
            _take_over(request, taken)
            return lambda: _run(request["arguments"], paths, script)
        try:
            each = Running(pid, os.pidfd_open(pid), client)
        except OSError:
            _kill(pid)
            os.waitpid(pid, 0)
            raise
        running.append(each)
        selector.register(each.pidfd, selectors.EVENT_READ, each)
        selector.register(client, selectors.EVENT_READ, each)
        client.sendall(b"y")
    except (OSError, struct.error):
        pass  # a client without an answer becomes an interpreter; one that is gone is seen by its connection
    finally:
        for fd in fds:
            os.close(fd)
    return None


def _can_be(request: dict[str, Any]) -> bool:
    """Return whether a fork can do as a new interpreter of this client would."""
    environ, here = request["environ"], dict(zip(warm_client.NAMESPACES, _namespaces(), strict=True))
    there = dict(zip(warm_client.NAMESPACES, request["namespaces"], strict=True))
    moved = {name for name in here if here[name] != there[name]}
    return (
        all(environ.get(name) == os.environ.get(name) for name in READ_AT_IMPORT)
        and moved <= {"net"}
        and (not moved or os.getuid() == 0)
    )


def _namespaces() -> list[str]:
    return [os.readlink(f"/proc/self/ns/{name}") for name in warm_client.NAMESPACES]


def _pass_on(each: Running, selector: selectors.PollSelector) -> None:
    signals = b""
    with contextlib.suppress(OSError):
        signals = each.client.recv(64)
    for number in signals:
        os.kill(each.pid, number)  # it has not been waited for, so nobody else has its id
    if not signals:
        selector.unregister(each.client)
        _kill(each.pid)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group may not be there yet, the program always is
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _tell_end(each: Running, selector: selectors.PollSelector) -> None:
    _, status = os.waitpid(each.pid, 0)
    selector.unregister(each.pidfd)
    os.close(each.pidfd)
    with contextlib.suppress(KeyError):
        selector.unregister(each.client)
    with contextlib.suppress(OSError):
        each.client.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))
    each.client.close()


def _take_over(request: dict[str, Any], fds: list[int]) -> None:
    """Make this fork what the client is: its files, network, cores, working directory and environment."""
    try:
        _become(request, fds[0], fds[1:])
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def _become(request: dict[str, Any], network: int, fds: list[int]) -> None:
    import torch

    from torch_cgx.cli import hosts

    os.setsid()  # so that whatever it starts can be killed with it
    numbers = request["fds"]
    if os.readlink(f"/proc/self/fd/{network}") != os.readlink("/proc/self/ns/net"):
        hosts._check(hosts._libc().setns(network, CLONE_NEWNET), "setns")
    above = max(network, *fds, *numbers) + 1
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    os.closerange(0, above)
    for fd, number in zip(kept, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(request["cores"]))))


def _run(arguments: list[str], paths: list[str], script: str) -> None:
    """Run a program as the interpreter with these arguments would."""
    import _torch_cgx_autoload

    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    if arguments[0] == "-u":
        unbuffered, arguments = True, arguments[1:]
    _open_standard_files(unbuffered)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.executable = script
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    _torch_cgx_autoload.register()  # which `import torch` would do
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        main.__file__ = arguments[0]
        exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), main.__dict__)


def _open_standard_files(unbuffered: bool) -> None:
    for number, name, errors in ((0, "stdin", "strict"), (1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        try:
            raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        except OSError:  # the client has none
            setattr(sys, name, None)
            continue
        if number == 0:
            file = io.TextIOWrapper(io.BufferedReader(raw), errors=errors)
        else:
            lines = number == 2 or raw.isatty()
            buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
            file = io.TextIOWrapper(buffer, errors=errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
