"""Train a character-level GPT sharded by FSDP2, its weights gathered at 8 bits a value and its gradients sent at 4.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_train.py --data tinyshakespeare.txt
    torchrun --standalone --nproc-per-node 2 examples/fsdp_train.py --data tinyshakespeare.txt --backend gloo \\
        --grad-bits 32 --weight-bits 32

Model, text and loss are those of gpt_train.py; `shard` is the part that a script of your own needs. With 32 bits for
both nothing is compressed: FSDP2 as torch has it. Each rank keeps its shard of the weights as they are, only what
travels is rounded; so the loss on the last tenth of the text is told twice: as the sharded model computes it, from
gathered weights, and of the weights themselves, as a checkpoint has them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import torch_cgx
from common import Average, Journal, generator, join, leave, rise_and_fall, total
from gpt import GPT
from gpt_train import load, loss_of, validate
from torch_cgx.fsdp import Compressed, compress

LAST = 20  # steps that the final loss is a mean of


def shard(
    model: GPT, *, grad_bits: int = 4, weight_bits: int = 8, bucket_size: int = 1024, mesh: DeviceMesh | None = None
) -> Compressed | None:
    """Shard the model block by block, over all ranks or those of `mesh`, and compress what travels (None: nothing)."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if grad_bits == weight_bits == 32:
        return None
    return compress(model, grad_bits=grad_bits, weight_bits=weight_bits, bucket_size=bucket_size)


def train(options: argparse.Namespace) -> None:
    text, vocabulary = load(options.data)
    train_text, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    device = join(options)
    rank, world = dist.get_rank(), dist.get_world_size()
    held_out = whole_pieces(held_out[: options.held_out], options.context, world)
    model = GPT(len(vocabulary), options.context, options.layers, options.width, options.heads).to(device)
    bits = {"grad_bits": options.grad_bits, "weight_bits": options.weight_bits}
    compressed = shard(model, bucket_size=options.bucket_size, **bits)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    schedule = rise_and_fall(optimizer, options.steps)
    average = Average(model, options.average)  # of this rank's shards
    places = generator(options.seed)
    journal = ShardedJournal(options, model, compressed, options.steps, device)
    for _ in range(options.steps):
        # All ranks draw the same places, and each takes its share of them.
        starts = torch.randint(len(train_text) - options.context, (world, options.batch), generator=places)[rank]
        loss = loss_of(model, train_text[starts[:, None] + torch.arange(options.context + 1)].to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update()
        journal.step(loss)
    journal.stop()
    average.apply()
    last = torch.stack(journal.losses[-LAST:]).mean()
    journal.finish(
        model,
        train_loss=total(float(last), device=device)[0] / world,
        validation_loss=validate(model, held_out, options.context, device),
        validation_loss_of_weights=validate(unsharded(model, options), held_out, options.context, device),
        steps_per_s=options.steps / journal.seconds,
    )


def whole_pieces(text: Tensor, context: int, world: int) -> Tensor:
    """As much of the text as gives all ranks equally many pieces: with sharded weights, reading one is a collective."""
    pieces = (len(text) - 1) // context // world * world
    if not pieces:
        raise ValueError(f"expected a held-out text of more than {world} times --context {context}, got {len(text)}")
    return text[: pieces * context + 1]


def unsharded(model: GPT, options: argparse.Namespace) -> GPT:
    """A copy of the model on every rank, of exactly the weights that the shards hold. All ranks must call this."""
    weights: dict[str, Any] = {name: shards.full_tensor() for name, shards in model.state_dict().items()}
    copy = GPT(len(weights["tokens.weight"]), options.context, options.layers, options.width, options.heads)
    copy.load_state_dict(weights)
    return copy.to(next(iter(weights.values())).device)


class ShardedJournal(Journal):
    """What the other examples report, of a sharded model."""

    def __init__(
        self, options: argparse.Namespace, model: nn.Module, compressed: Compressed | None, *more: Any
    ) -> None:
        super().__init__(options, None, *more)
        self.model, self.compressed = model, compressed

    def stop(self) -> None:
        super().stop()
        self.counted = self.count()  # now: validation gathers weights too

    def stats(self) -> dict[str, float]:
        """What this rank has sent in training; empty where nothing was compressed: Gloo and NCCL do not count."""
        return self.counted

    def count(self) -> dict[str, float]:
        if self.compressed is None:
            return {}
        of_groups = [torch_cgx.stats(group) for group in self.compressed.groups]
        stats = {name: sum(each[name] for each in of_groups) for name in of_groups[0]}
        if self.options.weight_bits == 32:
            stats["bytes_sent"] += self.gathered_nbytes()
        return stats

    def exact_nbytes(self, model: nn.Module) -> float:
        """Of gathers, and of reduce-scatters in which each of n ranks sends (n - 1) / n of the gradients."""
        world = dist.get_world_size()
        return self.gathered_nbytes() + len(self.losses) * (world - 1) / world * nbytes_of(model)

    def gathered_nbytes(self) -> float:
        """Each of n ranks sends (n - 1) / n of the weights in forward, and of those freed since in backward.

        Those are the blocks': what the model itself holds, FSDP2 keeps.
        """
        world = dist.get_world_size()
        return len(self.losses) * (world - 1) / world * (nbytes_of(self.model) + nbytes_of(self.model.blocks))


def nbytes_of(module: nn.Module) -> int:
    """Of all its parameters, on all ranks together."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FILE")
    add("--backend", choices=("cgx", "gloo", "nccl"), default="cgx")
    add("--grad-bits", type=int, choices=(*range(1, 9), 32), default=4, help="of gradients; 32: exact")
    add("--weight-bits", type=int, choices=(*range(1, 9), 32), default=8, help="of gathered weights; 32: exact")
    add("--bucket-size", type=int, default=1024, help="how many values share one min and unit")
    add("--steps", type=int, default=500)
    add("--batch", type=int, default=8, help="per process")
    add("--lr", type=float, default=1e-3, help="the highest: it rises to this, then falls to 0")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--average", type=float, default=0.0, metavar="DECAY", help="test a running mean of the weights")
    add("--context", type=int, default=128, help="characters that the model sees")
    add("--layers", type=int, default=6)
    add("--width", type=int, default=384)
    add("--heads", type=int, default=6)
    add("--held-out", type=int, metavar="N", help="validate on so many characters of the last tenth (all)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, help="of a process, for computing on a CPU (default: torch's)")
    add("--tensorboard", type=Path, metavar="DIR")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    parser.set_defaults(report=None)
    train(parser.parse_args())
    leave()


if __name__ == "__main__":
    main()
