"""Train a character-level BERT on a text file: it guesses characters that are hidden. Gradients travel at 4 bits.

    torchrun --standalone --nproc-per-node 2 examples/bert_train.py --data tinyshakespeare.txt
    mpirun -np 2 python examples/bert_train.py --data tinyshakespeare.txt --bits 4 --embedding-bits 8

15 % of the characters are to be guessed; of those, 80 % are hidden, 10 % are replaced by any, and 10 % stay. The last
tenth of the text is for validation, with the same characters hidden each time: the loss there is printed in nats a
hidden character. An epoch is as many characters as the rest has, taken at random places.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common import Average, Journal, distribute, flags, generator, join, leave, rise_and_fall, total
from gpt import Block
from gpt_train import load

HIDDEN, REPLACED, KEPT = 0.12, 0.015, 0.015  # shares of all characters


class Bert(nn.Module):
    """Scores of every token of up to `context`, of which it sees both sides. One more than `vocabulary` is the mask."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary + 1, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def train(options: argparse.Namespace) -> None:
    device = join(options)
    rank, world = dist.get_rank(), dist.get_world_size()
    text, vocabulary = load(options.data)
    train_text, validation_text = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    if len(validation_text) < options.context:
        raise ValueError(f"{options.data}: its last tenth is shorter than --context {options.context}")

    steps = max(1, round(options.epochs * len(train_text) / (options.context * options.batch * world)))
    model = Bert(len(vocabulary), options.context, options.layers, options.width, options.heads).to(device)
    rows = ("tokens.weight", "positions.weight", "head.weight") if options.embedding_bits else ()
    ddp, state = distribute(model, options, {name: {"bits": options.embedding_bits} for name in rows})
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = rise_and_fall(optimizer, steps)
    average = Average(model, options.average)
    places, masks = generator(options.seed), generator(options.seed, rank)
    journal = Journal(options, state, steps, device)
    for _ in range(steps):
        # All ranks draw the same places, and each takes its share of them.
        starts = torch.randint(len(train_text) - options.context + 1, (world, options.batch), generator=places)[rank]
        x = train_text[starts[:, None] + torch.arange(options.context)]
        loss = loss_of(ddp, x, *masked(x, len(vocabulary), masks), device)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update()
        journal.step(loss)
    journal.stop()
    average.apply()
    journal.finish(model, validation_loss=validate(model, validation_text, len(vocabulary), options.context, device))


def masked(x: Tensor, vocabulary: int, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """The text as the model sees it, and which characters it has to guess."""
    draw = torch.rand(x.shape, generator=noise)
    any_character = torch.randint(vocabulary, x.shape, generator=noise)
    seen = torch.where(draw < HIDDEN, vocabulary, torch.where(draw < HIDDEN + REPLACED, any_character, x))
    return seen, draw < HIDDEN + REPLACED + KEPT


def loss_of(
    model: nn.Module, x: Tensor, seen: Tensor, guess: Tensor, device: torch.device, reduction: str = "mean"
) -> Tensor:
    return F.cross_entropy(model(seen.to(device))[guess.to(device)], x[guess].to(device), reduction=reduction)


@torch.inference_mode()
def validate(model: nn.Module, text: Tensor, vocabulary: int, context: int, device: torch.device) -> float:
    """Nats a hidden character, over all whole pieces of `context` characters, each rank having read its share."""
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    texts = (text, *masked(text, vocabulary, generator(0)))
    pieces = (each.unfold(0, context, context)[rank::world].split(64) for each in texts)
    loss = count = 0.0
    for x, seen, guess in zip(*pieces, strict=True):
        loss += float(loss_of(model, x, seen, guess, device, "sum"))
        count += float(guess.sum())
    loss, count = total(loss, count, device=device)
    return loss / count


def main() -> None:
    parser = flags(__doc__, epochs=10, batch=32, lr=2e-3)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE")
    parser.add_argument("--embedding-bits", type=int, help="of the embeddings and the last layer (default: --bits)")
    parser.add_argument("--context", type=int, default=128, help="characters that the model sees")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    train(parser.parse_args())
    leave()


if __name__ == "__main__":
    main()
