"""`cgx plan`: the model of a step on top of the simulation, and the command from arguments to files."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from torch_cgx.cli import main
from torch_cgx.cli.plan.inputs import count, input_of_run, link_rate
from torch_cgx.cli.plan.model import CONTESTANTS, EXACT, FP16, Bucket, Plan, Site, Way, Workload, ddp_buckets
from torch_cgx.cli.plan.sites import GPUS, gpu_speeds, make_site, read_speeds
from torch_cgx.plan.costs import Speeds, Wire

Capture = pytest.CaptureFixture[str]
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


def site(ranks: int = 1, bytes_per_s: float = float("inf"), **changes: Any) -> Site:
    """Costs nothing but what is asked for."""
    wire = Wire(bytes_per_s)
    free = Site(ranks, "gpu", {"NCCL": wire}, {"NCCL": wire}, Speeds(), wire, wire)
    return replace(free, **changes)


STEP = Workload(1.0, 2.0, 0.5, (Bucket(1000, 1.0), Bucket(4000, 2.0)))


@pytest.mark.parametrize("nodes", [1, 2, 16])
@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_a_network_that_costs_nothing_is_ideal(contestant: str, nodes: int) -> None:
    prediction = Plan(site(4), STEP).predict(contestant, nodes)
    assert prediction.step_s == STEP.ideal_s == 3.5
    assert prediction.share == 1
    assert prediction.exposed_s == 0


def test_what_is_exposed_is_added() -> None:
    """Two nodes, exact: a value is 4 bytes, and 4 bytes leave each node for it. 4000 bytes/s: 1 s and 4 s."""
    plan = Plan(site(bytes_per_s=4000), STEP)
    prediction = plan.predict(EXACT, 2)
    assert prediction.communication_s == pytest.approx(5)
    # Backward starts at 1; ready at 2, done at 3; ready at 3, done at 7; optimizer.
    assert prediction.step_s == pytest.approx(7.5)
    assert prediction.exposed_s == pytest.approx(4)
    assert prediction.link_nbytes == pytest.approx(20_000)
    assert plan.predict(FP16, 2).step_s == pytest.approx(1 + 2 + 2 + 0.5)


def test_all_reduces_wait_for_each_other() -> None:
    first_slow = replace(STEP, buckets=(Bucket(4000, 1.0), Bucket(1000, 2.0)))
    assert Plan(site(bytes_per_s=4000), first_slow).predict(EXACT, 2).step_s == pytest.approx(1 + 1 + 4 + 1 + 0.5)


def test_kernels_take_time_from_backward_where_they_share_its_processor() -> None:
    """Sums of half of 1000 values at 1000 bytes/s take 2 s of the first all_reduce, which backward is late by."""
    speeds = Speeds(sum=1000)
    apart, shared = (
        Plan(site(speeds=speeds, steals_kernels=each), STEP).predict(EXACT, 2).step_s for each in (False, True)
    )
    assert apart == pytest.approx(1 + 1 + 2 + 8 + 0.5)
    assert shared == pytest.approx(1 + 2 + 2 + 8 + 0.5)


def test_fewer_bits_and_faster_links_are_never_slower() -> None:
    plans = [
        Plan(make_site("rtx3090", 4, 32e9, rate), Workload.of_step([200_000, 6_000_000, 6_000_000], 0.02))
        for rate in (1e9, 10e9, 100e9)
    ]
    for nodes in (1, 2, 5):
        table = [[plan.predict(contestant, nodes).step_s for contestant in CONTESTANTS] for plan in plans]
        for row in table:
            assert row == sorted(row, reverse=True)
        for slow, fast in pairwise(table):
            assert all(b <= a for a, b in zip(slow, fast, strict=True))


def test_bytes_on_the_link_are_those_of_the_payload() -> None:
    """4 bits, blocks of 1024: 2 (M - 1) / M payloads, whoever speaks for a node."""
    numel = 1024 * 8 * 4 * 3
    plan = Plan(site(4), Workload.of_step([numel], 1.0))
    payload = numel / 2 + numel / 1024 * 8
    for way in (Way(), Way("RING"), Way(broadcast=False), Way("RING", False)):
        assert plan.predict("4 bits", 3, way).link_nbytes == pytest.approx(2 * 2 / 3 * payload)


def test_grad_buckets_are_those_of_ddp() -> None:
    mega = 1 << 18  # values of 1 MB
    assert ddp_buckets([mega] * 60) == [mega, 25 * mega, 25 * mega, 9 * mega]
    assert ddp_buckets([100, 30 * mega, 50]) == [30 * mega + 50, 100]
    workload = Workload.of_step([mega, 3 * mega], 0.3)
    assert workload.forward_s == pytest.approx(0.1)
    assert [bucket.ready_s for bucket in workload.buckets] == pytest.approx([0.05, 0.2])


def test_kernel_speeds_of_a_gpu_are_half_of_the_roofline_of_docs_gpu() -> None:
    """docs/gpu.md, 64 MB in 4 bits on an RTX 3090: encode 81 us, reduce with 1 payload 162, with 3 180."""
    nbytes, speeds = 1 << 26, gpu_speeds(GPUS["rtx3090"])
    assert nbytes / speeds.encode == pytest.approx(2 * 81e-6, rel=0.01)
    assert nbytes / speeds.reduce == pytest.approx(2 * 162e-6, rel=0.01)
    assert nbytes / speeds.reduce + 2 * nbytes / speeds.more == pytest.approx(2 * 180e-6, rel=0.01)


def test_kernel_speeds_are_read_from_a_benchmark() -> None:
    speeds = read_speeds(max(RESULTS.glob("*/kernels-best-level.json")))
    assert 5e9 < speeds.reduce < speeds.encode < speeds.decode < 50e9


def test_counts_and_rates() -> None:
    assert count("335M") == 335_000_000
    assert count("25.6m") == 25_600_000
    assert count("7B") == 7 * 10**9
    assert link_rate("10gbit") == 1e10
    assert link_rate("1.6tbit") == 1.6e12


def run_file(folder: Path, **changes: Any) -> Path:
    """A run of `cgx bench train`, as its schema has it."""
    numels = [("head", 1 << 18), ("body", 5 << 20), ("stem", 1 << 20)]
    run = {
        "schema": "cgx-bench",
        "schema_version": 1,
        "kind": "train",
        "date": "2026-11-16T12:00:00+00:00",
        "command": [],
        "machine": {"cpu": "some", "cores": 2},
        "load": 0.1,
        "link": {"nodes": 2, "rate": "1gbit", "goodput_bit_per_s": [9.5e8, 9.5e8]},
        "settings": {"model": "gpt", "nodes": 2, "nproc": 1, "batch": 4, "rounds": 6, "steps": 3, "bucket_size": 1024},
        "model": {"name": "gpt", "parameters": 6 << 20, "layers": [[name, numel, 2] for name, numel in numels]},
        "phases": {"forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.03},
        "buckets": [
            {"numel": numel, "layers": [name], "ready_s": ready}
            for (name, numel), ready in zip(numels, (0.02, 0.15, 0.2), strict=True)
        ],
        "cells": [{"contestant": "gloo", "median_s": 0.5}],
    }
    path = folder / "bench.json"
    path.write_text(json.dumps(run | changes))
    return path


def test_the_command_predicts_writes_and_draws(tmp_path: Path, capsys: Capture) -> None:
    out, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = "--params 20M --step-ms 20 --gpus 2 --nodes 3 --intra 32gbit --inter 1gbit --price 10.4 --hours 10"
    assert main(["plan", *arguments.split(), "--json", str(out), "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "recommended: 4 bits" in shown
    assert "CGX_LINK_COSTS=1gbit" in shown
    report = json.loads(out.read_text())
    assert report["schema"] == "cgx-plan"
    assert [cell["contestant"] for cell in report["cells"]] == list(CONTESTANTS)
    exact, four = report["cells"][0], report["cells"][CONTESTANTS.index("4 bits")]
    # A ring of 6 ranks leaves each node once: 2 * 5 / 6 of 80 MB; nodes that speak for their ranks 2 * 2 / 3 of 10.08.
    assert exact["link_nbytes"] == pytest.approx(2 * 5 / 6 * 80e6)
    assert four["link_nbytes"] == pytest.approx(2 * 2 / 3 * (10e6 + 20e6 / 1024 * 8), rel=1e-4)
    assert exact["step_s"] >= exact["link_nbytes"] / 125e6
    assert four["ideal_share"] == pytest.approx(0.02 / four["step_s"])
    assert four["cost"] == pytest.approx(10 * four["step_s"] / 0.02 * 3 * 10.4)
    assert four["ideal_cost"] == pytest.approx(10 * 3 * 10.4)
    assert sorted({cell["nodes"] for cell in report["curves"]}) == [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_rotated_payloads_are_counted_where_the_quantizer_has_the_bits(tmp_path: Path, capsys: Capture) -> None:
    arguments = [
        "--params",
        "20M",
        "--step-ms",
        "20",
        "--gpus",
        "1",
        "--nodes",
        "2",
        "--inter",
        "1gbit",
        "--hours",
        "10",
    ]
    found = {}
    for quantizer in ("maxmin", "rotated"):
        out = tmp_path / f"{quantizer}.json"
        assert main(["plan", *arguments, "--quantizer", quantizer, "--json", str(out)]) == 0
        report = json.loads(out.read_text())
        assert report["settings"]["quantizer"] == quantizer
        found[quantizer] = {cell["contestant"]: cell["link_nbytes"] for cell in report["cells"]}
        told = capsys.readouterr().out
        assert ("CGX_COMPRESSION_QUANTIZER=rotated" in told) == (quantizer == "rotated")
        assert ("try adaptive bits" in told) == (quantizer == "maxmin")
    maxmin, rotated = found["maxmin"], found["rotated"]
    for contestant in CONTESTANTS:
        if contestant in ("4 bits", "3 bits", "2 bits", "1 bit"):  # four bytes less for each of the blocks
            blocks = 20e6 / 1024
            assert maxmin[contestant] - rotated[contestant] == pytest.approx(4 * blocks, rel=1e-2), contestant
        else:
            assert maxmin[contestant] == rotated[contestant]


def test_a_run_brings_its_step_its_nodes_and_its_link(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", "--from-run", str(run_file(tmp_path)), "--json", str(out), "--cores", "1"]) == 0
    settings = json.loads(out.read_text())["settings"]
    assert (settings["nodes"], settings["gpus"], settings["inter_bit_per_s"]) == (2, 1, 1e9)
    assert settings["ideal_step_s"] == pytest.approx(0.33)
    assert settings["buckets"] == [[1 << 18, 0.02], [5 << 20, 0.15], [1 << 20, 0.2]]
    assert settings["kernels"] == "cpu"
    assert "CGX_LINK_COSTS=1gbit" in capsys.readouterr().out


MODELS = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(700, 400), torch.nn.Linear(400, 3))
    model[1].requires_grad_(False)
    return model

def fail():
    raise OSError("no disk")
"""


