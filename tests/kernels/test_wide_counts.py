"""Five billion values: every count is 64 bits wide, from the layout to the tables that C and Triton read."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from torch_cgx import _native, payload_nbytes
from torch_cgx.codecs import RAW, Codec, MaxMin
from torch_cgx.group.calls import collective_call
from torch_cgx.kernels import Piece, Rounding
from torch_cgx.kernels.native import _make_table, available
from torch_cgx.kernels.random import random16
from torch_cgx.kernels.triton.table import make_table
from torch_cgx.plan.layout import Layer, make_layout

NUMEL = 5_000_000_000
LARGEST_GRID = 2**31 - 1  # of a CUDA launch


@pytest.mark.parametrize("quantizer", [MaxMin(4, 1024), MaxMin(1, 65536), MaxMin(8, 512), RAW])
@pytest.mark.parametrize("slice_nbytes", [64 << 20, 2**40])
def test_a_layout_of_five_billion_values_covers_them_with_payloads_of_the_right_length(
    quantizer: Codec, slice_nbytes: int
) -> None:
    layout = make_layout([Layer(NUMEL, quantizer)], 3, 4, slice_nbytes)
    end = 0
    for part in layout.slices:
        for chunk in part.chunks:
            last = chunk.pieces[-1]
            assert chunk.pieces[0].offset == end
            end = last.offset + last.numel
            assert chunk.nbytes == last.payload + quantizer.payload_nbytes(last.numel, 4)
    assert end == NUMEL
    if slice_nbytes == 2**40:
        assert len(layout.slices) == 1
        assert isinstance(quantizer, MaxMin) or max(chunk.nbytes for chunk in layout.slices[0].chunks) > 2**32


@pytest.mark.parametrize("structure", [_native.Piece, _native.Slot, _native.Step, _native.Stats])
def test_structures_for_the_native_library_have_64_bits_for_every_count(structure: Any) -> None:
    for name, kind in structure._fields_:
        assert kind is ctypes.c_int64, name
        row = structure()
        setattr(row, name, NUMEL)
        assert getattr(row, name) == NUMEL


def test_what_the_board_and_a_submission_say_of_five_billion_values_is_not_cut_off() -> None:
    call = collective_call("all_reduce", torch.float32, (NUMEL,), reduction="SUM")
    assert call.numel == NUMEL and call.dims[0] == NUMEL
    submission = _native.Submission()
    submission.bytes_before = 8 * NUMEL
    assert submission.bytes_before == 8 * NUMEL


@pytest.mark.parametrize("bits", [1, 4, 8, 32])
def test_the_native_library_and_python_agree_on_the_length_of_a_huge_payload(bits: int) -> None:
    if not available():
        pytest.skip("no native library")
    piece = Piece.of(RAW if bits == 32 else MaxMin(bits, 1024), NUMEL, NUMEL, 8)
    table = _make_table([piece], 0)
    quantizer = RAW if bits == 32 else MaxMin(bits, 1024)
    assert table.numel == 2 * NUMEL
    assert table.nbytes == 8 + quantizer.payload_nbytes(NUMEL, 4) > 2**29
    assert bits == 32 or payload_nbytes(NUMEL, torch.float32, bits, 1024) == table.nbytes - 8


@pytest.mark.parametrize("block", [32, 512, 1000, 65536])
def test_tables_for_triton_have_64_bits_and_grids_within_a_launch(block: int) -> None:
    piece = Piece(NUMEL, NUMEL, 4, block, 0, 8, MaxMin.kind)
    table = make_table([piece], 4, aligned=True)
    assert table.numel == 2 * NUMEL and table.nbytes > 2**31
    for launch in (table.main, table.headers):
        if launch is not None:
            assert 0 < launch.programs <= LARGEST_GRID
            assert max(run.end for run in launch.runs) == NUMEL
    rows = torch.tensor(table.main.runs, dtype=torch.int64)
    assert int(rows.max()) >= 2 * NUMEL - 1 or int(rows.max()) >= NUMEL


def test_random_numbers_of_neighbours_differ_beyond_32_bits() -> None:
    rounding = Rounding(stochastic=True, seed=1)
    assert random16(rounding, 2**32 - 2, 4).tolist()[:2] == random16(rounding, 2**32 - 2, 2).tolist()
    assert random16(rounding, 2**32, 64).tolist() != random16(rounding, 0, 64).tolist()
