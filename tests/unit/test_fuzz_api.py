"""The targets of tests/fuzz, with few inputs: `make fuzz` runs them for long, guided by coverage."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_any_input_works_or_is_refused_in_words(name: str) -> None:
    went = []

    @settings(max_examples=60)
    @given(st.binary(max_size=160))
    def search(data: bytes) -> None:
        went.append(TARGETS[name](data))

    search()
    assert len(went) >= 20
