"""What quantizing would cost each layer: measured on samples of its gradients, by the kernels that really quantize.

A sample is a running mean of the layer's gradients, the older ones decayed; of a large layer, of pieces spread over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_cgx.adaptive.layers import Candidate, LayerStats
from torch_cgx.config import Compression
from torch_cgx.hooks.buckets import KnownLayer
from torch_cgx.kernels import NEAREST, Kernels, Piece
from torch_cgx.quantizers import MaxMin

__all__ = ["Samples"]

_MOST_NUMEL = 1 << 21  # in all samples together
_LEAST_NUMEL = 4096  # of a layer that has so many
_DECAY = 0.9  # from one sampled step to the next


@dataclass(frozen=True, slots=True)
class _Sample:
    """Which values of a layer are looked at: all, or pieces `stride` apart; and their mean, then one row a piece."""

    numel: int  # of the layer
    itemsize: int
    stride: int
    mean: Tensor

    def of(self, gradient: Tensor) -> Tensor:
        if self.mean.dim() == 1:
            return gradient
        count, span = self.mean.shape
        return gradient[: count * self.stride].view(count, self.stride)[:, :span]

    def state_dict(self) -> dict[str, Any]:
        return {"numel": self.numel, "itemsize": self.itemsize, "stride": self.stride, "mean": self.mean.clone()}


class Samples:
    """Samples of some layers, by name."""

    def __init__(self, layers: Sequence[KnownLayer], itemsizes: Sequence[int], block: int) -> None:
        most = max(_LEAST_NUMEL, _MOST_NUMEL // max(1, len(layers)))
        self._samples = {
            layer.name: _sample(layer.numel, itemsize, most, block)
            for layer, itemsize in zip(layers, itemsizes, strict=True)
        }
        self._pieces: dict[Compression, tuple[tuple[Piece, ...], int]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._samples)

    def has(self, layers: Sequence[KnownLayer]) -> bool:
        return all(layer.name in self._samples and self._samples[layer.name].numel == layer.numel for layer in layers)

    def fits(self, numels: Mapping[str, int]) -> bool:
        """Whether all of these layers are among those."""
        return all(numels.get(name) == sample.numel for name, sample in self._samples.items())

    def add(self, layers: Sequence[KnownLayer], buffer: Tensor) -> None:
        """Take this step's gradients of these layers in."""
        known = [(self._samples[layer.name], layer) for layer in layers if layer.name in self._samples]
        if not known:
            return
        means = [sample.mean for sample, _ in known]
        values = [sample.of(layer.of(buffer)) for sample, layer in known]
        if buffer.dtype != torch.float32 or buffer.device.type != "cpu":
            values = [each.to("cpu", torch.float32) for each in values]
        torch._foreach_lerp_(means, values, 1 - _DECAY)

    def measure(self, candidates: Sequence[Compression], kernels: Kernels) -> Tensor:
        """For each layer its squared norm, and the squared error with each candidate; NaN where it is not finite."""
        samples = list(self._samples.values())
        if not samples:
            return torch.empty(0, 1 + len(candidates), dtype=torch.float64)
        flat = torch.cat([sample.mean.view(-1) for sample in samples])
        numels = [sample.mean.numel() for sample in samples]
        columns = [_squares(flat, numels)]
        tables = [self._table(candidate) for candidate in candidates]
        # One buffer for all candidates: new memory for each would cost more than the kernels do.
        lost = torch.empty_like(flat)
        payload = torch.empty(max((nbytes for _, nbytes in tables), default=0), dtype=torch.uint8)
        for pieces, nbytes in tables:
            kernels.encode(pieces, flat, payload[:nbytes], NEAREST, lost.zero_())
            columns.append(_squares(lost, numels))
        found = torch.stack(columns, 1)
        found *= torch.tensor([sample.numel / max(1, sample.mean.numel()) for sample in samples])[:, None]
        found[~torch.isfinite(found[:, 0])] = torch.nan
        for sample, norm in zip(samples, found[:, 0].tolist(), strict=True):
            if norm != norm:
                sample.mean.zero_()  # else it would stay
        return found

    def stats(self, measured: Tensor, candidates: Sequence[Compression], skip_incomplete: bool) -> list[LayerStats]:
        """What policies take, of what `measure` has returned."""
        quantizers = [MaxMin(each.bits, each.block, skip_incomplete) for each in candidates]
        return [
            LayerStats(name, sample.numel, row[0] ** 0.5, _candidates(sample, quantizers, row[1:]))
            for (name, sample), row in zip(self._samples.items(), measured.tolist(), strict=True)
        ]

    def nbytes(self, compression: Compression, skip_incomplete: bool) -> int:
        """Of all layers' payloads, sent alike."""
        if compression.bits == 32:
            return sum(sample.numel * sample.itemsize for sample in self._samples.values())
        quantizer = MaxMin(compression.bits, compression.block, skip_incomplete)
        return sum(quantizer.payload_nbytes(sample.numel, sample.itemsize) for sample in self._samples.values())

    def state_dict(self) -> dict[str, Any]:
        return {name: sample.state_dict() for name, sample in self._samples.items()}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Samples:
        """What `state_dict` has returned: whole, before any grad bucket is seen again."""
        found = cls((), (), 1)
        found._samples = {name: _Sample(**{**each, "mean": each["mean"].clone()}) for name, each in saved.items()}
        return found

    def take_over(self, before: Samples) -> None:
        """The means of layers that are sampled alike; the others begin anew."""
        for name, sample in self._samples.items():
            other = before._samples.get(name)
            if other is not None and (other.numel, other.mean.shape) == (sample.numel, sample.mean.shape):
                sample.mean.copy_(other.mean)

    def _table(self, candidate: Compression) -> tuple[tuple[Piece, ...], int]:
        """All samples as pieces of one tensor, and the bytes of their payloads; made once, as kernels cache by it."""
        if candidate not in self._pieces:
            quantizer = MaxMin(candidate.bits, candidate.block)
            pieces, offset, payload = [], 0, 0
            for sample in self._samples.values():
                numel = sample.mean.numel()
                if numel:
                    pieces.append(Piece(offset, numel, candidate.bits, candidate.block, 0, payload))
                offset += numel
                payload += quantizer.payload_nbytes(numel, 4)
            self._pieces[candidate] = tuple(pieces), payload
        return self._pieces[candidate]


def _sample(numel: int, itemsize: int, most: int, block: int) -> _Sample:
    span = max(block, 1024)
    count = max(1, most // span)
    if numel <= count * span:
        return _Sample(numel, itemsize, numel, torch.zeros(numel))  # all of it, as it lies
    return _Sample(numel, itemsize, numel // count, torch.zeros(count, span))


def _squares(flat: Tensor, numels: Sequence[int]) -> Tensor:
    """The squared norm of each part; none of them is empty. numpy's, since torch has none that is as fast for many."""
    starts = np.cumsum([0, *numels[:-1]])
    return torch.from_numpy(np.add.reduceat(flat.to(torch.float64).square_().numpy(), starts))


def _candidates(sample: _Sample, quantizers: Sequence[MaxMin], errors: Sequence[float]) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(each.bits, each.block, each.payload_nbytes(sample.numel, sample.itemsize), error)
        for each, error in zip(quantizers, errors, strict=True)
    )
