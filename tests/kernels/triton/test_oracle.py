"""The Triton kernels under Triton's interpreter, on CPU tensors, against the plain-torch oracle, to the byte."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.families import only
from tests.support.kernel_cases import DTYPES, payload_nbytes, piece_for, random_values, table_of

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.triton.agreement import STOCHASTIC, Counting, check_all_operations
from torch_cgx.codecs import MaxMin
from torch_cgx.kernels import NEAREST, Piece, Rounding
from torch_cgx.kernels.reference import ReferenceKernels
from torch_cgx.kernels.triton import TritonKernels
from torch_cgx.kernels.triton.table import EDGE, FLAT, RAW, TAIL, WHOLE, make_table

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about infinities and NaN

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)
# With blocks of 32, a tile is 1024 values: so many values make one whole tile, three edges and padding.
WHOLE_AND_EDGES = 1024 + 70


def check(rows: list[tuple[int, int, int, bool]], dtype: torch.dtype, rounding: Rounding, **options: Any) -> None:
    """The first piece starts at value 8, the tensor ends 5 values after the last one: neither may be written."""
    pieces, numel, nbytes = table_of(rows, dtype, offset=8)
    check_all_operations(random_values(numel + 5, dtype, seed=len(rows) + numel), pieces, nbytes, rounding, **options)


def kinds(rows: list[tuple[int, int, int, bool]], aligned: bool = True) -> set[int]:
    return {run.kind for run in make_table(table_of(rows, torch.float32)[0], 4, aligned).main.runs}


@pytest.mark.parametrize("bits", only((1, 4, 6, 8), WIDTHS))
def test_every_width_matches_the_oracle_to_the_byte(bits: int) -> None:
    rows = [(WHOLE_AND_EDGES, bits, 32, False)]
    assert kinds(rows) == {WHOLE, EDGE, TAIL}
    check(rows, DTYPES[bits % 3], (NEAREST, STOCHASTIC)[bits % 2])


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_width_with_every_type_and_rounding_matches_the_oracle(bits: int, dtype: torch.dtype) -> None:
    for rounding in (NEAREST, STOCHASTIC):
        check([(WHOLE_AND_EDGES, bits, 32, False)], dtype, rounding)


@pytest.mark.parametrize(
    ("block", "numel", "kind"),
    [
        (1, 20, FLAT),
        (7, 100, FLAT),
        (100, 250, FLAT),
        pytest.param(5000, 5100, FLAT, marks=pytest.mark.matrix),
        (96, 900, WHOLE),
        (1024, 1025, WHOLE),
        (4096, 4100, WHOLE),
    ],
)
def test_every_block_size_matches_the_oracle(block: int, numel: int, kind: int) -> None:
    rows = [(numel, 5 if block % 2 else 4, block, False)]
    assert kind in kinds(rows)
    check(rows, DTYPES[block % 3], STOCHASTIC if block == 100 else NEAREST, payloads=1)


@pytest.mark.matrix
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_width_matches_the_oracle_in_odd_blocks(bits: int) -> None:
    for block in (1, 9, 33, 300, 2048):
        check([(block * 2 + 5, bits, block, False)], DTYPES[(bits + block) % 3], (NEAREST, STOCHASTIC)[block % 2])


MIXED = [
    (1030, 4, 32, False),
    (5, 32, 1, False),
    (1100, 3, 32, True),
    (50, 8, 9, True),
    (1024, 1, 32, False),
    (37, 2, 64, True),
    (9, 32, 1, False),
]


@pytest.mark.parametrize("dtype", only([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_a_table_of_layers_with_different_bits_and_blocks_matches_the_oracle(dtype: torch.dtype) -> None:
    """Later pieces start at any value, raw tails at any byte."""
    assert kinds(MIXED) == {WHOLE, EDGE, FLAT, RAW, TAIL}
    check(MIXED, dtype, NEAREST)


def test_tiles_that_are_not_full_may_start_at_any_value() -> None:
    rows = [(5, 32, 1, False), (800, 4, 96, False)]
    assert WHOLE in kinds(rows)
    check(rows, torch.float32, NEAREST, payloads=1)


@pytest.mark.parametrize("shift", only([1], [1, 4]))
def test_slots_may_start_at_any_byte(shift: int) -> None:
    rows = [(200, 4, 32, True), (5, 32, 1, False), (30, 3, 9, True)]
    assert WHOLE not in kinds(rows, aligned=False)
    check(rows, torch.float16, NEAREST, shift=shift)


@pytest.mark.matrix
@settings(max_examples=6)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 400),
            st.sampled_from([*WIDTHS, 32]),
            st.sampled_from([32, 64, 1, 5, 40, 300]),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ),
    dtype=st.sampled_from(DTYPES),
    stochastic=st.booleans(),
    shift=st.sampled_from([0, 0, 8, 3]),
)
def test_tables_of_any_layers_match_the_oracle(
    rows: list[tuple[int, int, int, bool]], dtype: torch.dtype, stochastic: bool, shift: int
) -> None:
    check(rows, dtype, Rounding(stochastic=stochastic, seed=len(rows)), shift=shift)


@pytest.mark.parametrize("payloads", [0, 1, 5])
def test_any_number_of_payloads_is_summed_in_order(payloads: int) -> None:
    check([(1100, 4, 32, True), (20, 3, 9, False), (5, 32, 1, False)], torch.float32, NEAREST, payloads=payloads)


def test_bad_constant_and_subnormal_blocks_match_the_oracle() -> None:
    """In whole tiles, in edges and in flat runs: every kind of block, among blocks that are like the others."""
    tiny = torch.tensor([0.0, 1e-45, 3e-45, 1e-42] * 8)
    special = [
        torch.tensor([math.nan] + [1.0] * 31),
        torch.tensor([1.0] * 30 + [math.inf, -math.inf]),
        torch.full((32,), math.inf),
        torch.tensor([-3e38, 3e38] * 16),
        torch.full((32,), 0.1),
        torch.tensor([0.0, -0.0] * 16),
        tiny,
        -tiny,
        torch.tensor([-1.7e38, 1.7e38] * 16),
    ]
    x = torch.cat([*special, random_values(1024 - 32 * len(special), torch.float32, 1), *special])
    for block in (32, 16):
        for rounding in (NEAREST, STOCHASTIC):
            piece = piece_for(x.numel(), 3, block)
            check_all_operations(x, (piece,), payload_nbytes(piece, x.dtype), rounding)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_narrow_types_is_to_nearest_even_and_overflows_to_infinity(dtype: torch.dtype) -> None:
    """All 256 levels over wide and narrow ranges decode to ties, subnormals and beyond the largest value."""
    blocks = [(-1.0, 1.0), (0.0, 1e-7), (1.0, 1.25), (-60000.0, 65000.0), (3e-39, 5e-39)]
    x = torch.cat([torch.linspace(lo, hi, 256) for lo, hi in blocks]).to(dtype)
    piece = piece_for(x.numel(), 8, 256)
    check_all_operations(x, (piece,), payload_nbytes(piece, dtype), NEAREST, residual=False)


def test_raw_float64_is_summed_in_float64() -> None:
    piece = piece_for(11, 32, 1)
    x = torch.linspace(-1, 1, 11, dtype=torch.float64) / 3
    check_all_operations(x, (piece,), 88, NEAREST, residual=False)


def test_values_beyond_two_to_the_33_are_reached_and_draw_their_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tensor only the end is there; the interpreter must not copy all of it to itself after a call."""
    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    numel, start = 1100, 2**33 + 2
    there = random_values(1 << 16, torch.float32, 9)
    whole = (ctypes.c_float * (start + numel)).from_address(there.data_ptr() - 4 * start)
    x = torch.frombuffer(whole, dtype=torch.float32)
    pieces = (piece_for(numel, 4, 32, offset=start),)
    nbytes = payload_nbytes(pieces[0], torch.float32)
    expected, mine = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    ReferenceKernels().encode(pieces, x, expected, STOCHASTIC)
    TritonKernels().encode(pieces, x, mine, STOCHASTIC)
    assert torch.equal(mine, expected)
    decoded = ReferenceKernels().decode(pieces, expected, x), there[:numel].clone()
    TritonKernels().decode(pieces, expected, x)
    assert torch.equal(there[:numel], decoded[1])


