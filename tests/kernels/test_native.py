"""The native kernels against the plain-torch oracle, to the byte: widths, dtypes, SIMD levels, awkward lengths."""

from __future__ import annotations

import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.families import each_once
from tests.support.kernel_cases import DTYPES, Guarded, payload_nbytes, piece_for, random_values, same_bits, table_of
from torch_cgx.kernels import NEAREST, Piece, Rounding
from torch_cgx.kernels.native import NativeKernels, available, simd_levels
from torch_cgx.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.skipif(not available(), reason="installed without the native library")

LEVELS = simd_levels()


def check_all_operations(
    x: torch.Tensor, pieces: tuple[Piece, ...], nbytes: int, rounding: Rounding, threads: int = 1
) -> None:
    """encode, decode, decode-add and reduce of every level give what the oracle gives, and so do residuals."""
    oracle = ReferenceKernels()
    expected = torch.zeros(nbytes, dtype=torch.uint8)
    lost, lost_of_sum = (torch.full((x.numel(),), 7.0) for _ in range(2))
    oracle.encode(pieces, x, expected, rounding, lost)
    other = torch.zeros(nbytes, dtype=torch.uint8)
    oracle.encode(pieces, x.flip(0).contiguous(), other, rounding)
    decoded, added, reduced = x.clone(), x.clone(), x.clone()
    oracle.decode(pieces, expected, decoded)
    oracle.decode(pieces, other, added, add=True)
    total = torch.zeros(nbytes, dtype=torch.uint8)
    oracle.reduce(pieces, reduced, [expected, other], total, 1 / 3, rounding, lost_of_sum)
    for level in LEVELS:
        kernels = NativeKernels(level, threads)
        residual = torch.full((x.numel(),), 7.0)
        for kept in (None, residual):
            encoded = Guarded(nbytes)
            kernels.encode(pieces, x, encoded.payload, rounding, kept)
            assert encoded.untouched()
            assert torch.equal(encoded.payload, expected), level
        assert same_bits(residual, lost), level
        mine = torch.empty_like(x)
        kernels.decode(pieces, expected, mine)
        assert same_bits(mine, decoded), level
        mine = x.clone()
        kernels.decode(pieces, other, mine, add=True)
        assert same_bits(mine, added), level
        residual.fill_(7.0)
        for kept in (None, residual):
            mine, out = x.clone(), Guarded(nbytes)
            kernels.reduce(pieces, mine, [expected, other], out.payload, 1 / 3, rounding, kept)
            assert out.untouched()
            assert torch.equal(out.payload, total), level
            assert same_bits(mine, reduced), level
        assert same_bits(residual, lost_of_sum), level


