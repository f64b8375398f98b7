"""A tour of torch_cgx in five minutes, to read beside docs/tour.md. It runs alone, and starts two processes itself:

python examples/tour.py      # all parts, one after the other
python examples/tour.py 2    # one of them
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from torch_cgx import CGXState, cgx_hook

PROCESSES = 2
NUMEL = 1_000_000
STEPS = 60


def quantize() -> None:
    """Part 1 needs one process: a tensor becomes a payload of few bits a value, and a tensor again."""
    torch.manual_seed(0)
    x = torch.randn(NUMEL)
    print(f"{NUMEL:,} random values, {4 * NUMEL:,} bytes; every 1024 of them share a smallest value and a step.\n")
    print("bits      bytes   smaller   relative error")
    for bits in (8, 4, 2, 1):
        payload = torch_cgx.quantize(x, bits=bits, bucket_size=1024)
        y = torch_cgx.dequantize(payload, x.numel(), x.dtype, bits=bits, bucket_size=1024)
        error = (y - x).norm() / x.norm()
        print(f"{bits:4} {payload.numel():10,} {4 * NUMEL / payload.numel():8.2f}x {error:16.4f}")


def all_reduce(rank: int) -> None:
    """Part 2: the sum over two processes, exactly and at 4 bits."""
    torch.manual_seed(rank)
    mine = torch.randn(NUMEL)
    with torch_cgx.uncompressed():
        exact = summed(mine)
    torch_cgx.reset_stats()
    torch_cgx.set_default(bits=4, bucket_size=1024)  # or CGX_COMPRESSION_QUANTIZATION_BITS=4 in the environment
    compressed = summed(mine)
    torch_cgx.set_default()  # exact again
    stats = torch_cgx.stats()
    others = [torch.empty_like(compressed) for _ in range(PROCESSES)]
    dist.all_gather(others, compressed)
    if rank == 0:
        print(f"exact, the first three sums:      {shown(exact)}")
        print(f"at 4 bits, the first three sums:  {shown(compressed)}")
        print(f"relative error of the sum:        {(compressed - exact).norm() / exact.norm():.4f}")
        print(f"both processes hold the same bits: {'yes' if torch.equal(others[0], others[1]) else 'NO'}")
        print(f"bytes of the tensor, and as sent:  {stats['bytes_before']:,.0f} and {stats['bytes_after']:,.0f}")


def summed(mine: Tensor) -> Tensor:
    total = mine.clone()
    dist.all_reduce(total)
    return total


def shown(x: Tensor) -> str:
    return "  ".join(f"{value:7.4f}" for value in x[:3].tolist())


def train(rank: int) -> None:
    """Part 3: one model trained twice by DDP, exactly and with the hook; two lines differ."""
    exact, _ = trained(rank, bits=32)
    loss, state = trained(rank, bits=4)
    if rank == 0:
        print(f"loss after {STEPS} steps: {exact:.4f} exactly, {loss:.4f} at 4 bits; each layer of the second:\n")
        print(state.report())


def trained(rank: int, bits: int) -> tuple[float, CGXState]:
    """The loss at the end, the mean of both processes."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 10)))
    state = CGXState.from_model(model, compression_params={"bits": bits, "bucket_size": 1024})
    model.register_comm_hook(state, cgx_hook)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    torch.manual_seed(1 + rank)  # each process has its own data
    for _ in range(STEPS):
        x = torch.randn(128, 32)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach() / PROCESSES
    dist.all_reduce(mean)  # of fewer than 16 values: never compressed
    return mean.item(), state


def run_rank(rank: int, parts: list[int], store: str) -> None:
    """What each of the two processes does; with torchrun, init_process_group("cgx") alone would do."""
    torch.set_num_threads(1)
    dist.init_process_group("cgx", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    for part in parts:
        if rank == 0:
            print(f"\n=== {part}. {TITLES[part]} ===\n", flush=True)
        {2: all_reduce, 3: train}[part](rank)
    dist.destroy_process_group()


TITLES = {1: "Quantize a tensor", 2: "Sum a tensor over two processes", 3: "Train a model on two processes"}


def main() -> None:
    parser = argparse.ArgumentParser(description="A tour of torch_cgx.")
    parser.add_argument("part", nargs="?", type=int, choices=TITLES, help="run one part alone")
    part = parser.parse_args().part
    parts = list(TITLES) if part is None else [part]
    if 1 in parts:
        print(f"\n=== 1. {TITLES[1]} ===\n", flush=True)
        quantize()
    together = [part for part in parts if part != 1]
    if together:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (together, str(Path(folder) / "store")), PROCESSES)
    print("\nNext: docs/usage.md for your own script, docs/hook.md for bits by layer, `cgx bench allreduce` for times.")


if __name__ == "__main__":
    main()
