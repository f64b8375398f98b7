"""docs/architecture.md: its rows are those that import-linter checks, and the files that it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_page_has_the_rows_of_the_contract() -> None:
    contract = re.search(r"^layers = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S)
    table = re.search(r"^\| row \|.*?\n\|---.*?\n(.*?)\n\n", PAGE, re.M | re.S)
    assert contract is not None and table is not None
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table[1].splitlines()]
    assert rows == [row.split(" | ") for row in ast.literal_eval(contract[1])]


def test_the_files_that_the_page_names_exist() -> None:
    named = re.findall(r"`([\w/]+\.(?:py|cpp|h|md|toml))`", PAGE)
    assert len(named) > 30
    files = [str(path) for folder in ("src", "csrc", "docs", "tests") for path in (ROOT / folder).rglob("*.*")]
    files.append(str(ROOT / "pyproject.toml"))
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in files)]
