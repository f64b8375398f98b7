"""The flight recorders' files of a job's ranks, with their times moved to one clock.

Ranks on one kernel share a monotonic clock. Hosts are first compared by their wall clocks. Then each host is moved by
the median of how much later than elsewhere it saw the same operations end, because those end together.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_cgx.cli.registry import CommandFailed
from torch_cgx.engines.recorder import FORMAT

__all__ = ["GroupKey", "Operation", "RankFile", "align", "find_files", "read_files"]

PATTERN = "cgx-trace-rank*.json"
# When one of these has ended on a rank, all ranks have called it.
MEETINGS = ("all_reduce", "barrier", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")

GroupKey = tuple[str, tuple[int, ...], int]
"""Identical on all ranks: name, global ranks, and the number of earlier groups with both in the process."""


@dataclass(slots=True)
class Operation:
    """One rank's operation. Times are seconds on the common clock, or None if unknown or not reached yet."""

    rank: int
    group: GroupKey
    number: int | None
    told: dict[str, Any]
    submitted: float | None
    started: float | None
    finished: float | None

    @property
    def state(self) -> str:
        return str(self.told["state"])

    @property
    def ended(self) -> bool:
        return self.state in ("done", "enqueued")

    @property
    def waiting_for(self) -> int | None:
        waiting = self.told.get("waiting_for")
        return None if waiting is None else int(waiting["rank"])

    def signature(self) -> tuple[Any, ...]:
        """Return the properties that are identical on ranks that are in step."""
        names = ("operation", "dtype", "shape", "reduction", "bits", "root")
        return tuple(json.dumps(self.told.get(name)) for name in names)

    def text(self) -> str:
        """Return the operation as text, such as `all_reduce(float32[1000], SUM, 4 bits)`."""
        told, parts = self.told, []
        if told.get("dtype"):
            shape = told.get("shape")
            parts.append(str(told["dtype"]) + ("" if shape is None else str(shape)))
        if told.get("reduction"):
            parts.append(str(told["reduction"]))
        if told.get("root") is not None:
            parts.append(f"root {told['root']}")
        if told.get("bits"):
            parts.append("exact" if told["bits"] == 32 else f"{told['bits']} bits")
        return f"{told['operation']}({', '.join(parts)})"


@dataclass(slots=True)
class RankFile:
    path: Path
    told: dict[str, Any]
    rank: int
    clock: str
    offset: float  # seconds by which its monotonic clock is behind the common one
    groups: dict[GroupKey, dict[str, Any]]
    operations: list[Operation] = field(default_factory=list)

    @property
    def written(self) -> float:
        return float(self.told["written_ns"]) * 1e-9 + self.offset

    def time(self, ns: int | None) -> float | None:
        return None if ns is None else ns * 1e-9 + self.offset


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the given files, and the newest file of each rank in the given folders (restarts write several)."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            newest: dict[str, Path] = {}
            for each in sorted(path.glob(PATTERN), key=lambda file: file.stat().st_mtime):
                newest[each.name.split("-")[2]] = each
            if not newest:
                raise CommandFailed(f"{path}: has no files {PATTERN}, which a job with CGX_TRACE_DIR={path} writes")
            found += newest.values()
        else:
            found.append(path)
    return found


def read_files(paths: Iterable[Path]) -> list[RankFile]:
    """Return the files in the order of ranks."""
    files: dict[int, RankFile] = {}
    zero_ns: int | None = None
    for path in paths:
        file = _read(path, zero_ns)
        if zero_ns is None:
            zero_ns = _wall_minus_monotonic_ns(file.told)
        if file.rank in files:
            raise CommandFailed(f"{path}: is a second file of rank {file.rank}, beside {files[file.rank].path}")
        files[file.rank] = file
    return [files[rank] for rank in sorted(files)]


def _wall_minus_monotonic_ns(told: dict[str, Any]) -> int:
    return int(told["clock"]["wall_ns"]) - int(told["clock"]["monotonic_ns"])


def _read(path: Path, zero_ns: int | None) -> RankFile:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandFailed(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CommandFailed(f"{path}: is not JSON: {error}") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise CommandFailed(f'{path}: is no trace of this version: expected "format": "{FORMAT}"')
    try:
        return _parsed(path, told, zero_ns)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CommandFailed(f"{path}: is damaged; {type(error).__name__}: {error}") from None


def _parsed(path: Path, told: dict[str, Any], zero_ns: int | None) -> RankFile:
    """Return a parsed file.

    `zero_ns`: how much the first file's wall clock was ahead of its monotonic one, which is the common clock.
    """
    clock = told["clock"]
    keys: list[GroupKey] = []
    ahead_ns = _wall_minus_monotonic_ns(told)
    offset = (ahead_ns - (ahead_ns if zero_ns is None else zero_ns)) * 1e-9  # a float of seconds since 1970 loses them
    for group in told["groups"]:
        name, ranks = str(group["name"]), tuple(int(rank) for rank in group["ranks"])
        keys.append((name, ranks, sum(key[:2] == (name, ranks) for key in keys)))
    file = RankFile(
        path, told, int(told["rank"]), str(clock["name"]), offset, dict(zip(keys, told["groups"], strict=True))
    )
    file.operations = [
        Operation(
            *(file.rank, keys[each["group"]], each["number"], each),
            *(file.time(each[name]) for name in ("submitted_ns", "started_ns", "finished_ns")),
        )
        for each in told["operations"]
    ]
    return file


def align(files: Sequence[RankFile]) -> dict[str, float]:
    """Move all times to the first file's clock. Return the seconds by which each clock was moved."""
    hosts: dict[str, list[RankFile]] = {}
    for file in files:
        hosts.setdefault(file.clock, []).append(file)
    moved: dict[str, float] = {}
    aligned: list[RankFile] = []
    for clock, members in hosts.items():
        for file in members[1:]:  # one kernel has one monotonic clock; only the wall clock was read at different times
            _move(file, members[0].offset - file.offset)
        differences = _differences(_ends(aligned), _ends(members))
        moved[clock] = -statistics.median(differences) if differences else 0.0
        for file in members:
            _move(file, moved[clock])
        aligned += members
    return moved


def _ends(files: Iterable[RankFile]) -> dict[tuple[GroupKey, int], float]:
    """Return when the last of these ranks has ended each operation at which all ranks meet."""
    ends: dict[tuple[GroupKey, int], float] = {}
    for file in files:
        for each in file.operations:
            if each.state != "done" or each.told["operation"] not in MEETINGS:
                continue
            if each.finished is not None and each.number is not None:
                key = (each.group, each.number)
                ends[key] = max(each.finished, ends.get(key, each.finished))
    return ends


def _differences(here: dict[tuple[GroupKey, int], float], there: dict[tuple[GroupKey, int], float]) -> list[float]:
    return [there[key] - here[key] for key in here.keys() & there.keys()]


def _move(file: RankFile, seconds: float) -> None:
    file.offset += seconds
    for each in file.operations:
        for name in ("submitted", "started", "finished"):
            value = getattr(each, name)
            if value is not None:
                setattr(each, name, value + seconds)
