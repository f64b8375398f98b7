"""Containers often have 64 MB of /dev/shm, or less: slices shrink, then Gloo takes over, and a full one is an error.

The ranks live in a mount namespace of their own here, with a /dev/shm that each test makes as small as it likes.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_cgx
from tests.support import harness
from tests.support.families import each_once
from tests.support.gradients import digest, is_exact, noise, within_bound
from tests.support.harness import Outcome, Rank, describe, observe_ranks, run_ranks
from torch_cgx.kernels.native import available

MB = 1 << 20
SHM = "/dev/shm"
FILLER = f"{SHM}/filler"
LARGE = 3_000_003  # 12 MB
SOON_S = 30.0

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not available(), reason="installed without the native library"),
]


@pytest.fixture(scope="module", autouse=True)
def a_shared_memory_of_our_own() -> Iterator[None]:
    """Ranks get a private /dev/shm: as root, or in a user namespace where the kernel allows those."""
    mount = ["sh", "-c", f'mount -t tmpfs -o size=64m tmpfs {SHM} && exec "$@"', "sh"]
    reason = "there is no unshare command"
    for how in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        if shutil.which("unshare") is None:
            break
        probe = subprocess.run([*how, *mount, "mount", "-o", "remount,size=1m", SHM], capture_output=True, text=True)
        if probe.returncode == 0:
            with harness.nursery_started_by([*how, *mount]):
                yield
            return
        reason = probe.stderr.strip()
    pytest.skip(f"a private {SHM} needs permission to unshare and mount: {reason}")


def make_it(me: Rank, nbytes: int) -> None:
    """Give /dev/shm this size, empty, before any group is there."""
    if me.rank == 0:
        for left in os.listdir(SHM):
            os.unlink(f"{SHM}/{left}")
        subprocess.run(["mount", "-o", f"remount,size={nbytes}", SHM], check=True)
    me.meet("resized")
    facts = os.statvfs(SHM)
    assert facts.f_blocks * facts.f_frsize == nbytes
    assert os.listdir(SHM) == []
    me.meet("looked")


def uses_shared_memory() -> bool:
    group: Any = dist.group.WORLD
    return bool(group.carrier == "SHM")


def ramp(rank: int) -> Tensor:
    """Large and cheap to check: on four ranks every sum is a whole number, and its block's levels meet it."""
    return torch.arange(LARGE).remainder(16).add_(rank).float()


def large_sums(me: Rank, nbytes: int, bits: int) -> list[str]:
    make_it(me, nbytes)
    me.start_group("cgx")
    assert uses_shared_memory()
    torch_cgx.set_default(bits=bits)
    x = ramp(me.rank)
    dist.all_reduce(x)
    y = noise(me.rank, 300_001)
    dist.all_reduce(y, dist.ReduceOp.AVG)
    expected = sum(ramp(rank) for rank in range(me.world))
    assert isinstance(expected, Tensor)
    if bits == 32:
        assert torch.equal(x, expected)
        assert is_exact(y * me.world, me.world)
    else:
        # Each block holds all sixteen values: its levels are those.
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-4 * me.world)
        within_bound(y, me.world, bits, average=True)
    dist.barrier()
    assert os.listdir(SHM) == []
    return [digest(x), digest(y)]


@pytest.mark.parametrize(("megabytes", "world", "bits"), each_once((64, 3), (2, 4), (4, 32)))
def test_large_tensors_are_right_however_small_the_slices(megabytes: int, world: int, bits: int) -> None:
    first, *others = run_ranks(large_sums, world, None, megabytes * MB, bits, timeout_s=60.0, group_timeout_s=40.0)
    assert all(other == first for other in others)


def too_small(me: Rank, nbytes: int) -> str:
    logging.basicConfig()
    make_it(me, nbytes)
    me.start_group("cgx")
    assert not uses_shared_memory()
    exact = noise(me.rank, 100_000)
    dist.all_reduce(exact)
    assert is_exact(exact, me.world)
    torch_cgx.set_default(bits=4)
    x = noise(me.rank, 100_000)
    dist.all_reduce(x)
    within_bound(x, me.world, 4)
    assert os.listdir(SHM) == []
    return digest(x)


