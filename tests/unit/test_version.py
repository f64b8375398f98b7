"""The version stands in src/torch_cgx/version.py; whatever else names it says the same."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

import torch_cgx
from torch_cgx.cli import main
from torch_cgx.version import __version__

TREE = Path(__file__).resolve().parents[2]


def test_the_package_and_the_command_say_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_cgx.__version__ == __version__
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cgx {__version__}\n"


def test_an_installed_package_has_the_version_in_its_metadata() -> None:
    try:
        found = importlib.metadata.version("pytorch-cgx")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs on the source tree")
    assert found == __version__


def test_pages_that_name_the_version_name_this_one() -> None:
    named = re.search(r"^## (\S+)", (TREE / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert named is not None and named[1] == __version__
    cited = re.search(r"^version: (\S+)$", (TREE / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None and cited[1] == __version__
    series = __version__.rpartition(".")[0]
    in_readme = re.findall(r"\bversion (\d+\.\d+)\b", (TREE / "README.md").read_text())
    assert set(in_readme) <= {series}, in_readme
