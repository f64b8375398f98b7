"""The Triton kernels of the rotated codec under Triton's interpreter, against the plain-torch oracle, to the byte."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.families import only
from tests.support.kernel_cases import DTYPES, random_values, same_bits

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.triton.agreement import STOCHASTIC, Counting, check_all_operations
from torch_cgx.codecs import RAW, Codec, MaxMin, Rotated
from torch_cgx.codecs.rotated import BLOCKS
from torch_cgx.kernels import NEAREST, Piece, Rounding
from torch_cgx.kernels.reference import ReferenceKernels
from torch_cgx.kernels.triton import TritonKernels
from torch_cgx.kernels.triton.table import RAW as RAW_RUN
from torch_cgx.kernels.triton.table import ROTATED, TAIL, make_table

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about infinities and NaN

WIDTHS = (1, 2, 3, 4)
Rows = list[tuple[int, Codec]]
# Blocks of 64 have tiles of 16 blocks: one is whole, one has 3 blocks, and an incomplete block has one of its own.
WHOLE_AND_PART = 64 * 19 + 37


def table_of(rows: Rows, dtype: torch.dtype, offset: int = 8) -> tuple[tuple[Piece, ...], int, int]:
    """Consecutive pieces of (numel, codec), the end of their values and of their payloads."""
    pieces, nbytes = [], 0
    for numel, codec in rows:
        pieces.append(Piece.of(codec, offset, numel, nbytes))
        offset += numel
        nbytes += codec.payload_nbytes(numel, dtype.itemsize)
    return tuple(pieces), offset, nbytes


def check(rows: Rows, dtype: torch.dtype, rounding: Rounding = NEAREST, **options: Any) -> None:
    """The first piece starts at value 8, the tensor ends 5 values after the last one: neither may be written."""
    pieces, numel, nbytes = table_of(rows, dtype)
    x = random_values(numel + 5, dtype, seed=len(rows) + numel)
    check_all_operations(x, pieces, nbytes, rounding, summed=options.get("payloads", 2) > 0, **options)


@pytest.mark.parametrize("bits", only((1, 3, 4), WIDTHS))
def test_every_width_matches_the_oracle_to_the_byte(bits: int) -> None:
    check([(WHOLE_AND_PART, Rotated(bits, 64))], DTYPES[bits % 3], (NEAREST, STOCHASTIC)[bits % 2])


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_width_with_every_type_and_rounding_matches_the_oracle(bits: int, dtype: torch.dtype) -> None:
    for rounding in (NEAREST, STOCHASTIC):
        check([(WHOLE_AND_PART, Rotated(bits, 64))], dtype, rounding)


@pytest.mark.parametrize("block", only((1024,), BLOCKS))
def test_every_block_size_matches_the_oracle(block: int) -> None:
    """An incomplete last block of more than half of a block is as long as it, filled up with zeros."""
    check([(block + block // 2 + 3, Rotated(block.bit_length() % 4 + 1, block))], DTYPES[block.bit_length() % 3])


@pytest.mark.matrix
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_width_matches_the_oracle_in_blocks_of_every_size(bits: int) -> None:
    for block in BLOCKS:
        check([(2 * block + 65, Rotated(bits, block, block % 3 == 0))], DTYPES[bits % 3], STOCHASTIC, payloads=3)


@pytest.mark.parametrize("lengths", only([(1, 65, 600)], [(1, 65, 600), (2, 63, 64), (200, 512, 1023), (1025, 1100)]))
def test_incomplete_blocks_of_every_length_match_the_oracle(lengths: tuple[int, ...]) -> None:
    """They are rotated as a power of two of values from 64 on, in tiles of 1024."""
    rows: Rows = [(numel, Rotated(4, 1024)) for numel in lengths]
    runs = make_table(table_of(rows, torch.float32)[0], 4, True).rotated.runs
    wanted = {max(64, 1 << (numel % 1024 - 1).bit_length()) for numel in lengths}
    assert {run.block for run in runs if run.kind == ROTATED} - {1024} == wanted - {1024}
    check(rows, torch.float32, payloads=1)


MIXED: Rows = [
    (150, Rotated(4, 128, True)),
    (7, RAW),
    (90, Rotated(1, 64)),
    (100, Rotated(2, 256, True)),
    (40, Rotated(3, 128)),
]


@pytest.mark.parametrize("dtype", only([torch.bfloat16], DTYPES))
def test_a_table_of_layers_with_different_bits_and_blocks_matches_the_oracle(dtype: torch.dtype) -> None:
    """Later pieces start at any value, raw tails at any byte; a piece may be nothing but a raw tail."""
    table = make_table(table_of(MIXED, dtype)[0], dtype.itemsize, aligned=True)
    assert {run.kind for run in table.rotated.runs} == {ROTATED, RAW_RUN, TAIL}
    assert table.rotated.bits == 0 and not table.main.runs
    check(MIXED, dtype)


def test_both_codecs_share_a_table() -> None:
    check([(40, MaxMin(4, 32)), (100, Rotated(4, 64, True)), (5, RAW)], torch.float16, payloads=1)


@pytest.mark.parametrize("shift", only([1], [1, 4]))
def test_slots_may_start_at_any_byte(shift: int) -> None:
    check([(130, Rotated(3, 64)), (5, RAW), (65, Rotated(4, 64, True))], torch.float16, payloads=1, shift=shift)


@pytest.mark.parametrize("payloads", [0, 5])
def test_any_number_of_payloads_is_summed_in_order(payloads: int) -> None:
    check([(130, Rotated(4, 64, True)), (5, RAW)], torch.float32, payloads=payloads)


def special_blocks() -> torch.Tensor:
    """Blocks of 64 values, of every kind; those that are constant have such neighbours, and others."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    parts = [
        x[0],
        torch.full((64,), 0.1),
        torch.full((64,), -2.5),
        torch.full((64,), 2.4),
        torch.where(x[1] > 0, 0.0, -0.0),
        torch.full((64,), -0.0),
        x[2] * 2.0**-140,
        x[3] * 2.0**-149,
        x[4] * 2.0**-122,
        x[5] * 2.0**120,
        x[6] * 2.0**126,
        torch.where(torch.arange(64) == 5, 3.0, 0.0),
        torch.where(torch.arange(64) == 63, math.nan, 1.0),
        torch.full((64,), math.inf),
        torch.where(x[7] > 1, -math.inf, x[7]),
        torch.where(torch.arange(64) == 63, 1.0, torch.tensor(1.0).nextafter(torch.tensor(2.0))),
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("bits", only([2], WIDTHS))
def test_bad_constant_zero_and_subnormal_blocks_match_the_oracle(bits: int) -> None:
    """In a whole tile and in one that is not, alone and in sums with payloads whose blocks are of all kinds, too."""
    x = torch.cat((special_blocks(), special_blocks()[: 64 * 5], torch.full((20,), -3.0)))
    pieces, _, nbytes = table_of([(x.numel(), Rotated(bits, 64))], torch.float32, offset=0)
    check_all_operations(x, pieces, nbytes, NEAREST, payloads=3, roll=64, summed=True)


