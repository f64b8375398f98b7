"""Stand in for an interpreter that a `warm` server forks: `warm_client.py SOCKET PYTHON ARGUMENT...`.

This process gives the server its arguments, environment, working directory and open files. It passes on the signals
that it gets, and ends as the forked program ends. If it is killed, the server kills the program. Where the server is
gone, or would not do the same as a new interpreter, this process becomes a new interpreter instead.

It runs without `site` and imports little, because its start is all that a test pays for.
"""

import json
import os
import signal
import socket
import struct
import sys
from typing import NoReturn

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGABRT")
NAMESPACES = ("mnt", "net", "pid", "user")
# Of Python's own variables, the server knows these; others make a new interpreter.
KNOWN = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHON_EXEC")


def main(server: str, python: str, *arguments: str) -> NoReturn:
    passed_on = [getattr(signal, name) for name in PASSED_ON]
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    connection = socket.socket(socket.AF_UNIX)
    if not _served(connection, server, arguments):
        connection.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a new interpreter ignores it again
        os.execv(python, [python, *arguments])
    for number in passed_on:
        signal.signal(number, lambda received, _: connection.sendall(bytes([received])))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    status = connection.recv(struct.calcsize("i"), socket.MSG_WAITALL)
    if len(status) < struct.calcsize("i"):
        sys.stderr.write("the process that programs of tests are forked from has ended\n")
        os._exit(70)
    (code,) = struct.unpack("i", status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _served(connection: socket.socket, server: str, arguments: "tuple[str, ...]") -> bool:
    """Ask the server for a program with these arguments; return whether it has started one."""
    if not _known(arguments) or any(name.startswith("PYTHON") and name not in KNOWN for name in os.environ):
        return False
    fds = []
    for name in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{name}") and int(name) != connection.fileno():  # not the listing's own
            fds.append(int(name))
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    request = {
        "arguments": arguments,
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "fds": fds,
        "cores": sorted(os.sched_getaffinity(0)),
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES],
    }
    body = json.dumps(request).encode()
    try:
        connection.connect(server)
        socket.send_fds(connection, [struct.pack("I", len(body))], [network, *fds])
        connection.sendall(body)
        return connection.recv(1) == b"y"
    except OSError:
        return False
    finally:
        os.close(network)


def _known(arguments: "tuple[str, ...]") -> bool:
    """Return whether the server can do what these arguments ask of an interpreter."""
    rest = arguments[1:] if arguments[:1] == ("-u",) else arguments
    return bool(rest) and (not rest[0].startswith("-") or (rest[0] in ("-c", "-m") and len(rest) > 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
