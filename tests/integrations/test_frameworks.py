"""The examples with the frameworks that people train with, on two CPU processes; and what resumes with them.

A framework that is not installed is skipped. Their imports take seconds, so each is imported by few ranks.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.harness import Rank, run_ranks
from tests.support.launching import clean_environ, run, torchrun
from tests.support.training import flat

pytestmark = pytest.mark.ranks

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"
PROBE = HERE.parent / "support" / "example_probe.py"
LIMIT_S = 200.0  # imports alone were seen to take more than a minute on a busy machine
# What torchrun sets and the harness does not. Without the run's name, Lightning asks mpi4py for the ranks.
LAUNCHED = {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
BATCH, BATCHES, WORLD = 8, 3, 2


def need(*frameworks: str) -> None:
    for name in frameworks:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install {name}")


@pytest.mark.parametrize(
    ("example", "frameworks"),
    [
        pytest.param("plain", [], marks=pytest.mark.matrix),
        pytest.param("accelerate", ["accelerate"], marks=pytest.mark.matrix),
        pytest.param("trainer", ["accelerate", "transformers"], marks=pytest.mark.matrix),
        pytest.param("lightning", ["lightning"], marks=pytest.mark.matrix),
    ],
)
def test_an_example_compresses_its_gradients_and_all_ranks_agree(
    example: str, frameworks: list[str], tmp_path: Path
) -> None:
    need(*frameworks)
    output = run([*torchrun(), PROBE, EXAMPLES / f"{example}_train.py", tmp_path], clean_environ(tmp_path))
    files = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), output
    assert "Exception ignored" not in output
    ranks = [json.loads(file.read_text()) for file in files]
    assert ranks[0]["parameters"] == ranks[1]["parameters"], output
    for rank in ranks:
        stats = rank["stats"]
        assert stats["compressed_operations"] >= 20, stats
        assert 0 < stats["bytes_after"] < stats["bytes_before"] / 4, stats
        assert 0 < stats["bytes_sent"] < stats["bytes_before"] / 4, stats


def lightning_stops_and_resumes(me: Rank, folder: str) -> tuple[Tensor, Tensor]:
    import lightning.pytorch as pl

    from torch_cgx.lightning import CGXStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def trainer_with(strategy: Any, epochs: int) -> pl.Trainer:
        quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
        return pl.Trainer(accelerator="cpu", devices=WORLD, strategy=strategy, max_epochs=epochs, **quiet)

    def fit(epochs: int, checkpoint: str | None = None) -> tuple[pl.Trainer, CGXStrategy, Module]:
        pl.seed_everything(0)
        x = torch.randn(BATCH * BATCHES * WORLD, 32)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :10].argmax(1)), BATCH)
        # DDP lays its grad buckets out anew after the first step, and so after resuming, unless it looks for unused
        # parameters; other places in a grad bucket round otherwise.
        strategy = CGXStrategy(
            bits=2,
            quantizer="rotated",
            layer_min_size=16,
            overrides={"net.0.*": {"bits": 8, "quantizer": "maxmin"}},
            error_feedback=True,
            find_unused_parameters=True,
        )
        trainer, module = trainer_with(strategy, epochs), Module()
        trainer.fit(module, data, ckpt_path=checkpoint)
        return trainer, strategy, module

    assert isinstance(trainer_with("cgx", 1).strategy, CGXStrategy)
    with pytest.raises(TypeError, match="ddp_comm_hook"):
        CGXStrategy(ddp_comm_hook=print)

    _, _, whole = fit(2)
    first_half, strategy, _ = fit(1)
    full, weights = f"{folder}/full.ckpt", f"{folder}/weights.ckpt"
    first_half.save_checkpoint(full)
    first_half.save_checkpoint(weights, weights_only=True)
    assert strategy.cgx_state is not None
    chosen = {(each.name, each.bits, each.quantizer) for each in strategy.cgx_state.report().layers if each.bits != 32}
    assert chosen == {("net.0.weight", 8, "maxmin"), ("net.2.weight", 2, "rotated")}
    assert len(torch.load(full, weights_only=True)["torch_cgx"]) == WORLD
    assert "torch_cgx" not in torch.load(weights, weights_only=True)
    _, _, resumed = fit(2, full)
    return flat(whole), flat(resumed)


@pytest.mark.matrix
def test_lightning_resumes_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    need("lightning")
    results = run_ranks(lightning_stops_and_resumes, WORLD, "cgx", str(tmp_path), env=LAUNCHED, timeout_s=LIMIT_S)
    assert_same_bits([tensor for result in results for tensor in result])


def trainer_stops_and_resumes(me: Rank, folder: str) -> tuple[Tensor, Tensor]:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    from torch_cgx.transformers import CGXCallback

    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    words = torch.randint(1, 50, (BATCH * BATCHES * WORLD, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": int(row[0] > 25)} for row in words]

    def train(checkpoint: str | None = None) -> nn.Module:
        set_seed(0)
        model = BertForSequenceClassification(BertConfig(vocab_size=50, **size))
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            learning_rate=1e-3,
            max_steps=2 * BATCHES,
            save_steps=BATCHES,
            per_device_train_batch_size=BATCH,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        callback = CGXCallback(trainer, bits=2, quantizer="rotated", layer_min_size=16, error_feedback=True)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert callback.cgx_state is not None
        assert {each.quantizer for each in callback.cgx_state.report().layers} == {"rotated", None}
        return model

    return flat(train()), flat(train(f"{folder}/checkpoint-{BATCHES}"))


@pytest.mark.matrix
def test_trainer_resumes_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    need("accelerate", "transformers")
    results = run_ranks(trainer_stops_and_resumes, WORLD, "cgx", str(tmp_path), env=LAUNCHED, timeout_s=LIMIT_S)
    assert_same_bits([tensor for result in results for tensor in result])


def assert_same_bits(tensors: list[Tensor]) -> None:
    """Of both ranks, and of the run that stopped and the one that did not."""
    for other in tensors[1:]:
        torch.testing.assert_close(other, tensors[0], rtol=0, atol=0)
