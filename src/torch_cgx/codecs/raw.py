"""The null object among codecs: values are sent as they are, so that nothing asks whether to compress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["RAW", "Raw"]


@dataclass(frozen=True, slots=True)
class Raw:
    """Values in the tensor's own dtype, padded to 8 bytes."""

    kind: ClassVar[int] = 0
    bits: ClassVar[int] = 32  # as users ask for it, whatever the dtype
    block: ClassVar[int] = 1
    is_exact: ClassVar[bool] = True
    cut_numel: ClassVar[int] = 8

    def raw_tail(self, numel: int) -> int:
        return numel

    def payload_nbytes(self, numel: int, itemsize: int) -> int:
        return -(-numel * itemsize // 8) * 8


RAW = Raw()
