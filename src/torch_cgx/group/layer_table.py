"""The table behind `register_layer`: the layers of each grad bucket, for scripts that register them by hand.

A table belongs to one group (the default group, through the functions in the package). An all_reduce with as many
values as a registered grad bucket is compressed layer by layer. Hooks do not use the table, because they pass their
layers themselves.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from torch_cgx.config import Compression, Settings, whole_number
from torch_cgx.plan.layout import Layer, layer_of

__all__ = ["LayerTable"]

_Row = tuple[int, int, int]  # numel; bits and block, 0: the default at the time of the call


class LayerTable:
    """The layers by (grad bucket, position in it). `version` changes with every change, for caches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[int, int], _Row] = {}
        self._by_numel: dict[int, tuple[_Row, ...]] = {}
        self.version = 0

    def register(self, bucket_idx: int, layer_idx: int, numel: int, bits: int, bucket_size: int) -> None:
        bucket_idx, layer_idx = _place(bucket_idx, layer_idx)
        numel = whole_number(f"numel of layer {layer_idx} in bucket {bucket_idx}", numel)
        if numel < 1:
            raise ValueError(f"numel of layer {layer_idx} in bucket {bucket_idx}: expected at least 1, got {numel}")
        found = Compression(bits, bucket_size)  # raises if out of range
        self._set(bucket_idx, layer_idx, (numel, found.bits, found.block))

    def drop(self, bucket_idx: int) -> None:
        """Forget the layers of a grad bucket."""
        with self._lock:
            for place in [place for place in self._rows if place[0] == bucket_idx]:
                del self._rows[place]
            self._find_totals()

    def set_bits(self, bucket_idx: int, layer_idx: int, bits: int) -> None:
        found = Compression(bits)
        bucket_idx, layer_idx = _place(bucket_idx, layer_idx)
        numel, _, block = self._row(bucket_idx, layer_idx)
        self._set(bucket_idx, layer_idx, (numel, found.bits, block))

    def set_block(self, bucket_idx: int, layer_idx: int, bucket_size: int) -> None:
        found = Compression(32, bucket_size)
        bucket_idx, layer_idx = _place(bucket_idx, layer_idx)
        numel, bits, _ = self._row(bucket_idx, layer_idx)
        self._set(bucket_idx, layer_idx, (numel, bits, found.block))

    def cut(self, numel: int, compression: Compression, settings: Settings) -> tuple[Layer, ...]:
        """Return the layers of a tensor of `numel` values: the registered ones, or the whole tensor as one layer."""
        rows = None if compression.is_exact else self.find(numel)
        if rows is None:
            return (layer_of(numel, compression, settings),)
        return tuple(
            layer_of(
                layer_numel,
                replace(compression, bits=bits or compression.bits, block=block or compression.block),
                settings,
            )
            for layer_numel, bits, block in rows
        )

    def find(self, numel: int) -> tuple[_Row, ...] | None:
        """Return the layers of the grad bucket with `numel` values, of the lowest index if there are several."""
        return self._by_numel.get(numel)

    def _row(self, bucket_idx: int, layer_idx: int) -> _Row:
        try:
            return self._rows[bucket_idx, layer_idx]
        except KeyError:
            raise ValueError(
                f"layer {layer_idx} of bucket {bucket_idx} is not registered: call register_layer for it first"
            ) from None

    def _set(self, bucket_idx: int, layer_idx: int, row: _Row) -> None:
        with self._lock:
            self._rows[bucket_idx, layer_idx] = row
            self._find_totals()

    def _find_totals(self) -> None:
        by_bucket: dict[int, list[_Row]] = {}
        for (bucket, _), found in sorted(self._rows.items()):
            by_bucket.setdefault(bucket, []).append(found)
        by_numel: dict[int, tuple[_Row, ...]] = {}
        for rows in by_bucket.values():
            by_numel.setdefault(sum(row[0] for row in rows), tuple(rows))
        self._by_numel = by_numel
        self.version += 1


def _place(bucket_idx: object, layer_idx: object) -> tuple[int, int]:
    return whole_number("bucket_idx", bucket_idx), whole_number("layer_idx", layer_idx)
