"""`cgx bench kernels` on small buffers: what it prints, writes and draws, and that it times nothing that is wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_cgx.cli import main
from torch_cgx.cli.bench.alternate import MIN_ROUNDS, Samples, alternate
from torch_cgx.cli.bench.kernel_cases import LAYERS, Buffers, Level, group_cases, has_residual, mixed_layers
from torch_cgx.cli.bench.kernel_check import KEPT, REDUCED, ROUNDED, Bound, check_result, check_rotated
from torch_cgx.cli.bench.kernel_report import OPERATIONS, add_ratios, format_kernels, least_ratio, summary
from torch_cgx.cli.registry import CommandFailed
from torch_cgx.cli.table import format_markdown
from torch_cgx.codecs import MaxMin, Rotated
from torch_cgx.kernels.native import NativeKernels, available, simd_level, simd_levels

Capture = pytest.CaptureFixture[str]

needs_native = pytest.mark.skipif(not available(), reason="installed without the native library")
SMALL = ["bench", "kernels", "--sizes", "64K", "--bits", "3,8", "--seconds", "0.001"]


@pytest.fixture
def without_piquant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "piquant", None)  # importing it now fails


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of a small run against FBGEMM."""
    output = tmp_path_factory.mktemp("bench") / "out.json"
    assert main([*SMALL, "--against", "fbgemm", "--simd", "all", "--json", str(output)]) == 0
    return output


@needs_native
def test_writes_a_checked_cell_for_every_case_and_compares_it_within_its_group(saved: Path) -> None:
    report: dict[str, Any] = json.loads(saved.read_text())
    assert (report["schema"], report["schema_version"], report["kind"]) == ("cgx-bench", 1, "kernels")
    assert report["settings"]["bits"] == [3, 8]
    best = simd_level()
    assert report["settings"]["simd"] == simd_levels()[::-1]
    assert report["settings"]["simd"][0] == best
    for bits in (3, 8):
        group = [cell for cell in report["cells"] if cell["group_bits"] == bits]
        (memcpy,) = (cell for cell in group if cell["backend"] == "memcpy")
        fbgemm = {cell["operation"]: cell for cell in group if cell["backend"] == "fbgemm"}
        assert set(fbgemm) == ({"quantize", "dequantize"} if bits == 8 else set())
        ours = [cell for cell in group if cell["backend"] == "cgx"]
        found = {(cell["operation"], cell["dtype"], cell["simd"]) for cell in ours}
        assert len(found) == len(ours)
        assert found == {
            (operation, dtype, simd)
            for operation in (OPERATIONS if has_residual() else OPERATIONS[:5])
            for dtype in ("float32", "float16", "bfloat16")
            for simd in simd_levels()
        }
        for cell in group:
            assert (cell["nbytes"], cell["numel"]) == (65536, 16384)
            assert len(cell["batch_ns"]) >= MIN_ROUNDS
            assert cell["gb_per_s"] == pytest.approx(65536e-9 / cell["median_s"])
            assert cell["check"]["max_error_share"] <= 1
        for cell in ours:
            ratio = cell["ratio"]
            assert ratio["memcpy"] == pytest.approx(memcpy["median_s"] / cell["median_s"])
            assert ("float32" in ratio) == (cell["dtype"] != "float32")
            assert ("nearest" in ratio) == (cell["operation"].startswith("quantize-"))
            assert (best in ratio) == (cell["simd"] != best)
            assert ("fbgemm" in ratio) == (cell["dtype"] == "float32" and cell["operation"] in fbgemm)
        error = {cell["bits"]: cell["check"]["relative_error"] for cell in ours if cell["operation"] == "quantize"}
        assert error[bits] == pytest.approx({3: 0.27, 8: 0.0075}[bits], rel=0.2), "of normal values, 1024 a block"
    assert {cell["operation"] for cell in report["layers"]} == {"quantize", "dequantize", "reduce"}
    for cell in report["layers"]:
        assert cell["layers"] == LAYERS
        assert cell["overhead"] == pytest.approx(cell["one_call"]["median_s"] / cell["call_per_width"]["median_s"] - 1)


