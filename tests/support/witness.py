"""Says who still refers to namespaces of test hosts: the proof that none is left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from glob import glob
from types import TracebackType

from torch_cgx.cli.hosts import Hosts


class Witness:
    """Holds the namespaces itself meanwhile, so that the kernel cannot give their numbers to others."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._held = [os.open(path, os.O_RDONLY) for path in paths]
        self._names = {f"net:[{os.fstat(fd).st_ino}]" for fd in self._held}

    @classmethod
    def of(cls, hosts: Hosts) -> Witness:
        return cls({path for node in hosts.nodes for path in (node.namespace, node.switch)})

    def __len__(self) -> int:
        return len(self._names)

    def holders(self, patience_s: float = 20.0) -> list[str]:
        """Threads in them, descriptors and mounts of them, but for this process's own; waits for them to go."""
        deadline = time.monotonic() + patience_s
        while (found := self._look()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _look(self) -> list[str]:
        mine = [f"/proc/self/fd/{fd}" for fd in self._held]
        mine += [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._held]
        found = []
        for link in glob("/proc/[0-9]*/fd/*") + glob("/proc/[0-9]*/task/*/ns/net"):
            with contextlib.suppress(OSError):
                if os.readlink(link) in self._names and link not in mine:
                    found.append(link)
        with open("/proc/self/mountinfo") as file:
            found += [line for line in file if any(name in line for name in self._names)]
        return found

    def __enter__(self) -> Witness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._held:
            os.close(self._held.pop())
