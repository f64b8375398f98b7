"""Fixtures of the real-process tests: which backend, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from distributed import harness
from torch_cgx.cli.hosts import Hosts, HostsUnavailable


@pytest.fixture(params=["gloo", "cgx"])
def backend(request: pytest.FixtureRequest) -> str:
    """The same suite on torch's own backend and on ours: what gloo does is the standard."""
    name: str = request.param
    return name


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """Makes test hosts that last as long as the test: `make_hosts(2, rate="1gbit")`; skips where they cannot be."""
    with ExitStack() as stack:

        def make(nodes: int, rate: str | None = None) -> Hosts:
            try:
                return stack.enter_context(Hosts(nodes, rate))
            except HostsUnavailable as reason:
                pytest.skip(str(reason))

        yield make


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    before = harness.shared_memory_names()
    yield
    left = harness.left_in_shared_memory(before)
    assert not left, f"left in /dev/shm: {sorted(left)}"


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[None]:
    yield
    harness.close()
