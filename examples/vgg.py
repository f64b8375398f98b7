"""A small VGG: stages of 3 x 3 convolutions with a max pool after each, then fully connected layers."""

from __future__ import annotations

from torch import Tensor, nn


class VGG(nn.Module):
    """Stages of so many channels, each of two convolutions, for square images with sides of `size` pixels.

    `stride` is the first convolution's: 2 makes everything after it four times as cheap.
    """

    def __init__(
        self, size: int, channels: tuple[int, ...] = (16, 32, 64), hidden: int = 128, stride: int = 2, classes: int = 10
    ) -> None:
        super().__init__()
        side = -(-size // stride) >> len(channels)
        if side == 0:
            raise ValueError(f"expected images of at least {stride << len(channels)} pixels a side, got {size}")
        layers: list[nn.Module] = []
        before = 3
        for stage, count in enumerate(channels):
            for number in range(2):
                step = stride if stage == number == 0 else 1
                layers += [nn.Conv2d(before, count, 3, step, padding=1, bias=False), nn.BatchNorm2d(count), nn.ReLU()]
                before = count
            layers.append(nn.MaxPool2d(2))
        self.stages = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(before * side * side, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x))
