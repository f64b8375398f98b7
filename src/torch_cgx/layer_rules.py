"""Rules for the compression of each layer of a model, from its name and shape alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch_cgx.config import EXACT, Compression, shortened

__all__ = ["Choices", "read_compression", "write_compression"]

_KEYS = ("bits", "bucket_size", "quantizer")
_SHOWN = 8  # names in an error


class Choices:
    """The rules for one model. One-dimensional and small layers are always exact."""

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
        """Return the compression of a parameter with these names; it has several if modules share it."""
        return self.asked(names, shape, numel) or self._default

    def asked(self, names: Sequence[str], shape: Sequence[int], numel: int) -> Compression | None:
        """Return what its shape or an override asks for, or None if only the default applies."""
        if self._is_exact(shape, numel):
            return EXACT
        chosen = None
        for pattern, override in self._overrides.items():  # the last match counts
            if any(fnmatchcase(name, pattern) for name in names):
                chosen = override
        return chosen

    def _is_exact(self, shape: Sequence[int], numel: int) -> bool:
        return len(shape) <= 1 or numel < self._layer_min_numel

    @property
    def compresses(self) -> bool:
        """Return whether any rule asks for compression."""
        return any(not each.is_exact for each in (self._default, *self._overrides.values()))

    def without_effect(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the patterns that ask for compression but match only exact layers."""
        large = [name for name, shape in shapes.items() if not self._is_exact(shape, math.prod(shape))]
        return [
            pattern
            for pattern, override in self._overrides.items()
            if not override.is_exact and not any(fnmatchcase(name, pattern) for name in large)
        ]

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raise ValueError if a pattern matches nothing, which is usually a typing error."""
        for pattern in self._overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
                raise ValueError(
                    f"overrides: expected patterns of parameter names, got {pattern!r}, which matches none of {shown}"
                )


def read_compression(where: str, given: Mapping[str, int | str], default: Compression) -> Compression:
    """Read a dict with "bits", "bucket_size" and "quantizer". Missing keys are as in the default."""
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
    """Return the dict from which `read_compression` reads this, whatever the default."""
    return {"bits": compression.bits, "bucket_size": compression.block, "quantizer": compression.quantizer}
