"""What the training examples share: the flags, how a process joins the others, the hook, and what is reported.

Not a library: copy what you need. `distribute` is the part that a script of your own needs for compression.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import torch_cgx
from torch_cgx import AdaptiveBits, CGXState, cgx_hook


def flags(doc: str | None, *, epochs: int, batch: int, lr: float) -> argparse.ArgumentParser:
    """The flags that all examples have; `doc` is the example's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--backend", choices=("gloo", "nccl", "cgx"), default="cgx")
    parser.add_argument("--bits", type=int, choices=(*range(1, 9), 32), default=4, help="32: exact, without the hook")
    parser.add_argument(
        "--adaptive", action="store_true", help="bits layer by layer, with no more error than --bits everywhere"
    )
    parser.add_argument("--bucket-size", type=int, default=1024, help="how many values share a header")
    parser.add_argument("--quantizer", choices=["maxmin", "rotated"], default="maxmin", help="rotated: 1 to 4 bits")
    parser.add_argument("--layer-min-size", type=int, default=1024, help="layers with fewer values travel exactly")
    parser.add_argument("--error-feedback", action="store_true", help="send later what rounding lost; use below 4 bits")
    parser.add_argument("--epochs", type=float, default=epochs)
    parser.add_argument("--batch", type=int, default=batch, help="per process")
    parser.add_argument("--lr", type=float, default=lr, help="the highest: it rises to this, then falls to 0")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights, the order of the data and its augmentation"
    )
    parser.add_argument(
        "--average", type=float, default=0.0, metavar="DECAY", help="test a running mean of the weights"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of a process, for computing on a CPU (default: torch's)")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write every layer's bits there, for `cgx bits`")
    return parser


def join(options: argparse.Namespace) -> torch.device:
    """Join the other processes that torchrun or mpirun has started; the device that this one computes on."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    torch.manual_seed(options.seed)
    return device


def leave() -> None:
    """Leave the group. Call this when DDP is gone, which is after the function that made it.

    If DDP is the last to refer to a Gloo group, it ends the group and holds the GIL while it waits for Gloo's threads.
    One of them may need the GIL to drop the tensors of the last operation. Then the process hangs:
    https://github.com/pytorch/pytorch/issues/56297.
    """
    dist.destroy_process_group()


def distribute(
    model: nn.Module, options: argparse.Namespace, overrides: dict[str, dict[str, int]] | None = None
) -> tuple[DistributedDataParallel, CGXState | None]:
    """The model under DDP, its gradients compressed to `--bits` whatever the backend; and the hook's state."""
    ddp = DistributedDataParallel(model)
    if options.bits == 32:
        return ddp, None
    state = CGXState.from_model(
        ddp,
        layer_min_size=options.layer_min_size,
        compression_params={
            "bits": options.bits,
            "bucket_size": options.bucket_size,
            "quantizer": options.quantizer,
        },
        overrides=overrides,
        error_feedback=options.error_feedback,
        adaptive=AdaptiveBits() if options.adaptive else None,
    )
    ddp.register_comm_hook(state, cgx_hook)
    return ddp, state


def shuffled(numel: int, batch: int, seed: int, epoch: int) -> Iterator[Tensor]:
    """This rank's batches of one epoch, as indices: all ranks draw the same order, and each takes its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(numel, generator=generator(seed, epoch))
    for start in range(0, numel - batch * world + 1, batch * world):
        yield order[start + rank * batch : start + (rank + 1) * batch]


def generator(*numbers: int) -> torch.Generator:
    """Random numbers that depend on these alone."""
    return torch.Generator().manual_seed(hash(numbers) % 2**63)  # the hash of integers is the same in all processes


def rise_and_fall(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate rises for a tenth of the steps, then falls to 0 along a cosine."""
    rising = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising))) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Average:
    """A running mean of a model's weights (and of its batch norms' statistics), which is less noisy than they are."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        kept = model.state_dict() if decay else {}
        self.mean = {name: value.detach().clone() for name, value in kept.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, value in self.model.state_dict().items() if self.mean else ():
            if value.is_floating_point():
                self.mean[name].lerp_(value, 1 - self.decay)
            else:
                self.mean[name].copy_(value)

    def apply(self) -> None:
        """Give the mean to the model."""
        if self.mean:
            self.model.load_state_dict(self.mean)


def total(*values: float, device: torch.device) -> list[float]:
    """The sums of these over all ranks. Exact: of an all_reduce beside the hook nothing is compressed."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


