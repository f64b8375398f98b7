"""CUDA payloads through memory that ranks share, on a stand-in device: the ways there are, with the same bits."""

from __future__ import annotations

import pytest

from tests.support import standin
from tests.support.gradients import BITS
from tests.support.harness import Rank, run_ranks
from tests.support.on_device import STAGED, sums, the_group
from torch_cgx.errors import SharedMemoryError
from torch_cgx.group.cuda import sharing

pytestmark = pytest.mark.ranks

# By what goes wrong: which exchange is left.
WAYS = {"nothing": "DirectExchange", "registration": "DirectExchange", "sharing": "SharedExchange"}


def sums_over_shared_memory(me: Rank, wrong: str) -> list[str]:
    if wrong == "registration" and me.rank == 1:  # the other rank's device copies by itself all the same
        standin.StandInDevice.registers = False
    if wrong == "sharing" and me.rank == 1:

        def refuse(nbytes: int) -> None:
            raise SharedMemoryError("none is left")

        sharing.make_block = refuse  # type: ignore[assignment]
    digests = sums(me, "standin")
    group = the_group()
    assert group._parts.cuda is not None
    assert type(group._parts.cuda.reducer._exchange).__name__.removeprefix("Ordered") == WAYS[wrong]
    assert bool(group.device.registered) == (wrong == "nothing" or (wrong == "registration" and me.rank != 1))
    return digests


@pytest.mark.parametrize("wrong", WAYS)
def test_the_bits_are_those_of_the_cpu_path(wrong: str) -> None:
    on_cpu = run_ranks(sums, 3, None, "cgx", env={BITS: "4"})
    on_device = run_ranks(sums_over_shared_memory, 3, None, wrong, env={BITS: "4", **STAGED})
    assert on_device == on_cpu == [on_cpu[0]] * 3