def test_a_call_is_one_launch_however_many_layers_it_has() -> None:
    pieces, numel, nbytes = table_of([(40, bits, 32, False) for bits in [*WIDTHS, 32] * 20], torch.float32)
    kernels, slot = Counting(), torch.zeros(nbytes, dtype=torch.uint8)
    kernels.encode(pieces, torch.zeros(numel), slot, NEAREST)
    kernels.decode(pieces, slot, torch.zeros(numel))
    kernels.reduce(pieces, torch.zeros(numel), [slot] * 3, slot.clone(), 1.0, NEAREST)
    assert kernels.launches == ["encode_kernel", "decode_kernel", "encode_kernel"]


def test_a_sum_is_a_launch_a_payload_and_one_more_where_values_of_16_bits_travel_raw() -> None:
    """Its bits are those of the oracle: test_sums.py."""
    rows = [(40, bits, 32, False) for bits in [*WIDTHS, 32] * 20]
    for dtype, launches in ((torch.float32, 3), (torch.bfloat16, 6)):
        pieces, numel, nbytes = table_of(rows, dtype)
        kernels, slot = Counting(), torch.zeros(nbytes, dtype=torch.uint8)
        kernels.sum(pieces, torch.zeros(numel, dtype=dtype), [slot] * 3, 0.5)
        assert kernels.launches == ["decode_kernel"] * launches


