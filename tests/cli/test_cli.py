"""The `cgx` command as far as one process can show it: arguments, errors, tables, the report and its plot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torch_cgx
from torch_cgx.cli import main
from torch_cgx.cli.bench import report
from torch_cgx.cli.registry import COMMANDS, size
from torch_cgx.cli.table import format_nbytes, format_seconds, format_table
from torch_cgx.config import Compression

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4", 4),
        ("4B", 4),
        ("64K", 65536),
        ("64KB", 65536),
        ("64 KiB", 65536),
        ("1.5m", 1572864),
        ("2G", 2 << 30),
    ],
)
def test_a_size_is_bytes_with_powers_of_1024(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--bits", "9"], "1 to 8, or 32"),
        (["--bits", "0"], "1 to 8, or 32"),
        (["--bits", "four"], "1 to 8, or 32"),
        (["--sizes", "64Q"], "4, 64K, 1.5M, 2G"),
        (["--sizes", "64K,"], "4, 64K, 1.5M, 2G"),
        (["--sizes", "0"], "4, 64K, 1.5M, 2G"),
        (["--sizes", "0.3"], "4, 64K, 1.5M, 2G"),
        (["--sizes", "6"], "multiple of 4"),
        (["--sizes", "5", "--dtype", "float16"], "multiple of 2"),
        (["--nproc", "1"], "from 2 to"),
        (["--nproc", "0", "--nodes", "2"], "from 1 to"),
        (["--nodes", "1"], "from 2 to 64"),
        (["--rate", "1gbit"], "--nodes"),
        (["--rate", "fast", "--nodes", "2"], "1mbit to 100gbit"),
        (["--bucket-size", "0"], "from 1 to 65536"),
        (["--quantizer", "maxmax"], "choose from"),
        (["--quantizer", "rotated", "--bits", "8"], "bits of the rotated quantizer: expected 1 to 4"),
        (["--quantizer", "rotated", "--bucket-size", "1000"], "expected one of 64, 128, 256, 512, 1024, 2048, 4096"),
        (["--dtype", "int8"], "float32"),
        (["--against", "smoke"], "gloo"),
        (["--seconds", "-1"], "above 0"),
        (["--json", "no/such/folder/out.json"], "a folder that exists"),
        (["--plot", "out.jpg"], "ends in .png"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_is_allowed(
    arguments: list[str], allowed: str, capsys: Capture
) -> None:
    assert main(["bench", "allreduce", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("cgx bench allreduce: error: ")
    assert allowed in captured.err
    assert arguments[0] in captured.err


def test_version_is_that_of_the_package(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cgx {torch_cgx.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_without_a_command_the_help_names_them_all(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    below = [path for path in COMMANDS if list(path[: len(arguments)]) == arguments]
    assert below
    assert all(path[len(arguments)] in shown for path in below)


def test_an_unknown_command_is_refused_in_one_line(capsys: Capture) -> None:
    assert main(["bensch"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "bench" in error


def test_table_columns_are_aligned() -> None:
    table = format_table(["size", "time"], [["64 KB", "1.00 us"], ["4 MB", "20 ms"]]).splitlines()
    assert table == ["size      time", "-----  -------", "64 KB  1.00 us", "4 MB     20 ms"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.81e-5, "18.1 us"), (9.996e-4, "1.00 ms"), (9.999e-3, "10.0 ms"), (1.25, "1.25 s"), (125.0, "125 s")],
)
def test_seconds_have_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (4, "4 B"),
        (1024, "1 KB"),
        (65536, "64 KB"),
        (25 << 20, "25 MB"),
        (1536 << 20, "1.5 GB"),
        (1000, "1000 B"),
    ],
)
def test_bytes_are_written_as_they_are_given(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


def test_p95_is_a_sample_that_95_percent_do_not_exceed() -> None:
    assert report.quantile(list(range(1, 101)), 0.95) == 95
    assert report.quantile([3.0], 0.95) == 3.0
    assert report.quantile([1.0, 2.0], 0.95) == 2.0


def rank_cell(
    backend: str, nbytes: int, op_ns: list[list[int]], link_nbytes: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """What one rank reports of one size and backend."""
    check = {
        "relative_error": 0.1,
        "max_error": 0.2,
        "max_error_allowed": 0.5,
        "same_bits": True,
        "sent_nbytes": nbytes / 8 if backend == "cgx" else None,
    }
    return {
        "nbytes": nbytes,
        "numel": nbytes // 4,
        "backend": backend,
        "check": check,
        "ops_per_batch": len(op_ns[0]),
        "op_ns": op_ns,
        "link_nbytes": list(link_nbytes),
    }


def test_median_is_of_the_slowest_ranks_batches_and_p95_of_single_operations() -> None:
    first = [rank_cell("cgx", 1000, [[100, 100], [200, 200], [900, 100]])]
    second = [rank_cell("cgx", 1000, [[100, 300], [100, 100], [300, 100]])]
    (cell,) = report.merge_cells([first, second], compression=Compression(4, 1024))
    assert cell["batch_ns"] == [400, 400, 1000]
    assert cell["median_s"] == pytest.approx(200e-9)
    assert cell["p95_s"] == pytest.approx(900e-9)
    assert cell["gb_per_s"] == pytest.approx(5.0)


def test_ratio_is_the_other_median_over_ours_at_the_same_size() -> None:
    cells = [
        rank_cell("cgx", 1000, [[100]]),
        rank_cell("gloo", 1000, [[500]]),
        rank_cell("cgx", 4000, [[100]]),
        rank_cell("gloo", 4000, [[50]]),
    ]
    ours, gloo, ours_large, _ = report.merge_cells([cells, cells], compression=Compression(4, 1024))
    assert ours["ratio"] == {"gloo": pytest.approx(5.0)}
    assert ours_large["ratio"] == {"gloo": pytest.approx(0.5)}
    assert "ratio" not in gloo
    assert (gloo["bits"], gloo["bucket_size"], gloo["quantizer"]) == (32, None, None)
    assert (ours["bits"], ours["bucket_size"], ours["quantizer"]) == (4, 1024, "maxmin")


def test_bytes_sent_are_counted_for_cgx_and_computed_for_a_ring() -> None:
    cells = [rank_cell("cgx", 3000, [[100]]), rank_cell("gloo", 3000, [[100]])]
    ours, gloo = report.merge_cells([cells] * 3, compression=Compression(4, 1024))
    assert (ours["check"]["sent_nbytes"], ours["check"]["sent_from"]) == (375, "stats")
    assert (gloo["check"]["sent_nbytes"], gloo["check"]["sent_from"]) == (pytest.approx(4000), "ring")


def test_share_of_the_limit_is_the_least_time_on_the_slower_direction_over_the_median() -> None:
    link = {"nodes": 3, "rate": "1gbit", "goodput_bit_per_s": [950e6, 800e6]}
    cells = [
        [rank_cell("cgx", 1 << 20, [[4_000_000]], (9, 4)), rank_cell("gloo", 1 << 20, [[20_000_000]])],
        [rank_cell("cgx", 1 << 20, [[3_000_000]], (5, 11)), rank_cell("gloo", 1 << 20, [[10_000_000]])],
        [rank_cell("cgx", 1 << 20, [[3_000_000]]), rank_cell("gloo", 1 << 20, [[10_000_000]])],
    ]
    ours, gloo = report.merge_cells(cells, compression=Compression(4, 1024), link=link)
    assert gloo["limit_nbytes"] == pytest.approx(4 / 3 * (1 << 20))
    assert gloo["limit_share"] == pytest.approx(4 / 3 * (1 << 20) / 100e6 / 0.020)
    payload = (1 << 18) // 2 + 8 * 256  # four bits a value, and two floats for each of 256 blocks
    assert ours["limit_nbytes"] == pytest.approx(4 / 3 * payload)
    assert ours["limit_share"] == pytest.approx(4 / 3 * payload / 100e6 / 0.004)
    assert ours["link_nbytes"] == 11
    on_one_host, _ = report.merge_cells(cells, compression=Compression(4, 1024))
    assert "limit_share" not in on_one_host


def test_a_payload_is_never_counted_as_more_than_the_values_themselves() -> None:
    assert report.least_nbytes(2, numel=1, itemsize=4, compression=Compression(4, 1024)) == 4


def test_busy_is_compared_with_quiet_by_the_slowest_rank() -> None:
    first = {
        "nbytes": 8,
        "backend": "cgx",
        "clock": "native",
        "quiet_ns": [100, 100, 100],
        "busy_ns": [100, 150, 100],
    }
    second = {**first, "busy_ns": [120, 110, 400]}
    (cell,) = report.merge_busy([[first], [second]])
    assert cell["busy_ns"] == [120, 150, 400]
    assert cell["ratio"] == pytest.approx(1.5)


@pytest.mark.parametrize("backends", [["cgx"], ["cgx", "gloo"]])
def test_plot_is_a_png(backends: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from torch_cgx.cli.bench.plot import draw_allreduce

    cells = [rank_cell(name, nbytes, [[nbytes, nbytes]]) for nbytes in (4096, 1 << 20) for name in backends]
    result = {
        "machine": {"cpu": "a processor", "cores": 2},
        "settings": {"nproc": 2, "dtype": "float32", "bits": 4, "bucket_size": 1024},
        "cells": report.merge_cells([cells], compression=Compression(4, 1024)),
    }
    draw_allreduce(result, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--version", 0),
        ("--help", 0),
        ("nonsense", 2),
        ("bench", 2),
        ("bench allreduce --help", 0),
        ("bench allreduce --against smoke", 2),
        ("bench allreduce --sizes 6", 2),
        ("bench kernels --sizes 6", 2),
        ("bench train --against nccl", 2),
        ("bits --help", 0),
        ("doctor --bogus", 2),
        ("plan --help", 0),
        ("plan", 2),
        ("plan --params 7Q", 2),
        ("plan --params 7B", 2),
        ("trace no-such-file", 1),
    ],
)
def test_help_and_usage_errors_do_not_import_torch(words: str, code: int) -> None:
    """torch takes seconds to import."""
    script = """
import sys, _torch_cgx_autoload
try:
    code = _torch_cgx_autoload.command()
except SystemExit as stop:
    code = stop.code
assert not {"torch", "numpy"} & set(sys.modules)
sys.exit(code)
"""
    result = subprocess.run([sys.executable, "-c", script, *words.split()], capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
