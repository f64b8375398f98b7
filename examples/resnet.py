"""Residual networks for images of 32 x 32: ResNet-18, and a small one for where time is short."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a short cut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.short_cut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.short_cut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short_cut(x))


class ResNet(nn.Module):
    """Stages of so many channels, each with so many blocks and, but for the first, half the width and height.

    `pool` makes the first stage four times as cheap.
    """

    def __init__(self, channels: tuple[int, ...], blocks: int, pool: bool = False, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(channels[0]),
            nn.ReLU(),
            nn.MaxPool2d(2) if pool else nn.Identity(),
        )
        stages: list[nn.Module] = []
        before = channels[0]
        for stage, count in enumerate(channels):
            for block in range(blocks):
                stages.append(Block(before, count, stride=2 if stage > 0 and block == 0 else 1))
                before = count
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


MODELS = {
    "resnet18": lambda: ResNet((64, 128, 256, 512), blocks=2),
    "small": lambda: ResNet((16, 32, 64), blocks=1, pool=True),
}
