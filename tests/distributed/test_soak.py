"""A minute of `make soak`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"
SECONDS = 60.0


@pytest.mark.alone
def test_a_minute_of_mixed_load_is_right_and_nothing_grows() -> None:
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    assert spec is not None and spec.loader is not None
    sys.modules["soak"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    report = module.soak(SECONDS, seed=0)
    # Of what is left in /dev/shm a fixture knows more: whose it is.
    assert [each for each in report["problems"] if not each.startswith("left in /dev/shm")] == []
    for rank in report["ranks"]:
        assert len(rank["samples"]) >= 8  # fewer tell nothing of growth
        assert rank["counts"]["operations"] > 100
        assert rank["counts"]["compressed"] > 10
