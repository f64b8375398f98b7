"""What the tests of the Triton kernels share: the interpreted kernels against the plain-torch oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.kernel_cases import Guarded, same_bits
from torch_cgx.kernels import Piece, Rounding
from torch_cgx.kernels.reference import ReferenceKernels
from torch_cgx.kernels.triton import TritonKernels

STOCHASTIC = Rounding(stochastic=True, seed=7, op=3, rank=1, stage=1)


def check_all_operations(
    x: torch.Tensor,
    pieces: Sequence[Piece],
    nbytes: int,
    rounding: Rounding,
    *,
    payloads: int = 2,
    shift: int = 0,
    residual: bool = True,
    roll: int = 1,
    summed: bool = False,
) -> None:
    """Hold encode, decode, decode-add and reduce (and sum) to the oracle's bytes.

    `shift` moves slots off their alignment. Each payload has the values of the one before, moved on by `roll`.
    """
    oracle, kernels = ReferenceKernels(), TritonKernels()
    lost = [torch.full((x.numel(),), 7.0) if residual else None for _ in range(4)]

    def slot(fill: int = 0xA5) -> tuple[Guarded, torch.Tensor]:
        guarded = Guarded(nbytes + shift)
        guarded.payload.fill_(fill)
        return guarded, guarded.payload[shift:]

    expected, (guarded, mine) = slot()[1], slot()
    oracle.encode(pieces, x, expected, rounding, lost[0])
    kernels.encode(pieces, x, mine, rounding, lost[1])
    assert torch.equal(mine, expected)
    assert guarded.untouched()
    others = [expected]
    for _ in range(1, payloads):
        others.append(slot()[1])
        oracle.encode(pieces, x.roll(roll * len(others)), others[-1], rounding)
    decoded, mine = x.clone(), x.clone()
    oracle.decode(pieces, expected, decoded)
    kernels.decode(pieces, expected, mine)
    assert same_bits(mine, decoded)
    added, mine = x.clone(), x.clone()
    oracle.decode(pieces, others[-1], added, add=True)
    kernels.decode(pieces, others[-1], mine, add=True)
    assert same_bits(mine, added)
    reduced, mine = x.clone(), x.clone()
    total, (guarded, out) = slot()[1], slot(0x5A)
    oracle.reduce(pieces, reduced, others[:payloads], total, 1 / 3, rounding, lost[2])
    kernels.reduce(pieces, mine, others[:payloads], out, 1 / 3, rounding, lost[3])
    assert torch.equal(out, total)
    assert guarded.untouched()
    assert same_bits(mine, reduced)
    if residual:
        assert same_bits(lost[1], lost[0])
        assert same_bits(lost[3], lost[2])
    if summed:
        expected, mine = x.clone(), x.clone()
        oracle.sum(pieces, expected, others[:payloads], 1 / 3)
        kernels.sum(pieces, mine, others[:payloads], 1 / 3)
        assert same_bits(mine, expected)


class Counting(TritonKernels):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []

    def _enqueue(self, kernel: Any, n: int, args: Sequence[Any], constants: dict[str, Any], warps: int) -> None:
        self.launches.append(kernel.__name__)
