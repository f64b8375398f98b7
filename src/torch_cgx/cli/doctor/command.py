"""`cgx doctor`: the installation, the machine, the settings in force, a trial, and what to fix.

It first collects facts (machine.py, software.py, interfaces.py, origins.py, gpus.py). Then it tries an all_reduce
between two processes (trial.py) and, on GPUs, the kernels and an all_reduce (gpu_check.py). text.py formats the report.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from torch_cgx.cli.registry import command

if TYPE_CHECKING:
    from torch_cgx.cli.doctor.interfaces import Interface
    from torch_cgx.cli.doctor.text import Report
    from torch_cgx.cli.doctor.trial import Attempt

SMALL_SHARED_MEMORY_NBYTES = 64 * 1024**2
"""The size of /dev/shm in containers by default. Below it slices shrink and speed is lost."""
MOST_MEASURED = 8
"""The most interfaces to measure, because hosts of containers may have hundreds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quick", action="store_true", help="only look: measure nothing, start no processes")


@command("doctor", summary="what is installed, whether it works, and what to fix", arguments=add_arguments)
def doctor(options: argparse.Namespace) -> int:
    """Say what torch_cgx finds here, try an all_reduce between two processes, and end in "ready" or in what to fix.

    The exit code is 1 if something must be fixed.
    """
    from torch_cgx.cli.doctor import text

    report = examine(options.quick)
    print(json.dumps(as_json(report), indent=2) if options.json else text.text_of(report))
    return 1 if report.problems else 0


def examine(quick: bool) -> Report:
    from torch_cgx import version
    from torch_cgx.cli import gpus, machine
    from torch_cgx.cli.doctor import gpu_check, interfaces, origins, software
    from torch_cgx.cli.doctor.text import Report
    from torch_cgx.config import unknown_variables
    from torch_cgx.group.bootstrap import carriers
    from torch_cgx.group.cuda.engine import triton_kernels

    found = gpu_check.examine(gpus.all_gpus(), triton_kernels, only_look=quick)
    settings, complaints = origins.in_force()
    links = interfaces.find_interfaces()
    report = Report(
        quick=quick,
        machine=machine.facts(),
        shared_memory=machine.shared_memory_nbytes(),
        transports=carriers.describe(),
        mpi=software.find_mpi(),
        nccl=software.find_nccl(gpus.all_gpus()),
        triton=software.find_triton(),
        gpus=found.facts,
        interfaces=links,
        gloo=interfaces.find_gloo(links),
        settings=settings,
        problems=[*complaints, *found.problems, *filter(None, [interfaces.loopback_problem()])],
        advice=[*found.advice, *unknown_variables(), *filter(None, [version.conflict()])],
    )
    _judge(report)
    if not quick:
        _try(report)
    return report


def _judge(report: Report) -> None:
    """Add the problems and advice that follow from the facts alone."""
    from torch_cgx.cli.machine import SHARED_MEMORY

    if not report.machine["native"]:
        report.advice.append("the native library is missing, kernels run in plain torch: install g++, then reinstall")
    if report.shared_memory is None:
        report.advice.append(f"{SHARED_MEMORY} is missing: all_reduce goes over TCP, within this host too")
    elif _free_nbytes(report) < SMALL_SHARED_MEMORY_NBYTES:
        report.advice.append(f"{SHARED_MEMORY} is small: give the container more (docker run --shm-size=1g)")
    if report.gloo.problem:
        report.problems.append(report.gloo.problem)
    if report.gloo.advice:
        report.advice.append(report.gloo.advice)
    wants_mpi = dict.fromkeys(setting.variable for setting in report.settings if setting.value == "MPI")
    for variable in wants_mpi:
        if report.mpi["library"] is None:
            report.problems.append(f"{variable}=MPI: MPI is {report.mpi['told']}; or set {variable}=TCP")
        else:
            report.advice.append(f"{variable}=MPI: start the ranks with mpirun (or srun --mpi=pmix)")


def _free_nbytes(report: Report) -> int:
    return 0 if report.shared_memory is None else report.shared_memory[1]


def _try(report: Report) -> None:
    """Measure the interfaces, and try an all_reduce unless there are problems already."""
    from torch_cgx.cli.doctor import trial
    from torch_cgx.cli.doctor.interfaces import loopback_bit_per_s
    from torch_cgx.cli.progress import Progress
    from torch_cgx.scopes import compression

    measured = _worth_measuring(report)
    with Progress("cgx doctor") as progress:
        for number, link in enumerate(measured):
            progress.update(0.3 * number / len(measured), f"loopback of {link.name}")
            report.loopback[link.name] = loopback_bit_per_s(link)
        if report.problems:
            return
        progress.update(0.3, "two processes start")

        def on_way(way: str) -> None:
            progress.update(0.7 if way == trial.SHARED else 0.85, f"all_reduce over {way}")

        report.attempts += trial.try_ways(compression(), on_way)
    report.problems += _failures(report.attempts)
    if report.machine["native"] and _free_nbytes(report) >= SMALL_SHARED_MEMORY_NBYTES:  # else already explained
        report.advice += [attempt.note for attempt in report.attempts if attempt.note]


def _worth_measuring(report: Report) -> list[Interface]:
    """Return the interfaces that are up and have an address, first those that Gloo uses."""
    usable = [link for link in report.interfaces if link.up is not False and link.addresses]
    return sorted(usable, key=lambda link: link.name not in report.gloo.interfaces)[:MOST_MEASURED]


def _failures(attempts: list[Attempt]) -> list[str]:
    """Return one line per distinct error, with all the ways that failed with it."""
    failed: dict[str, list[str]] = {}
    for attempt in attempts:
        if attempt.error:
            failed.setdefault(attempt.error, []).append(attempt.over)
    return [f"all_reduce between two processes over {' and '.join(ways)}: {error}" for error, ways in failed.items()]


def as_json(report: Report) -> dict[str, object]:
    """Return the report in plain types, for `cgx doctor --json`."""
    free = report.shared_memory
    return {
        "schema": "cgx-doctor",
        "schema_version": 2,
        "ready": not report.problems,
        "quick": report.quick,
        "machine": report.machine,
        "shared_memory": None if free is None else {"size_nbytes": free[0], "free_nbytes": free[1]},
        "transports": report.transports,
        "mpi": report.mpi,
        "nccl": report.nccl,
        "triton": report.triton,
        "gpus": report.gpus,
        "interfaces": [
            {
                **asdict(link),
                "gloo": link.name in report.gloo.interfaces,
                "loopback_bit_per_s": report.loopback.get(link.name),
            }
            for link in report.interfaces
        ],
        "gloo": {"address": report.gloo.address, "reason": report.gloo.reason},
        "settings": {setting.field: setting.value for setting in report.settings},
        "origins": {
            setting.field: {"variable": setting.variable, "from": setting.origin} for setting in report.settings
        },
        "trials": [asdict(attempt) for attempt in report.attempts],
        "problems": report.problems,
        "advice": report.advice,
    }
