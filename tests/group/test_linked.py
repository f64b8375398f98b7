"""Groups whose ranks are linked by TCP connections: what goes wrong between them, and what they leave behind.

That their sums have the bits of shared memory is in test_without_shared_memory.py, how connections are made in
bootstrap/test_links.py, and faults that every transport must survive in tests/faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from tests.support.gradients import BITS, DTYPES, digest, is_exact, noise, within_bound
from tests.support.harness import Rank, names, needs_native, observe_ranks, raised, run_ranks
from tests.support.hooked import descend, hook
from tests.support.rough_link import rough_link
from tests.support.training import flat, loss_of, make_net
from torch_cgx.cli.hosts import Hosts, HostsUnavailable, Node
from torch_cgx.group.bootstrap import links

pytestmark = [pytest.mark.ranks, needs_native]

LINKED = {"CGX_INNER_COMMUNICATOR_TYPE": "TCP"}
SOON_S = 10.0  # promised is one second; a loaded machine shall not fail a test
CHILD_S = 60.0
LARGE = 3_000_000  # 12 MB: more than sockets buffer
MB = 1 << 20


def assert_linked() -> None:
    group: Any = dist.group.WORLD
    assert group.carrier == "TCP"


# ---- peers that die, compute, stop or never call ----


def sleeping_child() -> int:
    """Fork as a DataLoader does; return the child's pid. It has a process group of its own, to outlive its parent."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(CHILD_S)
        os._exit(0)
    return pid


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def killed_beside_its_children(me: Rank) -> None:
    assert_linked()
    dist.all_reduce(torch.ones(1000))
    if me.rank == 1:
        children = [sleeping_child() for _ in range(2)]
        me.store.set("children", ",".join(map(str, children)))
        dist.all_reduce(torch.ones(1000))
        me.mark()
        os.kill(os.getpid(), signal.SIGKILL)
    children = [int(pid) for pid in me.store.get("children").decode().split(",")]
    try:
        dist.all_reduce(torch.ones(1000))
        dist.all_reduce(torch.ones(1000))
    finally:
        alive = [is_alive(pid) for pid in children]
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert all(alive), "the children must outlive their parent, else this test shows nothing"


def test_a_killed_rank_is_noticed_though_its_forked_children_live() -> None:
    """A child that kept copies of the sockets would keep the connections open."""
    first, second = observe_ranks(killed_beside_its_children, 2, "cgx", env=LINKED)
    assert second.exit_code == -signal.SIGKILL
    raised(first, "PeerLostError")
    names(first, "rank 0 lost rank 1", "its process is gone")
    assert first.after_mark_s is not None and first.after_mark_s < SOON_S


def busy(seconds: int, holding_the_gil: bool) -> None:
    if holding_the_gil:
        ctypes.PyDLL(None).sleep(seconds)
    else:
        time.sleep(seconds)


def late(me: Rank, holding_the_gil: bool) -> float:
    """Wait for a peer for longer than TCP would wait for its host."""
    links._KEEPALIVE_IDLE_S = links._KEEPALIVE_INTERVAL_S = links._KEEPALIVE_PROBES = 1
    links._MOST_USER_TIMEOUT_S = 2.0
    me.start_group("cgx")
    assert_linked()
    slowest_s = 0.0
    for turn, numel in enumerate((1000, LARGE)):
        if me.rank == turn:
            busy(4, holding_the_gil)
        started = time.monotonic()
        x = torch.full((numel,), 1.0 + me.rank)
        dist.all_reduce(x)
        assert (x == 3.0).all()
        slowest_s = max(slowest_s, time.monotonic() - started)
    return slowest_s


@pytest.mark.matrix
@pytest.mark.parametrize("holding_the_gil", [False, True], ids=["sleeping", "holding the GIL"])
def test_a_rank_that_computes_for_seconds_is_waited_for(holding_the_gil: bool) -> None:
    waits_s = run_ranks(late, 2, None, holding_the_gil, env=LINKED, group_timeout_s=20.0)
    assert all(3.0 < wait_s < 15.0 for wait_s in waits_s)


