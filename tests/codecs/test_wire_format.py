"""docs/wire_format.md, held to the byte: its tables and examples are read from the page itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support import rotated_definition as definition
from torch_cgx import codecs
from torch_cgx.codecs import Codec, MaxMin, Rotated
from torch_cgx.kernels import NEAREST, Piece, Rounding
from torch_cgx.kernels.plain.rotated import MAGNITUDES, THRESHOLDS_SQUARED
from torch_cgx.kernels.random import key, random16, random_pairs
from torch_cgx.kernels.reference import ReferenceKernels

PAGE = definition.PAGE
STOCHASTIC = Rounding(stochastic=True, seed=4, op=2, rank=3, stage=1)


@dataclass(frozen=True)
class Section:
    """One of the page's worked examples."""

    text: str

    @classmethod
    def of(cls, title: str) -> Section:
        return cls(PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0])

    def values(self, number: int = 0) -> list[float]:
        """Return the numbers of a line like `values: 1.0, 3 times 0.0, 2.0` (commas may be left out)."""
        line = re.findall(r"^    values: (.*)$", self.text, re.M)[number]
        runs = re.findall(r"(?:(\d+) times )?(-?\d+\.\d+)", line)
        return [float(value) for count, value in runs for _ in range(int(count or 1))]

    def payload(self, number: int) -> bytes:
        """Return the hexadecimal digits at the start of each line of the fenced block with this number."""
        block = re.findall(r"^```\n(.*?)^```", self.text, re.M | re.S)[number]
        return bytes.fromhex(" ".join(line.split("   ")[0] for line in block.splitlines()))

    def words(self, number: int) -> list[int]:
        """Return the numbers of a line of hexadecimal words."""
        line = re.findall(r"^    ((?:0x[0-9a-f]+ ?)+)$", self.text, re.M)[number]
        return [int(word, 16) for word in line.split()]


MAXMIN, ROTATED = Section.of("Example: max-min"), Section.of("Example: rotated")
EXAMPLES = [
    pytest.param(MAXMIN, 0, torch.float32, MaxMin(3, 8), NEAREST, id="max-min float32"),
    pytest.param(MAXMIN, 1, torch.float16, MaxMin(3, 8, skip_incomplete=True), NEAREST, id="max-min float16 raw tail"),
    pytest.param(MAXMIN, 2, torch.float32, MaxMin(3, 8), STOCHASTIC, id="max-min float32 stochastic"),
    pytest.param(ROTATED, 0, torch.float32, Rotated(2, 64), NEAREST, id="rotated float32"),
    pytest.param(
        ROTATED, 1, torch.float16, Rotated(2, 64, skip_incomplete=True), NEAREST, id="rotated float16 raw tail"
    ),
]


@pytest.mark.parametrize(("section", "number", "dtype", "codec", "rounding"), EXAMPLES)
def test_the_page_s_values_encode_to_the_page_s_bytes(
    section: Section, number: int, dtype: torch.dtype, codec: Codec, rounding: Rounding
) -> None:
    values = torch.tensor(section.values(), dtype=dtype)
    payload = torch.full((codec.payload_nbytes(values.numel(), dtype.itemsize),), 0xA5, dtype=torch.uint8)
    ReferenceKernels().encode([Piece.of(codec, 0, values.numel())], values, payload, rounding)
    assert bytes(payload.tolist()) == section.payload(number)


def decoded(section: Section, number: int, dtype: torch.dtype, codec: Codec) -> Tensor:
    payload = torch.tensor(list(section.payload(number)), dtype=torch.uint8)
    values = torch.full((len(section.values()),), 7.0, dtype=dtype)
    ReferenceKernels().decode([Piece.of(codec, 0, values.numel())], payload, values)
    return values


@pytest.mark.parametrize(("number", "dtype", "skip_incomplete"), [(0, torch.float32, False), (1, torch.float16, True)])
def test_the_page_s_max_min_bytes_decode_to_the_page_s_values(
    number: int, dtype: torch.dtype, skip_incomplete: bool
) -> None:
    assert decoded(MAXMIN, number, dtype, MaxMin(3, 8, skip_incomplete)).tolist() == MAXMIN.values(1)


