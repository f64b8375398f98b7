"""Write CIFAR-10 as the .beton files that FFCV reads.

    python write_datasets.py --config-file default_config.yaml [--data cifar10.npz]

Images are stored as they are, not as JPEG: they are small, and nothing is lost. They are written once,
for trainings with any number of processes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.writer import DatasetWriter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from settings import add_data_flags, parse
from torch import Tensor

from cifar_data import load


class Pairs:
    """Images as FFCV wants them: arrays (32, 32, 3), each with its label."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy())
        self.labels = labels.tolist()
        # FFCV's writer waits for ever where one of its processes fails on an image.
        if (
            len(self.images) != len(self.labels)
            or self.images.dtype != np.uint8
            or self.images.shape[1:] != (32, 32, 3)
        ):
            raise ValueError(
                f"expected as many labels as images, uint8 (n, 32, 32, 3), got {len(self.labels)} labels and "
                f"{self.images.dtype} {self.images.shape}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return self.images[number], self.labels[number]


def write(path: Path, pairs: Pairs) -> None:
    DatasetWriter(str(path), {"image": RGBImageField(write_mode="raw"), "label": IntField()}).from_indexed_dataset(
        pairs
    )
    print(f"{path}: {len(pairs)} images, {path.stat().st_size / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_data_flags(parser)
    options = parse(parser, ["data"])
    data = load(options.data)
    write(options.train_beton, Pairs(data.train_images, data.train_labels))
    write(options.test_beton, Pairs(data.test_images, data.test_labels))


if __name__ == "__main__":
    main()
