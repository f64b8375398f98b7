"""Lightning: one strategy.

torchrun --nproc-per-node 2 examples/lightning_train.py

`python examples/lightning_train.py` works too: Lightning then starts the second process itself.
"""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_cgx
from torch_cgx.lightning import CGXStrategy


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


pl.seed_everything(0)
x = torch.randn(2048, 32)
data = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=64, shuffle=True)
model = Classifier()
strategy = CGXStrategy(bits=4, overrides={"net.4.weight": {"bits": 8}})
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, data)

stats = torch_cgx.stats()
if trainer.is_global_zero:
    print(f"loss {trainer.callback_metrics['loss'].item():.3f}")
    print(strategy.cgx_state.report())
    print(stats)
assert stats["bytes_after"] < stats["bytes_before"] / 6, stats
