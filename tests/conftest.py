"""What all tests share: `--only`, and what becomes of a test that fails and then does not.

`--only` splits the tests on machines with many cores: those that bear others beside them, and those that do not.

Tests of real processes are run once more where they fail (`--reruns`, see the Makefile), since they share the machine
with others. One that passes then is unsteady: the run shows what it failed with, and more than a few of them fail it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

# Some virtual machines announce AMX and do not let it run: torch's products of bfloat16 tensors then end the process
# with an illegal instruction. oneDNN reads this when it is first used; processes that tests start inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

MOST_UNSTEADY = 3
UNSTEADY = pytest.StashKey[list[tuple[str, str]]]()  # names, and what they failed with


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


def pytest_configure(config: pytest.Config) -> None:
    config.stash[UNSTEADY] = []


class Watch:
    """A plugin of its own, for hooks of reports are not given the configuration."""

    def __init__(self, unsteady: list[tuple[str, str]]) -> None:
        self._unsteady = unsteady

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":
            self._unsteady.append((report.nodeid, report.longreprtext))


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(Watch(session.config.stash[UNSTEADY]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(session.config.stash[UNSTEADY]) > MOST_UNSTEADY and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    unsteady = config.stash[UNSTEADY]
    if not unsteady:
        return
    terminalreporter.section(f"unsteady: failed, and run once more ({len(unsteady)}; {MOST_UNSTEADY} are borne)")
    for name, text in unsteady:
        terminalreporter.write_line(f"{name}\n{text}\n")
