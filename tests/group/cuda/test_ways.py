"""CUDA tensors on the stand-in device, by every way: several slices, residuals, MPI, and leaving after a failure."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_cgx
from tests.support.gradients import BITS, digest, is_exact, noise, within_bound
from tests.support.harness import Rank, run_ranks
from tests.support.launching import clean_environ, finish, start_ranks, with_mpi4py_on
from tests.support.launching import start as launch
from tests.support.on_device import CROSS, INNER, WAYS, start, the_group, trained
from tests.support.training import same_on_all_ranks

pytestmark = pytest.mark.ranks


def sliced_sum(me: Rank, backend: str) -> str:
    group = start(me, backend)
    x = noise(me.rank, 900_000)  # 3.4 MB
    dist.all_reduce(x)
    if backend == "standin":
        steps = [entry[0] for entry in group.device.log]
        assert steps.count("encode") == steps.count("reduce") == 4
        assert steps.index("encode", steps.index("encode") + 1) < steps.index("reduce"), "slices do not overlap"
    return digest(x)


@pytest.mark.parametrize("way", WAYS)
def test_several_slices_have_the_bits_of_the_cpu_path(way: str) -> None:
    env = {BITS: "4", "CGX_FUSION_BUFFER_SIZE_MB": "1"}
    on_cpu = run_ranks(sliced_sum, 2, None, "cgx", env=env)
    assert run_ranks(sliced_sum, 2, None, "standin", env={**env, **WAYS[way]}) == on_cpu == [on_cpu[0]] * 2


# ---- error feedback ----


def test_error_feedback_over_shared_memory_has_the_bits_of_the_cpu_path() -> None:
    options = {"error_feedback": True, "stochastic": True}
    on_cpu = same_on_all_ranks(run_ranks(trained, 2, None, "cgx", options))
    on_device = same_on_all_ranks(run_ranks(trained, 2, None, "standin", options, env=WAYS["shared memory"]))
    assert torch.equal(on_device, on_cpu)


# ---- the end ----


def leave_after_a_failure(me: Rank) -> str:
    group = start(me, "standin")
    dist.all_reduce(noise(me.rank, 5000))
    if me.rank == 1:
        group.kernels.fails_at = "decode"
    with pytest.raises(RuntimeError) as failure:
        for _ in range(3):
            dist.all_reduce(noise(me.rank, 5000))
    del group
    dist.destroy_process_group()
    me.start_group("standin", name="another", timeout_s=60.0)
    x = noise(me.rank, 5000)
    dist.all_reduce(x)
    within_bound(x, me.world, 4)
    assert the_group().device.log
    return str(failure.value)


@pytest.mark.parametrize("way", WAYS)
def test_after_a_failure_a_group_can_be_left_and_another_one_works(way: str) -> None:
    texts = run_ranks(leave_after_a_failure, 2, None, env={BITS: "4", **WAYS[way]}, group_timeout_s=6.0, grace_s=30.0)
    assert "an illegal memory access was encountered" in texts[1]


# ---- MPI ----

STAGED_OVER_MPI = """
import sys
from datetime import timedelta

import torch.distributed as dist

from tests.support import standin
from tests.group.cuda.test_ways import staged_sums

standin.register()
dist.init_process_group("standin", timeout=timedelta(seconds=60))
sys.stdout.write(staged_sums(dist.get_rank()) + "\\n")  # in one write: two ranks share the terminal
dist.destroy_process_group()
"""


def staged_sums(rank: int) -> str:
    """Digests, and over what payloads went."""
    digests = []
    for numel, dtype in ((17, torch.float32), (70_000, torch.bfloat16)):
        x = noise(rank, numel, dtype)
        dist.all_reduce(x)
        digests.append(digest(x))
    y = noise(rank, 5000)
    with torch_cgx.uncompressed():
        dist.all_reduce(y)
    assert is_exact(y, dist.get_world_size())
    side: Any = the_group()._cuda
    ordered = [each for each in side.reducer._exchange._transports if each is not None]  # ordered_staging.py
    (carrier,) = {type(each._transport).__name__ for each in ordered}
    return f"{carrier}: rank {rank} {digests}"


def staged_over_gloo(me: Rank) -> str:
    start(me, "standin")
    return staged_sums(me.rank)


@pytest.mark.matrix
@pytest.mark.parametrize("library", ["Open MPI", "MPICH"])
def test_payloads_staged_over_mpi_make_the_bits_of_those_over_gloo(library: str, tmp_path: Path) -> None:
    environ = clean_environ(tmp_path) | {BITS: "4", INNER: "MPI", CROSS: "MPI"}
    environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[3])
    script = tmp_path / "staged.py"
    script.write_text(STAGED_OVER_MPI)
    process = launch([*start_ranks(library), sys.executable, script], with_mpi4py_on(library, environ))
    output = finish(process)
    over_gloo = run_ranks(staged_over_gloo, 2, None, env={BITS: "4", INNER: "GLOO"})
    expected = [line.replace("GlooTransport", "MpiTransport") for line in over_gloo]
    assert expected != over_gloo
    assert sorted(re.findall(r"MpiTransport: rank \d \[.*?\]", output)) == expected, output
    assert process.returncode == 0, output
