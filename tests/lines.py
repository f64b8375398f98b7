"""Which statements of some files were executed: traced by hand, in ranks too, and their threads."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_COMPOUND = (ast.FunctionDef, ast.ClassDef, ast.If, ast.For, ast.While, ast.With, ast.Try)

Lines = set[tuple[str, int]]


@contextmanager
def traced(files: Sequence[Path], folder: Path) -> Iterator[None]:
    """Meanwhile note the lines of these files that this thread, and those it starts, execute; in a file of a folder."""
    names = {str(file) for file in files}
    seen: Lines = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return note if frame.f_code.co_filename in names else None

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return note

    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]
        (folder / f"{os.getpid()}-{len(list(folder.iterdir()))}.json").write_text(json.dumps(sorted(seen)))


def read(folder: Path) -> Lines:
    return {(name, line) for file in folder.iterdir() for name, line in json.loads(file.read_text())}


def unexecuted(file: Path, seen: Lines, about: re.Pattern[str] | None = None) -> list[str]:
    """The first lines of statements in functions that nobody executed; protocols and functions to override have none.

    With `about` only statements that it is found in, and those of branches and functions with it at their head.
    """
    source = file.read_text()
    lines = source.splitlines()
    found = []
    for statement in _statements(ast.parse(source), inside=False, about=about):
        span = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        if not any((str(file), line) in seen for line in span):
            found.append(lines[statement.lineno - 1].strip())
    return found


def _statements(node: ast.AST, inside: bool, about: re.Pattern[str] | None) -> Iterator[ast.stmt]:
    """Those of functions that are not made of others."""
    if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
        return
    head = node.test if isinstance(node, ast.If) else None
    if about is not None and (
        (head is not None and about.search(ast.unparse(head)))
        or (isinstance(node, ast.FunctionDef) and about.search(node.name))
    ):
        about = None
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if (
            inside
            and isinstance(child, ast.stmt)
            and not isinstance(child, (*_COMPOUND, ast.Pass))
            and not is_docstring
            and not _must_be_overridden(child)
            and (about is None or about.search(ast.unparse(child)))
        ):
            yield child
        yield from _statements(child, inside or isinstance(child, ast.FunctionDef), about)


def _must_be_overridden(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Raise) and ast.unparse(statement) == "raise NotImplementedError"