def test_blocks_that_fit_no_tile_take_a_second_launch_to_encode() -> None:
    pieces, numel, nbytes = table_of([(40, 4, 32, False), (40, 4, 9, False)], torch.float32)
    kernels, slot = Counting(), torch.zeros(nbytes, dtype=torch.uint8)
    kernels.encode(pieces, torch.zeros(numel), slot, NEAREST)
    kernels.decode(pieces, slot, torch.zeros(numel))
    assert kernels.launches == ["headers_kernel", "encode_kernel", "decode_kernel"]


def test_a_table_is_made_once_for_a_tuple_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("torch_cgx.kernels.triton.make_table", lambda *args: made.append(args) or make_table(*args))
    pieces, numel, nbytes = table_of([(40, 4, 32, False)], torch.float32)
    kernels, slot = Counting(), torch.zeros(nbytes, dtype=torch.uint8)
    for _ in range(3):
        kernels.decode(pieces, slot, torch.zeros(numel))
    assert len(made) == 1
    for _ in range(2):
        kernels.decode(list(pieces), slot, torch.zeros(numel))
    assert len(made) == 3


def test_not_all_tables_are_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_cgx.kernels.triton._KEPT_TABLES", 2)
    kernels = Counting()
    for numel in (32, 64, 96):
        pieces, numel, nbytes = table_of([(numel, 4, 32, False)], torch.float32)
        kernels.decode(pieces, torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(numel))
    assert len(kernels._tables) == 1