def one_never_calls(me: Rank) -> None:
    assert_linked()
    dist.all_reduce(torch.ones(1000))
    if me.rank == 1:
        me.store.wait(["raised"])
        return
    try:
        dist.all_reduce(torch.ones(1000))
    finally:
        me.store.set("raised", "")


def test_a_timeout_says_that_the_peer_answers() -> None:
    first, second = observe_ranks(one_never_calls, 2, "cgx", env=LINKED, group_timeout_s=1.5)
    assert second.ok
    raised(first, "CGXTimeoutError")
    names(first, " Timed out after ", r"waiting for rank 1\b", "it answers, so its process lives")


def one_is_stopped(me: Rank) -> None:
    assert_linked()
    dist.all_reduce(torch.ones(1000))
    if me.rank == 1:
        me.store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    stopped = int(me.store.get("pid"))
    try:
        dist.all_reduce(torch.ones(1000))
    finally:
        os.kill(stopped, signal.SIGKILL)


@pytest.mark.matrix
def test_a_timeout_says_that_a_stopped_peer_does_not_answer() -> None:
    first, _ = observe_ranks(one_is_stopped, 2, "cgx", env=LINKED, group_timeout_s=4.0)
    raised(first, "CGXTimeoutError")
    names(first, " Timed out after ", r"waiting for rank 1\b", "it does not answer: its process is stopped")


def one_host_goes(me: Rank, host: Node) -> None:
    """Its cable is pulled while nobody calls. TCP gives it up sooner than the group's timeout."""
    links._MOST_USER_TIMEOUT_S = 2.0
    me.start_group("cgx")
    assert_linked()
    dist.all_reduce(torch.ones(1000))
    me.meet("all have called")
    if me.rank == 2:
        while len(list(me.scratch.glob("*.ended"))) < 2:
            time.sleep(0.05)
        return
    if me.rank == 0:
        host.set_link(up=False)
        me.mark()
        me.store.set("gone", "")
    me.store.wait(["gone"])
    try:
        dist.all_reduce(torch.ones(1000))
    finally:
        me.store.set(f"raised/{me.rank}", "")
        me.store.wait(["raised/0", "raised/1"])


@pytest.mark.matrix
def test_a_host_that_is_gone_is_named_long_before_the_groups_timeout(make_hosts: Callable[..., Hosts]) -> None:
    nodes = make_hosts(3).nodes
    env = {"CGX_CROSS_COMMUNICATOR_TYPE": "TCP"}
    outcomes = observe_ranks(
        one_host_goes, 3, None, nodes[2], env=env, nodes=nodes, group_timeout_s=40.0, timeout_s=60.0, destroy=False
    )
    for outcome in outcomes[:2]:
        raised(outcome, "PeerLostError")
        names(outcome, rf"rank {outcome.rank}\b", r"lost rank 2\b", "cannot be reached: its host is down or cut off")
        assert outcome.after_mark_s is not None and outcome.after_mark_s < 20.0


def over_a_rough_link(me: Rank) -> list[str]:
    assert_linked()
    digests = []
    for numel in (100, 40_001, 400_003):
        x = noise(me.rank, numel)
        dist.all_reduce(x)
        within_bound(x, me.world, 4)
        y = torch.full((numel,), me.rank + 1)
        dist.all_reduce(y)
        assert (y == sum(range(1, me.world + 1))).all()
        digests.append(digest(x))
    return digests


@pytest.mark.matrix
def test_a_link_that_delays_loses_and_reorders_packets_only_costs_time(make_hosts: Callable[..., Hosts]) -> None:
    nodes = make_hosts(3).nodes
    env = {BITS: "4", "CGX_CROSS_COMMUNICATOR_TYPE": "TCP"}
    with contextlib.ExitStack() as stack:
        try:
            counts = stack.enter_context(rough_link(nodes[-1]))
        except HostsUnavailable as reason:
            pytest.skip(str(reason))
        first, *others = run_ranks(over_a_rough_link, 3, "cgx", env=env, nodes=nodes, group_timeout_s=20.0)
    assert all(other == first for other in others)
    assert counts["lost"] > 0 and counts["reordered"] > 0


# ---- several groups and threads ----