@pytest.mark.parametrize(("bits", "dtype"), each_once((1, 2, 3, 4, 5, 6, 7, 8, 32), DTYPES))
def test_every_width_and_type_matches_the_oracle_to_the_byte(bits: int, dtype: torch.dtype) -> None:
    for block in (1, 7, 33, 64, 100, 1024, 4099):
        for numel in (1, 7, 9, 33, 64, 1000, 1024, 2049, 4100):
            for rounding in (NEAREST, Rounding(stochastic=True, seed=7, op=3, rank=1, stage=1)):
                piece = piece_for(numel, bits, block)
                x = random_values(numel, dtype, seed=numel + block)
                check_all_operations(x, (piece,), payload_nbytes(piece, dtype), rounding)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 700), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 32]), st.integers(1, 300), st.booleans()
        ),
        min_size=1,
        max_size=6,
    ),
    dtype=st.sampled_from(DTYPES),
    stochastic=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_tables_of_mixed_layers_match_the_oracle(
    rows: list[tuple[int, int, int, bool]], dtype: torch.dtype, stochastic: bool, seed: int
) -> None:
    pieces, numel, nbytes = table_of(rows, dtype)
    x = random_values(numel, dtype, seed % 1000)
    check_all_operations(x, pieces, nbytes, Rounding(stochastic=stochastic, seed=seed))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_value_makes_its_block_nan_and_no_other(bad: float, dtype: torch.dtype) -> None:
    for position in range(40):
        x = random_values(96, dtype, seed=position)
        x[position] = bad
        piece = piece_for(96, 4, 32)
        check_all_operations(x, (piece,), payload_nbytes(piece, dtype), NEAREST)
        out = torch.empty(payload_nbytes(piece, dtype), dtype=torch.uint8)
        NativeKernels().encode((piece,), x, out, NEAREST)
        y = torch.empty_like(x)
        NativeKernels().decode((piece,), out, y)
        blocks = y.float().view(3, 32).isnan()
        assert blocks.all(dim=1).tolist() == [i == position // 32 for i in range(3)]
        assert blocks.any(dim=1).tolist() == [i == position // 32 for i in range(3)]


def test_a_range_that_overflows_is_nan_and_a_subnormal_range_is_kept() -> None:
    wide = torch.tensor([-3e38, 3e38] * 16)
    tiny = torch.tensor([0.0, 1e-45, 3e-45, 1e-42] * 8)
    for x in (wide, tiny):
        for bits in range(1, 9):
            piece = piece_for(32, bits, 32)
            check_all_operations(x, (piece,), payload_nbytes(piece, x.dtype), NEAREST)


@pytest.mark.parametrize("level", LEVELS)
def test_results_do_not_depend_on_the_callers_flush_to_zero(level: str) -> None:
    x = torch.tensor([0.0, 1e-41, 2e-41, 5e-39] * 16)
    piece = piece_for(64, 3, 16)
    nbytes = payload_nbytes(piece, x.dtype)
    plain, flushed = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    kernels = NativeKernels(level)
    kernels.encode((piece,), x, plain, NEAREST)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        kernels.encode((piece,), x, flushed, NEAREST)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(plain, flushed)


@pytest.mark.parametrize(
    "threads", [2, pytest.param(3, marks=pytest.mark.matrix), pytest.param(8, marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("block", [100, 513, 1024, 65535, 65536])
def test_results_do_not_depend_on_the_number_of_threads(block: int, threads: int) -> None:
    """Long enough for several parts; one piece is cut in the middle, others lie whole in one."""
    bits, rounding = block % 7 + 1, Rounding(stochastic=block % 2 == 0, seed=block)
    pieces, offset, nbytes = [], 0, 0
    for numel, width in ((600_011, bits), (17, 8), (200_003, 32)):
        pieces.append(piece_for(numel, width, block, skip=True, offset=offset, payload=nbytes))
        offset += numel
        nbytes += payload_nbytes(pieces[-1], torch.float32)
    check_all_operations(random_values(offset, torch.float32, block), tuple(pieces), nbytes, rounding, threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_results_that_go_past_the_cache_are_the_same(dtype: torch.dtype) -> None:
    """Above 16 MB decode streams, where the pointer allows it; float32 starts aligned, the 16-bit types do not."""
    numel = (16 << 20) // dtype.itemsize + 1000
    shift = 0 if dtype == torch.float32 else 1
    piece = piece_for(numel, 4, 1024)
    x = random_values(1 << 16, dtype, 1).repeat(numel // (1 << 16) + 1)[:numel]
    payload = torch.empty(payload_nbytes(piece, dtype), dtype=torch.uint8)
    NativeKernels().encode((piece,), x, payload, NEAREST)
    expected = torch.empty(numel, dtype=dtype)
    ReferenceKernels().decode((piece,), payload, expected)
    for level in LEVELS:
        for threads in (1, 2):
            mine = torch.empty(numel + shift, dtype=dtype)[shift:]
            NativeKernels(level, threads).decode((piece,), payload, mine)
            assert same_bits(mine, expected), level


def test_many_threads_may_call_at_once() -> None:
    """The helping threads serve one call at a time; who comes second works alone, with the same result."""
    piece = piece_for(400_000, 4, 512)
    x = random_values(400_000, torch.float32, 3)
    nbytes = payload_nbytes(piece, x.dtype)
    expected = torch.zeros(nbytes, dtype=torch.uint8)
    ReferenceKernels().encode((piece,), x, expected, NEAREST)
    kernels = NativeKernels(threads=2)

    def encode(_: int) -> bool:
        out = torch.zeros(nbytes, dtype=torch.uint8)
        kernels.encode((piece,), x, out, NEAREST)
        return torch.equal(out, expected)

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(encode, range(64)))


def test_a_forked_child_has_helping_threads_of_its_own() -> None:
    piece = piece_for(400_000, 4, 512)
    x = random_values(400_000, torch.float32, 4)
    kernels = NativeKernels(threads=2)
    mine, its = (torch.zeros(payload_nbytes(piece, x.dtype), dtype=torch.uint8) for _ in range(2))
    its.share_memory_()
    kernels.encode((piece,), x, mine, NEAREST)  # the parent's helpers are there before the fork
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for threads which it does not have ends by this
        kernels.encode((piece,), x, its, NEAREST)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(mine, its)


def test_a_residual_of_the_wrong_kind_is_refused() -> None:
    piece, out = piece_for(64, 4, 32), torch.zeros(48, dtype=torch.uint8)
    for residual in (torch.zeros(63), torch.zeros(64, dtype=torch.float64), torch.zeros(128)[::2]):
        with pytest.raises(ValueError, match="residual: expected at least 64 contiguous float32"):
            NativeKernels().encode((piece,), torch.zeros(64), out, NEAREST, residual)


def test_pieces_outside_their_tensors_are_refused() -> None:
    piece = piece_for(64, 4, 32)
    kernels = NativeKernels()
    with pytest.raises(ValueError, match="expected at least 64"):
        kernels.encode((piece,), torch.zeros(63), torch.zeros(100, dtype=torch.uint8), NEAREST)
    with pytest.raises(ValueError, match="expected at least 48 bytes, got 47"):
        kernels.encode((piece,), torch.zeros(64), torch.zeros(47, dtype=torch.uint8), NEAREST)
    with pytest.raises(TypeError, match="contiguous"):
        kernels.encode((piece,), torch.zeros(128)[::2], torch.zeros(48, dtype=torch.uint8), NEAREST)


def test_a_level_that_the_processor_lacks_is_refused_by_name() -> None:
    lacking = next(level for level in ("neon", "avx512") if level not in LEVELS)
    with pytest.raises(ValueError, match=f"CGX_SIMD={lacking}: this processor runs scalar"):
        NativeKernels(lacking)