def test_a_new_table_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be copied to the device, which a graph would do again and again from memory that is gone."""
    kernels, pieces = Counting(), (piece_for(64, 4, 32),)
    monkeypatch.setattr(kernels, "_device", "cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured: run the same operation once before"):
        kernels._kept(pieces, torch.zeros(64), True)


def test_a_triton_that_is_too_old_or_not_there_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("triton.__version__", "3.3.1")
        with pytest.raises(RuntimeError, match=r"expected Triton 3\.4 or newer.* got 3\.3\.1"):
            TritonKernels()
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    with pytest.raises(RuntimeError, match="pip install triton"):
        TritonKernels()


def test_every_value_belongs_to_one_program_of_one_run() -> None:
    """Whatever the table: programs of all runs cover all values once, quantized and raw."""
    for rows in (MIXED, [(5_000_000, 4, 1024, False)], [(70_000, 2, 65536, True), (3, 8, 32, True)]):
        pieces, numel, _ = table_of(rows, torch.float32)
        table = make_table(pieces, 4, aligned=True)
        seen = torch.zeros(numel, dtype=torch.int32)
        programs, _ = table.main.tensors(torch.device("cpu"))
        for pid, row in enumerate(programs.tolist()):
            run = table.main.runs[row]
            begin = run.begin + (pid - run.first_program) * run.step
            seen[run.offset + begin : run.offset + min(begin + run.step, run.end)] += 1
        assert (seen == 1).all()


def test_no_pieces_are_no_launch() -> None:
    kernels = TritonKernels()
    kernels.encode((), torch.zeros(4), torch.zeros(0, dtype=torch.uint8), NEAREST)
    kernels.decode((), torch.zeros(0, dtype=torch.uint8), torch.zeros(4))
    kernels.sum((), torch.zeros(4), [torch.zeros(0, dtype=torch.uint8)], 1.0)


def test_what_does_not_fit_is_refused_with_what_was_expected() -> None:
    kernels, piece = TritonKernels(), piece_for(64, 4, 32)
    slot = torch.zeros(48, dtype=torch.uint8)
    with pytest.raises(ValueError, match="values: expected at least 64 of them for these pieces, got 63"):
        kernels.encode((piece,), torch.zeros(63), slot, NEAREST)
    with pytest.raises(ValueError, match="expected at least 48 bytes, got 47"):
        kernels.encode((piece,), torch.zeros(64), slot[:47], NEAREST)
    with pytest.raises(TypeError, match="values: expected a contiguous float cpu tensor, got torch"):
        kernels.decode((piece,), slot, torch.zeros(64, dtype=torch.int32))
    with pytest.raises(TypeError, match="payload: expected a contiguous uint8 tensor on cpu, got torch"):
        kernels.decode((piece,), slot.view(torch.int8), torch.zeros(64))
    with pytest.raises(TypeError, match="values at 4 bits: expected float32, float16 or bfloat16, got float64"):
        kernels.decode((piece,), slot, torch.zeros(64, dtype=torch.float64))
    with pytest.raises(ValueError, match="bits of a piece: expected 1 to 8, or 32, got 9"):
        kernels.decode((Piece(0, 64, 9, 32, 0, 0, MaxMin.kind),), torch.zeros(99, dtype=torch.uint8), torch.zeros(64))
    with pytest.raises(ValueError, match="block of a piece: expected at least 1, got 0"):
        kernels.decode((Piece(0, 64, 4, 0, 0, 0, MaxMin.kind),), torch.zeros(99, dtype=torch.uint8), torch.zeros(64))
    with pytest.raises(ValueError, match="residual: expected it on cpu, got meta"):
        kernels.encode((piece,), torch.zeros(64), slot, NEAREST, torch.zeros(64, device="meta"))
    for residual in (torch.zeros(63), torch.zeros(64, dtype=torch.float64), torch.zeros(128)[::2]):
        with pytest.raises(ValueError, match="residual: expected at least 64 contiguous float32"):
            kernels.encode((piece,), torch.zeros(64), slot, NEAREST, residual)


def test_importing_the_package_does_not_import_triton_and_its_absence_says_what_to_install() -> None:
    program = (
        "import sys, torch_cgx, torch_cgx.kernels.triton\n"
        "assert 'triton' not in sys.modules\n"
        "sys.modules['triton'] = sys.modules['triton.runtime'] = None\n"
        "try: torch_cgx.kernels.triton.TritonKernels()\n"
        "except RuntimeError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert "pip install triton" in said
