"""Train a ResNet on CIFAR-10, with gradients that travel at 4 bits a value (or as many as you say).

    torchrun --standalone --nproc-per-node 2 examples/cifar_train.py --data DIR --download
    mpirun -np 2 python examples/cifar_train.py --data cifar10.npz --model small --bits 4 --bucket-size 1024
    torchrun --standalone --nproc-per-node 2 examples/cifar_train.py --data DIR --backend gloo --bits 2 --error-feedback

`--data` is the folder cifar-10-batches-py, the folder that holds it, or an .npz with train_images (n, 32, 32, 3),
train_labels, test_images and test_labels. `--backend gloo --bits 32` is plain PyTorch, to compare with.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cifar_data import Cifar, augmented, download, load, normalized
from common import Average, Journal, distribute, flags, generator, join, rise_and_fall, shuffled, total
from resnet import MODELS


def train(options: argparse.Namespace) -> None:
    device = join(options)
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.download:
        if rank == 0:
            download(options.data)
        dist.barrier()
    data = load(options.data)
    steps_an_epoch = len(data.train_images) // (options.batch * world)
    if steps_an_epoch == 0:
        raise ValueError(
            f"--batch {options.batch} on {world} processes: there are {len(data.train_images)} images only"
        )

    steps = max(1, round(options.epochs * steps_an_epoch))
    model = MODELS[options.model]().to(device)
    ddp, state = distribute(model, options)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = rise_and_fall(optimizer, steps)
    average = Average(model, options.average)
    journal = Journal(options, state, steps, device)
    for step in range(steps):
        epoch, number = divmod(step, steps_an_epoch)
        if number == 0:
            batches = shuffled(len(data.train_images), options.batch, options.seed, epoch)
            noise = generator(options.seed, epoch, rank)
        batch = next(batches)
        x = normalized(augmented(data.train_images[batch], noise).to(device))
        loss = F.cross_entropy(ddp(x), data.train_labels[batch].to(device), label_smoothing=options.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update()
        journal.step(loss)
    journal.stop()
    average.apply()
    accuracy, test_loss = test(model, data, device)
    journal.finish(model, accuracy=accuracy, test_loss=test_loss)


@torch.inference_mode()
def test(model: nn.Module, data: Cifar, device: torch.device) -> tuple[float, float]:
    """Accuracy and loss, each rank having judged its share of the images, as they are and mirrored."""
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    right = loss = 0.0
    for images, labels in zip(
        data.test_images[rank::world].split(500), data.test_labels[rank::world].split(500), strict=True
    ):
        x, y = normalized(images.to(device)), labels.to(device)
        scores = (model(x).softmax(1) + model(x.flip(3)).softmax(1)) / 2
        right += float((scores.argmax(1) == y).sum())
        loss += float(F.nll_loss(scores.log(), y, reduction="sum"))
    right, loss, count = total(right, loss, len(data.test_labels[rank::world]), device=device)
    return right / count, loss / count


def main() -> None:
    parser = flags(__doc__, epochs=20, batch=64, lr=0.1)
    parser.add_argument("--data", type=Path, required=True, metavar="PATH")
    parser.add_argument("--download", action="store_true", help="fetch CIFAR-10 into --data where it is not there")
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
