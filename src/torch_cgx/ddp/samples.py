"""Samples of each layer's gradients, on which the real kernels measure what quantizing would cost.

A sample is a running mean of the layer's gradients in which older ones decay. A large layer is sampled in pieces spread
over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_cgx.adaptive.layers import Candidate, LayerStats
from torch_cgx.codecs import Codec
from torch_cgx.config import Compression
from torch_cgx.ddp.buckets import KnownLayer
from torch_cgx.kernels import NEAREST, Kernels, Piece

__all__ = ["Samples"]

_MOST_NUMEL = 1 << 21  # in all samples together
_LEAST_NUMEL = 4096  # per layer that has so many
_DECAY = 0.9  # from one sampled step to the next


@dataclass(frozen=True, slots=True)
class _Sample:
    """The sampled values of a layer (all of them, or those at `positions`) and their mean.

    Gradients vary across a layer (rows of frequent words, a few loud columns), so pieces lie at random places.
    `squares`, the mean squared norms of the whole gradient and of the sample, tell what the sample misses.
    """

    numel: int  # of the layer
    itemsize: int
    positions: Tensor | None
    mean: Tensor
    squares: Tensor

    @classmethod
    def make(cls, numel: int, itemsize: int, most: int, block: int) -> _Sample:
        span = max(block, 1024)
        count = max(1, most // span)
        positions = None if numel <= count * span else _positions(numel, count, span)
        mean = torch.zeros(numel if positions is None else positions.numel(), device="cpu")
        return cls(numel, itemsize, positions, mean, torch.zeros(2, dtype=torch.float64, device="cpu"))

    def of(self, gradient: Tensor) -> Tensor:
        if self.positions is None:
            return gradient
        part = gradient.index_select(0, self.positions.to(gradient.device))
        norms = torch.stack([torch.linalg.vector_norm(each, dtype=torch.float32) for each in (gradient, part)])
        self.squares.lerp_(norms.to("cpu", torch.float64).square_(), 1 - _DECAY)
        return part

    @property
    def scale(self) -> float:
        """Return the factor from the sample's squared error to the layer's."""
        if self.positions is None:
            return 1.0
        whole, part = self.squares.tolist()
        return whole / part if part > 0 else self.numel / self.mean.numel()

    def begin_anew(self) -> None:
        self.mean.zero_()
        self.squares.zero_()

    def state_dict(self) -> dict[str, Any]:
        kept = {"numel": self.numel, "itemsize": self.itemsize, "positions": self.positions}
        return {**kept, "mean": self.mean.clone(), "squares": self.squares.clone()}

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> _Sample:
        return cls(**{**saved, "mean": saved["mean"].clone(), "squares": saved["squares"].clone()})


class Samples:
    """Samples of some layers, by name."""

    def __init__(self, layers: Sequence[KnownLayer], itemsizes: Sequence[int], block: int) -> None:
        most = max(_LEAST_NUMEL, _MOST_NUMEL // max(1, len(layers)))
        self._samples = {
            layer.name: _Sample.make(layer.numel, itemsize, most, block)
            for layer, itemsize in zip(layers, itemsizes, strict=True)
        }
        self._pieces: dict[Codec, tuple[tuple[Piece, ...], int]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._samples)

    def has(self, layers: Sequence[KnownLayer]) -> bool:
        return all(layer.name in self._samples and self._samples[layer.name].numel == layer.numel for layer in layers)

    def fits(self, numels: Mapping[str, int]) -> bool:
        """Return whether the model has every sampled layer, in the same size."""
        return all(numels.get(name) == sample.numel for name, sample in self._samples.items())

    def add(self, layers: Sequence[KnownLayer], buffer: Tensor) -> None:
        """Add this step's gradients of these layers to their samples."""
        known = [(self._samples[layer.name], layer) for layer in layers if layer.name in self._samples]
        if not known:
            return
        means = [sample.mean for sample, _ in known]
        values = [sample.of(layer.of(buffer)) for sample, layer in known]
        if buffer.dtype != torch.float32 or buffer.device.type != "cpu":
            values = [each.to("cpu", torch.float32) for each in values]
        torch._foreach_lerp_(means, values, 1 - _DECAY)

    def measure(self, candidates: Sequence[Compression], kernels: Kernels, skip_incomplete: bool = False) -> Tensor:
        """Return each layer's squared norm and its squared error with each candidate; NaN if it is not finite."""
        samples = list(self._samples.values())
        if not samples:
            return torch.empty(0, 1 + len(candidates), dtype=torch.float64, device="cpu")
        flat = torch.cat([sample.mean for sample in samples])
        numels = [sample.mean.numel() for sample in samples]
        columns = [_squares(flat, numels)]
        tables = [self._table(each.codec(skip_incomplete)) for each in candidates]
        # One buffer for all candidates: allocating one for each would cost more than the kernels do.
        lost = torch.empty_like(flat)
        payload = torch.empty(max((nbytes for _, nbytes in tables), default=0), dtype=torch.uint8, device="cpu")
        for pieces, nbytes in tables:
            kernels.encode(pieces, flat, payload[:nbytes], NEAREST, lost.zero_())
            columns.append(_squares(lost, numels))
        found = torch.stack(columns, 1)
        found *= torch.tensor([sample.scale for sample in samples], dtype=torch.float64, device="cpu")[:, None]
        found[~torch.isfinite(found[:, 0])] = torch.nan
        for sample, norm in zip(samples, found[:, 0].tolist(), strict=True):
            if norm != norm:
                sample.begin_anew()  # otherwise the NaN would stay
        return found

    def stats(self, measured: Tensor, candidates: Sequence[Compression], skip_incomplete: bool) -> list[LayerStats]:
        """Convert what `measure` has returned to what policies take."""
        codecs = [each.codec(skip_incomplete) for each in candidates]
        return [
            LayerStats(name, sample.numel, row[0] ** 0.5, _candidates(sample, codecs, row[1:]))
            for (name, sample), row in zip(self._samples.items(), measured.tolist(), strict=True)
        ]

    def nbytes(self, compression: Compression, skip_incomplete: bool) -> int:
        """Return the size of all layers' payloads with this compression."""
        if compression.is_exact:
            return sum(sample.numel * sample.itemsize for sample in self._samples.values())
        codec = compression.codec(skip_incomplete)
        return sum(codec.payload_nbytes(sample.numel, sample.itemsize) for sample in self._samples.values())

    def state_dict(self) -> dict[str, Any]:
        return {name: sample.state_dict() for name, sample in self._samples.items()}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Samples:
        """Restore what `state_dict` has returned, complete before any grad bucket is seen again."""
        found = cls((), (), 1)
        found._samples = {name: _Sample.from_state(each) for name, each in saved.items()}
        return found

    def take_over(self, before: Samples) -> None:
        """Copy the means of layers with identical sizes; the others start over."""
        for name, sample in self._samples.items():
            other = before._samples.get(name)
            if other is not None and (other.numel, other.mean.shape) == (sample.numel, sample.mean.shape):
                sample.mean.copy_(other.mean)
                sample.squares.copy_(other.squares)

    def _table(self, codec: Codec) -> tuple[tuple[Piece, ...], int]:
        """Return all samples as pieces of one tensor, and their payloads' size; made once, as kernels cache by it."""
        if codec not in self._pieces:
            pieces, offset, payload = [], 0, 0
            for sample in self._samples.values():
                numel = sample.mean.numel()
                pieces.append(Piece.of(codec, offset, numel, payload))
                offset += numel
                payload += codec.payload_nbytes(numel, 4)
            self._pieces[codec] = tuple(pieces), payload
        return self._pieces[codec]


def _positions(numel: int, count: int, span: int) -> Tensor:
    """Return positions of `count` pieces of `span` values, one at random in each share; identical on all ranks."""
    share = numel // count
    places = torch.Generator(device="cpu").manual_seed(numel)
    offsets = torch.randint(share - span + 1, (count,), generator=places, device="cpu")
    starts = torch.arange(count, device="cpu") * share + offsets
    return (starts[:, None] + torch.arange(span, device="cpu")).view(-1)


def _squares(flat: Tensor, numels: Sequence[int]) -> Tensor:
    """Return the squared norm of each part, none of them empty. With many parts, numpy is faster than torch."""
    starts = np.cumsum([0, *numels[:-1]])
    return torch.from_numpy(np.add.reduceat(flat.to(torch.float64).square_().numpy(), starts))


def _candidates(sample: _Sample, codecs: Sequence[Codec], errors: Sequence[float]) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(each.bits, each.block, each.payload_nbytes(sample.numel, sample.itemsize), error)
        for each, error in zip(codecs, errors, strict=True)
    )
