"""HSDP's all_reduce across replicas, which no FSDP hook reaches: settings on its group compress it.

FSDP calls it right after a reduce-scatter, on the result, so the reduce-scatter announces to the group which layers
will come.
"""

from __future__ import annotations

import weakref
from itertools import accumulate
from typing import ClassVar

from torch_cgx.codecs import Codec, Rotated
from torch_cgx.config import Compression
from torch_cgx.group.compression import Override
from torch_cgx.group.process_group import ProcessGroupCGX
from torch_cgx.plan.layout import Layer

__all__ = ["Claim", "Replicas", "fineness", "finest"]


class Replicas:
    """One replicate group, and all claims on it: models may share a mesh."""

    _of: ClassVar[weakref.WeakKeyDictionary[ProcessGroupCGX, Replicas]] = weakref.WeakKeyDictionary()

    def __init__(self, group: ProcessGroupCGX) -> None:
        self._group = weakref.ref(group)
        self._claims: list[Claim] = []

    @classmethod
    def of(cls, group: ProcessGroupCGX) -> Replicas:
        """Return the only instance for this group."""
        found = cls._of.get(group)
        if found is None:
            found = cls._of[group] = cls(group)
        return found

    @property
    def group(self) -> ProcessGroupCGX:
        group = self._group()
        assert group is not None  # its claims belong to a model that uses it
        return group

    def claim(self, whole: Compression) -> Claim:
        """Add a claim; `whole` is for all_reduces of unannounced lengths, where the finest of several claims counts."""
        claim = Claim(self, whole)
        self._claims.append(claim)
        self.tell()
        return claim

    def drop(self, claim: Claim) -> None:
        if claim in self._claims:
            self._claims.remove(claim)
            self.tell()

    def tell(self) -> None:
        """Tell the group which layers to expect. It knows them by their total alone, so equal totals share all cuts."""
        if not self._claims:
            self.group.override_compression(None)
            return
        whole = max((claim.whole for claim in self._claims), key=lambda whole: fineness(whole.codec()))
        layers: dict[int, tuple[Layer, ...]] = {}
        for claim in self._claims:
            for numel, known in claim.known.items():
                layers[numel] = finest(layers[numel], known) if numel in layers else known
        self.group.override_compression(Override(whole, layers))


class Claim:
    """The expectations of one call of `compress` on a replicate group."""

    def __init__(self, replicas: Replicas, whole: Compression) -> None:
        self._replicas = replicas
        self.whole = whole
        self.known: dict[int, tuple[Layer, ...]] = {}  # by their total number of values
        self._heard: set[tuple[Layer, ...]] = set()

    @property
    def group(self) -> ProcessGroupCGX:
        return self._replicas.group

    def expect(self, layers: tuple[Layer, ...]) -> None:
        """Announce an all_reduce of these layers."""
        if layers in self._heard:
            return
        self._heard.add(layers)
        numel = sum(layer.numel for layer in layers)
        known = self.known.get(numel)
        self.known[numel] = layers if known is None else finest(known, layers)
        self._replicas.tell()

    def release(self) -> None:
        """Drop the claim; without any claims, the group's other settings apply again."""
        self._replicas.drop(self)


def finest(one: tuple[Layer, ...], other: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return layers of the same total, cut wherever either is cut, with the codec of the two that loses less."""
    if one == other:
        return one
    ends = [list(accumulate(layer.numel for layer in layers)) for layers in (one, other)]
    merged, start = [], 0
    for end in sorted(set(ends[0] + ends[1])):
        if end == start:
            continue
        found = [
            next(layer for layer, last in zip(layers, lasts, strict=True) if last > start).codec
            for layers, lasts in zip((one, other), ends, strict=True)
        ]
        merged.append(Layer(end - start, max(found, key=fineness)))
        start = end
    return tuple(merged)


def fineness(codec: Codec) -> tuple[int, bool, int]:
    """Return a sort key that puts codecs that lose less later.

    More bits lose less, and 32 lose nothing. At the same bits rotated values lose less than max-min's, and those in
    smaller blocks less than those in larger ones.
    """
    return codec.bits, codec.kind == Rotated.kind, -codec.block
