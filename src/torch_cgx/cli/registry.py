"""The list of sub-commands of `cgx`, and the argument types they share.

A sub-command is one function with the decorator `command`. No other code knows its name. Modules that register
commands import nothing heavy at the top, so that `cgx --help` stays quick. Torch is imported when a command runs,
after its arguments were checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torch_cgx import codecs
from torch_cgx.config import DEFAULT_QUANTIZER, Compression

AddArguments = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]

BITS = (*range(1, 9), 32)
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""The types that the quantizer takes, and the bytes per value."""


class UsageError(Exception):
    """The user asked for something impossible: one line on stderr, exit code 2."""


class CommandFailed(Exception):
    """The command failed: one line on stderr, exit code 1."""


@dataclass(frozen=True, slots=True)
class Command:
    path: tuple[str, ...]
    summary: str
    add_arguments: AddArguments
    run: Run


COMMANDS: dict[tuple[str, ...], Command] = {}


def command(*path: str, summary: str, arguments: AddArguments) -> Callable[[Run], Run]:
    """Register a function as the sub-command `cgx path...`; its docstring is the long help."""

    def register(run: Run) -> Run:
        COMMANDS[path] = Command(path, summary, arguments, run)
        return run

    return register


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line. argparse would print the whole usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_FACTOR = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


def size(text: str) -> int:
    """Return a size such as `64K` in bytes, 65536. K, M and G are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    nbytes = float(match[1]) * _FACTOR[match[2].upper()] if match else 0.0
    if nbytes < 1 or nbytes != int(nbytes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: allowed are bytes as in 4, 64K, 1.5M, 2G (K = 1024)")
    return int(nbytes)


def sizes(text: str) -> tuple[int, ...]:
    return tuple(size(part) for part in text.split(","))


def bits(text: str) -> int:
    if not text.isdecimal() or int(text) not in BITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: 1 to 8, or 32 for exact")
    return int(text)


def add_compression_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --bucket-size and --quantizer. `check_compression` must check them together with the bits."""
    parser.add_argument(
        "--bucket-size",
        type=whole_number(1, codecs.MAX_BLOCK),
        default=1024,
        metavar="N",
        help="values that share a header (1024)",
    )
    parser.add_argument(
        "--quantizer",
        choices=codecs.names(),
        default=DEFAULT_QUANTIZER,
        help=f"of cgx; rotated has 1 to 4 bits ({DEFAULT_QUANTIZER})",
    )


def check_compression(bits: int, bucket_size: int, quantizer: str) -> Compression:
    """Return the compression that these arguments ask for."""
    try:
        return Compression(bits, bucket_size, quantizer)
    except ValueError as error:
        raise UsageError(f"argument --quantizer: {error}") from None


def widths_of(quantizer: str) -> tuple[int, ...]:
    """Return the bits per value that a quantizer takes."""
    family = codecs.family(quantizer)

    def takes(width: int) -> bool:
        try:
            family.make(width, family.default_block)
        except ValueError:
            return False
        return True

    return tuple(width for width in range(1, 9) if takes(width))


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a whole number from {low} to {high}")
        return int(text)

    return parse


def rate(text: str) -> str:
    from torch_cgx.cli.hosts import parse_rate

    try:
        parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def above_zero(of: str = "", such_as: str = "10.4", most: float = math.inf) -> Callable[[str], float]:
    """Return an argument type for a number above 0, for example of seconds."""
    what = f"a number of {of} above 0" if of else "a number above 0"
    if math.isfinite(most):
        what += f", at most {most:g}"

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0 < number <= most or math.isinf(number):
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed: {what}, such as {such_as}")
        return number

    return parse


positive_seconds = above_zero("seconds", "0.5")


def output_file(text: str) -> Path:
    """Return a path that can be written. It is better to refuse it now than after minutes of measuring."""
    path = Path(text)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: it needs a file name in a folder that exists")
    return path


def plot_file(text: str) -> Path:
    path = output_file(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a file name that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("plots need matplotlib: pip install matplotlib")
    return path
