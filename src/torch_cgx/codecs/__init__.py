"""What a payload is: its length, and where a layer may be cut. Pure arithmetic about lengths.

What is done to values stands in `kernels`; which layer gets which codec is decided above. A further codec is a class
beside these, and a line in the registry below (or a call of `register` from outside).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch_cgx.codecs.maxmin import MAX_BLOCK, MaxMin
from torch_cgx.codecs.raw import RAW, Raw
from torch_cgx.codecs.rotated import Rotated

__all__ = [
    "MAX_BLOCK",
    "RAW",
    "Codec",
    "Family",
    "MaxMin",
    "Raw",
    "Rotated",
    "family",
    "family_of",
    "make_codec",
    "names",
    "register",
]


class Codec(Protocol):
    """Immutable and hashable, because layouts are cached by it."""

    @property
    def kind(self) -> int:
        """A number that tells codecs apart in the kernels' tables and in what ranks compare."""

    @property
    def bits(self) -> int:
        """Bits per value, as users ask for them."""

    @property
    def is_exact(self) -> bool:
        """Whether values are sent as they are."""

    @property
    def block(self) -> int:
        """Values per block."""

    @property
    def cut_numel(self) -> int:
        """A layer may be cut at multiples of this many values: whole blocks, and whole bytes of levels."""

    def raw_tail(self, numel: int) -> int:
        """Return how many of the last values of a piece are sent raw."""

    def payload_nbytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes of a piece's payload: a multiple of 8 that grows with `numel`."""


class _Make(Protocol):
    def __call__(self, bits: int, block: int, skip_incomplete: bool = False) -> Codec:
        """Return the codec; `ValueError` where these bits or this block are not for it."""


@dataclass(frozen=True, slots=True)
class Family:
    """A codec as users choose it: by `quantizer=`, with bits and bucket size beside it."""

    name: str
    kind: int
    make: _Make
    default_block: int  # where no bucket size is given


_families: dict[str, Family] = {}


def register(family: Family) -> None:
    """Add a codec. All ranks must do so, before they use it."""
    for other in _families.values():
        if other.name == family.name or other.kind == family.kind:
            raise ValueError(
                f"codec {family.name!r}: expected its own name and kind ({family.kind}), got those of {other.name!r}"
            )
    _families[family.name] = family


def names() -> list[str]:
    """Return the names of all codecs that users can choose."""
    return sorted(_families)


def family(name: str) -> Family:
    """Return the codec of this name."""
    if not isinstance(name, str) or name not in _families:
        raise ValueError(f"quantizer: expected {' or '.join(map(repr, names()))}, got {name!r:.200}")
    return _families[name]


def family_of(kind: int) -> Family:
    """Return the codec of this kind, which is not that of raw values."""
    return next(each for each in _families.values() if each.kind == kind)


def make_codec(name: str, bits: int, block: int, skip_incomplete: bool = False) -> Codec:
    """Return the codec that users ask for by these. `skip_incomplete`: an incomplete last block is sent raw."""
    return RAW if bits == RAW.bits else family(name).make(bits, block, skip_incomplete)


register(Family("maxmin", MaxMin.kind, MaxMin, default_block=512))
register(Family("rotated", Rotated.kind, Rotated, default_block=1024))
