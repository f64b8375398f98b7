"""Tests of PyTorch's own, as the torch wheel ships them, on backend cgx."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.harness import Rank, run_ranks

pytestmark = pytest.mark.ranks

pytest.importorskip("expecttest", reason="needs expecttest, which `make test` installs")


def run_torch_test(me: Rank, name: str) -> None:
    """Run one test of torch's on the group that the harness has made."""
    os.environ["BACKEND"] = "gloo"  # for decorators, which skip the tests that ask for time-outs on any other backend
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    base: Any = DistributedTest._DistTestBase

    class OnThisGroup(base, TestCase):
        """Torch's tests without its own start of processes."""

    dist.barrier()  # those imports take seconds, and torch gives ranks one second to make a group together
    getattr(OnThisGroup(name), name)()


@pytest.mark.alone
@pytest.mark.parametrize("inner", ["SHM", "TCP"])
def test_barrier_timeout_full_group(inner: str) -> None:
    """Torch looks for " (Timed out|closed|timeout) " in what the barrier raises, after the group's own limit."""
    name = "test_barrier_timeout_full_group"
    run_ranks(run_torch_test, 2, "cgx", name, env={"CGX_INNER_COMMUNICATOR_TYPE": inner}, timeout_s=180.0)
