"""A small vision transformer: patches of an image as tokens, the blocks of gpt.py without their mask."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt import Block


class ViT(nn.Module):
    """For square images with sides of `size` pixels, cut into squares of `patch`; classifies the mean of its tokens."""

    def __init__(
        self, size: int, patch: int, layers: int = 3, width: int = 64, heads: int = 4, classes: int = 10
    ) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"expected patches that divide the image, got {patch} of {size} pixels")
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Embedding((size // patch) ** 2, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.positions.weight, std=0.5)  # patches are about as large: places matter from the start

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        positions = torch.arange(tokens.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(tokens + self.positions(positions)).mean(1)))
