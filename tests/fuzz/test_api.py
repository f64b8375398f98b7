"""The targets of tests/fuzz, with few inputs: `make fuzz` runs them for long, guided by coverage."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_any_input_works_or_is_refused_in_words(name: str) -> None:
    went = []

    @settings(max_examples=60)
    @given(st.binary(max_size=160))
    def search(data: bytes) -> None:
        went.append(TARGETS[name](data))

    search()
    assert len(went) >= 20


# What `make fuzz` has found: tensors as a checkpoint's settings and version, a member that says nothing of its GPUs.
FOUND = [
    ("checkpoint", b"\x81\x81\xcd\xd0\x85" + b"\xda" * 23 + b"\xd4"),
    ("checkpoint", b"Q\x03\xf4>\x80B\xff\x11`\xd7\x11"),
    ("membership", b"/`\xdc\xcf(\xf5\xf5\xf5\xf5Y\xf5\xf5\xf5u\xf5\xf5\xf5\xf5#"),
]


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_once_broke_is_refused_in_words(name: str, data: bytes) -> None:
    TARGETS[name](data)
