"""`--only` splits the tests on machines with many cores: those that bear others beside them, and those that do not."""

from __future__ import annotations

import pytest


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
