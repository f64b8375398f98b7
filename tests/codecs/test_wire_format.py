"""docs/wire_format.md, held to the byte: its examples are read from the page itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_cgx.codecs import MaxMin
from torch_cgx.kernels import NEAREST, Piece, Rounding
from torch_cgx.kernels.random import random16
from torch_cgx.kernels.reference import ReferenceKernels

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "wire_format.md").read_text(encoding="utf-8")
VALUES, DECODED = ([float(x) for x in line.split()] for line in re.findall(r"^    values: (.*)$", PAGE, re.M))
STOCHASTIC = Rounding(stochastic=True, seed=4, op=2, rank=3, stage=1)

EXAMPLES = [
    pytest.param(0, torch.float32, False, NEAREST, id="float32 nearest"),
    pytest.param(1, torch.float16, True, NEAREST, id="float16 raw tail"),
    pytest.param(2, torch.float32, False, STOCHASTIC, id="float32 stochastic"),
]


def payload_on_page(number: int) -> bytes:
    """The hexadecimal digits at the start of each line of the page's fenced block with this number."""
    block = re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S)[number]
    return bytes.fromhex(" ".join(line.split("   ")[0] for line in block.splitlines()))


def example(dtype: torch.dtype, skip_incomplete: bool) -> tuple[Tensor, Piece, int]:
    values = torch.tensor(VALUES, dtype=dtype)
    quantizer = MaxMin(bits=3, block=8, skip_incomplete=skip_incomplete)
    piece = Piece.of(quantizer, 0, len(VALUES))
    return values, piece, quantizer.payload_nbytes(len(VALUES), values.element_size())


@pytest.mark.parametrize(("number", "dtype", "skip_incomplete", "rounding"), EXAMPLES)
def test_the_page_s_values_encode_to_the_page_s_bytes(
    number: int, dtype: torch.dtype, skip_incomplete: bool, rounding: Rounding
) -> None:
    values, piece, nbytes = example(dtype, skip_incomplete)
    payload = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
    ReferenceKernels().encode([piece], values, payload, rounding)
    assert bytes(payload.tolist()) == payload_on_page(number)


@pytest.mark.parametrize(("number", "dtype", "skip_incomplete", "rounding"), EXAMPLES[:2])
def test_the_page_s_bytes_decode_to_the_page_s_values(
    number: int, dtype: torch.dtype, skip_incomplete: bool, rounding: Rounding
) -> None:
    values, piece, _ = example(dtype, skip_incomplete)
    payload = torch.tensor(list(payload_on_page(number)), dtype=torch.uint8)
    ReferenceKernels().decode([piece], payload, values)
    assert values.tolist() == DECODED


def test_the_page_s_random_numbers_are_drawn() -> None:
    first, beyond = re.findall(r"^    ((?:0x[0-9a-f]{4} ?)+)$", PAGE, re.M)
    for start, line in ((0, first), (2**32 - 1, beyond)):
        expected = [int(word, 16) for word in line.split()]
        assert random16(STOCHASTIC, start, len(expected)).tolist() == expected
