"""What the site's pages say, held to the code: the variables, their defaults, the public names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torch_cgx
from torch_cgx.config import Settings, compression_from_environ

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
VARIABLE = re.compile(r'"(CGX_[A-Z_]+)"')
ROWS = re.findall(
    r"^\| `(CGX_[A-Z_]+)` \| ([^|]+) \| ([^|]+) \|", (DOCS / "variables.md").read_text(encoding="utf-8"), re.MULTILINE
)
DEFAULTS = [(name, default.split("`")[1]) for name, default, _ in ROWS if default.startswith("`")]


def test_every_variable_has_one_row() -> None:
    read = VARIABLE.findall((ROOT / "src" / "torch_cgx" / "config.py").read_text(encoding="utf-8"))
    assert len(read) > 10
    assert sorted(name for name, _, _ in ROWS) == sorted(set(read))


def test_no_other_file_reads_variables() -> None:
    others = [path for path in (ROOT / "src").rglob("*.py") if path.name != "config.py"]
    reads = re.compile(r"""(environ|getenv)[^\n]*["']CGX_""")
    assert not [str(path) for path in others if reads.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("name", "default"), DEFAULTS)
def test_a_default_is_what_holds_without_the_variable(name: str, default: str) -> None:
    assert Settings.from_environ({name: default}) == Settings.from_environ({})
    assert compression_from_environ({name: default}) == compression_from_environ({})


def test_most_defaults_are_checked() -> None:
    assert len(DEFAULTS) >= 11


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: torch_cgx\.(\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(name for name in torch_cgx.__all__ if name != "__version__")


def test_every_public_name_says_what_it_is_for() -> None:
    for name in torch_cgx.__all__:
        text = getattr(torch_cgx, name).__doc__
        assert name == "__version__" or (text and len(text) > 20), name


def test_every_link_of_the_pages_leads_somewhere() -> None:
    """As GitHub follows them; `make site` holds the site itself to that."""
    pages = [*DOCS.glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    assert len(pages) > 20
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", text):
            assert ":" in link or (page.parent / link).exists(), f"{page.name}: {link}"
