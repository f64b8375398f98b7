"""What the faulty rank does, and the others meanwhile: one function for each fault of `cases`."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.nursery import Rank
from torch_cgx.cli.hosts import HostsUnavailable, Node

BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"
NUMEL = 20_001
LARGE = 8_000_000
STAGED = 24_000_000
GIVE_UP_S = 60.0
SHM = "/dev/shm"
LIMITS = {resource.RLIMIT_AS: "VmSize", resource.RLIMIT_DATA: "VmData"}


class WrongResult(Exception):
    """A collective returned, and should not have, or with something else than the sum."""


class NotNoticed(Exception):
    """The others went on as if nothing had happened."""


@dataclass
class Scene:
    """What a fault's function gets."""

    me: Rank
    backend: str
    node: Node | None  # the faulty rank's test host, where there is one

    @property
    def is_faulty(self) -> bool:
        return self.me.rank == self.me.world - 1

    def step(self, numel: int = NUMEL) -> None:
        """A compressed sum (on gloo an exact one) and an exact one, both looked at."""
        for dtype in (torch.float32, torch.int64):
            x = torch.ones(numel, dtype=dtype)
            dist.all_reduce(x)
            if not (x == self.me.world).all():
                raise WrongResult(f"a sum of {self.me.world} ones is {x[x != self.me.world][0]}")

    def steps(self, numel: int = NUMEL) -> None:
        """Until something raises."""
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            self.step(numel)
        raise NotNoticed(f"nothing was raised in {GIVE_UP_S} s")

    def later(self, act: Callable[[], None], seconds: float = 0.2) -> threading.Timer:
        """Do it from another thread, in the middle of whatever this one does then."""

        def mark_and_act() -> None:
            self.me.mark()
            act()

        timer = threading.Timer(seconds, mark_and_act)
        timer.daemon = True
        timer.start()
        return timer

    @contextlib.contextmanager
    def saying_when_raised(self) -> Any:
        try:
            yield
        finally:
            self.me.store.set(f"raised/{self.me.rank}", "")

    def wait_until_others_have_raised(self) -> None:
        """By looking: a wait would keep this rank's other threads from the store."""
        deadline = time.monotonic() + GIVE_UP_S
        while not self.me.store.check([f"raised/{rank}" for rank in range(self.me.world - 1)]):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def killed(scene: Scene) -> None:
    if scene.is_faulty:
        scene.later(lambda: os.kill(os.getpid(), signal.SIGKILL))
    scene.steps()


def stopped(scene: Scene) -> None:
    """By SIGSTOP, until all others have raised; rank 0 then ends it."""
    me = scene.me
    if scene.is_faulty:
        me.store.set("pid", str(os.getpid()))
        me.mark()
        os.kill(os.getpid(), signal.SIGSTOP)
    pid = int(me.store.get("pid"))
    try:
        with scene.saying_when_raised():
            scene.steps()
    finally:
        if me.rank == 0:
            scene.wait_until_others_have_raised()
            os.kill(pid, signal.SIGKILL)


def raises_before(scene: Scene) -> None:
    if scene.is_faulty:
        scene.me.mark()
        raise KeyError("a mistake of the user's")
    scene.steps()


def raises_in_hook(scene: Scene) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    import torch_cgx

    net = DistributedDataParallel(torch.nn.Linear(200, 200))
    state: Any = torch_cgx.CGXState(None, compression_params={"bits": 4}) if scene.backend == "cgx" else None
    calls = []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(bucket.index())
        if scene.is_faulty and len(calls) == 4:
            scene.me.mark()
            raise KeyError("a mistake of the hook's")
        return torch_cgx.cgx_hook(state, bucket) if scene.backend == "cgx" else allreduce_hook(state, bucket)

    # DDP looks at the annotations, which are strings in this file.
    hook.__annotations__ = {"return": torch.futures.Future[torch.Tensor]}
    net.register_comm_hook(state, hook)
    for _ in range(1000):
        net(torch.ones(4, 200)).sum().backward()
    raise NotNoticed("a thousand steps went well")


def never_calls(scene: Scene) -> None:
    if scene.is_faulty:
        scene.me.mark()
        scene.wait_until_others_have_raised()
        return
    with scene.saying_when_raised():
        scene.steps()


def differs(how: str) -> Callable[[Scene], None]:
    """All ranks call at once, the faulty one something else. Whatever comes out, if it does, is wrong."""

    def act(scene: Scene) -> None:
        import torch_cgx

        other, kind = scene.is_faulty, how.partition(",")[0]
        x = torch.ones(1001 if other and kind == "shape" else 1000)
        op = dist.ReduceOp.MAX if other and kind == "reduction" else dist.ReduceOp.SUM
        if kind == "dtype":
            x = x.to(torch.int32 if other else torch.float32)
        if scene.backend == "cgx":
            torch_cgx.set_default(bits=8 if other and kind == "bits" else 32 if "exact" in how else 4)
        scene.me.mark()
        if kind == "broadcast" and other:
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x, op)
        raise WrongResult(f"the call returned, with {x[0].item():g}")

    return act


def link_down(scene: Scene) -> None:
    assert scene.node is not None
    if scene.me.rank == 0:
        node = scene.node
        scene.later(lambda: node.set_link(up=False))
    scene.steps()


def slow_link(scene: Scene) -> None:
    """A hundred times slower than it was, for some seconds of transfers."""
    assert scene.node is not None
    if scene.me.rank == 0:
        scene.me.mark()
        bucket = ["tbf", "rate", "4mbit", "burst", "16kb", "limit", "4mb"]
        scene.node.run(["tc", "qdisc", "replace", "dev", scene.node.interface, "root", *bucket])
    for _ in range(4):
        scene.step(40_000)


