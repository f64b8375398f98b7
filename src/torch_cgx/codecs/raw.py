"""The null object among quantizers: values travel raw, so that nothing asks whether to compress."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """Values in the tensor's own dtype, padded to 8 bytes."""

    @property
    def bits(self) -> int:
        return 32  # the kernels' name for raw, whatever the dtype

    @property
    def is_exact(self) -> bool:
        return True

    @property
    def block(self) -> int:
        return 1

    @property
    def cut_numel(self) -> int:
        return 8

    def raw_tail(self, numel: int) -> int:
        return numel

    def payload_nbytes(self, numel: int, itemsize: int) -> int:
        return -(-numel * itemsize // 8) * 8
