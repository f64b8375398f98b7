"""Every fault that we promise to survive, as data: what the faulty rank does, and what must become of the others.

`test_fault_matrix` holds the promises, `__main__` measures them beside gloo's. Both run `inject` on real ranks; under
mpirun this file is the program: `python cases.py FOLDER FAULT BACKEND TIMEOUT_S`.

The faulty rank is the last one. All ranks of these groups compress to 4 bits unless a fault says otherwise.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.faults.acts import (
    SHM,
    Scene,
    aborts,
    destroys_twice,
    differs,
    forked,
    interrupted_in_destroy,
    interrupted_in_init,
    interrupted_while_encoding,
    interrupted_while_waiting,
    killed,
    leaves_work_pending,
    link_down,
    never_calls,
    out_of_memory,
    raises_before,
    raises_in_hook,
    rough_link,
    shared_memory_full,
    slow_link,
    stopped,
)
from tests.support.nursery import Rank, preload
from torch_cgx.cli.hosts import Node

# What an error of ours must say: who speaks, of whom, in which operation, of which tensor, and what to do.
WHO_WHAT = (r"rank {me}\b", r"rank {peer}\b", r"operation \d+", r"\w+\[\d+\]")
ADVICE = r"(?i)make sure|restart all ranks|must make the same calls|make /dev/shm larger"


@dataclass(frozen=True)
class Fault:
    name: str
    act: Callable[[Scene], None]
    raised: tuple[str, ...] = ()  # what all others raise, one of these; none: they go on, with right results
    faulty: tuple[str, ...] | int | None = ()  # what the faulty rank raises; or the signal that ends it; None: either
    waits: bool = False  # the others raise when the group's time-out is over, not before
    says: tuple[str, ...] = (*WHO_WHAT, ADVICE)  # of the others' messages
    destroy: bool = True  # whether ranks that come to the end of their function destroy the group
    own_start: bool = False  # it starts the group itself
    transports: tuple[str, ...] = ("SHM", "GLOO", "TCP", "MPI", "HIERARCHY")
    gloo: bool = True  # whether there is such a thing on gloo


LOST = ("PeerLostError", "PoisonedError")
MISMATCH = ("MismatchError",)
BOTH = (r"rank {me}\b", r"operation \d+", r"\w+\[\d+\]", ADVICE)
UNDER_DDP = (r"rank {peer}\b", r"operation \d+", r"\w+\[\d+\]", ADVICE)
HOSTS = ("GLOO", "TCP", "HIERARCHY")
INTERRUPTED = ("KeyboardInterrupt",)

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("killed (SIGKILL)", killed, LOST, signal.SIGKILL),
        Fault("stopped (SIGSTOP)", stopped, ("CGXTimeoutError", "PoisonedError"), signal.SIGKILL, waits=True),
        Fault("exception before its call", raises_before, LOST, ("KeyError",)),
        Fault("exception in its DDP hook", raises_in_hook, ("RuntimeError",), ("KeyError",), says=UNDER_DDP),
        Fault("never calls", never_calls, ("CGXTimeoutError", "PoisonedError"), (), waits=True),
        Fault("another shape", differs("shape"), MISMATCH, MISMATCH),
        Fault("another shape, exact", differs("shape, exact"), MISMATCH, MISMATCH, gloo=False),
        Fault("another dtype", differs("dtype"), MISMATCH, MISMATCH),
        Fault("another dtype, exact", differs("dtype, exact"), MISMATCH, MISMATCH, gloo=False),
        Fault("other bits", differs("bits"), MISMATCH, MISMATCH, gloo=False),
        Fault("another reduction", differs("reduction"), MISMATCH, MISMATCH),
        Fault("broadcast instead", differs("broadcast"), MISMATCH, MISMATCH),
        Fault("broadcast instead, exact", differs("broadcast, exact"), MISMATCH, MISMATCH, gloo=False),
        Fault("link down", link_down, ("CGXError",), ("CGXError",), waits=True, says=BOTH, transports=HOSTS),
        Fault("link 100 times slower", slow_link, transports=HOSTS),
        Fault("delay, loss and reordering", rough_link, transports=HOSTS),
        Fault(
            "/dev/shm full",
            shared_memory_full,
            ("SharedMemoryError",),
            ("SharedMemoryError",),
            says=(SHM, "larger"),
            transports=("SHM",),
        ),
        Fault("out of memory while staging", out_of_memory, ("CGXError",), ("CGXError", "MemoryError"), says=BOTH),
        Fault("fork after init, child calls", forked),
        Fault("ends with work pending", leaves_work_pending, LOST, (), destroy=False),
        Fault("destroys the group twice", destroys_twice),
        Fault("abort()", aborts, ("PoisonedError", "PeerLostError", "CGXError"), (), says=WHO_WHAT),
        Fault("Ctrl-C while waiting", interrupted_while_waiting, LOST, INTERRUPTED),
        Fault("Ctrl-C while encoding", interrupted_while_encoding, LOST, INTERRUPTED),
        Fault("Ctrl-C in destroy", interrupted_in_destroy, (), None),
        Fault(
            "Ctrl-C in init",
            interrupted_in_init,
            ("CGXTimeoutError",),
            INTERRUPTED,
            waits=True,
            says=(r"rank {me}\b", r"rank {peer}\b", ADVICE),
            own_start=True,
        ),
    )
}


def inject(me: Rank, name: str, backend: str, node: Node | None = None) -> None:
    """One rank's part in a fault."""
    fault = FAULTS[name]
    scene = Scene(me, backend, node)
    try:
        if not fault.own_start:
            me.meet("all are here", 120.0)  # before the group's time-out, which is short, begins
            me.start_group(backend)
            scene.step()
            me.meet("all have a group")
        fault.act(scene)
    finally:
        if scene.is_faulty and fault.act is leaves_work_pending:
            me.store.set("faulty has ended", "")


def main(folder: str, name: str, backend: str, timeout_s: str) -> None:
    """One rank under mpirun; what becomes of it is left in a file."""
    preload()  # torch_cgx sets RANK from the launcher's variables
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: Any = dist.FileStore(os.path.join(folder, "store"), world)
    me = Rank(rank, world, backend, float(timeout_s), store, Path(folder))
    found: dict[str, Any] = {"kinds": [], "message": "", "after_mark_s": None}
    try:
        inject(me, name, backend)
        if FAULTS[name].destroy:
            me.end(wait=dist.is_initialized())
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException as error:
        found = {"kinds": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}
        found["after_mark_s"] = me.since_mark()
        raise
    finally:
        partial = Path(folder, f"{rank}.partial")
        partial.write_text(json.dumps(found))
        partial.rename(Path(folder, f"{rank}.json"))
        deadline = time.monotonic() + 3.0  # mpirun ends all when the first of them ends; each shall have its say
        while rank < world - 1 and len(list(Path(folder).glob("*.json"))) < world - 1 and time.monotonic() < deadline:
            time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
