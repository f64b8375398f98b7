"""Train a ResNet on CIFAR-10 with FFCV's data loader, and with gradients that travel at 4 bits a value.

    torchrun --standalone --nproc-per-node 2 train_cifar_ffcv_cgx.py --config-file default_config.yaml
    mpirun -np 2 python train_cifar_ffcv_cgx.py --config-file default_config.yaml --epochs 5 --model small

It reads what write_datasets.py has written. The training is that of ../cifar_train.py; only where batches come from is
another: FFCV reads, augments and normalizes the next ones on threads of its own, compiled, while the model computes.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import numba
import numpy as np
import torch
import torch.distributed as dist
from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.reader import Reader
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, RandomTranslate, ToDevice, ToTensor, ToTorchImage
from ffcv.transforms.common import Squeeze
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from settings import add_data_flags, parse

from cifar_data import MEAN, SPREAD, normalized
from cifar_train import cifar_flags, train
from common import leave


class Betons:
    """Batches from .beton files. What FFCV yields is its own memory, and is overwritten some batches later."""

    size = 32

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        for path in (options.train_beton, options.test_beton):
            if not path.is_file():
                raise FileNotFoundError(f"{path}: write_datasets.py, with the same --config-file, writes it")
        # FFCV gives torch as many threads as it has itself; so it is told to have as many as torch.
        self.threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        augment = [RandomTranslate(padding=4), *([RandomHorizontalFlip()] if options.mirror else [])]
        self.loader = Loader(
            str(options.train_beton),
            batch_size=options.batch,
            num_workers=self.threads,
            order=OrderOption.RANDOM,
            distributed=True,  # each rank gets its share of the same order, another one each epoch
            seed=options.seed,
            drop_last=True,
            pipelines=self.pipelines(augment),
        )
        self.steps = len(self.loader)
        # The first batch takes seconds, in which the pipeline is compiled: this is no part of the training's time.
        begun = iter(self.loader)
        self.first = chain(list(islice(begun, 1)), begun)

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self.first if number == 0 else self.loader

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Not `distributed`, which repeats images until all ranks have as many.
        images = np.arange(Reader(str(self.options.test_beton)).num_samples, dtype=np.uint64)
        yield from Loader(
            str(self.options.test_beton),
            batch_size=500,
            num_workers=self.threads,
            indices=images[dist.get_rank() :: dist.get_world_size()],
            order=OrderOption.SEQUENTIAL,
            drop_last=False,
            pipelines=self.pipelines([]),
        )

    def pipelines(self, augment: list[object]) -> dict[str, list[object]]:
        """What is done to images and labels. What works on arrays comes before ToTensor."""
        image, label = [SimpleRGBImageDecoder(), *augment], [IntDecoder()]
        if self.device.type == "cuda":
            # FFCV's own normalization needs cupy on a GPU.
            image += [ToTensor(), ToDevice(self.device, non_blocking=True), ToTorchImage(), Normalized()]
            label += [ToTensor(), ToDevice(self.device, non_blocking=True), Squeeze(1)]
        else:
            mean, spread = (255 * np.array(values) for values in (MEAN, SPREAD))
            image += [NormalizeImage(mean, spread, np.float32), ToTensor(), ToTorchImage(channels_last=False)]
            label += [ToTensor(), Squeeze(1)]
        return {"image": image, "label": label}


class Normalized(torch.nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return normalized(images)


def end_the_process(failed: threading.ExceptHookArgs) -> None:
    """For a failed thread: where it was FFCV's, the training would wait for its batches for ever."""
    threading.__excepthook__(failed)
    os._exit(1)


def main() -> None:
    threading.excepthook = end_the_process
    parser = cifar_flags(__doc__)
    add_data_flags(parser)
    train(parse(parser, ["data", "training"]), Betons)
    leave()


if __name__ == "__main__":
    main()
