"""A training that survives its processes: checkpoints every few steps, and goes on from the last one when restarted.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restart_train.py --data text.txt --folder run

Kill a process while it runs: the other one raises within a second, torchrun starts both again, and they end with the
loss, to the last bit, that they would have had. For that a checkpoint has the model, the optimizer, the place in the
data, the random numbers' state, and each rank's `CGXState`. With several torchruns (`--nnodes 1:3
--rdzv-backend c10d --rdzv-endpoint HOST:PORT`) it goes on with those that are left: the batch is the same, divided
among fewer.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import generator
from gpt import GPT
from gpt_train import load, loss_of
from torch_cgx import CGXState, cgx_hook

CONTEXT = 64


class Training:
    """Everything that a checkpoint must bring back."""

    def __init__(self, vocabulary: int, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.model = GPT(vocabulary, CONTEXT, layers=2, width=64, heads=2)
        # DDP would lay out its grad buckets anew after the first step of every process: other cuts, other bits.
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.hook_state = CGXState.from_model(self.ddp, compression_params={"bits": options.bits}, error_feedback=True)
        self.ddp.register_comm_hook(self.hook_state, cgx_hook)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 2e-3)
        self.places = generator(options.seed)
        self.step = 0

    def save(self, folder: Path) -> None:
        """All ranks call it. A checkpoint has its name only when it is whole."""
        partial, whole = folder / "partial", folder / f"step-{self.step:06d}"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            common = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "places": self.places.get_state(),
                "step": self.step,
            }
            torch.save(common, partial / "common.pt")
        dist.barrier()
        own = {"hook": self.hook_state.state_dict(), "random": torch.get_rng_state()}
        torch.save(own, partial / f"rank-{dist.get_rank()}.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            partial.rename(whole)
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Go on from the last whole checkpoint, if there is one. All ranks call it."""
        last = max(folder.glob("step-*"), default=None)
        if last is None:
            return
        common = torch.load(last / "common.pt", weights_only=True)
        self.model.load_state_dict(common["model"])
        self.optimizer.load_state_dict(common["optimizer"])
        self.places.set_state(common["places"])
        self.step = common["step"]
        own_file = last / f"rank-{dist.get_rank()}.pt"
        if own_file.exists():  # not where there are more ranks than there were
            own: dict[str, Any] = torch.load(own_file, weights_only=True)
            self.hook_state.load_state_dict(own["hook"])
            torch.set_rng_state(own["random"])
        if dist.get_rank() == 0:
            print(f"goes on from step {self.step} with {dist.get_world_size()} processes", flush=True)


def train(options: argparse.Namespace) -> None:
    dist.init_process_group("cgx")
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.batch % world:
        raise ValueError(f"--batch: expected a multiple of the {world} processes, got {options.batch}")
    text, vocabulary = load(options.data)
    training = Training(len(vocabulary), options)
    training.load(options.folder)
    while training.step < options.steps:
        # All ranks draw the places of the whole batch, so that it does not matter how many they are.
        starts = torch.randint(len(text) - CONTEXT, (options.batch,), generator=training.places)[rank::world]
        loss = loss_of(training.ddp, text[starts[:, None] + torch.arange(CONTEXT + 1)])
        training.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
        training.step += 1
        if training.step % options.every == 0:
            training.save(options.folder)
    mean = loss.detach().double()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"loss {mean.item()!r} after {training.step} steps with {world} processes", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="a text")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=24, help="of all processes together")
    parser.add_argument("--bits", type=int, choices=range(1, 9), default=4)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
