"""Fixtures of the real-process tests: which backend, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed import harness


@pytest.fixture(params=["gloo", "cgx"])
def backend(request: pytest.FixtureRequest) -> str:
    """The same suite on torch's own backend and on ours: what gloo does is the standard."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    before = harness.shared_memory_names()
    yield
    left = harness.shared_memory_names(before) - before
    assert not left, f"left in /dev/shm: {sorted(left)}"


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[None]:
    yield
    harness.close()
