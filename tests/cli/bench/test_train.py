"""`cgx bench train` with its processes: every contestant trains, what it sends is what its way allows."""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.end_probe import count_ddp_modules
from tests.support.harness import Rank, run_ranks, warm_python
from torch_cgx.cli.bench import train_ranks
from torch_cgx.cli.hosts import Hosts

pytestmark = pytest.mark.ranks

CGX = ["-m", "torch_cgx.cli", "bench", "train"]
LIMIT_S = 240.0
QUICK = ("--model", "mlp", "--batch", "4", "--rounds", "2", "--steps", "1")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([warm_python(), *CGX, *QUICK, *arguments], capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.matrix
def test_every_contestant_trains_and_is_told_apart(tmp_path: Path) -> None:
    output, plot = tmp_path / "out.json", tmp_path / "out.png"
    done = bench("--bits", "8,4,rotated-2,adaptive", "--json", str(output), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(output.read_text())
    assert (result["schema"], result["kind"], result["link"]) == ("cgx-bench", "train", None)
    cells = {cell["contestant"]: cell for cell in result["cells"]}
    assert list(cells) == ["ideal", "gloo", "fp16", "powersgd", "cgx-8", "cgx-4", "rotated-2", "adaptive"]
    exact = 4 * result["model"]["parameters"]
    assert cells["ideal"]["sent_nbytes"] == 0
    assert cells["ideal"]["in_step_s"] > 0
    assert cells["gloo"]["in_step_s"] is None
    assert cells["gloo"]["sent_nbytes"] == exact
    assert cells["fp16"]["sent_nbytes"] == exact / 2
    assert cells["powersgd"]["sent_nbytes"] < exact / 20
    assert 7.5 < exact / cells["cgx-4"]["sent_nbytes"] < 8
    assert 3.8 < exact / cells["cgx-8"]["sent_nbytes"] < 4
    assert 15 < exact / cells["rotated-2"]["sent_nbytes"] < 16
    assert sum(bucket["numel"] for bucket in result["buckets"]) == result["model"]["parameters"]
    ready = [bucket["ready_s"] for bucket in result["buckets"]]
    assert len(ready) > 1
    assert 0 < ready[0] <= ready[-1]
    for name, cell in cells.items():
        assert len(cell["step_s"]) == 2
        curve = [loss for _, loss in cell["loss"]]
        assert len(curve) == (0 if name == "ideal" else 4)
        assert not curve or curve[-1] < curve[0], f"{name} learns nothing"
    assert "cgx, adaptive" in done.stdout
    assert plot.stat().st_size > 10_000


@pytest.mark.matrix
def test_between_nodes_the_links_count_what_is_sent(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    make_hosts(1)  # skips where there can be none
    output = tmp_path / "out.json"
    done = bench("--nodes", "3", "--rate", "1gbit", "--against", "gloo", "--json", str(output))
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["link"]["node_cores"] == (result["machine"]["cores"] // 3 or None)
    for cell in result["cells"][1:]:
        assert 1.0 <= cell["link_nbytes"] / cell["sent_nbytes"] < 1.1


@pytest.mark.matrix
def test_what_is_wrong_with_the_data_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "data.npz").write_bytes(b"not a zip file")
    done = bench("--data", str(tmp_path / "data.npz"))
    assert done.returncode == 1
    assert "expected an .npz with train_images" in done.stderr
    assert "Traceback" not in done.stderr


def copies_left_at_the_end(rank: Rank) -> int:
    arguments = {"model": "mlp", "contestants": ("ideal", "gloo", "cgx-4"), "batch": 4, "rounds": 1, "steps": 1}
    arguments |= {"bucket_size": 1024, "bucket_mb": None, "data": None, "device": "cpu", "nodes": 1}
    left: list[int] = []
    gc.disable()
    train_ranks.join_world = lambda timeout_s: None  # the harness has made the group
    train_ranks.dist.destroy_process_group = lambda: left.append(count_ddp_modules())
    train_ranks.run(arguments, lambda message: None)
    return left[0]


def test_the_copies_are_gone_when_a_rank_leaves_the_gloo_group() -> None:
    assert run_ranks(copies_left_at_the_end, 2, "gloo", destroy=False) == [0, 0]
