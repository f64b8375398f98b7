"""Nothing from a peer is unpickled, and no length from one is trusted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from torch_cgx import MismatchError
from torch_cgx.ddp import checkpoint
from torch_cgx.group.bootstrap.store_json import MOST_NBYTES, parse_answer
from torch_cgx.version import __version__

SOURCE = Path(__file__).resolve().parents[2] / "src"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# What torch makes of pickles.
OBJECTS = re.compile(r"(_object|_object_list|scatter_object_output_list)$")


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    named = [(node.func, node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", ""), node) for f, node in named]


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_package_unpickles_nothing(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not imports(tree) & UNPICKLES
    for name, call in calls(tree):
        assert not OBJECTS.search(name), f"line {call.lineno}: {name} unpickles what peers send"
        assert name not in ("eval", "exec"), f"line {call.lineno}"
        if name == "load" and ast.unparse(call.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(call), f"line {call.lineno}"


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_examples_load_checkpoints_without_running_them(path: Path) -> None:
    for _, call in calls(ast.parse(path.read_text(encoding="utf-8"))):
        if ast.unparse(call.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(call), f"line {call.lineno}"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b" " * (MOST_NBYTES + 1), "expected at most 65536 bytes, got 65537"),
        (b"[" * 60000, "expected JSON, got"),
        (b"\x80\x04N.", "expected JSON, got"),
        (b"[1]", "expected an object, got [1]"),
        (b"{}", "expected text for 'problem', got None"),
        (b'{"problem": 4}', "expected text for 'problem', got 4"),
    ],
)
def test_an_entry_of_the_store_that_we_did_not_write_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(MismatchError) as caught:
        parse_answer(raw, "opened/1", {"problem": str})
    text = str(caught.value)
    assert said in text and "'opened/1'" in text and __version__ in text and len(text) < 1000


def test_a_state_that_would_run_code_is_refused_where_it_arrives() -> None:
    packed = checkpoint._packed({"step": 3, "residuals": {"a": torch.ones(3)}})
    assert checkpoint._unpacked(packed)["residuals"]["a"].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        checkpoint._unpacked(checkpoint._packed({"step": checkpoint.gather_states}))


@pytest.mark.parametrize("nbytes", [-1, 1001, 2**62])
def test_a_length_beyond_the_model_s_is_refused(nbytes: int) -> None:
    with pytest.raises(MismatchError, match=f"rank 1 has a state of {nbytes} bytes: expected at most 1000"):
        checkpoint._bounded(nbytes, 1, 1000)
