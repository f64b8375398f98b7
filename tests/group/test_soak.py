"""A minute of `make soak`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.mark.matrix
@pytest.mark.alone
def test_a_minute_of_mixed_load_is_right_and_nothing_grows(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    command = [sys.executable, SOAK, "--minutes", "1", "--seed", "0", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert path.exists(), done.stderr[-2000:]
    report = json.loads(path.read_text())
    assert report["problems"] == []
    for rank in report["ranks"]:
        assert len(rank["samples"]) >= 8  # fewer tell nothing of growth
        assert rank["counts"]["operations"] > 100
        assert rank["counts"]["compressed"] > 10
