"""Plain PyTorch: the backend's name and one line after DDP.

torchrun --nproc-per-node 2 examples/plain_train.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from torch_cgx import CGXState, cgx_hook

dist.init_process_group("cgx")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10)))
state = CGXState.from_model(model, compression_params={"bits": 4, "bucket_size": 1024})
model.register_comm_hook(state, cgx_hook)

optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(1 + dist.get_rank())  # every rank has its own data
for _ in range(20):
    x = torch.randn(64, 32)
    loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

stats = torch_cgx.stats()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
    print(state.report())
    print(stats)
assert stats["bytes_after"] < stats["bytes_before"] / 6, stats
dist.destroy_process_group()