def test_the_page_s_rotated_bytes_decode_to_the_page_s_values() -> None:
    values = decoded(ROTATED, 0, torch.float32, Rotated(2, 64)).tolist()
    lines = re.findall(r"^    value (\d+): +(\S+)$", ROTATED.text, re.M)
    assert [int(index) for index, _ in lines] == [0, 1, 5, 18, 40, 128, 129, 130]
    for index, value in lines:
        assert f"{values[int(index)]:.9g}" == f"{float(value):.9g}", index
    assert values[64:128] == [-0.75] * 64


def test_the_page_s_rotated_bytes_in_float16_end_with_the_raw_values_themselves() -> None:
    values = decoded(ROTATED, 1, torch.float16, Rotated(2, 64, skip_incomplete=True))
    assert values[128:].tolist() == ROTATED.values()[128:]


@pytest.mark.parametrize(("number", "skip_incomplete"), [(0, False), (1, True)])
def test_the_page_s_rotated_bytes_are_those_of_its_definition(number: int, skip_incomplete: bool) -> None:
    values = [definition.F(value) for value in ROTATED.values()]
    raw = torch.tensor(ROTATED.values()[128:], dtype=torch.float16).view(torch.uint8) if skip_incomplete else None
    coded = values[:128] if skip_incomplete else values
    key_of_nearest = definition.key_of()
    blocks = [definition.encode_block(block, 2, key_of_nearest) for block in definition.blocks_of(coded, 64)]
    tail = b"" if raw is None else bytes(raw.tolist())
    assert definition.payload_of(blocks, 2, key_of_nearest, tail) == ROTATED.payload(number)


def test_the_numbers_on_the_way_to_the_rotated_example_are_those_of_its_definition() -> None:
    signs_key = definition.key_of()
    values = [definition.F(value) for value in ROTATED.values()[:64]]
    before = [v * s / 8 for v, s in zip(values, definition.signs(signs_key, 64), strict=True) if v != 0]
    y = definition.rotate(values, signs_key)
    q = definition.tree([v * v for v in y])
    levels = definition.encode_block(values, 2, signs_key).levels
    d = definition.tree([abs(v) * definition.M[2][level & 1] for v, level in zip(y, levels, strict=True)])
    threshold = definition.T[2][0] * (q / 64)
    text = " ".join(ROTATED.text.split())
    assert "butterflies as {}, {}, {} and {}.".format(*before) in text
    assert f"rotated: {' '.join(str(v) for v in y[:8])} " in text
    assert f"The largest of all 64 is {max(abs(v) for v in y)}, so E = 127" in text
    assert f"q = {q:.0f}, T_0 = {threshold!s}, and d = {d!s}." in text
    assert definition.encode_block(values, 2, signs_key).scale == q / d


def test_the_tables_of_the_rotated_quantizer_are_the_page_s() -> None:
    assert sorted(definition.M) == sorted(definition.T) == [1, 2, 3, 4]
    for bits in definition.M:
        assert [float(m) for m in definition.M[bits]] == list(MAGNITUDES[bits])
        assert [float(t) for t in definition.T[bits]] == list(THRESHOLDS_SQUARED[bits])


def test_the_page_s_random_numbers_are_drawn() -> None:
    for start, number in ((0, 0), (2**32 - 1, 1)):
        expected = MAXMIN.words(number)
        assert random16(STOCHASTIC, start, len(expected)).tolist() == expected


def test_the_page_s_signs_and_keys_are_drawn() -> None:
    assert random_pairs(key(NEAREST), torch.arange(2)).tolist() == ROTATED.words(0)
    payload = torch.zeros(Rotated(2, 64).payload_nbytes(64, 4), dtype=torch.uint8)
    ReferenceKernels().encode([Piece.of(Rotated(2, 64), 0, 64)], torch.ones(64), payload, STOCHASTIC)
    assert bytes(payload[:8].tolist()) == ROTATED.payload(2)


def test_the_page_s_codecs_are_those_of_the_registry() -> None:
    rows = re.findall(r"^\| (raw|max-min|rotated) \| (\d) \|", PAGE, re.M)
    kinds = {codecs.family(name).kind for name in ("maxmin", "rotated")} | {codecs.RAW.kind}
    assert [int(kind) for _, kind in rows] == sorted(kinds) == [0, 1, 2]
