"""What the benchmarks of sharded training decide without training: arguments, statistics, tables, what is refused."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fsdp_accuracy as accuracy
import fsdp_memory as memory
import fsdp_speed as speed

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20


@pytest.fixture(scope="module")
def contestants() -> Iterator[ModuleType]:
    """Under a name that nobody else has; what it puts at the head of the search path is for its own imports."""
    pytest.importorskip("tqdm")
    before, known = list(sys.path), set(sys.modules)
    spec = importlib.util.spec_from_file_location(
        "fsdp_contestants_under_test", ROOT / "benchmarks/fsdp_contestants.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    for name in ("common", "fsdp_train", "gpt", "gpt_train", spec.name):
        if name not in known:
            sys.modules.pop(name, None)


def made_up_runs(shift: float, seeds: int = 5, steps: int = 500) -> dict[str, Any]:
    runs = {}
    for world, setting, seed in accuracy.wanted(accuracy.WORLDS, seeds):
        exact = setting == accuracy.EXACT
        loss = 2.0 + seed / 10 + (0.0 if exact else shift)
        runs[accuracy.key(world, setting, seed)] = {
            "arguments": accuracy.arguments_of(world, setting, seed, steps),
            "validation_loss": loss,
            "validation_loss_of_weights": loss - (0.0 if exact else 0.001),
            "bytes_sent": 60_000_000 if exact else 12_000_000,
        }
    return runs


def settings_of(world: int, setting: str) -> dict[str, str]:
    words = accuracy.arguments_of(world, setting, 3, 500)
    return dict(zip(words[::2], words[1::2], strict=True))


def test_runs_of_a_pair_differ_in_bits_alone_and_all_worlds_read_as_much() -> None:
    for world in accuracy.WORLDS:
        exact, compressed = (settings_of(world, setting) for setting in (accuracy.EXACT, accuracy.COMPRESSED))
        assert {name for name in compressed if exact.get(name) != compressed[name]} == {
            "--weight-bits",
            "--grad-bits",
            "--bucket-size",
        }
        assert set(exact) < set(compressed) and exact["--weight-bits"] == exact["--grad-bits"] == "32"
        assert exact["--seed"] == "3" and int(exact["--batch"]) * world == accuracy.PIECES


def test_the_model_of_the_accuracy_benchmark_has_ten_million_parameters() -> None:
    layers, width = (int(settings_of(2, accuracy.EXACT)[name]) for name in ("--layers", "--width"))
    assert 12 * layers * width**2 >= accuracy.LEAST_PARAMETERS  # of the blocks' matrices alone


def test_accuracy_tells_differences_seed_by_seed() -> None:
    runs = made_up_runs(0.01)
    assert accuracy.differences(runs, 4, 5) == pytest.approx([0.01] * 5)
    rows = accuracy.table(runs, accuracy.WORLDS, 5).splitlines()
    assert len(rows) == 6 and rows[2] == "| 2 | exact | 2.2000 |  |  |  | 60 MB, 1/1.0 |"
    assert rows[5].startswith(
        f"| 4 | {accuracy.COMPRESSED} | 2.2100 | +0.0100 | +0.0100 to +0.0100 | +0.0090 to +0.0090 |"
    )
    assert rows[5].endswith("| 12 MB, 1/5.0 |")


@pytest.mark.parametrize(("shift", "met"), [(-0.01, True), (0.01, False)])
def test_accuracy_judges_as_the_hooks_benchmark_does(shift: float, met: bool) -> None:
    lines = accuracy.verdicts(made_up_runs(shift), accuracy.WORLDS, 5).splitlines()
    assert len(lines) == 2 and all(("NOT met" not in line) == met for line in lines)


def start_accuracy(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["fsdp_accuracy", *map(str, arguments)])
    return int(accuracy.main())


def test_stored_runs_are_not_repeated_unless_their_arguments_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, path = made_up_runs(0.0), tmp_path / "it.json"
    accuracy.store(runs, path)
    where = ("--data", tmp_path, "--json", path)
    assert start_accuracy(monkeypatch, *where) == 0
    assert "+0.0000" in capsys.readouterr().out
    assert start_accuracy(monkeypatch, *where, "--steps", "400") == 1
    assert "tinyshakespeare.txt" in capsys.readouterr().err


def test_after_an_interruption_whole_seeds_can_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, path = made_up_runs(0.01), tmp_path / "it.json"
    del runs[accuracy.key(4, accuracy.COMPRESSED, 3)]
    accuracy.store(runs, path)
    assert accuracy.whole_seeds(runs, accuracy.WORLDS, 5, 500) == 3
    page = tmp_path / "page.md"
    page.write_text(f"before\n{accuracy.BEGIN}\nold\n{accuracy.END}\nafter\n")
    assert start_accuracy(monkeypatch, "--json", path, "--stored", "--doc", page) == 0
    assert "| 2.1100 |" in capsys.readouterr().out  # the mean of three seeds
    assert page.read_text().startswith(f"before\n{accuracy.BEGIN}\n| ranks |") and "old" not in page.read_text()
    accuracy.store({}, path)
    assert start_accuracy(monkeypatch, "--json", path, "--stored") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parameters": 9_000_000}, "9,000,000 parameters"),
        ({"losses": [1.0]}, "got 1 steps"),
        ({"stats": {}}, "got 0 compressed collectives"),
    ],
)
def test_a_run_that_is_not_what_its_row_says_is_refused(change: dict[str, Any], said: str) -> None:
    result = {"parameters": 10_100_000, "losses": [1.0, 2.0], "stats": {"compressed_operations": 8}}
    accuracy.check(result, accuracy.COMPRESSED, 2)
    with pytest.raises(RuntimeError, match=said):
        accuracy.check(result | change, accuracy.COMPRESSED, 2)
    with pytest.raises(RuntimeError, match="exact: got 8"):
        accuracy.check(result, accuracy.EXACT, 2)


def made_up_rank(slower: float) -> dict[str, Any]:
    """Three rounds; exact steps have three quarters of communication, of which compression leaves a fifth."""
    seconds = {"ideal": (1.0, 0.0), "gloo": (4.0, 3.0), "cgx exact": (4.4, 3.3), "cgx 8/4": (1.5, 0.6)}
    return {
        "measured": {
            name: {
                "step_s": [step, step + slower, step],
                "gather_s": [communication / 2] * 3,
                "scatter_s": [communication / 2] * 3,
                "communication_s": [communication, communication, communication + slower],
                "processor_s": [1.0] * 3,
                "link_nbytes": [80 * MB] * 3,
            }
            for name, (step, communication) in seconds.items()
        }
    }


def made_up_speed() -> dict[str, Any]:
    cells = speed.merge([made_up_rank(0.0), made_up_rank(0.5)])
    return {"cells": cells, "errors": {"gloo": 0.0, "cgx exact": 0.0, "cgx 8/4": 0.125}}


def test_speed_takes_the_slowest_rank_and_then_medians_over_rounds() -> None:
    cell = made_up_speed()["cells"]["gloo"]
    assert cell["rounds"]["step_s"] == [4.0, 4.5, 4.0] and cell["rounds"]["communication_s"] == [3.0, 3.0, 3.5]
    assert (cell["step_s"], cell["communication_s"], cell["share"]) == (4.0, 3.0, 0.75)
    assert (cell["added_s"], cell["steps_per_s"]) == (3.0, 0.25)


def test_speed_shows_every_contestant_and_judges_against_gloo() -> None:
    result = made_up_speed()
    rows = speed.table(result).splitlines()
    assert len(rows) == 2 + len(speed.CONTESTANTS)
    assert rows[2].startswith("| ideal | 1.00 s | 1.00 |  |  |")
    assert rows[5].startswith("| cgx 8/4 | 1.50 s | 0.67 | 600 ms | 40 % |") and rows[5].endswith("| 80 MB | 1.2e-01 |")
    lines = speed.verdicts(result["cells"])
    assert lines[0].startswith("5.00 times less communication than gloo") and lines[0].endswith("asked for 3.2: met")
    assert lines[1].startswith("2.67 times the steps a second of gloo") and lines[1].endswith("asked for 2: met")
    assert lines[-1] == "communication is 75 % of the exact step on gloo"


def test_speed_warns_of_a_share_for_which_its_goal_is_not() -> None:
    cells = made_up_speed()["cells"]
    cells["gloo"]["share"] = 0.9
    assert "choose --batch" in speed.verdicts(cells)[-1]
    cells["cgx 8/4"]["rounds"]["step_s"] = [2.5] * 3
    assert "NOT met" in speed.verdicts(cells)[1]


def made_up_cell(peak_mb: int, losses: tuple[float, ...] = (4.0, 3.0)) -> dict[str, Any]:
    def rank(nbytes: int) -> dict[str, Any]:
        return {"peak_nbytes": nbytes, "before_nbytes": 300 * MB, "parameters": 10_700_000, "losses": list(losses)}

    return dict(memory.cell_of([[rank(mb * MB), rank((mb - 9) * MB)] for mb in (peak_mb - 5, peak_mb, peak_mb + 5)]))


def test_memory_is_the_median_run_of_the_rank_with_the_most() -> None:
    cell = made_up_cell(700)
    assert (cell["peak_nbytes"], cell["own_nbytes"]) == (700 * MB, 400 * MB)
    sizes = {"small": {"gloo": cell, "cgx 8/4": made_up_cell(728), "cgx 8/4, messages": made_up_cell(742)}}
    rows = memory.table(sizes).splitlines()
    assert rows[3] == "| 10.7 million | cgx 8/4 | 728 MB | 723 MB to 733 MB | +4.0 % | 428 MB | +7.0 % |"
    near, far = memory.verdicts(sizes)
    assert near.endswith("1.040 times the peak of exact FSDP2; asked for at most 1.05: met")
    assert far.endswith("NOT met")


def test_memory_of_a_training_of_something_else_is_refused() -> None:
    gloo = made_up_cell(700)
    memory.check({"gloo": gloo, "cgx exact": made_up_cell(700), "cgx 8/4": made_up_cell(700, (4.0, 3.1))})
    for name, losses in (("cgx 8/4", (4.0, 4.0)), ("cgx 8/4", (4.0, float("nan"))), ("cgx exact", (4.0, 3.1))):
        with pytest.raises(RuntimeError, match=name):
            memory.check({"gloo": gloo, name: made_up_cell(700, losses)})


@pytest.mark.parametrize("script", [accuracy, speed, memory], ids=lambda module: str(module.__name__))
def test_help_says_what_it_does(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, "--help"])
    with pytest.raises(SystemExit):
        script.main()
    assert script.__doc__.splitlines()[0] in capsys.readouterr().out


def test_names_of_contestants_say_their_bits(contestants: ModuleType) -> None:
    assert [contestants.widths_of(name) for name in speed.CONTESTANTS] == [(32, 32), (32, 32), (32, 32), (8, 4)]
    with pytest.raises(ValueError, match="got 'cgx 8'"):
        contestants.widths_of("cgx 8")


def test_without_communication_shards_are_repeated_and_gradients_cut(contestants: ModuleType) -> None:
    output = torch.tensor([0.0, 0.0, 5.0, 6.0])
    contestants.repeat_shard(output, output[2:], 1, 2)
    assert output.tolist() == [5.0, 6.0, 5.0, 6.0]
    mine = torch.empty(2)
    contestants.cut_share(mine, torch.arange(4.0), 1, 2)
    assert mine.tolist() == [2.0, 3.0]


def test_the_clock_counts_what_is_spent_inside_of_collectives(contestants: ModuleType) -> None:
    clock = contestants.Clock()
    watched = contestants.Watched(contestants.Absent(contestants.cut_share), clock, "scatter_s")

    class Group:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

    out = watched.allocate((2,), dtype=torch.float32, device=torch.device("cpu"))
    watched(output_tensor=out, input_tensor=torch.ones(4), group=Group(), op=None)
    gather_s, scatter_s = clock.read()
    assert out.tolist() == [1.0, 1.0] and gather_s == 0.0 and scatter_s > 0.0 and clock.read() == (0.0, 0.0)


def test_batches_are_the_same_for_whoever_asks(contestants: ModuleType) -> None:
    size = contestants.Size(1, 8, 1, context=16, batch=2)
    assert torch.equal(size.text(3, 1), size.text(3, 1)) and size.text(3, 1).shape == (2, 17)
    assert not torch.equal(size.text(3, 1), size.text(3, 0))
