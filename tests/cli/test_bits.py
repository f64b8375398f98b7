"""`cgx bits`: the table and the picture of a report's choices, and what it says of files that have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torch_cgx.cli import main
from torch_cgx.cli.bits import read
from torch_cgx.ddp.report import LayerReport, Report

Capture = pytest.CaptureFixture[str]


def choice(step: int, reason: str, **bits: int) -> dict[str, Any]:
    """Layers in the order of grad buckets, which is not the model's."""
    layers = {name.replace("_", "."): [each, 1024] for name, each in reversed(bits.items())}
    return {"step": step, "reason": reason, "layers": layers}


def report(*choices: dict[str, Any], layers: tuple[str, ...] = ("first.weight", "first.bias", "last.weight")) -> Any:
    """As a state writes it: numels of 1000, 2000 and so on."""
    told = [
        LayerReport(name, 1000 * number, 4, "maxmin", 4000 * number, 500 * number, None, None, None, False)
        for number, name in enumerate(layers, 1)
    ]
    return Report(0, 100, None, told, choices).as_dict()


def written(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "report.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


FIRST = choice(10, "because", first_weight=2, last_weight=6)
SECOND = choice(60, "exact: faster", first_weight=32, last_weight=32)


def test_the_table_has_a_line_for_each_choice(tmp_path: Path, capsys: Capture) -> None:
    assert main(["bits", written(tmp_path, report(FIRST, SECOND))]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["step", "bits", "on", "average", "reason"]
    assert lines[2:] == [["10", "5.00", "because"], ["60", "exact", "exact:", "faster"]]  # 2 * 1000 + 6 * 3000 of 4000


def test_layers_are_in_the_models_order_and_the_last_choice_lasts_until_the_end(tmp_path: Path) -> None:
    found = read(Path(written(tmp_path, report(FIRST, SECOND))))
    assert found.names == ["first.weight", "last.weight"]
    assert found.end == 100


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON, which json.dump(state.report().as_dict(), file) writes"),
        ([1, 2], 'has no "choices"'),
        ({"layers": {}}, 'has no "choices"'),
        (report(), "no bits have been chosen: make the state with adaptive"),
        (report(choice(8, "no layer is free to choose")), "no bits have been chosen"),
        ({"choices": 3}, '"layers": {name: [bits, bucket size]}'),
        ({"choices": [{"step": 3, "reason": ""}]}, "KeyError: 'layers'"),
        ({"choices": [choice(3, "", first_weight=9)]}, "bits: expected 1 to 8 or 32, got 9"),
    ],
)
def test_a_file_without_choices_is_told_in_one_line(content: Any, words: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["bits", written(tmp_path, content)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("cgx bits: ") and captured.err.count("\n") == 1
    assert "report.json" in captured.err and words in captured.err


def test_a_missing_file_and_a_wrong_picture_are_named(tmp_path: Path, capsys: Capture) -> None:
    assert main(["bits", str(tmp_path / "nothing.json")]) == 1
    assert "nothing.json: cannot be read: No such file" in capsys.readouterr().err
    assert main(["bits", written(tmp_path, report(FIRST)), "--plot", "bits.jpg"]) == 2
    assert "ends in .png" in capsys.readouterr().err


def many_layers() -> Any:
    names = tuple(f"a.module.with.a.name.that.is.longer.than.others.blocks.{number}.weight" for number in range(200))
    choices = [
        {"step": step, "reason": "many", "layers": {name: [2 + (step + len(name)) % 7, 128] for name in names[step:]}}
        for step in range(0, 90, 2)
    ]
    return report(*choices, layers=names)


@pytest.mark.parametrize(
    "content",
    [report(FIRST), report(FIRST, SECOND), {"choices": [FIRST]}, many_layers()],
    ids=["one choice", "two choices", "no sizes", "many layers"],
)
def test_the_picture_is_a_png(content: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bits", written(tmp_path, content), "--plot", str(tmp_path / "bits.png")]) == 0
    assert (tmp_path / "bits.png").read_bytes().startswith(b"\x89PNG")