def test_sums_of_constant_blocks_stay_constant() -> None:
    x = torch.tensor([0.1, -0.1, 5.0, 0.0]).repeat_interleave(64)
    pieces, _, nbytes = table_of([(256, Rotated(1, 64))], torch.float32, offset=0)
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    kernels = TritonKernels()
    kernels.encode(pieces, x, slot, NEAREST)
    summed = x.clone()
    kernels.sum(pieces, summed, [slot, slot], 0.5)
    assert torch.equal(summed, (x + (x + x)) * 0.5)
    kernels.reduce(pieces, x, [slot, slot], slot.clone(), 0.5, NEAREST)
    assert torch.equal(x, summed)


def test_levels_that_overflow_in_float16_become_infinite() -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(2)).mul(3e4).clamp(-65504, 65504).to(torch.float16)
    pieces, _, nbytes = table_of([(256, Rotated(1, 64))], x.dtype, offset=0)
    check_all_operations(x, pieces, nbytes, NEAREST, summed=True)
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    TritonKernels().encode(pieces, x, slot, NEAREST)
    TritonKernels().decode(pieces, slot, x)
    assert x.isinf().any() and not x.isnan().any()


def test_a_program_may_have_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_cgx.kernels.triton.table._MANY_PROGRAMS", 1)
    rows: Rows = [(64 * 32, Rotated(4, 64)), (300, RAW)]
    runs = make_table(table_of(rows, torch.float32)[0], 4, True).rotated.runs
    assert runs[0].step == 2 * 1024 and runs[0].programs == 1
    check(rows, torch.float32, payloads=1, residual=False)


