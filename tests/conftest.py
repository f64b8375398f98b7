"""Settings and fixtures of all tests.

Tests with the marker `ranks` start processes; nothing of theirs may be left in shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import settings

from tests.support import harness
from torch_cgx.cli.hosts import Hosts, HostsUnavailable

# Some virtual machines announce AMX and do not let it run: torch's products of bfloat16 tensors then end the process
# with an illegal instruction. oneDNN reads this when it is first used; processes that tests start inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Before anything imports Triton: its kernels run in its interpreter in this process. Tests that compile them start
# another, and so do ranks, whose environment is without this variable (support/harness.py).
os.environ["TRITON_INTERPRET"] = "1"

# Machines that run tests are busy with other tests: slow is not wrong.
settings.register_profile("cgx", deadline=None, max_examples=60)
settings.load_profile("cgx")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--only",
        choices=["together", "alone"],
        help="only tests that bear others beside them, or only those that do not",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only = config.getoption("--only")
    if only is None:
        return
    chosen = [item for item in items if (item.get_closest_marker("alone") is not None) == (only == "alone")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


@pytest.fixture(params=[pytest.param("gloo", marks=pytest.mark.matrix), "cgx"])
def backend(request: pytest.FixtureRequest) -> str:
    """Run a test on ours and, in CI, on torch's own backend: what gloo does is the standard."""
    name: str = request.param
    return name


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """Make test hosts that last as long as the test: `make_hosts(2, rate="1gbit")`. Skip where they cannot be made."""
    with ExitStack() as stack:

        def make(nodes: int, rate: str | None = None) -> Hosts:
            try:
                return stack.enter_context(Hosts(nodes, rate))
            except HostsUnavailable as reason:
                pytest.skip(str(reason))

        yield make


@pytest.fixture(scope="session")
def private_shared_memory() -> None:
    """Keep other processes' files out of sight where that is allowed; elsewhere the harness asks who holds them."""
    harness.make_shared_memory_private()


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("ranks") is None:
        yield
        return
    request.getfixturevalue("private_shared_memory")
    before = harness.shared_memory_names()
    yield
    left = harness.left_in_shared_memory(before)
    assert not left, f"left in /dev/shm: {sorted(left)}"


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[None]:
    yield
    harness.close()
