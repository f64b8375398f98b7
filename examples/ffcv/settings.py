"""Flags whose defaults stand in a YAML file: what the scripts in this folder share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the file's section `data`."""
    parser.add_argument("--data", type=Path, metavar="PATH", help="an .npz or the folder cifar-10-batches-py")
    parser.add_argument("--train-beton", type=Path, metavar="FILE")
    parser.add_argument("--test-beton", type=Path, metavar="FILE")


def parse(
    parser: argparse.ArgumentParser, sections: Sequence[str], words: Sequence[str] | None = None
) -> argparse.Namespace:
    """The flags in `words` (default: the command line); what is not given there is taken from --config-file."""
    parser.add_argument("--config-file", type=Path, required=True, metavar="FILE", help="YAML; flags override it")
    path = parser.parse_known_args(words)[0].config_file
    content = yaml.safe_load(path.read_text())
    for section in sections:
        for name, value in content[section].items():
            if name not in {action.dest for action in parser._actions}:
                parser.error(f"{path}: section {section} has {name}, which is none of the flags; see --help")
            # As text, so that it is checked as the flag would be.
            parser.set_defaults(**{name: value if isinstance(value, bool) else str(value)})
    options = parser.parse_args(words)
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if action.choices is not None and value is not None and value not in action.choices:
            parser.error(f"{path}: {action.dest} is {value}, expected one of {', '.join(map(str, action.choices))}")
    return options
