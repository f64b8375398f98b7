"""The findings of `cgx doctor`, and their text for a terminal. This module looks for nothing itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_cgx.cli.doctor.interfaces import Gloo, Interface
from torch_cgx.cli.doctor.origins import Setting
from torch_cgx.cli.doctor.software import Mpi, describe_mpirun
from torch_cgx.cli.doctor.trial import Attempt
from torch_cgx.cli.machine import SHARED_MEMORY, Machine
from torch_cgx.cli.table import format_bits, format_nbytes, format_seconds

__all__ = ["Report", "text_of"]


@dataclass(slots=True)
class Report:
    quick: bool
    machine: Machine
    shared_memory: tuple[int, int] | None  # size and free, in bytes
    transports: Mapping[str, str]
    mpi: Mpi
    nccl: str
    triton: str
    gpus: Mapping[str, str]
    interfaces: Sequence[Interface]
    gloo: Gloo
    settings: Sequence[Setting]
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    loopback: dict[str, float | None] = field(default_factory=dict)  # bits per second, by interface
    attempts: list[Attempt] = field(default_factory=list)


def text_of(report: Report) -> str:
    sections = [_installation(report), _network(report), _settings(report), _trial(report), _verdict(report)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _installation(report: Report) -> list[str]:
    facts: dict[str, object] = {
        **report.machine,
        "native": "yes" if report.machine["native"] else "no",
        str(SHARED_MEMORY): _shared_memory(report.shared_memory),
        **{f"transport {name}": text for name, text in report.transports.items()},
        "mpirun": describe_mpirun(report.mpi),
        "NCCL": report.nccl,
        "Triton": report.triton,
        **report.gpus,
    }
    return ["installation", *_columns([name, "-" if value is None else str(value)] for name, value in facts.items())]


def _shared_memory(found: tuple[int, int] | None) -> str:
    return "missing" if found is None else f"{format_nbytes(found[0])}, {format_nbytes(found[1])} free"


def _network(report: Report) -> list[str]:
    shown = [link for link in report.interfaces if link.addresses]
    without = len(report.interfaces) - len(shown)
    rows = [["", "state", "speed", "loopback", "Gloo", "addresses"]]
    rows += [
        [
            link.name,
            {True: "up", False: "down", None: "-"}[link.up],
            "-" if link.speed_mbit_per_s is None else _bit_per_s(link.speed_mbit_per_s * 1e6),
            "-" if (rate := report.loopback.get(link.name)) is None else _bit_per_s(rate),
            "takes it" if link.name in report.gloo.interfaces else "-",
            ", ".join(link.addresses),
        ]
        for link in shown
    ]
    lines = ["network interfaces", *(_columns(rows) if shown else ["  none that can be seen"])]
    if without and shown:
        lines.append(f"  and {without} without an address")
    if any(rate is not None for rate in report.loopback.values()):
        lines.append(
            "  loopback: TCP from an address to itself, through this host's kernel; it says nothing of the wire"
        )
    return lines


def _settings(report: Report) -> list[str]:
    rows = [[setting.label, setting.origin, setting.text] for setting in report.settings]
    return ["settings in force", *_columns([["", "from", "value"], *rows])]


def _trial(report: Report) -> list[str]:
    if not report.attempts:
        return []
    first = report.attempts[0]
    rows = [["over", "result", "relative error", "same bits", "time"]]
    for each in report.attempts:
        result = "failed" if each.error else "not used" if each.note else "right"
        rows.append(
            [
                each.over,
                result,
                "-" if each.relative_error is None else f"{each.relative_error:.2g}",
                "-" if each.same_bits is None else "yes" if each.same_bits else "no",
                "-" if each.median_s is None else format_seconds(each.median_s),
            ]
        )
    title = f"all_reduce of {format_nbytes(first.nbytes)} at {format_bits(first.bits)} between two processes"
    return [title, *_columns(rows)]


def _verdict(report: Report) -> list[str]:
    lines = [f"advice: {line}" for line in report.advice]
    if report.problems:
        lines += [f"fix: {line}" for line in report.problems]
        if not (report.attempts or report.quick):
            lines.append("no all_reduce was tried: it would fail for what is to be fixed")
        return lines
    return [*lines, "ready, as far as one can tell without trying it" if report.quick else "ready"]


def _bit_per_s(rate: float) -> str:
    giga = rate / 1e9
    return f"{giga:.3g} Gbit/s" if giga >= 1 else f"{rate / 1e6:.3g} Mbit/s"


def _columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the rows as indented lines, with columns flush left."""
    table = list(rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return [f"  {line}".rstrip() for line in padded]
