"""`cgx doctor`: what is installed, what it runs on, which settings are in force, and what to fix.

Without GPUs it only looks, and starts no processes. On GPUs it tries the kernels and an all_reduce (gpu_check.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from torch_cgx.cli.registry import command

SMALL_SHARED_MEMORY_NBYTES = 64 * 1024**2
"""What containers give /dev/shm unless told otherwise; below it slices shrink and speed is lost."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


@command("doctor", summary="what is installed, and what to fix", arguments=add_arguments)
def doctor(options: argparse.Namespace) -> int:
    """Print the facts that decide how fast torch_cgx runs here. Exit code 1 if something must be fixed."""
    from torch_cgx.cli import gpu_check, gpus, machine
    from torch_cgx.cuda.engine import triton_kernels
    from torch_cgx.transports import factory

    facts = machine.facts()
    free_nbytes = machine.shared_memory_free_nbytes()
    transports = factory.describe()
    settings, complaint = settings_in_force()
    found = gpu_check.examine(gpus.all_gpus(), triton_kernels)
    problems = [*([complaint] if complaint else []), *found.problems]
    advice = [*found.advice]
    if not facts["native"]:
        advice.append("the native library is missing, kernels run in plain torch: install g++, then reinstall")
    if free_nbytes is None:
        advice.append(f"{machine.SHARED_MEMORY} is missing: all_reduce goes over messages")
    elif free_nbytes < SMALL_SHARED_MEMORY_NBYTES:
        advice.append(f"{machine.SHARED_MEMORY} is small: give the container more (docker run --shm-size=1g)")

    if options.json:
        report = {
            "schema": "cgx-doctor",
            "schema_version": 1,
            "machine": facts,
            "shared_memory_free_nbytes": free_nbytes,
            "transports": transports,
            "gpus": found.facts,
            "settings": settings,
            "problems": problems,
            "advice": advice,
        }
        print(json.dumps(report, indent=2))
    else:
        print_text(
            {
                **facts,
                "native": "yes" if facts["native"] else "no",
                f"{machine.SHARED_MEMORY} free": format_free(free_nbytes),
                **{f"transport {name}": text for name, text in transports.items()},
                **found.facts,
            },
            settings,
            problems,
            advice,
        )
    return 1 if problems else 0


def settings_in_force() -> tuple[dict[str, object], str | None]:
    """The settings a group created now would have, or what is wrong with them."""
    from torch_cgx.config import Settings, compression_from_environ
    from torch_cgx.kernels import cpu

    try:
        compression = compression_from_environ()
        settings = Settings.from_environ()
        if cpu.available():
            cpu.simd_level(settings.simd)  # raises for a level that this processor does not have
        values = {"bits": compression.bits, "bucket_size": compression.block}
        return values | dataclasses.asdict(settings), None
    except ValueError as error:
        return {}, str(error)


def format_free(nbytes: int | None) -> str:
    from torch_cgx.cli.table import format_nbytes

    return "missing" if nbytes is None else format_nbytes(nbytes)


def print_text(facts: dict[str, object], settings: dict[str, object], problems: list[str], advice: list[str]) -> None:
    for title, values in (("installation", facts), ("settings in force", settings)):
        if values:
            print(title)
            width = max(map(len, values))
            for name, value in values.items():
                print(f"  {name:<{width}}  {'-' if value is None else value}")
    for line in advice:
        print(f"advice: {line}")
    for line in problems:
        print(f"fix: {line}")
    if not problems:
        print("ready")
