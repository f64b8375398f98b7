"""The `cgx` command: `cgx bench`, `cgx bits`, `cgx doctor`, `cgx plan`, `cgx trace`.

`main` builds the parser from the registered sub-commands, runs one, and turns any failure into one line and an exit
code: 0 done, 1 failed, 2 wrong usage, 130 interrupted. It measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    from torch_cgx.cli.registry import CommandFailed, UsageError

    parser = make_parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its line; a caller of main wants the code
        return int(stop.code or 0)
    if "run" not in options:
        options.parser.print_help(sys.stderr)
        return 2
    try:
        return int(options.run(options))
    except UsageError as error:
        print(f"{options.prog}: error: {error}", file=sys.stderr)
        return 2
    except CommandFailed as error:
        print(f"{options.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{options.prog}: interrupted", file=sys.stderr)
        return 130


_COMMANDS = (
    "bench.allreduce",
    "bench.kernels",
    "bench.train",
    "bits",
    "doctor.command",
    "plan.command",
    "trace.command",
)


def make_parser() -> argparse.ArgumentParser:
    from torch_cgx.cli.registry import COMMANDS, Parser

    for module in _COMMANDS:  # importing a module registers its commands
        importlib.import_module(f"torch_cgx.cli.{module}")

    parser = Parser(prog="cgx", description="Compressed all-reduce for torch.distributed: measure it, check it.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.set_defaults(parser=parser)
    # One level of sub-parsers for every prefix of a path: ("bench", "allreduce") lives below ("bench",).
    levels: dict[tuple[str, ...], Any] = {(): parser.add_subparsers(metavar="command", title="commands")}
    for path, command in sorted(COMMANDS.items()):
        for depth in range(1, len(path)):
            prefix = path[:depth]
            if prefix not in levels:
                group = levels[prefix[:-1]].add_parser(prefix[-1], help=GROUPS[prefix], description=GROUPS[prefix])
                group.set_defaults(parser=group)
                levels[prefix] = group.add_subparsers(metavar="what", title="what")
        leaf = levels[path[:-1]].add_parser(
            path[-1],
            help=command.summary,
            description=inspect.getdoc(command.run),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(leaf)
        leaf.set_defaults(run=command.run, prog=leaf.prog)
    return parser


GROUPS: dict[tuple[str, ...], str] = {("bench",): "measure, with the result checked first"}


class _Version(argparse.Action):
    """An action that looks up the version only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from torch_cgx import __version__

        print(f"cgx {__version__}")
        parser.exit()
