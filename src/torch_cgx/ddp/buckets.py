"""A grad bucket as the hook knows it: its layers, their codecs, and what was observed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_cgx import functional
from torch_cgx.codecs import RAW, Codec
from torch_cgx.config import EXACT, Compression
from torch_cgx.ddp.report import LayerReport
from torch_cgx.plan.layout import Layer

__all__ = ["KnownBucket", "KnownLayer"]

# Measured, as multiples of the cost of one contiguous value: reading a value by its position, and the fixed cost of a
# range of values.
_POSITION_COST = 32
_RANGE_COST = 8192


@dataclass(slots=True)
class KnownLayer:
    """One parameter's gradient."""

    name: str
    parameter: Tensor
    start: int  # in its grad bucket
    numel: int
    compression: Compression
    is_free: bool = False  # nobody asked for particular bits, so they may be chosen
    relative_error: float | None = None
    nonfinite_step: int | None = None
    nonfinite_here: int | None = None
    nonfinite_elsewhere: bool = False

    def take_over(self, before: KnownLayer) -> None:
        """Copy what was observed of this layer while it was in another grad bucket."""
        if before.compression == self.compression:
            self.relative_error = before.relative_error
        self.nonfinite_step = before.nonfinite_step
        self.nonfinite_here = before.nonfinite_here
        self.nonfinite_elsewhere = before.nonfinite_elsewhere

    def change_to(self, compression: Compression) -> None:
        if compression != self.compression:
            self.compression = compression
            self.relative_error = None  # it belonged to the old compression

    @property
    def is_unexplained(self) -> bool:
        """Return whether its average was not finite and this rank does not know yet whether it is the cause."""
        return self.nonfinite_step is not None and self.nonfinite_here is None and not self.nonfinite_elsewhere

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.numel]

    def own_gradient(self, buffer: Tensor) -> Tensor | None:
        """Return this rank's own gradient if DDP keeps it outside of the grad bucket, else None."""
        gradient = self.parameter.grad
        if gradient is None or gradient.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
            return None
        return gradient

    def report(self, itemsize: int, codec: Codec) -> LayerReport:
        return LayerReport(
            name=self.name,
            numel=self.numel,
            bits=codec.bits,
            quantizer=None if codec.is_exact else self.compression.quantizer,
            bytes_exact=self.numel * itemsize,
            bytes_sent=codec.payload_nbytes(self.numel, itemsize),
            relative_error=self.relative_error,
            nonfinite_step=self.nonfinite_step,
            nonfinite_here=self.nonfinite_here,
            nonfinite_elsewhere=self.nonfinite_elsewhere,
        )


