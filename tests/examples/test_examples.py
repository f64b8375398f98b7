"""The examples as users start them, on two processes and small settings: they learn, and bytes really are fewer."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from tests.support.harness import warm_python
from tests.support.launching import clean_environ, run, start_ranks, torchrun

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIGHT = ["--device", "cpu", "--threads", "1"]


def write_images(path: Path) -> Path:
    """Ten colours as CIFAR-10's ten classes, with noise: easily learnt."""
    draw = np.random.default_rng(0)
    colours = draw.integers(40, 216, (10, 1, 1, 3))

    def some(count: int) -> tuple[Any, Any]:
        labels = np.arange(count) % 10
        noise = draw.integers(-30, 31, (count, 32, 32, 3))
        return (colours[labels] + noise).astype(np.uint8), labels.astype(np.uint8)

    train, test = some(320), some(40)
    np.savez(path, train_images=train[0], train_labels=train[1], test_images=test[0], test_labels=test[1])
    return path


def write_text(path: Path) -> Path:
    path.write_text("the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 60)
    return path


def launch(launcher: list[str], script: str, folder: Path, *arguments: str | Path) -> dict[str, Any]:
    """What rank 0 wrote, of an example that ran to its end."""
    output = folder / "result.json"
    command = [*launcher, EXAMPLES / script, *LIGHT, "--json", output, *arguments]
    printed = run(command, clean_environ(folder))
    assert output.exists(), printed
    assert "MB sent by rank 0" in printed
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def assert_learns(result: dict[str, Any], falls_to: float) -> None:
    """The mean of the last losses is at most this share of the mean of the first."""
    losses = result["losses"]
    few = max(1, len(losses) // 5)
    assert mean(losses[-few:]) < falls_to * mean(losses[:few]), losses


def assert_compressed(result: dict[str, Any], times: float) -> None:
    stats = result["stats"]
    assert stats["compressed_operations"] >= len(result["losses"]), stats
    assert stats["bytes_before"] > times * stats["bytes_after"], stats
    assert 0 < result["bytes_sent"] < len(result["losses"]) * 4 * result["parameters"] / times


@pytest.mark.matrix
def test_cifar_train_compresses_on_cgx(tmp_path: Path) -> None:
    data = write_images(tmp_path / "images.npz")
    settings = ["--model", "small", "--epochs", "4", "--batch", "16", "--lr", "0.05", "--bits", "4"]
    result = launch(torchrun(), "cifar_train.py", tmp_path, "--data", data, *settings)
    assert len(result["losses"]) == 40
    assert_learns(result, 0.7)
    assert_compressed(result, 5)
    assert result["accuracy"] > 0.3


@pytest.mark.matrix
def test_a_vit_learns_the_digits_of_scikit_learn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    settings = ["--model", "vit", "--patch", "2", "--no-mirror", "--optimizer", "adamw", "--lr", "3e-3"]
    result = launch(
        torchrun(), "cifar_train.py", tmp_path, "--data", "digits", *settings, "--epochs", "3", "--adaptive"
    )
    assert len(result["losses"]) == 27  # batches of 64 on two ranks, of two thirds of 1,797 images
    assert_learns(result, 0.95)
    assert_compressed(result, 5)


@pytest.mark.matrix
def test_a_vgg_compresses_on_gloo(tmp_path: Path) -> None:
    data = write_images(tmp_path / "images.npz")
    settings = ["--model", "vgg", "--epochs", "4", "--batch", "16", "--lr", "0.05", "--backend", "gloo"]
    result = launch(torchrun(), "cifar_train.py", tmp_path, "--data", data, *settings)
    assert_learns(result, 0.7)
    assert_compressed(result, 6)
    assert result["accuracy"] > 0.3


GPT = ["--context", "32", "--layers", "1", "--width", "64", "--batch", "8", "--lr", "5e-3"]


@pytest.mark.matrix
def test_gpt_train_compresses_on_gloo_with_error_feedback(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text.txt")
    settings = ["--epochs", "6", "--backend", "gloo", "--bits", "2", "--error-feedback"]
    result = launch(torchrun(), "gpt_train.py", tmp_path, "--data", data, *GPT, *settings)
    assert_learns(result, 0.8)
    assert_compressed(result, 10)
    assert result["validation_loss"] < np.log(27)  # which is what not knowing anything costs


@pytest.mark.matrix
def test_bert_train_learns_to_guess_hidden_characters(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text.txt")
    settings = ["--epochs", "24", "--bits", "4", "--embedding-bits", "8"]
    result = launch(torchrun(), "bert_train.py", tmp_path, "--data", data, *GPT, *settings)
    assert_learns(result, 0.95)
    assert_compressed(result, 5)
    assert result["validation_loss"] < np.log(27)


@pytest.mark.matrix
def test_bert_qa_compresses_under_mpirun(tmp_path: Path) -> None:
    launcher = [*start_ranks("Open MPI"), warm_python()]
    result = launch(launcher, "bert_qa.py", tmp_path, "--epochs", "8", "--width", "64", "--bits", "4")
    assert_learns(result, 0.9)
    assert_compressed(result, 6)
    assert 0 <= result["exact_match"] <= result["f1"] <= 1