@needs_native
def test_rotated_kernels_are_checked_and_timed_too(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out.json"
    arguments = ["--quantizer", "rotated", "--sizes", "64K", "--seconds", "0.001", "--against", "none"]
    assert main(["bench", "kernels", *arguments, "--json", str(output)]) == 0
    assert capsys.readouterr().out.startswith("rotated kernels on ")
    report = json.loads(output.read_text())
    assert (report["settings"]["quantizer"], report["settings"]["bits"]) == ("rotated", [1, 2, 3, 4])
    ours = [cell for cell in report["cells"] if cell["backend"] == "cgx"]
    assert {cell["operation"] for cell in ours} == set(OPERATIONS)
    assert all(0 < cell["check"]["max_error_share"] <= 1 for cell in ours)
    error = {cell["bits"]: cell["check"]["relative_error"] for cell in ours if cell["operation"] == "quantize"}
    assert error == pytest.approx({1: 0.755, 2: 0.365, 3: 0.189, 4: 0.098}, rel=0.03)


@needs_native
def test_prints_operations_down_and_widths_across_also_from_a_saved_run(saved: Path, capsys: Capture) -> None:
    assert main(["bench", "kernels", "--from", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"64 KB of float32, {simd_level()}, 1 thread" in lines
    assert any(line.startswith("operation") and line.split()[-4:] == ["3", "bits", "8", "bits"] for line in lines)
    rows = [line.split() for line in lines]
    per_level = 3  # dtypes
    assert sum(row[:3] == ["quantize", "x", "memcpy"] for row in rows) == per_level * len(simd_levels())
    assert all(len(row) == 5 for row in rows if row[:3] == ["quantize", "x", "memcpy"])
    assert any(line.startswith(f"one call for {LAYERS} layers") for line in lines)
    assert main(["bench", "kernels", "--from", str(saved), "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert "| operation |  | 3 bits | 8 bits |\n| --- | --- | ---: | ---: |\n| memcpy | GB/s | " in shown


@needs_native
def test_draws_a_png_from_a_saved_run(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    assert main(["bench", "kernels", "--from", str(saved), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"plot: {picture}" in capsys.readouterr().out


@needs_native
def test_says_that_piquant_is_missing_and_how_to_install_it(without_piquant: None, capsys: Capture) -> None:
    assert main([*SMALL[:4], "--bits", "2", "--seconds", "0.001", "--dtypes", "float16"]) == 0
    shown = capsys.readouterr().out
    assert "without piquant: not installed: pip install pypiquant" in shown
    assert main([*SMALL, "--against", "piquant"]) == 2
    assert capsys.readouterr().err.endswith(
        "error: argument --against: piquant is not installed: pip install pypiquant\n"
    )


@needs_native
@pytest.mark.skipif(importlib.util.find_spec("piquant") is None, reason="pypiquant is not installed")
def test_piquant_is_measured_where_it_is_installed(capsys: Capture) -> None:
    assert main([*SMALL, "--against", "piquant", "--dtypes", "float32,bfloat16"]) == 0
    assert "quantize             x piquant" in capsys.readouterr().out


@needs_native
def test_more_threads_are_compared_with_one(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    arguments = ["--threads", "1,2", "--dtypes", "float32", "--against", "none", "--json", str(output)]
    assert main([*SMALL, *arguments]) == 0
    report = json.loads(output.read_text())
    cells = [cell for cell in report["cells"] if cell["backend"] == "cgx"]
    assert {cell["threads"] for cell in cells} == {1, 2}
    assert all(("1 thread" in cell["ratio"]) == (cell["threads"] == 2) for cell in cells)
    assert (report["peers"], report["missing"]) == ({}, {})


@needs_native
def test_torch_has_its_threads_back_afterwards() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert main([*SMALL, "--against", "none", "--dtypes", "float32"]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@needs_native
def test_the_level_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("CGX_SIMD", "scalar")
    assert main([*SMALL, "--against", "none", "--dtypes", "float32"]) == 0
    assert "64 KB of float32, scalar, 1 thread" in capsys.readouterr().out
    monkeypatch.setenv("CGX_SIMD", "mmx")
    assert main(SMALL) == 2
    assert "CGX_SIMD" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--bits", "9"], "from 1 to 8"),
        (["--bits", "32"], "from 1 to 8"),
        (["--bits", "2,2"], "once"),
        (["--sizes", "64Q"], "4, 64K, 1.5M, 2G"),
        (["--sizes", "5000"], "a multiple of 4096"),
        (["--bucket-size", "0"], "from 1 to 65536"),
        (["--quantizer", "maxmax"], "choose from"),
        (["--quantizer", "rotated", "--bits", "2,5"], "bits of the rotated quantizer: expected 1 to 4"),
        (["--quantizer", "rotated", "--bucket-size", "512", "--bucket-size", "96", "--sizes", "384"], "one of 64, 128"),
        (["--dtypes", "float64"], "float32, float16, bfloat16"),
        (["--threads", "0"], "from 1 to 256"),
        (["--against", "gloo"], "fbgemm, piquant, none"),
        (["--seconds", "0"], "above 0"),
        (["--json", "no/such/folder/out.json"], "a folder that exists"),
        (["--plot", "out.jpg"], "ends in .png"),
        (["--from", "no-such.json"], "a file that --json has written"),
        pytest.param(["--simd", "mmx"], "scalar", marks=needs_native),
        pytest.param(["--simd", "scalar,scalar"], "scalar", marks=needs_native),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_is_allowed(
    arguments: list[str], allowed: str, capsys: Capture
) -> None:
    assert main(["bench", "kernels", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("cgx bench kernels: error: ")
    assert allowed in captured.err
    assert arguments[0] in captured.err


@pytest.mark.parametrize(
    "text", ["[1, 2]", "{}", "not JSON", '{"schema": "cgx-bench", "schema_version": 1, "kind": "allreduce"}']
)
def test_another_file_is_refused_by_from(text: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["bench", "kernels", "--from", str(path)]) == 1
    assert f"{path} is not a report of cgx bench kernels" in capsys.readouterr().err


@needs_native
@pytest.mark.parametrize("broken", ["encode", "decode", "reduce"])
def test_a_wrong_kernel_is_not_timed(broken: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    right = getattr(NativeKernels, broken)

    def wrong(self: NativeKernels, pieces: Any, first: torch.Tensor, second: Any, *rest: Any, **named: Any) -> None:
        right(self, pieces, first, second, *rest, **named)
        target = first if broken == "reduce" else second  # where values, or their levels, are written
        target[-1] = 77 if broken != "encode" else int(target[-1]) ^ 0xFF

    monkeypatch.setattr(NativeKernels, broken, wrong)
    assert main([*SMALL, "--against", "none", "--dtypes", "float32"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is wrong: " in captured.err


@needs_native
def test_fbgemm_rows_are_blocks_and_widths_that_do_not_fill_bytes_are_left_out() -> None:
    buffers = Buffers(6 * 100, [torch.float32])
    level = Level(simd_level(), 1)

    def operations(bits: int) -> list[str]:
        cases = group_cases(buffers, MaxMin(bits, 6), [torch.float32], [level], ["fbgemm"])
        return [case.labels["operation"] for case in cases if case.labels["backend"] == "fbgemm"]

    assert operations(8) == operations(4) == ["quantize", "dequantize"]
    assert operations(2) == operations(3) == []  # six values of 2 bits are not whole bytes; FBGEMM has no 3 bits


def test_a_result_off_by_more_than_its_bound_is_an_error() -> None:
    values = torch.linspace(-1, 1, 64)
    bound = Bound(bits=4, block=32, units=0.5)
    unit = float(values[31] - values[0]) / 15
    got = values.clone()
    got[40] += 0.49 * unit
    assert check_result("it", values, got, bound).max_error_share == pytest.approx(0.98, abs=0.01)
    got[40] += 0.02 * unit
    with pytest.raises(CommandFailed, match="it is wrong: off by up to 1"):
        check_result("it", values, got, bound)
    got[40] = torch.nan
    with pytest.raises(CommandFailed, match="it is wrong"):
        check_result("it", values, got, bound)


def lossy(values: torch.Tensor, share: float) -> torch.Tensor:
    """The values with an error that has this share of their squared norm."""
    error = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
    return values + error * (share**0.5 * float(values.norm()) / float(error.norm()))


@pytest.mark.parametrize(("bits", "lost"), [(1, 0.5708), (2, 0.1331), (3, 0.03578), (4, 0.009588)])
def test_rotated_values_are_judged_by_what_all_of_them_have_lost(bits: int, lost: float) -> None:
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    found = check_rotated("it", values, lossy(values, lost), bits, ROUNDED)
    assert found.relative_error == pytest.approx(lost**0.5, rel=1e-3)
    assert 0.95 < found.max_error_share < 1
    check_rotated("it", values, lossy(values, 1.4 * lost), bits, REDUCED)
    check_rotated("it", values, 2 * lossy(values, lost / 4), bits, ROUNDED, factor=2.0)
    with pytest.raises(CommandFailed, match=r"it is wrong: an error of .* of the norm, allowed is"):
        check_rotated("it", values, lossy(values, 1.1 * lost), bits, ROUNDED)
    for wrong in (torch.zeros_like(values), values.roll(1), torch.full_like(values, torch.nan)):
        with pytest.raises(CommandFailed, match="it is wrong"):
            check_rotated("it", values, wrong, bits, ROUNDED)
    check_rotated("it", values, values, bits, KEPT)
    with pytest.raises(CommandFailed, match="it is wrong"):
        check_rotated("it", values, lossy(values, 1e-8), bits, KEPT)


def test_layers_cover_all_values_with_very_different_sizes_and_all_widths() -> None:
    codecs = [MaxMin(2, 1024), MaxMin(5, 1024), Rotated(4, 1024)]
    layers = mixed_layers(1 << 20, codecs)
    assert len(layers) == LAYERS
    assert sum(layer.numel for layer in layers) == 1 << 20
    assert {layer.codec for layer in layers} == set(codecs)
    numels = sorted(layer.numel for layer in layers)
    assert numels[-1] > 100 * numels[0] > 0
    assert layers == mixed_layers(1 << 20, codecs)


def test_cases_alternate_and_what_they_change_is_restored_before_each_batch() -> None:
    log: list[str] = []
    cases = [
        SimpleNamespace(run=lambda: log.append("a"), restore=None),
        SimpleNamespace(run=lambda: log.append("b"), restore=lambda: log.append("restore")),
    ]
    samples = alternate(cases, 1e-6, lambda _: None)
    assert [len(of_case.batch_ns) for of_case in samples] == [MIN_ROUNDS] * 2
    order = [name for before, name in zip(["", *log], log, strict=False) if name != before]
    assert order[-8:] == ["a", "restore", "b", "restore", "b", "a", "restore", "b"]


def test_a_batch_of_several_operations_counts_as_one_of_them() -> None:
    told = summary(Samples(10, [1000, 3000, 2000]))
    assert told["median_s"] == pytest.approx(200e-9)
    assert told["p95_s"] == pytest.approx(300e-9)


def cell(backend: str, operation: str, median_s: float, **other: Any) -> dict[str, Any]:
    plain = {"nbytes": 64 << 20, "group_bits": 4, "bits": 4, "dtype": "float32", "simd": None, "threads": 1}
    own = {"simd": "avx512"} if backend == "cgx" else {}
    return {
        **plain,
        **own,
        "backend": backend,
        "operation": operation,
        "median_s": median_s,
        "gb_per_s": 1 / median_s,
        **other,
    }


def test_a_ratio_is_the_others_time_over_ours_and_the_lowest_stands_beside_its_goal() -> None:
    cells = [
        cell("memcpy", "memcpy", 1.0),
        cell("cgx", "quantize", 0.5),
        cell("cgx", "quantize-stochastic", 1.25),
        cell("cgx", "quantize", 0.25, dtype="float16"),
        cell("cgx", "quantize", 2.0, simd="avx2"),
        cell("fbgemm", "quantize", 0.4),
        cell("piquant", "dequantize", 0.1),
    ]
    add_ratios(cells, "avx512")
    assert [one.get("ratio") for one in cells] == [
        None,
        pytest.approx({"memcpy": 2.0, "fbgemm": 0.8}),
        pytest.approx({"memcpy": 0.8, "nearest": 0.4}),
        pytest.approx({"memcpy": 4.0, "float32": 2.0}),
        pytest.approx({"memcpy": 0.5, "fbgemm": 0.2, "avx512": 0.25}),
        None,
        None,
    ]
    result = {
        "machine": {"cpu": "a processor", "torch": "2"},
        "settings": {"bits": [4], "bucket_size": 1024},
        "peers": {},
        "missing": {},
        "load": 0.0,
        "cells": cells,
        "layers": [],
    }
    rows = [line.split() for line in format_kernels(result).partition("lowest ratios")[2].splitlines()]
    lowest = {(row[2], row[3], row[5]): row[-3:] for row in rows if row[:2] == ["64", "MB"]}
    assert lowest == {
        ("avx512", "quantize", "memcpy"): ["2.00x", "1.30x", "yes"],
        ("avx512", "quantize-stochastic", "nearest"): ["0.40x", "0.50x", "NO"],
        ("avx512", "any", "float32"): ["2.00x", "1.00x", "yes"],
        ("avx512", "any", "fbgemm"): ["0.80x", "1.00x", "NO"],
        ("avx2", "quantize", "memcpy"): ["0.50x", "0.91x", "NO"],
        ("avx2", "any", "fbgemm"): ["0.20x", "1.00x", "NO"],
    }


@pytest.mark.parametrize(
    ("nbytes", "bucket_size", "simd", "least"),
    [
        (64 << 20, 1024, "avx512", 0.8),
        (64 << 20, 1024, "avx2", pytest.approx(0.56)),
        (64 << 20, 1024, "scalar", None),
        (64 << 20, 512, "avx512", None),
        (4 << 20, 1024, "avx512", None),
    ],
)
def test_goals_are_for_64_mb_and_blocks_of_1024(nbytes: int, bucket_size: int, simd: str, least: Any) -> None:
    assert least_ratio({"settings": {"bucket_size": bucket_size}}, nbytes, "reduce", "memcpy", simd) == least


def test_goals_are_those_of_maxmin_which_older_files_mean() -> None:
    settings = {"bucket_size": 1024, "quantizer": "maxmin"}
    assert least_ratio({"settings": settings}, 64 << 20, "reduce", "memcpy", "avx512") == 0.8
    assert (
        least_ratio({"settings": {**settings, "quantizer": "rotated"}}, 64 << 20, "reduce", "memcpy", "avx512") is None
    )


def test_markdown_tables_have_a_rule_that_aligns_numbers_right() -> None:
    table = format_markdown(["size", "time"], [["64 KB", "1.00 us"]])
    assert table.splitlines() == ["| size | time |", "| --- | ---: |", "| 64 KB | 1.00 us |"]
