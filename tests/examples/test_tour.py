"""What a newcomer runs first: examples/tour.py, and the 20-second example of docs/index.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.harness import warm_python
from tests.support.launching import clean_environ, run, torchrun

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
SIZES = re.compile(r"^ +(\d) +([\d,]+) +([\d.]+)x", re.MULTILINE)
SENT = re.compile(r"as sent: +([\d,]+ and [\d,]+)")
LAYERS = re.compile(r"^(\d\.\w+) +([\d,]+) +(\w+) +([\d,]+) +([\d,]+)", re.MULTILINE)
LOSS = re.compile(r"([\d.]+) exactly, ([\d.]+) at 4 bits")


@pytest.mark.matrix
def test_the_tour_runs_alone_and_prints_the_sizes_that_its_page_shows(tmp_path: Path) -> None:
    printed = run([warm_python(), ROOT / "examples" / "tour.py"], clean_environ(tmp_path))
    page = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    for found in (SIZES, SENT, LAYERS):
        assert found.findall(printed) and found.findall(printed) == found.findall(page), printed
    assert "hold the same bits: yes" in printed
    match = LOSS.search(printed)
    assert match, printed
    exact, compressed = map(float, match.groups())
    assert exact < 1 and compressed < exact + 0.2  # it begins at ln 10


def test_the_first_example_compresses(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    example = re.search(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    assert example
    script = tmp_path / "train.py"
    counted = 'import torch_cgx\nprint("compressed", torch_cgx.stats()["compressed_operations"] >= 10)\n'
    script.write_text(example[1].replace("dist.destroy_process_group()", counted + "dist.destroy_process_group()"))
    printed = run([*torchrun(), script], {**clean_environ(tmp_path), "CGX_COMPRESSION_QUANTIZATION_BITS": "4"})
    assert printed.count("compressed True") == 2 and "rank 1: loss" in printed
