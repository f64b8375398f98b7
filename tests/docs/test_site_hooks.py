"""docs/hooks.py: links that work on GitHub work in the site."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("mkdocs", reason="needs MkDocs, which `make test` installs")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks_under_test", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module._repository.update({"contributing.md": "CONTRIBUTING.md", "source/examples/demo.py.md": "examples/demo.py"})
    return module


@pytest.mark.parametrize(
    ("place", "before", "after"),
    [
        ("frameworks.md", "[a](../examples/demo.py)", "[a](source/examples/demo.py.md)"),
        ("frameworks.md", "[a](hook.md#below-4-bits)", "[a](hook.md#below-4-bits)"),
        ("reliability.md", "[a](../CONTRIBUTING.md)", "[a](contributing.md)"),
        ("contributing.md", "[a](docs/architecture.md#words)", "[a](architecture.md#words)"),
        ("source/examples/demo.py.md", "[a](../docs/hook.md)", "[a](../../hook.md)"),
        ("hook.md", "[a](../examples/nowhere.py)", "[a](../examples/nowhere.py)"),
        ("hook.md", "[a](https://example.org/b.md)", "[a](https://example.org/b.md)"),
        ("hook.md", "```\n[a](../CONTRIBUTING.md)\n```", "```\n[a](../CONTRIBUTING.md)\n```"),
        ("hook.md", "Two:\n- one\n- two\n", "Two:\n\n- one\n- two\n"),
    ],
)
def test_links_and_lists(hooks: ModuleType, place: str, before: str, after: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=place))
    assert hooks.on_page_markdown(before, page=page, config=None, files=None) == after


def table(cell: str) -> str:
    return f"<table><tr><th>a</th><th>b</th><th>c</th></tr><tr><td>1</td><td>2</td><td>{cell}</td></tr></table>"


def test_tables_of_sentences_are_labelled_and_those_of_figures_are_not(hooks: ModuleType) -> None:
    assert hooks.on_page_content(table("3.5")) == table("3.5")
    found = hooks.on_page_content(table("word " * 20))
    assert '<td data-label="a">1</td><td data-label="b">2</td><td data-label="c">word' in found


def test_names_of_variables_may_be_broken_at_underscores(hooks: ModuleType) -> None:
    html = "<code>CGX_COMPRESSION_SEED</code> <code>layer_min_size</code>"
    assert hooks.on_page_content(html) == html.replace("CGX_COMPRESSION_SEED", "CGX_<wbr>COMPRESSION_<wbr>SEED")
