"""HSDP's all_reduce across replicas, which no hook of FSDP's reaches: it is compressed by settings on its group.

FSDP calls it by itself right after a reduce-scatter, on what came out of that, so the reduce-scatter tells the group in
good time which layers will come.
"""

from __future__ import annotations

import weakref
from functools import reduce
from itertools import accumulate
from typing import ClassVar

from torch_cgx.codecs import Identity
from torch_cgx.config import Compression
from torch_cgx.group.process_group import ProcessGroupCGX
from torch_cgx.plan.layout import Layer

__all__ = ["Claim", "Replicas", "finest"]


class Replicas:
    """One replicate group, and all who expect something of it: models may share a mesh."""

    _of: ClassVar[weakref.WeakKeyDictionary[ProcessGroupCGX, Replicas]] = weakref.WeakKeyDictionary()

    def __init__(self, group: ProcessGroupCGX) -> None:
        self._group = weakref.ref(group)
        self._claims: list[Claim] = []
        self._registered: dict[int, tuple[int, tuple[Layer, ...]]] = {}  # by total: bucket index and layers

    @classmethod
    def of(cls, group: ProcessGroupCGX) -> Replicas:
        """The only one of this group."""
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
        """`whole`: for all_reduces of a length that nobody has announced; of several claims the most bits hold."""
        claim = Claim(self, whole)
        self._claims.append(claim)
        self._ask()
        return claim

    def drop(self, claim: Claim) -> None:
        if claim in self._claims:
            self._claims.remove(claim)
            self._ask()
            for numel in claim.known:
                self.tell(numel)

    def _ask(self) -> None:
        asked = max((claim.whole for claim in self._claims), key=lambda whole: whole.bits, default=None)
        self.group.compress_all_reduces(asked)

    def tell(self, numel: int) -> None:
        """The group knows layers by their total alone: of several, all cuts are kept."""
        known = [claim.known[numel] for claim in self._claims if numel in claim.known]
        layers = reduce(finest, known) if known else ()
        bucket, registered = self._registered.get(numel, (0, ()))
        if layers == registered:
            return
        table = self.group.layers
        if registered:
            table.drop(bucket)
            del self._registered[numel]
        if layers:
            bucket = -1 - table.version  # below all others, which have the same total perhaps: the lowest counts
            for number, layer in enumerate(layer for layer in layers if layer.numel):
                table.register(bucket, number, layer.numel, layer.quantizer.bits, layer.quantizer.block)
            self._registered[numel] = bucket, layers


class Claim:
    """What one call of `compress` expects of a replicate group."""

    def __init__(self, replicas: Replicas, whole: Compression) -> None:
        self._replicas = replicas
        self.whole = whole
        self.known: dict[int, tuple[Layer, ...]] = {}  # by the values that they have together
        self._heard: set[tuple[Layer, ...]] = set()

    @property
    def group(self) -> ProcessGroupCGX:
        return self._replicas.group

    def expect(self, layers: tuple[Layer, ...]) -> None:
        """An all_reduce of these comes."""
        if layers in self._heard:
            return
        self._heard.add(layers)
        numel = sum(layer.numel for layer in layers)
        known = self.known.get(numel)
        self.known[numel] = layers if known is None else finest(known, layers)
        self._replicas.tell(numel)

    def release(self) -> None:
        """Nothing more is expected: what is not FSDP's counts for the group again."""
        self._replicas.drop(self)


def finest(one: tuple[Layer, ...], other: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Layers of the same total, cut wherever either is cut, with the quantizer of the two that loses less."""
    if one == other:
        return one
    ends = [list(accumulate(layer.numel for layer in layers)) for layers in (one, other)]
    merged, start = [], 0
    for end in sorted(set(ends[0] + ends[1])):
        if end == start:
            continue
        found = [
            next(layer for layer, last in zip(layers, lasts, strict=True) if last > start).quantizer
            for layers, lasts in zip((one, other), ends, strict=True)
        ]
        exact = any(isinstance(each, Identity) for each in found)
        merged.append(
            Layer(end - start, Identity() if exact else max(found, key=lambda each: (each.bits, -each.block)))
        )
        start = end
    return tuple(merged)
