"""docs/errors.md names every exception, and what it quotes still stands in the sources."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from torch_cgx import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.MULTILINE)
SHORTEST = 4  # characters between two gaps that say anything


def sources() -> str:
    files = [*(ROOT / "src" / "torch_cgx").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    return re.sub(r'"\s*\n\s*f?"', "", text)  # literals that go on in the next line


SOURCES = sources()


def kinds() -> list[str]:
    return [name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)]


@pytest.mark.parametrize("name", kinds())
def test_every_exception_has_a_section(name: str) -> None:
    assert f"\n## {name}\n" in PAGE


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_is_quoted_still_is_what_is_said(quoted: str) -> None:
    parts = [part for part in quoted.split("...") if len(part.strip()) >= SHORTEST]
    assert parts, "nothing is quoted"
    for part in parts:
        assert part in SOURCES or part.strip() in SOURCES, f"{part!r} is said nowhere"


def test_there_are_many_of_them() -> None:
    assert len(kinds()) == 8 and len(QUOTED) > 35
