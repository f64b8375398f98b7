"""The example of sharded training as users start it, on two processes and a small model: exactly, and compressed."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch.distributed.fsdp

from tests.support.launching import clean_environ, run, torchrun

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fsdp_train.py"
SMALL = ["--steps", "30", "--batch", "4", "--context", "32", "--layers", "2", "--width", "64", "--heads", "4"]
UNIFORM = 3.3  # nats: what not knowing anything costs, with 27 characters

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not hasattr(torch.distributed.fsdp, "FSDPModule")
        or not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter"),
        reason="this torch has no FSDP2 whose collectives can be replaced",
    ),
]


def launch(folder: Path, *arguments: str) -> dict[str, Any]:
    """What rank 0 wrote, of a run to its end."""
    text, output = folder / "text.txt", folder / "result.json"
    text.write_text("the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 60)
    output.unlink(missing_ok=True)
    environ = clean_environ(folder / "-".join(arguments).strip("-"))
    light = ["--device", "cpu", "--threads", "1", "--lr", "5e-3"]
    printed = run([*torchrun(), EXAMPLE, "--data", text, "--json", output, *light, *SMALL, *arguments], environ)
    assert output.exists(), printed
    assert "validation loss" in printed and "MB sent by rank 0" in printed
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def assert_learns(result: dict[str, Any]) -> None:
    losses = result["losses"]
    assert len(losses) == 30 and mean(losses[-5:]) < 0.9 * mean(losses[:5]), losses
    assert result["train_loss"] < UNIFORM and result["validation_loss"] < UNIFORM
    assert result["steps_per_s"] > 0


@pytest.mark.matrix
def test_exact_bits_on_cgx_train_as_gloo_does(tmp_path: Path) -> None:
    gloo, cgx = (
        launch(tmp_path, "--backend", name, "--grad-bits", "32", "--weight-bits", "32") for name in ("gloo", "cgx")
    )
    assert_learns(gloo)
    assert cgx["losses"] == gloo["losses"]
    assert gloo["validation_loss"] == pytest.approx(gloo["validation_loss_of_weights"], rel=1e-5)
    assert cgx["stats"] == gloo["stats"] == {} and cgx["bytes_sent"] == gloo["bytes_sent"]


@pytest.mark.matrix
def test_fsdp_train_compresses_weights_and_gradients(tmp_path: Path) -> None:
    result = launch(tmp_path, "--average", "0.8")
    assert_learns(result)
    assert result["stats"]["compressed_operations"] >= 30 * 2 * 2, result["stats"]  # both of both blocks, at least
    exact_nbytes = 4 * result["parameters"] * 30
    assert 0 < result["bytes_sent"] < exact_nbytes / 2
    assert result["validation_loss"] == pytest.approx(result["validation_loss_of_weights"], rel=0.02)
