"""Examples that train with DDP on Gloo leave the group when DDP is gone (see `leave` in examples/common.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import end_probe
from tests.support.harness import warm_python
from tests.support.launching import clean_environ, free_port, run

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FEW_STEPS = ["--backend", "gloo", "--device", "cpu", "--threads", "1", "--epochs", "0.1", "--width", "64"]
TEXT = ["--data", "TEXT", "--context", "32", "--layers", "1", *FEW_STEPS]
DIGITS = ["--data", "digits", "--no-mirror", "--model", "vit", "--patch", "2", *FEW_STEPS[:-2]]


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("cifar_train.py", [*DIGITS, "--bits", "4"]),
        pytest.param("cifar_train.py", [*DIGITS, "--bits", "32"], marks=pytest.mark.matrix),
        pytest.param("gpt_train.py", TEXT, marks=pytest.mark.matrix),
        pytest.param("bert_train.py", TEXT, marks=pytest.mark.matrix),
        pytest.param("bert_qa.py", FEW_STEPS, marks=pytest.mark.matrix),
        ("demo.py", ["--backend", "gloo", "--output", "OUTPUT"]),
    ],
)
def test_ddp_is_gone_when_an_example_leaves_its_group(tmp_path: Path, example: str, arguments: list[str]) -> None:
    if {"digits", "OUTPUT"} & set(arguments):
        pytest.importorskip("sklearn")
    files = {"TEXT": tmp_path / "text.txt", "OUTPUT": tmp_path / "output.json"}
    files["TEXT"].write_text("the quick brown fox jumps over the lazy dog. " * 60)
    told = tmp_path / "told.txt"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [warm_python(), end_probe.__file__, told, EXAMPLES / example, *(files.get(a, a) for a in arguments)]
    printed = run(command, clean_environ(tmp_path) | alone)
    assert told.is_file(), printed
    assert told.read_text() == "0\n", printed
