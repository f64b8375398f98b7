"""Find and write stored results: benchmarks/results/DATE-MACHINE/NAME.json, listed in benchmarks/results/README.md.

python benchmarks/results.py               # make today's folder for this machine, and print its path
python benchmarks/results.py FILE.json ... # rewrite files so that a diff of them can be read
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from markers import short_cpu

__all__ = [
    "RESULTS",
    "folder",
    "format_json",
    "machine_of",
    "newest",
    "newest_of_each",
    "newest_or_new",
    "write_json",
]

RESULTS = Path(__file__).resolve().parent / "results"
WIDTH = 120


@cache
def folder() -> Path:
    """Make today's folder for this machine. Later calls return the same one, even after midnight."""
    from torch_cgx.cli import machine

    path = RESULTS / f"{datetime.now(timezone.utc):%Y-%m-%d}-{machine_of(machine.facts())}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def machine_of(facts: Mapping[str, Any]) -> str:
    """Return the short name of the machine that a result's `machine` describes, such as `xeon`."""
    return short_cpu(facts["cpu"]).lower().replace(" ", "-")


def newest(name: str, machine: str = "*") -> Path:
    """Return the file of this name in the newest folder that has it (of this machine)."""
    paths = sorted(RESULTS.glob(f"*-{machine}/{name}"))
    if not paths:
        raise FileNotFoundError(f"{RESULTS}: no folder{'' if machine == '*' else f' of {machine}'} has {name}")
    return paths[-1]


def newest_or_new(name: str, machine: str = "*") -> Path:
    """Return the newest file of this name, or else where today's would be stored."""
    try:
        return newest(name, machine)
    except FileNotFoundError:
        return folder() / name


def newest_of_each(pattern: str) -> list[Path]:
    """Return the newest file of each name that matches `pattern`, ordered by name."""
    return [newest(name) for name in sorted({path.name for path in RESULTS.glob(f"*/{pattern}")})]


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that a diff of it can be read. A reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(format_json(value) + "\n")
    unfinished.replace(path)


def format_json(value: Any) -> str:
    """Format `value` with one list of samples per line, and nested values that are short on one line."""
    return "".join(_lines(value, ""))


def _lines(value: Any, indent: str) -> Iterator[str]:
    line = json.dumps(value)
    samples = isinstance(value, list) and not any(isinstance(item, list | dict) for item in value)
    if samples or not isinstance(value, list | dict) or len(indent) + len(line) <= WIDTH:
        yield line
        return
    begin, end = "{}" if isinstance(value, dict) else "[]"
    pairs = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    deeper = indent + " "
    for number, (key, item) in enumerate(pairs):
        yield f"{',' if number else begin}\n{deeper}" + ("" if key is None else f"{json.dumps(key)}: ")
        yield from _lines(item, deeper)
    yield f"\n{indent}{end}"


def main(names: list[str]) -> int:
    for path in map(Path, names):
        write_json(path, json.loads(path.read_text()))
    if not names:
        print(os.path.relpath(folder()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