def test_values_beyond_two_to_the_33_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tensor only the end is there; the interpreter must not copy all of it to itself after a call."""
    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    numel, start = 150, 2**33 + 2
    there = random_values(1 << 16, torch.float32, 9)
    whole = (ctypes.c_float * (start + numel)).from_address(there.data_ptr() - 4 * start)
    x = torch.frombuffer(whole, dtype=torch.float32)
    pieces, _, nbytes = table_of([(numel, Rotated(4, 64))], torch.float32, offset=start)
    expected, mine = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    ReferenceKernels().encode(pieces, x, expected, STOCHASTIC)
    TritonKernels().encode(pieces, x, mine, STOCHASTIC)
    assert torch.equal(mine, expected)
    ReferenceKernels().decode(pieces, expected, x)
    decoded = there[:numel].clone()
    there[:numel] = 0.0
    TritonKernels().decode(pieces, expected, x)
    assert same_bits(there[:numel], decoded)


@pytest.mark.matrix
@settings(max_examples=8)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 700),
            st.one_of(
                st.builds(Rotated, st.sampled_from(WIDTHS), st.sampled_from(BLOCKS[:5]), st.booleans()),
                st.builds(MaxMin, st.integers(1, 8), st.sampled_from([32, 5]), st.booleans()),
                st.just(RAW),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    dtype=st.sampled_from(DTYPES),
    stochastic=st.booleans(),
    shift=st.sampled_from([0, 0, 8, 3]),
)
def test_tables_of_any_layers_match_the_oracle(rows: Rows, dtype: torch.dtype, stochastic: bool, shift: int) -> None:
    check(rows, dtype, Rounding(stochastic=stochastic, seed=len(rows)), shift=shift)


def launches(rows: Rows) -> list[list[str]]:
    """The names of the kernels that encode, decode, reduce and sum launch."""
    pieces, numel, nbytes = table_of(rows, torch.float32)
    kernels, slot, found = Counting(), torch.zeros(nbytes, dtype=torch.uint8), []
    for call in (
        lambda: kernels.encode(pieces, torch.zeros(numel), slot, NEAREST),
        lambda: kernels.decode(pieces, slot, torch.zeros(numel)),
        lambda: kernels.reduce(pieces, torch.zeros(numel), [slot] * 3, slot.clone(), 1.0, NEAREST),
        lambda: kernels.sum(pieces, torch.zeros(numel), [slot] * 3, 0.5),
    ):
        call()
        found.append(kernels.launches.copy())
        kernels.launches.clear()
    return found


def test_a_call_is_one_launch_however_many_rotated_and_raw_layers_it_has() -> None:
    assert launches([*MIXED, *MIXED]) == [
        ["encode_rotated_kernel"],
        ["decode_rotated_kernel"],
        ["encode_rotated_kernel"],
        ["sum_rotated_kernel"],
    ]


def test_layers_of_the_other_codec_take_launches_of_their_own() -> None:
    assert launches([*MIXED, (40, MaxMin(4, 32))]) == [
        ["encode_rotated_kernel", "encode_kernel"],
        ["decode_rotated_kernel", "decode_kernel"],
        ["encode_rotated_kernel", "encode_kernel"],
        ["sum_rotated_kernel", "decode_kernel", "decode_kernel", "decode_kernel"],
    ]


def test_every_value_belongs_to_one_program_of_one_run() -> None:
    big: Rows = [(5_000_000, Rotated(4, 1024)), (70_000, Rotated(4, 4096, True)), (3, RAW)]
    for rows in (MIXED, big, [*MIXED, (100, MaxMin(4, 9, True)), (9, RAW)]):
        pieces, numel, _ = table_of(rows, torch.float32, offset=0)
        table = make_table(pieces, 4, aligned=True)
        seen = torch.zeros(numel, dtype=torch.int32)
        assert table.rotated is not None
        for launch in (table.main, table.rotated):
            for pid, row in enumerate(launch.tensors(torch.device("cpu"))[0].tolist()):
                run = launch.runs[row]
                begin = run.begin + (pid - run.first_program) * run.step
                seen[run.offset + begin : run.offset + min(begin + run.step, run.end)] += 1
        assert (seen == 1).all()


def test_what_does_not_fit_is_refused_with_what_was_expected() -> None:
    kernels = TritonKernels()
    (piece,), _, nbytes = table_of([(70, Rotated(4, 64))], torch.float32, offset=0)
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"payload: expected at least {nbytes} bytes, got {nbytes - 1}"):
        kernels.encode((piece,), torch.zeros(70), slot[:-1], NEAREST)
    with pytest.raises(ValueError, match="values: expected at least 70 of them for these pieces, got 69"):
        kernels.sum((piece,), torch.zeros(69), [slot], 1.0)
    with pytest.raises(TypeError, match="values at 4 bits: expected float32, float16 or bfloat16, got float64"):
        kernels.decode((piece,), slot, torch.zeros(70, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"bits of the rotated quantizer: expected 1 to 4 .* got 5"):
        kernels.decode((replace(piece, bits=5),), slot, torch.zeros(70))
    with pytest.raises(ValueError, match=r"bucket size of the rotated quantizer: expected one of 64, .* got 96"):
        kernels.decode((replace(piece, block=96),), slot, torch.zeros(70))
