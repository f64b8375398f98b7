"""`cgx bench train` without its processes: arguments, models, data, and the figures made of what ranks measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.families import only
from torch_cgx.cli import main
from torch_cgx.cli.bench import train_report
from torch_cgx.cli.bench.train import ours
from torch_cgx.cli.bench.train_contestants import Watch
from torch_cgx.cli.bench.train_models import MODELS, Images, Text, library_text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "rnn"], "gpt"),
        (["--against", "gloo,horovod"], "gloo, nccl, fp16, powersgd, or none"),
        (["--against", "nccl"], "nccl is not allowed with --device cpu"),
        (["--bits", "9"], "widths from 1 to 8"),
        (["--bits", "4,4"], "the same twice"),
        (["--bits", "rotated-5"], "rotated-1 to rotated-4"),
        (["--bits", "rotated-32"], "rotated-1 to rotated-4"),
        (["--bits", "maxmin-4"], "widths from 1 to 8"),
        (["--bits", "cgx-4"], "widths from 1 to 8"),
        (["--bits", "-4"], "widths from 1 to 8"),
        (
            ["--bits", "4,rotated-2", "--bucket-size", "1000"],
            "bucket size of the rotated quantizer: expected one of 64",
        ),
        (["--rate", "1gbit"], "needs --nodes"),
        (["--nproc", "1"], "2 to 256"),
        (["--bucket-mb", "0"], "above 0"),
        (["--data", "nowhere.txt"], "not a file"),
        (["--device", "cuda"], "needs a GPU"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "train", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_contestants_of_both_quantizers_are_named() -> None:
    assert ours("4,rotated-2,32,adaptive") == ("cgx-4", "rotated-2", "cgx-32", "adaptive")
    of = train_report.compression_of
    assert [of(name) for name in ("cgx-4", "rotated-2")] == [("maxmin", 4), ("rotated", 2)]
    assert [of(name) for name in ("ideal", "adaptive", "fp16")] == [None] * 3
    names = map(train_report.names_of, ("cgx-4", "cgx-1", "cgx-32", "rotated-2", "rotated-1", "adaptive", "gloo"))
    assert list(names) == [
        "cgx, 4 bits",
        "cgx, 1 bit",
        "cgx, exact",
        "cgx, rotated, 2 bits",
        "cgx, rotated, 1 bit",
        "cgx, adaptive",
        "gloo",
    ]


@pytest.mark.parametrize("name", only(["mlp", "vit"], MODELS))
def test_every_model_learns_from_batches_that_only_step_and_rank_decide(name: str) -> None:
    kind = MODELS[name]
    source, again = kind.source(None), kind.source(None)
    x, y = source.batch(3, 1, 2)
    assert all(torch.equal(a, b) for a, b in zip((x, y), again.batch(3, 1, 2), strict=True))
    assert not torch.equal(x, source.batch(3, 0, 2)[0])
    assert not torch.equal(x, source.batch(4, 1, 2)[0])
    torch.manual_seed(0)
    model = kind.build()
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) > 5_000_000
    before = [parameter.clone() for parameter in model.parameters()]
    kind.optimizer(model).step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_gpt_has_more_than_ten_million_parameters() -> None:
    assert sum(parameter.numel() for parameter in MODELS["gpt"].build().parameters()) >= 10_000_000


def test_text_is_guessed_one_byte_ahead_and_its_end_is_held_out(tmp_path: Path) -> None:
    text = bytes(range(250)) * 40
    (tmp_path / "text").write_bytes(text)
    source = Text(tmp_path / "text")
    x, y = source.batch(0, 0, 3)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y, (x + 1) % 250)
    assert len(source.train) == 9000
    assert source.held_out()[0].max() < 250
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(ValueError, match="at least 1280 bytes, got 1"):
        Text(tmp_path / "short")


def test_the_librarys_text_is_the_same_every_time() -> None:
    assert library_text() == library_text()
    assert len(library_text()) > 1_000_000


def test_images_come_from_a_file_of_the_given_form(tmp_path: Path) -> None:
    images = np.full((30, 32, 32, 3), 255, dtype=np.uint8)
    labels = np.arange(30) % 10
    path = tmp_path / "images.npz"
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    x, y = Images(path).batch(0, 0, 4)
    assert x.shape == (4, 3, 32, 32)
    assert float(x.max()) == 1.0
    assert y.dtype == torch.int64
    np.savez(path, train_images=images[:, :8], train_labels=labels, test_images=images, test_labels=labels)
    with pytest.raises(ValueError, match="32 x 32 x 3"):
        Images(path)
    np.savez(path, pictures=images)
    with pytest.raises(ValueError, match="train_images"):
        Images(path)


def test_time_on_the_way_counts_overlapping_buckets_once() -> None:
    watch = Watch([100, 150, 400], [200, 300, 0], [])
    watch.settle(500)
    assert watch.busy_s() == pytest.approx(300e-9)


def rank(steps: dict[str, list[float]], curves: dict[str, list[list[float]]] | None = None) -> dict[str, Any]:
    return {
        "model": {"name": "mlp", "parameters": 10, "layers": []},
        "phases": {"forward_s": min(steps["ideal"]), "backward_s": 2.0, "optimizer_s": 0.1},
        "buckets": [],
        "cells": [
            {
                "contestant": name,
                "step_s": step_s,
                "busy_s": [1.5 for _ in step_s],
                "processor_s": step_s,
                "in_step_s": [2 * each for each in step_s] if name == "ideal" else [],
                "sent_nbytes": 8.0,
                "link_nbytes": [9.0, 11.0],
                "loss": (curves or {}).get(name, []),
            }
            for name, step_s in steps.items()
        ],
    }


HEAD: dict[str, Any] = {
    "date": "",
    "command": [],
    "machine": {"cpu": "CPU", "cores": 2, "simd": None, "torch": "2"},
    "load": 0.0,
    "settings": {"batch": 1, "nproc": 1},
    "link": {"nodes": 2, "rate": "1gbit", "goodput_bit_per_s": [9e8, 9e8]},
}


def test_shares_are_of_the_slowest_rank_round_by_round() -> None:
    ranks = [
        rank({"ideal": [1.0, 2.0, 1.0], "gloo": [2.0, 4.0, 2.0]}),
        rank({"ideal": [1.0, 1.0, 1.0], "gloo": [2.0, 2.0, 4.0]}),
    ]
    ideal, gloo = train_report.merge(ranks, **HEAD)["cells"]
    assert ideal["step_s"] == [1.0, 2.0, 1.0]
    assert gloo["step_s"] == [2.0, 4.0, 4.0]
    assert (ideal["ideal_share"], gloo["ideal_share"]) == (1.0, 0.5)
    assert (gloo["exposed_s"], gloo["communication_s"], gloo["hidden_s"]) == (3.0, 1.5, 0.0)
    assert gloo["link_nbytes"] == 11.0
    assert ideal["communication_s"] is ideal["hidden_s"] is None
    assert (ideal["in_step_s"], gloo["in_step_s"]) == (2.0, None)


def test_losses_are_compared_when_all_have_trained_equally_long() -> None:
    curves = {"gloo": [[0.0, 4.0], [10.0, 2.0]], "cgx-4": [[0.0, 4.0], [4.0, 3.0], [5.0, 1.0]]}
    steps = {"ideal": [1.0], "gloo": [2.0], "cgx-4": [1.25]}
    result = train_report.merge([rank(steps, curves)], **HEAD)
    assert result["equal_s"] == 5.0
    assert [cell["loss_at_equal_time"] for cell in result["cells"]] == [None, 3.0, 1.0]
    text = train_report.format_train(result)
    assert "loss at 5 s" in text
    assert "cgx, 4 bits" in text
    assert "80 %" in text
