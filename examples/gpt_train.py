"""Train a character-level GPT on a text file, with gradients that travel at 4 bits a value (or as many as you say).

    torchrun --standalone --nproc-per-node 2 examples/gpt_train.py --data tinyshakespeare.txt
    mpirun -np 2 python examples/gpt_train.py --data tinyshakespeare.txt --backend gloo --bits 2 --error-feedback

The last tenth of the text is for validation: the loss there is printed in nats a character. An epoch is as many
characters as the rest has, taken at random places. `--compile` trains the model through torch.compile.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common import Average, Journal, distribute, flags, generator, join, leave, rise_and_fall, total
from gpt import GPT


def train(options: argparse.Namespace) -> None:
    device = join(options)
    rank, world = dist.get_rank(), dist.get_world_size()
    text, vocabulary = load(options.data)
    train_text, validation_text = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    if len(validation_text) <= options.context:
        raise ValueError(f"{options.data}: its last tenth is shorter than --context {options.context} and one more")

    steps = max(1, round(options.epochs * len(train_text) / (options.context * options.batch * world)))
    model = GPT(len(vocabulary), options.context, options.layers, options.width, options.heads).to(device)
    # Rows of rare characters have small gradients, beside those of frequent ones, with which they share their levels.
    rows = ("tokens.weight", "positions.weight", "head.weight") if options.embedding_bits else ()
    ddp, state = distribute(model, options, {name: {"bits": options.embedding_bits} for name in rows})
    run = torch.compile(ddp) if options.compile else ddp
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = rise_and_fall(optimizer, steps)
    average = Average(model, options.average)
    places = generator(options.seed)
    journal = Journal(options, state, steps, device)
    for _ in range(steps):
        # All ranks draw the same places, and each takes its share of them.
        starts = torch.randint(len(train_text) - options.context, (world, options.batch), generator=places)[rank]
        x = train_text[starts[:, None] + torch.arange(options.context + 1)].to(device)
        loss = loss_of(run, x)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update()
        journal.step(loss)
    journal.stop()
    average.apply()
    journal.finish(model, validation_loss=validate(model, validation_text, options.context, device))


def load(path: Path) -> tuple[Tensor, str]:
    """The text as numbers of characters, and the characters."""
    text = path.read_text(encoding="utf-8")
    vocabulary = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(vocabulary)}
    return torch.tensor([numbers[character] for character in text]), vocabulary


def loss_of(model: nn.Module, x: Tensor, reduction: str = "mean") -> Tensor:
    scores = model(x[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), x[:, 1:].flatten(), reduction=reduction)


@torch.inference_mode()
def validate(model: nn.Module, text: Tensor, context: int, device: torch.device) -> float:
    """Nats a character, over all whole pieces of `context` characters, each rank having read its share of them."""
    model.eval()
    pieces = text.unfold(0, context + 1, context)[dist.get_rank() :: dist.get_world_size()]
    loss = sum(float(loss_of(model, piece.to(device), "sum")) for piece in pieces.split(64))
    loss, count = total(loss, len(pieces) * context, device=device)
    return loss / count


def main() -> None:
    parser = flags(__doc__, epochs=5, batch=32, lr=2e-3)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--embedding-bits", type=int, help="of the embeddings and the last layer (default: --bits; 8 is good advice)"
    )
    parser.add_argument("--context", type=int, default=128, help="characters that the model sees")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    train(parser.parse_args())
    leave()


if __name__ == "__main__":
    main()
