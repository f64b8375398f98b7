"""The Triton kernels compiled ahead of time, without a GPU: what the interpreter cannot show of them.

In a process of its own (benchmarks/gpu_estimates.py), because Triton either interprets or compiles. It is forked from
the nursery: to import torch and Triton takes 5 s, and there are a dozen.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Rank, describe, observe_ranks
from torch_cgx.codecs import Rotated

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_estimates.py"
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
LIMIT_S = 540.0


def printed_by_the_script(me: Rank, rotated: bool, options: tuple[str, ...]) -> str:
    printed = io.StringIO()
    sys.argv = [str(SCRIPT), "--json", *options]
    main = runpy.run_path(str(SCRIPT))["main"]
    if rotated:
        # Of a tile there are two ways to go; the script counts instructions where there is one.
        main.__globals__.update(MaxMin=Rotated, loop_instructions=lambda sass: (None, 0))
    try:
        with contextlib.redirect_stdout(printed):
            main()
    except Exception:
        sys.stderr.write(printed.getvalue())  # in the log, with what Triton says of an error
        raise
    return printed.getvalue()


@lru_cache
def compiled(*options: str, rotated: bool = False) -> list[dict[str, Any]]:
    (outcome,) = observe_ranks(printed_by_the_script, 1, None, rotated, options, timeout_s=LIMIT_S)
    unknown = re.search(r"Value '(sm_\w+)' is not defined for option 'gpu-name'", outcome.trace + outcome.log)
    if unknown:
        pytest.skip(f"the ptxas that this Triton brings does not know {unknown[1]}")
    assert outcome.ok, describe([outcome])
    found = [json.loads(line) for line in outcome.value.splitlines()]
    assert found
    return found


def check(found: dict[str, Any], *, wide: bool = True, wide_levels: bool = True) -> None:
    """No spilled register; every operation rounded by itself; values move 16 bytes at once."""
    assert found["spilled_nbytes"] == 0
    assert 0 < found["registers"] <= 255
    arithmetic = found["arithmetic"]
    for name in arithmetic:
        assert not name.startswith(("fma", "mad", "rcp", "sqrt", "ex2")), arithmetic
        assert not re.search(r"approx|full|ftz", name), arithmetic
        assert ".rn." in name, arithmetic
    if not found["kernel"].startswith("decode"):
        assert arithmetic["div.rn.f32"] >= 2
    if wide:
        operation = found["case"]["operation"]
        if operation != "decode":
            assert "ld.global.v4.b32" in found["memory"]
        if operation != "encode":
            assert "st.global.v4.b32" in found["memory"]
        # At 1 bit a thread has 4 bytes of levels to write: one word.
        if wide_levels and operation in ("encode", "reduce") and found["case"]["bits"] in (2, 4, 8):
            assert "st.global.v2.b32" in found["memory"] or "st.global.v4.b32" in found["memory"]


def test_the_kernels_compile_without_spills_fused_or_approximate_arithmetic_and_with_wide_accesses() -> None:
    found = compiled("--targets", "sm_86")
    assert [one["kernel"] for one in found] == ["encode_kernel", "decode_kernel", "encode_kernel"]
    for one in found:
        check(one)
        assert one["instructions_per_value"] < 60


@pytest.mark.matrix
@pytest.mark.parametrize("target", [target for target in TARGETS if target != "sm_86"])
def test_they_compile_alike_for_other_gpus(target: str) -> None:
    for one in compiled("--targets", target):
        check(one)


@pytest.mark.matrix
def test_they_compile_alike_at_other_widths() -> None:
    for one in compiled("--bits", "1,2,7,8", "--operations", "encode,decode"):
        check(one)


@pytest.mark.matrix
def test_they_compile_alike_for_narrow_types() -> None:
    for one in compiled("--dtypes", "float16,bfloat16", "--operations", "add,reduce"):
        check(one)


@pytest.mark.matrix
def test_they_compile_alike_with_residuals_and_stochastic_rounding() -> None:
    for one in compiled("--stochastic", "--residual", "--operations", "reduce"):
        check(one)


@pytest.mark.matrix
def test_layers_of_all_widths_and_small_and_large_blocks_compile_alike() -> None:
    for options in (("--bits", "0", "--operations", "decode"), ("--blocks", "64,4096", "--operations", "encode")):
        for one in compiled(*options):
            check(one)


@pytest.mark.matrix
def test_blocks_that_fit_no_tile_compile_to_two_launches_without_spills() -> None:
    found = compiled("--blocks", "100", "--operations", "reduce")
    assert [one["kernel"] for one in found] == ["headers_kernel", "encode_kernel"]
    for one in found:
        check(one, wide=False)


def check_rotated(*options: str) -> None:
    for one in compiled(*options, rotated=True):
        assert one["kernel"].endswith("_rotated_kernel")
        check(one, wide_levels=False)


def test_rotated_kernels_compile_without_spills_and_fused_or_approximate_arithmetic() -> None:
    check_rotated("--targets", "sm_86", "--operations", "encode")


@pytest.mark.matrix
@pytest.mark.parametrize("target", TARGETS)
def test_rotated_kernels_compile_alike_for_other_gpus(target: str) -> None:
    check_rotated("--targets", target)


@pytest.mark.matrix
def test_rotated_kernels_compile_alike_at_other_widths_and_for_other_types_and_blocks() -> None:
    check_rotated("--bits", "1,2,3", "--operations", "encode,add")
    check_rotated("--dtypes", "float16,bfloat16", "--operations", "add,encode")
    check_rotated("--blocks", "64,4096", "--operations", "encode,decode")


@pytest.mark.matrix
def test_rotated_kernels_compile_alike_with_residuals() -> None:
    check_rotated("--residual", "--operations", "encode,reduce")


@pytest.mark.matrix
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("target", ["gfx90a", "gfx942"])
def test_they_compile_for_amd_without_spills_and_fused_arithmetic(target: str, rotated: bool) -> None:
    for one in compiled("--targets", target, rotated=rotated):
        assert one["spilled_nbytes"] == 0
        assert set(one["arithmetic"]) <= {"fadd", "fsub", "fmul", "fdiv"}, "a flag such as contract, or llvm.fma"
        assert "fmul" in one["arithmetic"]
        accesses = " ".join(one["memory"])
        assert "load_dwordx4" in accesses or "store_dwordx4" in accesses
