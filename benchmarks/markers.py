"""Parts of pages that scripts write: what stands between two comments, and words that fit into narrow columns."""

from __future__ import annotations

from pathlib import Path

__all__ = ["short_cpu", "write_between"]


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Both markers must be there, once: else the text would go nowhere, or half of the page."""
    content = page.read_text()
    if content.count(begin) != 1 or content.count(end) != 1 or content.index(begin) > content.index(end):
        raise ValueError(f"{page}: expected the markers {begin} and {end}, once each and in this order")
    page.write_text(f"{content[: content.index(begin)]}{begin}\n{text}\n{content[content.index(end) :]}")


def short_cpu(name: str) -> str:
    """`Intel(R) Xeon(R) Processor` -> `Xeon`."""
    words = name.replace("(R)", "").replace("(TM)", "").split()
    return " ".join(word for word in words if word not in ("Intel", "AMD", "Processor", "CPU")) or name
