"""The models of `cgx bench train`, and their training data. Nothing is downloaded or measured here.

Each model has the size at which its kind is trained on ordinary machines: 5 to 11 million parameters. Without `--data`,
the GPT reads the source of Python's own standard library. Images are then noise around one picture per class, which a
model can learn.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "Images", "Kind", "Source", "Text"]

CONTEXT = 64
CLASSES = 10
SIDE = 32
TEXT_NBYTES = 1 << 21
HELD_OUT = 16  # pieces of text, or images


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.inward(x).split(width, 2)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        mixed: Tensor = self.outward(y.transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection and the norm before it."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, causal))
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        thought: Tensor = x + self.think(x)
        return thought


class GPT(nn.Module):
    """Scores of the next byte, for each of `CONTEXT` bytes."""

    def __init__(self, layers: int = 6, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256, bias=False))
        _start_small(self)

    def forward(self, text: Tensor) -> Tensor:
        places = self.places(torch.arange(text.shape[1], device=text.device))
        scores: Tensor = self.head(self.blocks(self.tokens(text) + places))
        return scores


class ViT(nn.Module):
    """Scores of the classes, from patches of 4 x 4."""

    def __init__(self, layers: int = 6, width: int = 384, heads: int = 6, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.places = nn.Parameter(torch.zeros(1, (SIDE // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))
        _start_small(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        scores: Tensor = self.head(self.blocks(x).mean(1))
        return scores


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        stride = 1 if channels_in == channels else 2
        self.convolve = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.short_cut: nn.Module = nn.Identity()
        if channels_in != channels:
            self.short_cut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolve(x) + self.short_cut(x))


class ResNet(nn.Module):
    """ResNet-18 for images of 32 x 32."""

    def __init__(self, channels: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels[0], 3, padding=1, bias=False), nn.BatchNorm2d(channels[0]), nn.ReLU()
        )
        before = (channels[0], *channels)
        pairs = [(start, end) for first, end in zip(before, channels, strict=False) for start in (first, end)]
        self.stages = nn.Sequential(*(Residual(start, end) for start, end in pairs))
        self.head = nn.Linear(channels[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.stages(self.stem(images)).mean((2, 3)))
        return scores


def perceptron(width: int = 1024) -> nn.Module:
    """Return a perceptron with three hidden layers."""
    sizes = [3 * SIDE * SIDE, width, width, width]
    hidden = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, CLASSES))


def _start_small(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class Source:
    """The training data of a model. A step and rank always get the same batch."""

    def batch(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return the held-out data, which is in no batch."""
        raise NotImplementedError


class Text(Source):
    """Bytes of a file, each with the next byte as its target. The last tenth is held out."""

    def __init__(self, path: Path | None) -> None:
        text = path.read_bytes() if path else library_text()
        if len(text) < 20 * CONTEXT:
            raise ValueError(f"{path}: expected a text of at least {20 * CONTEXT} bytes, got {len(text)}")
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.train, self.test = values[: len(values) * 9 // 10], values[len(values) * 9 // 10 :]

    def batch(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.train) - CONTEXT, (size,), generator=_chance(step, rank))
        return _pieces(self.train, starts)

    def held_out(self) -> tuple[Tensor, Tensor]:
        return _pieces(self.test, torch.linspace(0, len(self.test) - CONTEXT - 1, HELD_OUT).long())


class Images(Source):
    """Images of an .npz with train_images (n, 32, 32, 3), train_labels, test_images, test_labels, or generated ones."""

    def __init__(self, path: Path | None) -> None:
        if path is None:
            self._made_up()
            return
        try:
            with np.load(path) as file:
                names = ("train_images", "train_labels", "test_images", "test_labels")
                images, labels, test_images, test_labels = (torch.from_numpy(file[name]) for name in names)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"{path}: expected an .npz with train_images, train_labels, test_images and test_labels: {error}"
            ) from error
        if images.shape[1:] != (SIDE, SIDE, 3):
            raise ValueError(f"{path}: expected images of {SIDE} x {SIDE} x 3, got {tuple(images.shape[1:])}")
        self.train, self.test = _as_input(images), _as_input(test_images[:: max(1, len(test_images) // 200)])
        self.labels, self.test_labels = labels.long(), test_labels[:: max(1, len(test_labels) // 200)].long()

    def _made_up(self) -> None:
        chance = _chance(0, 0)
        pictures = torch.randn(CLASSES, 3, SIDE, SIDE, generator=chance)
        labels = torch.randint(CLASSES, (1200,), generator=chance)
        images = pictures[labels] + 2 * torch.randn(len(labels), 3, SIDE, SIDE, generator=chance)
        self.train, self.test = images[200:], images[:200]
        self.labels, self.test_labels = labels[200:], labels[:200]

    def batch(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        picked = torch.randint(len(self.train), (size,), generator=_chance(step, rank))
        return self.train[picked], self.labels[picked]

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self.test, self.test_labels


def library_text() -> bytes:
    """Return the source of Python's standard library, modules in order of name, up to the needed length."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_NBYTES:
            break
    return bytes(text[:TEXT_NBYTES])


def _pieces(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    pieces = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def _as_input(images: Tensor) -> Tensor:
    return (images.permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous()


def _chance(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * step + rank)


@dataclass(frozen=True, slots=True)
class Kind:
    """A model with its data, its optimizer and a batch that suits an ordinary processor."""

    build: Callable[[], nn.Module]
    source: Callable[[Path | None], Source]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: int  # per rank and step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), fused=True)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, fused=True)


MODELS: dict[str, Kind] = {
    "gpt": Kind(GPT, Text, _adamw, 8),
    "resnet": Kind(ResNet, Images, _sgd, 4),
    "vit": Kind(ViT, Images, _adamw, 8),
    "mlp": Kind(perceptron, Images, _sgd, 64),
}