def test_a_model_is_built_and_its_parameters_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "some_model_of_plan.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "plan.json"
    model = ["plan", "--step-ms", "20", "--gpus", "1", "--nodes", "1", "--json", str(out), "--model"]
    assert main([*model, "some_model_of_plan:build"]) == 0
    buckets = json.loads(out.read_text())["settings"]["buckets"]
    assert sum(numel for numel, _ in buckets) == 700 * 400 + 400
    capsys.readouterr()
    assert main([*model, "some_model_of_plan:fail"]) == 2
    assert "no disk" in capsys.readouterr().err


def test_where_exact_is_as_fast_nothing_else_is_recommended(capsys: Capture) -> None:
    arguments = "--params 1M --step-ms 1000 --gpus 1 --nodes 2 --inter 100gbit"
    assert main(["plan", *arguments.split()]) == 0
    assert "recommended: exact, 1.00 s a step. Compression does not pay here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "one of --params, --from-run and --model"),
        (["--params", "1M"], "--step-ms"),
        (["--params", "lots", "--step-ms", "5"], "25.6M, 335M, 7B"),
        (["--params", "1M", "--step-ms", "5", "--quantizer", "rotated", "--bucket-size", "100"], "one of 64, 128, 256"),
        (["--params", "1M", "--step-ms", "0"], "above 0"),
        (["--params", "1M", "--model", "a:b", "--step-ms", "5"], "--params and --model"),
        (["--params", "1M", "--step-ms", "5", "--nodes", "1025"], "from 1 to 1024"),
        (["--params", "1M", "--step-ms", "5", "--inter", "fast"], "1mbit to 100tbit"),
        (["--params", "1M", "--step-ms", "5", "--kernels", "abacus"], "rtx3090, a100, h100, cpu, or a file"),
        (["--params", "1M", "--step-ms", "5", "--steps", "5", "--hours", "5"], "not allowed with"),
        (["--model", "nothing", "--step-ms", "5"], "my.module:build"),
        (["--model", "no_such_module:build", "--step-ms", "5"], "no_such_module"),
        (["--from-run", "no/such/file"], "cgx bench train --json"),
        (["--from-run", "no/such/file", "--step-ms", "5"], "not allowed with --from-run"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_is_allowed(
    arguments: list[str], expected: str, capsys: Capture
) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert expected in captured.err


@pytest.mark.parametrize("changes", [{"kind": "allreduce"}, {"buckets": []}, {"phases": {}}, {"link": {"rate": "x"}}])
def test_a_file_that_is_no_training_run_is_refused(tmp_path: Path, changes: dict[str, Any], capsys: Capture) -> None:
    assert main(["plan", "--from-run", str(run_file(tmp_path, **changes))]) == 2
    assert "allowed is a file that `cgx bench train --json` has written" in capsys.readouterr().err


def test_grad_buckets_are_ready_when_backward_ends_even_if_a_slow_step_was_noted(tmp_path: Path) -> None:
    run = json.loads(run_file(tmp_path).read_text())
    for bucket in run["buckets"]:
        bucket["ready_s"] *= 10
    ready = [bucket.ready_s for bucket in input_of_run(run).workload.buckets]
    assert ready == pytest.approx([0.02, 0.15, 0.2])
