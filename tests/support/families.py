"""Choose which cases of a family `make test` runs; `make matrix` runs the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def each_once(*parameters: Collection[Any]) -> list[Any]:
    """Return all combinations of these parameters' values, marked `matrix` but for as few as have every value.

    Case k of `make test` has value k of each parameter, where a shorter one begins again after its last value.
    """
    cases = range(max(map(len, parameters)))
    chosen = {tuple(case % len(values) for values in parameters) for case in cases}
    return [
        pytest.param(
            *(value for _, value in combination),
            marks=() if tuple(index for index, _ in combination) in chosen else pytest.mark.matrix,
            id="-".join(str(value) for _, value in combination),
        )
        for combination in product(*map(enumerate, parameters))
    ]


def only(chosen: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return these values, marked `matrix` but for the chosen ones."""
    return [pytest.param(value, marks=() if value in chosen else pytest.mark.matrix, id=str(value)) for value in values]
