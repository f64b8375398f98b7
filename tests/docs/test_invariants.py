"""docs/invariants.md: the laws are numbered, and the tests that hold them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
# The number of each law, and its text up to the next one.
LAWS = [
    (int(number), text) for number, text in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", PAGE, re.MULTILINE | re.DOTALL)
]
CITED = re.compile(r"^    - `([\w/]+\.\w+)::(\w+)`$", re.MULTILINE)


def functions_in(path: Path) -> set[str]:
    """Return the names of the functions that a test file defines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".cpp":
        return set(re.findall(r"^void (\w+)\(", text, re.MULTILINE))
    return {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def test_the_numbers_are_unique_and_consecutive() -> None:
    assert [number for number, _ in LAWS] == list(range(1, len(LAWS) + 1))
    assert len(LAWS) > 40


@pytest.mark.parametrize(("number", "text"), LAWS, ids=[str(number) for number, _ in LAWS])
def test_every_law_cites_tests_and_they_exist(number: int, text: str) -> None:
    cited = CITED.findall(text)
    assert cited, f"law {number} cites no test"
    assert len(cited) == text.count("::"), f"law {number} has a citation of another form"
    for path, name in cited:
        assert name in functions_in(ROOT / path), f"law {number}: {path}::{name}"
