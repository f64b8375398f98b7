"""examples/ffcv, as its README has it: .beton files are written, and two processes train from them."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.harness import warm_python
from tests.support.launching import clean_environ, run, torchrun

pytestmark = pytest.mark.ranks

try:
    importlib.metadata.version("ffcv")  # not an import, which takes seconds
except importlib.metadata.PackageNotFoundError:
    pytest.skip(
        "FFCV is not installed: sh tools/ffcv-packages PYTHON does it, or see examples/ffcv/README.md",
        allow_module_level=True,
    )

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ffcv"
IMAGES, BATCH, EPOCHS = 256, 16, 3


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    # What FFCV compiles runs for a moment only.
    return clean_environ(tmp_path) | {"NUMBA_OPT": "0"}


def write_images(path: Path) -> None:
    """Ten classes that differ in colour, so that a few steps learn something."""
    random = np.random.default_rng(0)
    colours = random.integers(40, 216, (10, 3))
    labels = random.integers(0, 10, IMAGES).astype(np.uint8)
    images = colours[labels][:, None, None, :] + random.integers(-40, 40, (IMAGES, 32, 32, 3))
    images = images.astype(np.uint8)
    # An odd number for the test: ranks have different shares.
    np.savez(path, train_images=images, train_labels=labels, test_images=images[:33], test_labels=labels[:33])


@pytest.mark.matrix
@pytest.mark.timeout(1000)  # several trainings, each of which may take launching.LIMIT_S
def test_two_processes_train_compressed_from_beton_files(tmp_path: Path, environ: dict[str, str]) -> None:
    write_images(tmp_path / "images.npz")
    betons = ["--train-beton", str(tmp_path / "train.beton"), "--test-beton", str(tmp_path / "test.beton")]
    config = ["--config-file", str(EXAMPLE / "default_config.yaml")]
    command = [warm_python(), EXAMPLE / "write_datasets.py", *config, "--data", tmp_path / "images.npz", *betons]
    written = run(command, environ)
    assert (tmp_path / "test.beton").is_file(), written

    result = tmp_path / "result.json"
    flags = ["--model", "small", "--epochs", str(EPOCHS), "--batch", str(BATCH), "--json", str(result)]
    printed = run([*torchrun(), EXAMPLE / "train_cifar_ffcv_cgx.py", *config, *betons, *flags], environ)
    assert result.is_file(), printed
    report = json.loads(result.read_text())
    losses, stats = report["losses"], report["stats"]
    assert len(losses) == EPOCHS * IMAGES // (2 * BATCH)
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4]), losses
    assert report["accuracy"] > 0.3  # of ten classes
    assert report["settings"]["bits"] == 4
    assert stats["compressed_operations"] >= len(losses)
    assert stats["bytes_before"] > 5 * stats["bytes_after"], stats
    # Two ranks: what a rank sends is what its gradients are.
    assert stats["bytes_sent"] < 4 * report["parameters"] * len(losses) / 5

    table = run(
        [
            warm_python(),
            EXAMPLE / "compare.py",
            *config,
            *betons,
            "--data",
            tmp_path / "images.npz",
            "--model",
            "small",
            "--epochs",
            "0.5",
            "--batch",
            str(BATCH),
            "--price-per-hour",
            "3",
        ],
        environ,
    )
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows == ["", "vanilla", "CGX", "CGX + FFCV"], table
