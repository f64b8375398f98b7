"""A grad bucket as the hook knows it: its layers, their quantizers, and what was seen of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_cgx import codec
from torch_cgx.config import Compression
from torch_cgx.hooks.report import LayerReport
from torch_cgx.layout import Layer
from torch_cgx.quantizers import Identity, MaxMin

__all__ = ["KnownBucket", "KnownLayer"]

_COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(slots=True)
class KnownLayer:
    """One parameter's gradient."""

    name: str
    parameter: Tensor
    start: int  # in its grad bucket
    numel: int
    compression: Compression
    relative_error: float | None = None
    nonfinite_step: int | None = None
    nonfinite_here: int | None = None
    nonfinite_elsewhere: bool = False

    def take_over(self, before: KnownLayer) -> None:
        """What was seen of it while it lay in another grad bucket."""
        self.relative_error = before.relative_error
        self.nonfinite_step = before.nonfinite_step
        self.nonfinite_here = before.nonfinite_here
        self.nonfinite_elsewhere = before.nonfinite_elsewhere

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.numel]

    def own_gradient(self, buffer: Tensor) -> Tensor | None:
        """What this rank put into the average, where DDP keeps it outside of the grad bucket."""
        gradient = self.parameter.grad
        if gradient is None or gradient.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
            return None
        return gradient

    def report(self, itemsize: int, quantizer: MaxMin | Identity) -> LayerReport:
        return LayerReport(
            name=self.name,
            numel=self.numel,
            bits=quantizer.bits,
            bytes_exact=self.numel * itemsize,
            bytes_sent=quantizer.payload_nbytes(self.numel, itemsize),
            relative_error=self.relative_error,
            nonfinite_step=self.nonfinite_step,
            nonfinite_here=self.nonfinite_here,
            nonfinite_elsewhere=self.nonfinite_elsewhere,
        )


@dataclass(slots=True)
class KnownBucket:
    """Its layers in order. DDP makes new grad buckets after the first step, and so do we then."""

    dtype: torch.dtype
    layers: Sequence[KnownLayer]
    skip_incomplete: bool
    residual: Tensor | None = None
    wire_layers: tuple[Layer, ...] = field(init=False)
    exact_layers: tuple[Layer, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.wire_layers = _joined([Layer(each.numel, self.quantizer(each)) for each in self.layers])
        self.exact_layers = _joined([Layer(each.numel, Identity()) for each in self.layers])

    @property
    def is_compressed(self) -> bool:
        return any(layer.quantizer.bits != 32 for layer in self.wire_layers)

    def quantizer(self, layer: KnownLayer) -> MaxMin | Identity:
        bits, block = layer.compression.bits, layer.compression.block
        exact = bits == 32 or self.dtype not in _COMPRESSIBLE
        return Identity() if exact else MaxMin(bits, block, self.skip_incomplete)

    def is_made_of(self, dtype: torch.dtype, parameters: Sequence[Tensor]) -> bool:
        return (
            dtype == self.dtype
            and len(parameters) == len(self.layers)
            and all(layer.parameter is parameter for layer, parameter in zip(self.layers, parameters, strict=True))
        )

    def measure(self, buffer: Tensor) -> None:
        """What quantizing these gradients, which are this rank's own, will lose."""
        for layer in self.layers:
            if self.quantizer(layer).bits == 32 or buffer.device.type != "cpu":
                continue
            values = layer.of(buffer)
            bits, block = layer.compression.bits, layer.compression.block
            payload = codec.quantize(values, bits, block)
            decoded = codec.dequantize(payload, layer.numel, values.dtype, bits, block)
            norm = torch.linalg.vector_norm(values, dtype=torch.float32)
            lost = torch.linalg.vector_norm(decoded.sub_(values), dtype=torch.float32)
            layer.relative_error = float(lost / norm) if norm > 0 else 0.0

    def look_at_own(self, buffer: Tensor, step: int) -> None:
        """Note the layers that are not finite before they are averaged."""
        for layer in self.layers:
            if layer.nonfinite_here is None and not torch.isfinite(layer.of(buffer)).all():
                layer.nonfinite_here = step

    def may_be_nonfinite(self, averaged: Tensor) -> bool:
        """A look at one value of each block: where one value is not finite, the whole block decodes to NaN."""
        stride = min(layer.quantizer.block for layer in self.wire_layers if layer.quantizer.bits != 32)
        return not bool(torch.isfinite(averaged[::stride].sum(dtype=torch.float32)))

    def look_at_average(self, averaged: Tensor, step: int) -> bool:
        """Note the layers that are not finite, and whether that came from here; whether there are any."""
        found = False
        for layer in self.layers:
            if torch.isfinite(layer.of(averaged)).all():
                continue
            found = True
            if layer.nonfinite_step is not None:
                continue
            layer.nonfinite_step = step
            own = layer.own_gradient(averaged)
            if own is not None and layer.nonfinite_here is None:
                if torch.isfinite(own).all():
                    layer.nonfinite_elsewhere = True
                else:
                    layer.nonfinite_here = step
        return found

    def reports(self) -> list[LayerReport]:
        return [layer.report(self.dtype.itemsize, self.quantizer(layer)) for layer in self.layers]


def _joined(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Neighbours that travel raw as one layer: fewer pieces, and less padding."""
    joined: list[Layer] = []
    for layer in layers:
        if joined and layer.quantizer.bits == 32 == joined[-1].quantizer.bits:
            joined[-1] = Layer(joined[-1].numel + layer.numel, layer.quantizer)
        else:
            joined.append(layer)
    return tuple(joined)