def rough_link(scene: Scene) -> None:
    """Packets to and from the faulty rank's host are late, lost or out of order, for some seconds of transfers."""
    assert scene.node is not None
    if scene.me.rank == 0:
        scene.me.mark()
        for at, device in ((scene.node.namespace, scene.node.interface), (scene.node.switch, scene.node.port)):
            set_netem(at, device, ["delay", "10ms", "3ms", "loss", "1%", "reorder", "5%"])
    scene.me.meet("the link is rough")
    for _ in range(10):
        scene.step(40_000)


def set_netem(namespace: str, device: str, how: Sequence[str]) -> None:
    """Let the kernel spoil what a device of this network namespace sends. Raise where it cannot."""
    command = ["nsenter", f"--net={namespace}", "tc", "qdisc", "replace", "dev", device, "root", "netem", *how]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise HostsUnavailable(f"rough links need a kernel with netem (modprobe sch_netem): {done.stderr.strip()}")


def shared_memory_full(scene: Scene) -> None:
    """Needs a /dev/shm of our own."""
    if scene.me.rank == 0:
        facts = os.statvfs(SHM)
        with open(f"{SHM}/filler", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, facts.f_bavail * facts.f_frsize)
    scene.me.meet("full")
    scene.me.mark()
    scene.step(LARGE)


def no_memory(nbytes: int) -> torch.Tensor:
    return torch.empty(1 << 60, dtype=torch.uint8)


def room_for_python() -> list[bytes]:
    """Return small objects between which Python's allocators have room: an interpreter that has none to raise a
    MemoryError in aborts."""
    return [bytes(nbytes) for nbytes in (400, 4000) for _ in range(4000)][::100]


def out_of_memory(scene: Scene) -> None:
    """No more memory than there is now; the tensor is there already. Over Gloo, the heaps of threads have room left
    whatever the limits, so there it is torch's allocator that is made to fail."""
    from torch_cgx.engines import plain

    x = torch.ones(STAGED)
    scene.me.meet("ready")
    if scene.is_faulty:
        gc.collect()
        kept = room_for_python()
        facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        for limit, name in LIMITS.items():  # of mappings, and of what threads' heaps may still grow to
            resource.setrlimit(limit, (int(facts[name].split()[0]) << 10, resource.RLIM_INFINITY))
        plain._bytes = no_memory
        scene.me.mark()
    try:
        dist.all_reduce(x)
    finally:
        if scene.is_faulty:
            for limit in LIMITS:
                resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            del kept
    if not torch.allclose(x, torch.full_like(x, float(scene.me.world))):
        raise WrongResult(f"a sum of {scene.me.world} ones is {x.min()} to {x.max()}")


def forked(scene: Scene) -> None:
    """A child of the faulty rank uses the group; the group itself goes on."""
    if scene.is_faulty:
        scene.me.mark()
        pid = os.fork()
        if pid == 0:
            code = 3
            with contextlib.suppress(BaseException):
                try:
                    dist.all_reduce(torch.ones(NUMEL))
                except RuntimeError as error:
                    code = 0 if "does not survive fork" in str(error) else 4
            os._exit(code)
        code = _exit_code(pid, GIVE_UP_S / 2 if scene.backend == "cgx" else 3.0)  # gloo's is known to hang
        scene.me.store.set("forked", "")  # and not before: the others have only the group's timeout
        if code != 0:
            raise NotNoticed(f"the forked child {'hung' if code is None else f'ended with {code}'}")
    scene.me.store.wait(["forked"])
    scene.step()


def _exit_code(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


_pending: list[Any] = []


def leaves_work_pending(scene: Scene) -> None:
    """The faulty rank ends its script while nobody else has made its call; the others then make it."""
    if scene.is_faulty:
        x = torch.ones(NUMEL)
        _pending.append([dist.all_reduce(y, async_op=True) for y in (x, x.long())])
        scene.me.mark()
        return
    scene.me.store.wait(["faulty has ended"])
    scene.steps()


def destroys_twice(scene: Scene) -> None:
    scene.me.meet("all are done")
    scene.me.mark()
    dist.destroy_process_group()
    with contextlib.suppress(AssertionError, ValueError, RuntimeError):  # torch's own refusal
        dist.destroy_process_group()
    if dist.is_initialized():
        raise NotNoticed("the group is still there")
    scene.me.start_group(scene.backend, name="again")
    scene.step()


def aborts(scene: Scene) -> None:
    if scene.is_faulty:
        time.sleep(0.2)
        scene.me.mark()
        group: Any = dist.group.WORLD
        group.abort()
        scene.wait_until_others_have_raised()
        return
    with scene.saying_when_raised():
        scene.steps()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_while_waiting(scene: Scene) -> None:
    if scene.is_faulty:
        with scene.saying_when_raised():
            scene.later(interrupt, 0.4)
            scene.steps()
    scene.me.store.wait([f"raised/{scene.me.world - 1}"])
    scene.steps()


def interrupted_while_encoding(scene: Scene) -> None:
    if scene.is_faulty:
        scene.later(interrupt, 0.6)
    scene.steps(LARGE // 2)


def interrupted_in_destroy(scene: Scene) -> None:
    scene.me.meet("all are done")
    if scene.is_faulty:
        timer = scene.later(interrupt, 0.0005)
        dist.destroy_process_group()
        timer.join()  # if it was faster than the signal
    else:
        dist.destroy_process_group()


def interrupted_in_init(scene: Scene) -> None:
    """The others come when it is gone, and wait for a rank that will not come."""
    if scene.is_faulty:
        with scene.saying_when_raised():
            scene.later(interrupt)
            scene.me.start_group(scene.backend)
    scene.me.store.wait([f"raised/{scene.me.world - 1}"])
    scene.me.start_group(scene.backend)