class Journal:
    """Losses and times of a training: a progress bar and a summary on rank 0, TensorBoard and JSON where asked."""

    def __init__(self, options: argparse.Namespace, state: CGXState | None, steps: int, device: torch.device) -> None:
        self.options, self.state, self.device = options, state, device
        self.losses: list[Tensor] = []
        self.writer: Any = None
        self.start = time.perf_counter()
        self.first = dist.get_rank() == 0
        if self.first and options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(options.tensorboard))
        self.bar = tqdm(
            total=steps, unit="step", disable=not self.first, mininterval=0.5 if sys.stderr.isatty() else 10.0
        )

    def step(self, loss: Tensor) -> None:
        number = len(self.losses)
        self.losses.append(loss.detach())  # a tensor yet: reading a number would make a GPU wait
        self.bar.update()
        if number % 20 == 0:
            self.bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            if self.writer is not None:
                self.writer.add_scalar("loss", loss.item(), number)
                if self.state is not None and number % 100 == 0:
                    self.state.log_to(self.writer)

    def stop(self) -> None:
        """The training is over: what follows is not timed."""
        self.bar.close()
        self.seconds = time.perf_counter() - self.start

    def finish(self, model: nn.Module, **figures: float) -> None:
        """Report. All ranks must call this."""
        mine = torch.stack(self.losses).float()
        of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, mine)
        stats = self.stats()
        counted = bool(stats) and stats["operations"] > 0  # Gloo and NCCL, which carry what is exact, do not count
        sent_nbytes = stats["bytes_sent"] if counted else self.exact_nbytes(model)
        if self.first:
            self.print_summary(stats, sent_nbytes, figures)
            result = {
                "settings": {name: value for name, value in vars(self.options).items() if not isinstance(value, Path)},
                "world": dist.get_world_size(),
                "parameters": sum(p.numel() for p in model.parameters()),
                **figures,
                "seconds": self.seconds,
                "bytes_sent": sent_nbytes,
                "stats": stats,
                "losses": torch.stack(of_ranks).mean(0).tolist(),
            }
            if self.options.json:
                self.options.json.write_text(json.dumps(result) + "\n")
            if self.options.report and self.state is not None:
                self.options.report.write_text(json.dumps(self.state.report().as_dict()) + "\n")
            if self.writer is not None:
                for name, value in figures.items():
                    self.writer.add_scalar(name, value, len(self.losses))
                self.writer.close()

    def stats(self) -> dict[str, float]:
        """What this rank has sent; empty where torch's own backends carried it, which do not count."""
        if self.state is not None:
            return torch_cgx.stats(self.state.group)
        return torch_cgx.stats() if self.options.backend == "cgx" else {}

    def exact_nbytes(self, model: nn.Module) -> float:
        """Of gloo's and NCCL's rings, in which each of n ranks sends (n - 1) / n of the gradients twice."""
        gradients = sum(p.numel() * p.element_size() for p in model.parameters())
        world = dist.get_world_size()
        return len(self.losses) * 2 * (world - 1) / world * gradients

    def print_summary(self, stats: dict[str, float], sent_nbytes: float, figures: dict[str, float]) -> None:
        print(*(f"{name.replace('_', ' ')} {value:.4f}" for name, value in figures.items()), sep=", ", end="; ")
        print(f"{self.seconds:.1f} s for {len(self.losses)} steps; {sent_nbytes / 1e6:,.2f} MB sent by rank 0")
        if self.state is not None and stats["compressed_operations"]:
            ratio = stats["bytes_before"] / max(1, stats["bytes_after"])
            print(f"gradients were compressed {ratio:.1f} times by the hook, on backend {self.options.backend}")
