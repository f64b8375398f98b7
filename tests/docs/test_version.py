"""The version stands in src/torch_cgx/version.py; whatever else names it says the same."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

import torch_cgx
from torch_cgx import version
from torch_cgx.cli import main
from torch_cgx.version import __version__

TREE = Path(__file__).resolve().parents[2]


def test_the_package_and_the_command_say_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_cgx.__version__ == __version__
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cgx {__version__}\n"


def test_an_installed_package_has_the_version_in_its_metadata() -> None:
    try:
        found = importlib.metadata.version("torch-cgx")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs on the source tree")
    assert found == __version__


def test_pages_that_name_the_version_name_this_one() -> None:
    named = re.search(r"^## (\S+)", (TREE / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert named is not None and named[1] == __version__
    cited = re.search(r"^version: (\S+)$", (TREE / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None and cited[1] == __version__
    series = ".".join(__version__.split(".")[:2])
    in_readme = re.findall(r"\bversion (\d+\.\d+)\b", (TREE / "README.md").read_text())
    assert set(in_readme) <= {series}, in_readme


def test_no_page_and_no_message_sends_anybody_to_a_package_that_is_not_ours_or_not_published() -> None:
    """`pytorch-cgx` is the original authors' program; `torch-cgx` is not published yet."""
    promised = re.compile(r"pip3? install\s+[^\n`]*torch-cgx")
    texts = [path for path in _tree() if path.suffix != ".json" and path.name != Path(__file__).name]
    assert len(texts) > 100
    wrong = {str(path.relative_to(TREE)): found[0] for path in texts if (found := promised.search(_text(path)))}
    assert not wrong


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both distributions are installed."""
    for name, number in (("pytorch-cgx", "0.1.1"), ("torch-cgx", __version__)):
        folder = tmp_path / f"{name.replace('-', '_')}-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    version.warn_of_conflict.cache_clear()


@pytest.mark.usefixtures("beside")
def test_rank_0_says_once_what_to_uninstall_where_the_other_distribution_is_installed_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "torch_cgx"):
            dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
    (message,) = [record.message for record in caplog.records if "pytorch-cgx" in record.message]
    assert "pytorch-cgx 0.1.1 is installed beside torch-cgx" in message
    first, then = message.index("pip uninstall pytorch-cgx"), message.index("pip install --force-reinstall")
    assert first < then, "the two share files: what is uninstalled second is gone"


@pytest.mark.usefixtures("beside")
def test_the_doctor_says_what_to_uninstall(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json"]) == 0
    assert any("pip uninstall pytorch-cgx" in line for line in json.loads(capsys.readouterr().out)["advice"])


@pytest.mark.parametrize("installed", [{}, {"torch-cgx": "1.0"}, {"pytorch-cgx": "0.1.1"}])
def test_nothing_is_said_where_one_of_the_two_is_installed(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "version_of", installed.get)
    assert version.conflict() is None


def _tree() -> list[Path]:
    """The files that git keeps; all that are there, where the tree came without git."""
    listed = subprocess.run(["git", "ls-files"], cwd=TREE, capture_output=True, text=True)
    if listed.returncode == 0:
        return [TREE / name for name in listed.stdout.splitlines() if (TREE / name).is_file()]
    return [path for folder in ("docs", "src", "examples") for path in (TREE / folder).rglob("*") if path.is_file()]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:  # a picture, a library
        return ""
