"""Decide how a call is compressed: one set of rules per group.

The first line that applies decides.

| what | how |
|---|---|
| values that no codec takes (integers, float64), or fewer than CGX_COMPRESSION_MINIMAL_SIZE | exact |
| the layers that a hook or FSDP2 hands over | as they specify; the hook checks for `uncompressed` itself |
| the innermost `compressed` or `uncompressed` block | as it specifies |
| a reduce-scatter or an all-gather | exact |
| the group's own compression (`override`, which HSDP uses) | as it specifies |
| `set_default` | as it specifies |
| CGX_COMPRESSION_QUANTIZATION_BITS, unless a hook decides for the group (`ignore_env_bits`) | as it specifies |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_cgx import codecs, scopes
from torch_cgx.config import EXACT, Compression, Settings
from torch_cgx.plan.layout import Layer

__all__ = ["COMPRESSIBLE", "CompressionRules", "Override", "is_summable", "widest_compression"]

COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)
_SUMMABLE = (*COMPRESSIBLE, torch.float64)


@dataclass(frozen=True, slots=True)
class Override:
    """The compression of one group's all_reduces, regardless of the process's default."""

    compression: Compression
    layers: Mapping[int, tuple[Layer, ...]] = field(default_factory=dict)  # by the tensor's number of values


class CompressionRules:
    """The table above, for one group."""

    def __init__(self, settings: Settings) -> None:
        self._minimal_numel = settings.minimal_numel
        self._ignores_env_bits = False
        self._override: Override | None = None

    def ignore_env_bits(self) -> None:
        """Ignore CGX_COMPRESSION_QUANTIZATION_BITS from now on, because a hook's state decides.

        This outlives the state, because ranks collect garbage at different times.
        """
        self._ignores_env_bits = True

    def override(self, override: Override | None) -> None:
        """Compress this group's all_reduces in this way from now on, identically on all ranks. None: by default."""
        self._override = override

    def default(self) -> Compression:
        """Return the compression of an all_reduce that is called now, before its tensor is considered."""
        if self._override is not None and not scopes.in_block():
            return self._override.compression
        return scopes.asked_compression() if self._ignores_env_bits else scopes.compression()

    def for_all_reduce(self, tensor: Tensor) -> Compression:
        """Return the compression of an all_reduce of this tensor that is called now."""
        return self._for_tensor(tensor, tensor.numel(), self.default())

    def layers_of(self, tensor: Tensor) -> tuple[Layer, ...] | None:
        """Return the layers that the group's own compression has for this tensor, if any."""
        if self._override is None or scopes.in_block():
            return None
        return self._override.layers.get(tensor.numel())

    def for_shares(self, tensor: Tensor, share_numel: int) -> Compression:
        """Return the compression of a reduce-scatter or an all-gather whose shares have `share_numel` values."""
        return self._for_tensor(tensor, share_numel, scopes.share_compression())

    def _for_tensor(self, tensor: Tensor, numel: int, asked: Compression) -> Compression:
        return asked if tensor.dtype in COMPRESSIBLE and numel >= self._minimal_numel else EXACT


def is_summable(tensor: Tensor, reduction: str) -> bool:
    """Return whether our programs can reduce this tensor; torch's own groups reduce all others."""
    return tensor.dtype in _SUMMABLE and reduction in ("SUM", "AVG") and tensor.layout is torch.strided


def widest_compression(layers: Sequence[Layer]) -> Compression:
    """Return the compression of the layer with the most bits, which describes the call in errors and profiles."""
    compressed = [layer.codec for layer in layers if not layer.is_exact]
    if not compressed:
        return EXACT
    widest = max(compressed, key=lambda codec: codec.bits)
    return Compression(widest.bits, widest.block, codecs.family_of(widest.kind).name)
