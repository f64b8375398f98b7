"""The plain-torch arithmetic of each codec, which `ReferenceKernels` looks up by a piece's kind.

A further codec is a file beside these and a line in the registry below (or a call of `register` from outside).
"""

from __future__ import annotations

from torch_cgx.codecs import MaxMin, Rotated
from torch_cgx.kernels.plain.codec import PlainCodec, Run
from torch_cgx.kernels.plain.maxmin import PlainMaxMin
from torch_cgx.kernels.plain.rotated import PlainRotated

__all__ = ["PlainCodec", "Run", "plain_codec", "register"]

_codecs: dict[int, PlainCodec] = {}


def register(kind: int, codec: PlainCodec) -> None:
    """Add the arithmetic of the codec family of this kind."""
    if kind in _codecs:
        raise ValueError(f"plain kernels of kind {kind}: expected one codec, got a second one")
    _codecs[kind] = codec


def plain_codec(kind: int) -> PlainCodec:
    """Return the arithmetic of the codec family of this kind."""
    if kind not in _codecs:
        raise ValueError(f"a piece's kind: expected one of {sorted(_codecs)}, or 0 for raw values, got {kind}")
    return _codecs[kind]


register(MaxMin.kind, PlainMaxMin())
register(Rotated.kind, PlainRotated())
