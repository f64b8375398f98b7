"""`--only` splits the tests for make: those that run side by side, those that do not, and long tables of cases."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--only",
        choices=["together", "alone", "matrix"],
        help="only tests that bear others beside them, or those that do not, without the matrix in both; or only that",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only = config.getoption("--only")
    if only is None:
        return
    chosen = [item for item in items if _part_of(item) == only]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def _part_of(item: pytest.Item) -> str:
    for part in ("matrix", "alone"):
        if item.get_closest_marker(part) is not None:
            return part
    return "together"
