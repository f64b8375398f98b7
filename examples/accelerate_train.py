"""Hugging Face Accelerate: make the group before the Accelerator, and register the hook on the prepared model.

torchrun --nproc-per-node 2 examples/accelerate_train.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_cgx
from torch_cgx import CGXState, cgx_hook

dist.init_process_group("cgx")  # on CPU, Accelerate would make a gloo group, and refuses other names
accelerator = Accelerator(cpu=True)
set_seed(0)
x = torch.randn(2048, 32)
data = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
state = CGXState.from_model(model, compression_params={"bits": 4, "bucket_size": 1024})
model.register_comm_hook(state, cgx_hook)

for _ in range(2):
    for x, y in data:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

stats = torch_cgx.stats()
accelerator.print(f"loss {accelerator.gather(loss.detach()[None]).mean().item():.3f}")
accelerator.print(state.report())
accelerator.print(stats)
assert stats["bytes_after"] < stats["bytes_before"] / 6, stats
accelerator.end_training()  # this destroys the group too
