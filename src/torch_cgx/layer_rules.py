"""Which layer of a model is compressed how: from its name and shape alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch_cgx.config import EXACT, Compression, shortened

__all__ = ["Choices", "read_compression", "write_compression"]

_KEYS = ("bits", "bucket_size", "quantizer")
_SHOWN = 8  # names in an error


class Choices:
    """The rules of one `CGXState`. One-dimensional and small layers are exact, whatever else is asked."""

    def __init__(
        self,
        default: Compression,
        layer_min_numel: int,
        overrides: Mapping[str, Compression],
    ) -> None:
        self._default = default
        self._layer_min_numel = layer_min_numel
        self._overrides = dict(overrides)

    @property
    def default(self) -> Compression:
        return self._default

    def of(self, names: Sequence[str], shape: Sequence[int], numel: int) -> Compression:
        """Of a parameter that has these names: several, where modules share it."""
        return self.asked(names, shape, numel) or self._default

    def asked(self, names: Sequence[str], shape: Sequence[int], numel: int) -> Compression | None:
        """What its shape or an override asks for; None: nothing but the default."""
        if self._is_exact(shape, numel):
            return EXACT
        chosen = None
        for pattern, override in self._overrides.items():  # of several that match, the last
            if any(fnmatchcase(name, pattern) for name in names):
                chosen = override
        return chosen

    def _is_exact(self, shape: Sequence[int], numel: int) -> bool:
        return len(shape) <= 1 or numel < self._layer_min_numel

    @property
    def compresses(self) -> bool:
        """Whether compression is asked for at all."""
        return any(not each.is_exact for each in (self._default, *self._overrides.values()))

    def without_effect(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the patterns that ask for compression, but match exact layers only."""
        large = [name for name, shape in shapes.items() if not self._is_exact(shape, math.prod(shape))]
        return [
            pattern
            for pattern, override in self._overrides.items()
            if not override.is_exact and not any(fnmatchcase(name, pattern) for name in large)
        ]

    def check_patterns(self, names: Sequence[str]) -> None:
        """A pattern that matches nothing is a typing error more often than not."""
        for pattern in self._overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
                raise ValueError(
                    f"overrides: expected patterns of parameter names, got {pattern!r}, which matches none of {shown}"
                )


def read_compression(where: str, given: Mapping[str, int | str], default: Compression) -> Compression:
    """Read a dict with "bits", "bucket_size" and "quantizer". What is missing is as in the default."""
    keys = f"{', '.join(map(repr, _KEYS[:-1]))} and {_KEYS[-1]!r}"
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: expected a dict with the keys {keys}, got {shortened(given)}")
    unknown = [key for key in given if key not in _KEYS]
    if unknown:
        raise ValueError(f"{where}: expected the keys {keys}, got {shortened(unknown[0])}")
    asked = {**write_compression(default), **given}
    for key in ("bits", "bucket_size"):
        if isinstance(asked[key], bool) or not isinstance(asked[key], int):
            raise ValueError(f"{where}: expected a whole number for {key!r}, got {shortened(asked[key])}")
    try:
        return Compression(asked["bits"], asked["bucket_size"], asked["quantizer"])  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def write_compression(compression: Compression) -> dict[str, int | str]:
    """Return the dict that `read_compression` reads this from, whatever the default."""
    return {"bits": compression.bits, "bucket_size": compression.block, "quantizer": compression.quantizer}
