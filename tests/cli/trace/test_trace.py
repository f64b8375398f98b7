"""`cgx trace` on files made by hand: who was waited for, whose clock was moved, and what Perfetto gets."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from torch_cgx.cli import main
from torch_cgx.engines.recorder import FORMAT

Capture = pytest.CaptureFixture[str]
MS = 1_000_000
START = 50_000 * MS  # of every monotonic clock here
WALL = 1_700_000_000_000 * MS


def operation(number: int, at_ms: float, end_ms: float | None, **more: Any) -> dict[str, Any]:
    return {
        "group": 0,
        "number": number,
        "operation": "all_reduce",
        "dtype": "float32",
        "shape": [1000],
        "reduction": "SUM",
        "bits": 32,
        "root": None,
        "nbytes": 4000,
        "payload_nbytes": 4000,
        "sent_nbytes": 4000,
        "carrier": "SHM",
        "state": "running" if end_ms is None else "done",
        "submitted_ns": START + int(at_ms * MS),
        "started_ns": START + int(at_ms * MS),
        "finished_ns": None if end_ms is None else START + int(end_ms * MS),
        "phases_ns": {"encode": 1000, "wait": 2000, "reduce": 3000, "decode": 4000},
        "waited_for": None,
        "waiting_for": None,
        **more,
    }


def write(
    folder: Path,
    rank: int,
    operations: list[dict[str, Any]],
    *,
    world: int = 2,
    clock: str = "one",
    wall_ms: float = 0.0,
    peers: list[dict[str, Any]] | None = None,
) -> None:
    group = {
        "name": "0",
        "rank": rank,
        "ranks": list(range(world)),
        "carrier": "SHM",
        "closed": False,
        "failure": None,
        "failed_ns": None,
        "peers": peers or [],
    }
    told = {
        "format": FORMAT,
        "torch_cgx": "0",
        "why": "signal",
        "rank": rank,
        "pid": 100 + rank,
        "host": "here",
        "clock": {"name": clock, "wall_ns": WALL + int(wall_ms * MS), "monotonic_ns": START},
        "written_ns": START + 5000 * MS,
        "groups": [group],
        "operations": operations,
    }
    (folder / f"cgx-trace-rank{rank}-{100 + rank}.json").write_text(json.dumps(told))


def findings(folder: Path, capsys: Capture, *more: str) -> dict[str, Any]:
    assert main(["trace", str(folder), "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def peer(rank: int, number: int, life: str = "present") -> dict[str, Any]:
    return {
        "rank": rank,
        "pid": 100 + rank,
        "life": life,
        "number": number,
        "call": "barrier()",
        "called_ns": START,
        "waits_for": None,
    }


def test_a_rank_that_did_not_call_is_who_was_waited_for(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, 0, [operation(1, 0, 1), operation(2, 10, None, waiting_for={"rank": 1, "since_ns": START})])
    write(tmp_path, 1, [operation(1, 0, 1)])
    (stop,) = findings(tmp_path, capsys)["stops"]
    assert (stop["number"], stop["culprits"]) == (2, [1])
    assert [each["called"] for each in stop["standings"]] == [True, False]
    assert "operation 1" in stop["standings"][1]["doing"]
    assert main(["trace", str(tmp_path)]) == 0
    assert "waited for: rank 1 (it has not called the operation)" in capsys.readouterr().out


def test_a_rank_without_a_file_is_known_by_its_peers_board(tmp_path: Path, capsys: Capture) -> None:
    peers = [peer(0, 2), peer(1, 2), peer(2, 1)]
    for rank in (0, 1):
        write(tmp_path, rank, [operation(1, 0, 1), operation(2, 10, None)], world=3, peers=peers)
    found = findings(tmp_path, capsys)
    assert found["missing"] == [2]
    assert found["stops"][0]["culprits"] == [2]
    assert "last called operation 1, barrier()" in found["stops"][0]["standings"][2]["doing"]


def test_a_killed_rank_is_named_even_if_it_had_called(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, 0, [operation(1, 0, None)], peers=[peer(0, 1), peer(1, 1, "gone")])
    (stop,) = findings(tmp_path, capsys)["stops"]
    assert (stop["culprits"], stop["reason"]) == ([1], "its process is gone")


def test_a_stopped_rank_is_the_one_that_is_waited_for_and_has_no_file(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, 0, [operation(1, 0, None, waiting_for={"rank": 2, "since_ns": START})], world=3)
    write(tmp_path, 1, [operation(1, 0, None, waiting_for={"rank": 0, "since_ns": START})], world=3)
    assert findings(tmp_path, capsys)["stops"][0]["culprits"] == [2]


def test_of_ranks_that_wait_for_each_other_the_end_of_the_chain_is_named(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, 0, [operation(1, 0, None, waiting_for={"rank": 1, "since_ns": START})], world=3)
    write(tmp_path, 1, [operation(1, 0, None, waiting_for={"rank": 2, "since_ns": START})], world=3)
    write(tmp_path, 2, [operation(1, 0, None)], world=3)
    assert findings(tmp_path, capsys)["stops"][0]["culprits"] == [2]


def test_ranks_that_called_different_things_are_both_shown(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, 0, [operation(1, 0, None)])
    write(tmp_path, 1, [operation(1, 0, None, shape=[7])])
    (stop,) = findings(tmp_path, capsys)["stops"]
    assert (stop["culprits"], stop["reason"]) == ([0, 1], "they called different things")
    assert "[7]" in stop["standings"][1]["doing"]


def test_a_handle_that_nobody_waited_for_is_no_stop(tmp_path: Path, capsys: Capture) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, [operation(1, 0, None, state="submitted"), operation(2, 1, 2)])
    assert findings(tmp_path, capsys)["stops"] == []


def test_lateness_is_summed_from_each_first_call(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, 0, [operation(1, 0, 9), operation(2, 10, 31)])
    write(tmp_path, 1, [operation(1, 5, 9), operation(2, 30, 31)])
    found = findings(tmp_path, capsys)
    assert [round(each["seconds"] * 1e3) for each in found["late"]] == [0, 25]
    assert [each["last"] for each in found["late"]] == [0, 2]
    assert found["slowest"][0]["number"] == 2
    assert found["slowest"][0]["last_rank"] == 1
    assert found["phases_s"]["0"]["decode"] == pytest.approx(8e-6)


def test_another_hosts_clock_is_moved_by_the_median_of_common_ends(tmp_path: Path, capsys: Capture) -> None:
    """Its wall clock is 300 ms ahead; one of three ends was seen late, which a median does not heed."""
    write(tmp_path, 0, [operation(1, 0, 10), operation(2, 20, 30), operation(3, 40, 50)])
    late = [operation(1, 4, 10), operation(2, 24, 99), operation(3, 44, 50)]
    write(tmp_path, 1, late, clock="two", wall_ms=300)
    found = findings(tmp_path, capsys)
    assert found["clocks_moved_s"]["1"] == pytest.approx(-0.3, abs=1e-5)
    assert found["late"][1]["seconds"] == pytest.approx(0.012, abs=1e-5)


def test_ranks_of_one_kernel_are_compared_by_its_monotonic_clock(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, 0, [operation(1, 0, 10)])
    write(tmp_path, 1, [operation(1, 2, 10)], wall_ms=800)  # the wall clock was set meanwhile
    assert findings(tmp_path, capsys)["late"][1]["seconds"] == pytest.approx(0.002, abs=1e-5)


def test_perfetto_gets_complete_events_on_named_tracks(tmp_path: Path, capsys: Capture) -> None:
    first = [operation(1, 0, 10), operation(2, 5, 20), operation(3, 30, None)]  # the first two overlap
    write(tmp_path, 0, first)
    write(tmp_path, 1, [operation(1, 1, 10)])
    out = tmp_path / "perfetto.json"
    findings(tmp_path, capsys, "--perfetto", str(out))
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in slices} == named
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {0, 1}
    second = next(event for event in slices if event["name"].endswith("#2"))
    assert (second["ts"], second["dur"]) == (5000.0, 15000.0)  # microseconds, whole nanoseconds kept
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in slices:
        by_track.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_track.values():  # slices of one track may not overlap
        ordered = sorted(spans)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(ordered))


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is not JSON"), ("{}", "is no trace of this version"), (json.dumps({"format": FORMAT}), "is damaged")],
)
def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path, capsys: Capture, content: str, words: str) -> None:
    path = tmp_path / "cgx-trace-rank0-1.json"
    path.write_text(content)
    assert main(["trace", str(path)]) == 1
    assert words in capsys.readouterr().err


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path, capsys: Capture) -> None:
    assert main(["trace", str(tmp_path)]) == 1
    assert f"CGX_TRACE_DIR={tmp_path}" in capsys.readouterr().err
