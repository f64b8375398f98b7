"""Reads CIFAR-10: the standard python batches, an .npz, or the official archive; or scikit-learn's digits."""

from __future__ import annotations

import hashlib
import os
import pickle
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FOLDER = "cifar-10-batches-py"
ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
MD5 = "c58f30108f718f92721af3b95e74349a"
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
DIGITS = Path("digits")
MEAN, SPREAD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Cifar(NamedTuple):
    """Images uint8 (n, 3, 32, 32), the digits (n, 3, 8, 8), labels int64 (n,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(path: Path) -> Cifar:
    """From an .npz with the four arrays, the folder cifar-10-batches-py, or a folder that holds it; or `digits`."""
    if path.is_file():
        return load_npz(path)
    if path == DIGITS and not path.exists():
        return load_digits()
    for folder in (path, path / FOLDER):
        if (folder / "data_batch_1").is_file():
            return load_batches(folder)
    raise FileNotFoundError(
        f"{path}: expected an .npz with {', '.join(ARRAYS)}, or the folder {FOLDER} with data_batch_1 to 5 and "
        f"test_batch; where there is a network, --download fetches it; `{DIGITS}` are scikit-learn's"
    )


def load_npz(path: Path) -> Cifar:
    """Images as (n, height, width, 3)."""
    with np.load(path) as arrays:
        missing = [name for name in ARRAYS if name not in arrays]
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}; expected {', '.join(ARRAYS)}")
        train, train_labels, test, test_labels = (torch.from_numpy(arrays[name]) for name in ARRAYS)
    return Cifar(
        train.permute(0, 3, 1, 2).contiguous(),
        train_labels.long(),
        test.permute(0, 3, 1, 2).contiguous(),
        test_labels.long(),
    )


def load_batches(folder: Path) -> Cifar:
    """Pickled dictionaries with data, of rows of 3 x 32 x 32 bytes, and labels. Only for files that you trust."""

    def load_batch(name: str) -> tuple[Tensor, Tensor]:
        with (folder / name).open("rb") as file:
            batch = pickle.load(file, encoding="latin1")
        return torch.from_numpy(batch["data"]).view(-1, 3, 32, 32), torch.tensor(batch["labels"])

    images, labels = zip(*(load_batch(f"data_batch_{number}") for number in range(1, 6)), strict=True)
    return Cifar(torch.cat(images), torch.cat(labels), *load_batch("test_batch"))


def load_digits() -> Cifar:
    """1,797 grey images of 8 x 8, as the package scikit-learn has them; the last third is for tests."""
    from sklearn.datasets import load_digits as load_from_package

    digits = load_from_package()
    images = torch.from_numpy(digits.images * (255 / 16)).round().to(torch.uint8)[:, None].repeat(1, 3, 1, 1)
    labels = torch.from_numpy(digits.target).long()
    begin = len(images) * 2 // 3
    return Cifar(images[:begin], labels[:begin], images[begin:], labels[begin:])


def download(path: Path, address: str = ADDRESS, md5: str = MD5) -> None:
    """Fetch the official archive and unpack it in `path`, unless it is there. Nothing is left where it fails."""
    if (path / FOLDER).is_dir():
        return
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path) as unfinished:
        archive = Path(unfinished) / "archive.tar.gz"
        urllib.request.urlretrieve(address, archive)
        got = hashlib.md5(archive.read_bytes()).hexdigest()
        if got != md5:
            raise ValueError(f"{address}: expected md5 {md5}, got {got}")
        with tarfile.open(archive) as tar:
            tar.extractall(unfinished, filter="data")
        os.rename(Path(unfinished) / FOLDER, path / FOLDER)


def normalized(images: Tensor) -> Tensor:
    mean, spread = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (MEAN, SPREAD))
    return (images / 255 - mean) / spread


def augmented(images: Tensor, generator: torch.Generator, mirror: bool = True) -> Tensor:
    """Each image moved by up to an eighth of it, with black where it was not, and, where wanted, half mirrored."""
    count, size = len(images), images.shape[-1]
    reach = size // 8
    padded = torch.nn.functional.pad(images, (reach, reach, reach, reach))
    rows = torch.randint(2 * reach + 1, (count, 1), generator=generator) + torch.arange(size)
    columns = torch.randint(2 * reach + 1, (count, 1), generator=generator) + torch.arange(size)
    if mirror:
        mirrored = torch.rand(count, 1, generator=generator) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    image = torch.arange(count).view(-1, 1, 1, 1)
    channel = torch.arange(3).view(1, -1, 1, 1)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
