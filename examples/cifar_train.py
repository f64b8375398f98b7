"""Train a ResNet, a VGG or a ViT on CIFAR-10, with gradients that travel at 4 bits a value (or as many as you say).

    torchrun --standalone --nproc-per-node 2 examples/cifar_train.py --data DIR --download
    mpirun -np 2 python examples/cifar_train.py --data cifar10.npz --model small --bits 4 --bucket-size 1024
    torchrun --standalone --nproc-per-node 2 examples/cifar_train.py --data DIR --backend gloo --bits 2 --error-feedback
    torchrun --standalone --nproc-per-node 2 examples/cifar_train.py --data digits --no-mirror --model vit --patch 2 \\
        --optimizer adamw --lr 3e-3

`--data` is the folder cifar-10-batches-py, the folder that holds it, or an .npz with train_images (n, 32, 32, 3),
train_labels, test_images and test_labels; `digits` are scikit-learn's, of 8 x 8, which need no file. `--backend gloo
--bits 32` is plain PyTorch, to compare with.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_data import augmented, download, load, normalized
from common import Average, Journal, distribute, flags, generator, join, leave, rise_and_fall, shuffled, total
from resnet import MODELS as RESNETS
from vgg import VGG
from vit import ViT

MODELS = (*RESNETS, "vgg", "vit")


class Source(Protocol):
    """Where batches come from: images as the model takes them, and labels, on the device."""

    steps: int  # in an epoch
    size: int  # of an image's side, in pixels

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's batches of an epoch."""

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of the test images."""


class InMemory:
    """All of CIFAR-10 in memory, augmented when it is asked for."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        if options.download:
            if dist.get_rank() == 0:
                download(options.data)
            dist.barrier()
        self.data = load(options.data)
        self.size = self.data.train_images.shape[-1]
        self.steps = len(self.data.train_images) // (options.batch * dist.get_world_size())

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        noise = generator(self.options.seed, number, dist.get_rank())
        for batch in shuffled(len(self.data.train_images), self.options.batch, self.options.seed, number):
            x = augmented(self.data.train_images[batch], noise, self.options.mirror)
            yield normalized(x.to(self.device)), self.data.train_labels[batch].to(self.device)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        for x, y in zip(self.data.test_images[mine].split(500), self.data.test_labels[mine].split(500), strict=True):
            yield normalized(x.to(self.device)), y.to(self.device)


def train(options: argparse.Namespace, make_source: Callable[[argparse.Namespace, torch.device], Source]) -> None:
    device = join(options)
    source = make_source(options, device)
    if source.steps == 0:
        raise ValueError(f"--batch {options.batch} on {dist.get_world_size()} processes: more than there are images")

    steps = max(1, round(options.epochs * source.steps))
    model = make_model(options, source.size).to(device)
    ddp, state = distribute(model, options)
    optimizer = make_optimizer(options, model)
    schedule = rise_and_fall(optimizer, steps)
    average = Average(model, options.average)
    journal = Journal(options, state, steps, device)
    epochs = itertools.chain.from_iterable(source.epoch(number) for number in itertools.count())
    for x, y in itertools.islice(epochs, steps):
        loss = F.cross_entropy(ddp(x), y, label_smoothing=options.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update()
        journal.step(loss)
    journal.stop()
    average.apply()
    accuracy, test_loss = test(model, source, device, options.mirror)
    journal.finish(model, accuracy=accuracy, test_loss=test_loss)


def make_model(options: argparse.Namespace, size: int) -> nn.Module:
    if options.model == "vgg":
        return VGG(size)
    if options.model == "vit":
        return ViT(size, options.patch)
    return RESNETS[options.model]()


def make_optimizer(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if options.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), options.lr, weight_decay=0.05)
    return torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)


@torch.no_grad()  # not inference_mode, in which FFCV's threads could not fill what is allocated here
def test(model: nn.Module, source: Source, device: torch.device, mirror: bool) -> tuple[float, float]:
    """Accuracy and loss, each rank having judged its share of the images, as they are and, where wanted, mirrored."""
    model.eval()
    right = loss = count = 0.0
    for x, y in source.test():
        scores = model(x).softmax(1)
        if mirror:
            scores = (scores + model(x.flip(3)).softmax(1)) / 2
        right += float((scores.argmax(1) == y).sum())
        loss += float(F.nll_loss(scores.log(), y, reduction="sum"))
        count += len(y)
    right, loss, count = total(right, loss, count, device=device)
    return right / count, loss / count


def cifar_flags(doc: str | None) -> argparse.ArgumentParser:
    parser = flags(doc, epochs=20, batch=64, lr=0.1)
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--patch", type=int, default=4, help="pixels of the sides of what a ViT takes for one token")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="adamw is what a ViT needs")
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument(
        "--mirror", action=argparse.BooleanOptionalAction, default=True, help="train and test on mirrored images too"
    )
    return parser


def main() -> None:
    parser = cifar_flags(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="PATH")
    parser.add_argument("--download", action="store_true", help="fetch CIFAR-10 into --data where it is not there")
    train(parser.parse_args(), InMemory)
    leave()


if __name__ == "__main__":
    main()
