"""MkDocs calls this: files of the repository that pages link to become part of the site.

Pages link to each other and to files outside docs/ by relative paths, as GitHub wants it. Here each file outside docs/
that is reached that way, from the nav or from a page (also from a page that was reached so itself), gets a place in
the site: Markdown becomes a page, a folder its README or a list, JSON is copied as it is, all else a page with its
text. Links are changed to lead there. A link to a file that is not there stays as it is, and strict builds end with it.

A list may follow a paragraph without an empty line, as on GitHub. For the width of a phone, long names of variables may
be broken at their underscores, and tables of several columns with sentences are marked, so that site.css can put their
cells one below the other.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
# What the nav names: its place in the site, and in the repository.
NAMED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
COPIED = (".json", ".png", ".svg")
SENTENCE = 60  # characters of a cell that is no mere figure
LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LIST_AT_ONCE = re.compile(r"^((?![-|#>\s]).+)\n(?=- )", re.MULTILINE)
_VARIABLE = re.compile(r"(?<=<code>)[A-Z]+(?:_[A-Z]+){2,}(?=</code>)")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")

_repository: dict[str, str] = {}  # by place in the site


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages link to."""
    _repository.clear()
    _repository.update(NAMED)
    waiting = [f"{DOCS}/{file.src_uri}" for file in files if file.src_uri.endswith(".md")] + list(NAMED.values())
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        for target in _targets(_text(source), source):
            if target not in seen and not target.startswith(f"{DOCS}/"):
                seen.add(target)
                _repository[_place(target)] = target
                if _is_page(target):
                    waiting.append(target)
    for place, source in sorted(_repository.items()):
        # What the nav does not name is reached by links alone.
        inclusion = InclusionLevel.UNDEFINED if place in NAMED else InclusionLevel.NOT_IN_NAV
        if source.endswith(COPIED):
            file = File.generated(config, place, abs_src_path=str(ROOT / source), inclusion=inclusion)
        else:
            file = File.generated(config, place, content=_page(source), inclusion=inclusion)
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links to files of the repository to their places in the site."""
    place = page.file.src_uri
    source = _repository.get(place, f"{DOCS}/{place}")
    places = {each: there for there, each in _repository.items()}

    def changed(match: re.Match[str]) -> str:
        target = _resolved(match[2], source)
        if target is None:
            return match[0]
        there = places.get(target) or target.removeprefix(f"{DOCS}/")
        return match[1] + posixpath.relpath(there, posixpath.dirname(place) or ".") + (match[3] or "") + match[4]

    def as_github(part: str) -> str:
        return _LIST_AT_ONCE.sub(r"\1\n\n", _LINK.sub(changed, part))

    return "".join(part if is_code else as_github(part) for part, is_code in _parts(markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Makes the page fit for a phone."""
    html = _TABLE.sub(lambda table: _labelled(table[0]), html)
    return _VARIABLE.sub(lambda name: name[0].replace("_", "_<wbr>"), html)


def _labelled(table: str) -> str:
    """A table of sentences with the head of its column at each cell; others as they are."""
    heads, cells = (
        [re.sub(r"<[^>]+>", "", each) for each in re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", table, re.DOTALL)]
        for tag in ("th", "td")
    )
    if len(heads) < 3 or not any(len(cell) > SENTENCE for cell in cells):
        return table
    column = itertools.cycle(head.replace('"', "&quot;") for head in heads)
    labelled = re.sub("<td", lambda _: f'<td data-label="{next(column)}"', table)
    return f'<div class="stacked">{labelled}</div>'


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """The text in turns with fenced code."""
    end = 0
    for fence in _FENCE.finditer(markdown):
        yield markdown[end : fence.start()], False
        yield fence[0], True
        end = fence.end()
    yield markdown[end:], False


def _targets(markdown: str, source: str) -> Iterator[str]:
    for part, is_code in _parts(markdown):
        if not is_code:
            for match in _LINK.finditer(part):
                target = _resolved(match[2], source)
                if target is not None:
                    yield target


def _resolved(link: str, source: str) -> str | None:
    """The path in the repository of what a file links to, where it is one that is there."""
    if ":" in link or link.startswith("/"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return target if not target.startswith("..") and (ROOT / target).exists() else None


def _is_page(path: str) -> bool:
    return path.endswith(".md") or (ROOT / path / "README.md").is_file()


def _place(path: str) -> str:
    """Where a file of the repository gets in the site."""
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    if path.endswith("README.md"):
        return f"source/{posixpath.dirname(path)}/index.md"
    for place, source in NAMED.items():
        if source == path:
            return place
    return f"source/{path}" if path.endswith((*COPIED, ".md")) else f"source/{path}.md"


def _text(path: str) -> str:
    whole = ROOT / path
    return (whole / "README.md" if whole.is_dir() else whole).read_text(encoding="utf-8")


def _page(path: str) -> str:
    if _is_page(path):
        return _text(path)
    whole = ROOT / path
    if whole.is_dir():
        names = sorted(each.name for each in whole.iterdir() if not each.name.startswith((".", "__")))
        return f"# {path}\n\nFiles of this folder of the repository:\n\n" + "".join(f"- `{name}`\n" for name in names)
    return f"# {whole.name}\n\n`{path}`\n\n~~~~{LANGUAGES.get(whole.suffix, 'text')}\n{_text(path)}\n~~~~\n"