def on_groups_and_threads(me: Rank) -> list[str]:
    assert_linked()
    groups = [dist.new_group() for _ in range(3)]
    wrong: list[str] = []
    digests: dict[tuple[int, int], str] = {}

    def work_on(index: int) -> None:
        try:
            for turn in range(9):
                x = noise(me.rank, (100, 3000, 70_001)[(index + turn) % 3])
                dist.all_reduce(x, group=groups[index])
                within_bound(x, me.world, 4)
                digests[index, turn] = digest(x)
        except Exception as error:
            wrong.append(f"thread {index}: {error}")

    threads = [threading.Thread(target=work_on, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    pending = []
    for turn in range(9):  # meanwhile, on two other groups
        x, y = noise(me.rank, 5000 + turn), noise(me.rank, 40_000)
        pending.append((dist.all_reduce(x, group=groups[2], async_op=True), x))
        pending.append((dist.all_reduce(y, async_op=True), y))
    for work, x in reversed(pending):
        assert work is not None
        work.wait()
        within_bound(x, me.world, 4)
    for thread in threads:
        thread.join()
    assert not wrong
    return [digests[key] for key in sorted(digests)] + [digest(x) for _, x in pending]


def test_several_groups_and_threads_at_once() -> None:
    first, *others = run_ranks(on_groups_and_threads, 2, "cgx", env={BITS: "4", **LINKED})
    assert len(first) == 36 and all(other == first for other in others)


# ---- the bits of shared memory ----


def shares(me: Rank) -> list[str]:
    digests = []
    for bits, numel, dtype in (
        (2, 17, DTYPES[0]),
        (4, 5001, DTYPES[1]),
        (8, 150_001, DTYPES[2]),
        (4, 300_000, DTYPES[0]),
    ):
        share = torch.full((numel,), torch.nan, dtype=dtype)
        whole = torch.full((me.world * numel,), torch.nan, dtype=dtype)
        with torch_cgx.compressed(bits):
            dist.reduce_scatter_tensor(share, noise(me.rank, me.world * numel, dtype), op=dist.ReduceOp.AVG)
            dist.all_gather_into_tensor(whole, noise(me.rank, numel, dtype))
        assert torch.isfinite(share).all() and torch.isfinite(whole).all()
        assert not torch.equal(whole[: numel * me.world].view(me.world, -1)[me.rank], noise(me.rank, numel, dtype))
        digests += [digest(share), digest(whole)]
    assert torch_cgx.stats()["compressed_operations"] == 8
    return digests


def test_compressed_shares_have_the_bits_of_shared_memory() -> None:
    over_links = run_ranks(shares, 2, "cgx", env=LINKED)
    assert over_links == run_ranks(shares, 2, "cgx")
    assert all(ranks[1::2] == over_links[0][1::2] for ranks in over_links)


def trained_with_feedback(me: Rank) -> tuple[Tensor, dict[str, Tensor]]:
    ddp = DistributedDataParallel(make_net(), bucket_cap_mb=0.01)
    state = hook(ddp, compression_params={"bits": 2, "bucket_size": 64}, error_feedback=True)
    for step in range(8):
        ddp.zero_grad()
        loss_of(ddp, step, me.rank).backward()
        descend(ddp)
    return flat(ddp), state.state_dict()["residuals"]


def test_error_feedback_trains_to_the_bits_of_shared_memory() -> None:
    over_links = run_ranks(trained_with_feedback, 2, "cgx", env=LINKED)
    shared = run_ranks(trained_with_feedback, 2, "cgx")
    for (parameters, residuals), (expected, expected_residuals) in zip(over_links, shared, strict=True):
        assert torch.equal(parameters, expected) and torch.equal(parameters, over_links[0][0])
        assert residuals.keys() == expected_residuals.keys()
        assert all(torch.equal(residuals[name], expected_residuals[name]) for name in residuals)
        assert any(residual.any() for residual in residuals.values())


# ---- settings ----


def started(me: Rank) -> None:
    me.start_group("cgx")


@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["on one rank", "on all ranks"])
def test_an_interface_that_does_not_exist_is_an_error_on_all_ranks(ranks: tuple[int, ...]) -> None:
    rank_env = {rank: {"CGX_SOCKET_IFNAME": "nope0"} for rank in ranks}
    outcomes = observe_ranks(started, 2, None, env=LINKED, rank_env=rank_env)
    for outcome in outcomes:
        raised(outcome, "ValueError", "MismatchError")
        names(outcome, "CGX_SOCKET_IFNAME", "'nope0'", "does not exist")
        assert outcome.seconds < SOON_S


# ---- what is left behind ----


def resident_nbytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def open_files() -> Counter[str]:
    """Count open descriptors by what they are, without numbers."""
    kinds: Counter[str] = Counter()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            kinds[os.readlink(file).partition("[")[0].partition(":")[0]] += 1
    return kinds


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def mixed_load(me: Rank, count: int, seed: int) -> None:
    """Operations of all kinds, the same on every rank. Some are waited for later, and some are never waited for."""
    sizes = [int(300_000 ** (step / 63)) for step in range(64)]  # few enough that caches of plans are soon full
    random_calls = random.Random(seed)
    pending: list[tuple[Any, Tensor]] = []
    for turn in range(count):
        numel = random_calls.choice(sizes)
        bits = random_calls.choice((32, 32, 2, 4, 8))
        kind = random_calls.choice(("sync", "async", "async", "integers", "maximum"))
        if kind == "integers":
            x = torch.full((numel,), turn)
            dist.all_reduce(x)
            assert x[-1] == me.world * turn
            continue
        x = torch.full((numel,), 1.0)
        if kind == "maximum":
            dist.all_reduce(x, dist.ReduceOp.MAX)
            continue
        with torch_cgx.compressed(bits) if bits < 32 else torch_cgx.uncompressed():
            work = dist.all_reduce(x, async_op=kind == "async")
        if work is None:
            assert x[-1] == me.world
        else:
            pending.append((work, x))
        if len(pending) == 8:
            for work, x in pending:
                work.wait()
                assert x[-1] == me.world
            pending.clear()
    for work, _ in pending:
        work.wait()


def growth(me: Rank) -> tuple[int, Counter[str], int]:
    assert_linked()
    mixed_load(me, 500, 1)
    before = resident_nbytes(), open_files(), thread_count()
    mixed_load(me, 1500, 2)
    return resident_nbytes() - before[0], open_files() - before[1], thread_count() - before[2]


@pytest.mark.matrix
def test_two_thousand_mixed_operations_leave_memory_files_and_threads_as_they_were() -> None:
    for nbytes, files, threads in run_ranks(growth, 2, "cgx", env=LINKED):
        assert nbytes < 8 * MB, f"{nbytes / MB:.1f} MB more"
        assert not files and threads <= 0


def left_by_a_group(me: Rank, backend: str, name: str) -> tuple[Counter[str], int]:
    """What is open after a group that was not before it. Gloo's thread may take a moment to close its files."""
    before, threads = open_files(), thread_count()
    me.start_group(backend, name=name)
    if backend == "cgx":
        assert_linked()
        assert "/dev/shm/cgx-" not in Path("/proc/self/maps").read_text() + "".join(open_files())
        assert open_files()["socket"] > before["socket"]
    for numel in (100, 200_000):
        x = noise(me.rank, numel)
        dist.all_reduce(x)
        assert backend == "cgx" or is_exact(x, me.world)
    me.meet(f"done with {name}")
    dist.destroy_process_group()
    gc.collect()
    deadline = time.monotonic() + 1.0
    while (open_files() - before or thread_count() > threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    return open_files() - before, thread_count() - threads


def left_by_both(me: Rank) -> dict[str, tuple[Counter[str], int]]:
    left_by_a_group(me, "cgx", "warm-up")
    return {backend: left_by_a_group(me, backend, backend) for backend in ("gloo", "cgx")}


def test_a_destroyed_group_leaves_no_descriptor_no_thread_and_nothing_in_shared_memory() -> None:
    for left in run_ranks(left_by_both, 2, None, env={BITS: "4", **LINKED}):
        (gloo_files, gloo_threads), (files, threads) = left["gloo"], left["cgx"]
        assert not files - gloo_files and threads <= gloo_threads