@dataclass(slots=True)
class KnownBucket:
    """A grad bucket's layers in order. It is remade when DDP rebuilds its grad buckets after the first step."""

    dtype: torch.dtype
    layers: Sequence[KnownLayer]
    compressible: bool  # whether the group compresses this dtype on this device
    skip_incomplete: bool
    residual: Tensor | None = None
    measured: bool = field(init=False)
    watching: bool = field(init=False)  # a layer is unexplained: look at this rank's own gradients
    wire_layers: tuple[Layer, ...] = field(init=False)
    exact_layers: tuple[Layer, ...] = field(init=False)
    _positions: Tensor = field(init=False)  # with `_ranges`: values that show whether any is not finite
    _ranges: list[slice] = field(init=False)

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Update everything that follows from the layers' compressions."""
        self.measured = all(each.relative_error is not None for each in self.layers if not self.codec(each).is_exact)
        self.watching = any(each.is_unexplained for each in self.layers)
        self.wire_layers = _joined([Layer(each.numel, self.codec(each)) for each in self.layers])
        self.exact_layers = _joined([Layer(each.numel, RAW) for each in self.layers])
        self._positions, self._ranges = _telling(self.wire_layers)

    @property
    def is_compressed(self) -> bool:
        return any(not layer.is_exact for layer in self.wire_layers)

    @property
    def compressed_spans(self) -> list[slice]:
        """Return the spans of the compressed layers."""
        compressed = [layer for layer in self.layers if not self.codec(layer).is_exact]
        return [slice(layer.start, layer.start + layer.numel) for layer in compressed]

    @property
    def free_layers(self) -> list[KnownLayer]:
        """Return the layers whose bits may be chosen."""
        return [layer for layer in self.layers if layer.is_free] if self.compressible else []

    def codec(self, layer: KnownLayer) -> Codec:
        compression = layer.compression if self.compressible else EXACT
        return compression.codec(self.skip_incomplete)

    def is_made_of(self, dtype: torch.dtype, parameters: Sequence[Tensor]) -> bool:
        return (
            dtype == self.dtype
            and len(parameters) == len(self.layers)
            and all(layer.parameter is parameter for layer, parameter in zip(self.layers, parameters, strict=True))
        )

    def measure(self, buffer: Tensor) -> None:
        """Measure what quantizing these gradients, which are this rank's own, will lose."""
        self.measured = True
        for layer in self.layers:
            if self.codec(layer).is_exact:
                continue
            values = layer.of(buffer).cpu()
            how = (layer.compression.bits, layer.compression.block, layer.compression.quantizer)
            payload = functional.quantize(values, *how)
            decoded = functional.dequantize(payload, layer.numel, values.dtype, *how)
            norm = torch.linalg.vector_norm(values, dtype=torch.float32)
            lost = torch.linalg.vector_norm(decoded.sub_(values), dtype=torch.float32)
            if torch.isfinite(norm):
                layer.relative_error = float(lost / norm) if norm > 0 else 0.0

    def look_at_own(self, buffer: Tensor, step: int) -> None:
        """Note which layers are not finite before they are averaged."""
        if torch.isfinite(buffer.sum(dtype=torch.float32)):
            return
        for layer in self.layers:
            if layer.nonfinite_here is None and not torch.isfinite(layer.of(buffer)).all():
                layer.nonfinite_here = step

    def may_be_nonfinite(self, averaged: Tensor, compressed: bool) -> bool:
        """Return whether the average may have a NaN or an infinity, from one value per block.

        One is enough: a block with a value that is not finite decodes to NaN as a whole.
        """
        if not compressed:
            return not bool(torch.isfinite(averaged.sum(dtype=torch.float32)))
        looked_at = averaged[self._positions].sum(dtype=torch.float32)
        for values in self._ranges:
            looked_at += averaged[values].sum(dtype=torch.float32)
        return not bool(torch.isfinite(looked_at))

    def look_at_average(self, averaged: Tensor, step: int, looked_at_own: bool) -> None:
        """Note which layers are not finite, and whether this rank is the cause."""
        for layer in self.layers:
            if torch.isfinite(layer.of(averaged)).all():
                continue
            if layer.nonfinite_step is None:
                layer.nonfinite_step = step
            if not layer.is_unexplained:
                continue
            own = layer.own_gradient(averaged)
            if looked_at_own or (own is not None and torch.isfinite(own).all()):
                layer.nonfinite_elsewhere = True
            elif own is not None:
                layer.nonfinite_here = step
        self.watching = any(layer.is_unexplained for layer in self.layers)

    def reports(self) -> list[LayerReport]:
        return [layer.report(self.dtype.itemsize, self.codec(layer)) for layer in self.layers]


def _joined(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Merge neighbouring layers that are sent raw: fewer pieces, and less padding."""
    joined: list[Layer] = []
    for layer in layers:
        if joined and layer.is_exact and joined[-1].is_exact:
            joined[-1] = Layer(joined[-1].numel + layer.numel, layer.codec)
        else:
            joined.append(layer)
    return tuple(joined)


def _telling(layers: Sequence[Layer]) -> tuple[Tensor, list[slice]]:
    """Return each block's first value and all raw values, as positions or ranges; all values if that is cheaper."""
    positions: list[Tensor] = [torch.empty(0, dtype=torch.int64, device="cpu")]
    ranges: list[slice] = []
    start = cost = 0
    for layer in layers:
        end, codec = start + layer.numel, layer.codec
        raw_from = end - codec.raw_tail(layer.numel)
        if raw_from > start:
            positions.append(torch.arange(start, raw_from, codec.block, device="cpu"))
            cost += _POSITION_COST * len(positions[-1])
        raw_numel = end - raw_from
        if _POSITION_COST * raw_numel <= _RANGE_COST + raw_numel:
            positions.append(torch.arange(raw_from, end, device="cpu"))
            cost += _POSITION_COST * raw_numel
        else:
            ranges.append(slice(raw_from, end))
            cost += _RANGE_COST + raw_numel
        start = end
    if cost > start + _RANGE_COST:
        return positions[0], [slice(0, start)]
    return torch.cat(positions), ranges