@pytest.mark.parametrize("world", [2, 3])
def test_below_the_floor_there_is_one_warning_and_connections_are_used(world: int) -> None:
    outcomes = observe_ranks(too_small, world, None, 1 * MB)
    assert all(outcome.ok for outcome in outcomes), describe(outcomes)
    assert len({outcome.value for outcome in outcomes}) == 1
    log = "".join(outcome.log for outcome in outcomes)
    assert log.count("WARNING") == 1, log
    assert "uses connections within a host" in log and SHM in log and str(1 * MB) in log


def fill() -> None:
    """Leave no byte free."""
    facts = os.statvfs(SHM)
    with open(FILLER, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, facts.f_bavail * facts.f_frsize)
    assert os.statvfs(SHM).f_bavail == 0


def filled_up(me: Rank, before: int) -> None:
    """`before`: values of an all_reduce that runs while there is still room."""
    make_it(me, 64 * MB)
    me.start_group("cgx")
    if before:
        dist.all_reduce(torch.ones(before))
    me.meet("there was room")
    if me.rank == 0:
        fill()
    me.meet("full")
    if before:  # what is allocated stays usable
        x = torch.ones(before)
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((before,), float(me.world)))
    me.mark()
    dist.all_reduce(torch.ones(LARGE))


def raised(outcome: Outcome, kind: str) -> None:
    report = describe([outcome])
    assert not outcome.timed_out and outcome.exit_code == 1, report
    assert kind in outcome.error_kinds, report


@pytest.mark.parametrize("before", [0, 1000], ids=["first segment", "larger segment"])
def test_a_full_one_is_an_error_on_all_ranks_that_says_what_to_do(before: int) -> None:
    for outcome in observe_ranks(filled_up, 3, None, before):
        raised(outcome, "SharedMemoryError")
        assert SHM in outcome.message and "larger" in outcome.message
        assert outcome.after_mark_s is not None and outcome.after_mark_s < SOON_S
    (left,) = run_ranks(what_is_left, 1, None)
    assert left == [os.path.basename(FILLER)]


def what_is_left(me: Rank) -> list[str]:
    return os.listdir(SHM)


def room_again(me: Rank) -> None:
    make_it(me, 64 * MB)
    me.start_group("cgx")
    if me.rank == 0:
        fill()
    me.meet("full")
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(torch_cgx.CGXError, match=SHM):
            dist.all_reduce(torch.ones(LARGE))
        assert time.monotonic() - started < SOON_S
    dist.destroy_process_group()
    me.meet("destroyed")
    if me.rank == 0:
        os.unlink(FILLER)
    me.meet("room")
    me.start_group("cgx", name="again")
    x = torch.ones(LARGE)
    dist.all_reduce(x)
    assert uses_shared_memory()
    assert torch.equal(x, torch.full((LARGE,), float(me.world)))


def test_a_new_group_works_once_there_is_room_again() -> None:
    run_ranks(room_again, 2, None)


def full_from_the_start(me: Rank) -> None:
    logging.basicConfig()
    make_it(me, 64 * MB)
    if me.rank == 0:
        fill()
    me.meet("full")
    me.start_group("cgx")
    assert not uses_shared_memory()
    x = noise(me.rank, 10_000)
    dist.all_reduce(x)
    assert is_exact(x, me.world)


def test_one_that_is_full_when_the_group_is_created_means_connections() -> None:
    outcomes = observe_ranks(full_from_the_start, 2, None)
    assert all(outcome.ok for outcome in outcomes), describe(outcomes)
    assert "".join(outcome.log for outcome in outcomes).count("WARNING") == 1


def many_groups(me: Rank) -> None:
    """A mesh's worth of them; each may take half of what is free, but takes what it needs."""
    make_it(me, 64 * MB)
    me.start_group("cgx")
    groups = [dist.new_group() for _ in range(8)]
    for group in groups * 2:
        x = torch.ones(2_000_000)
        dist.all_reduce(x, group=group)
        assert (x == me.world).all()


def test_several_groups_find_room_beside_each_other() -> None:
    run_ranks(many_groups, 2, None)
