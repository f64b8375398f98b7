"""The flight recorder by itself: the ring, the file, and what may go wrong with it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from torch_cgx import _native
from torch_cgx.config import Settings
from torch_cgx.engines.recorder import FORMAT, LENGTH, GroupRecorder, NativeEntry, OpInfo, Recorder
from torch_cgx.errors import CGXTimeoutError, PoisonedError

BARRIER = OpInfo("barrier")


def group_in(folder: Path | None, ranks: tuple[int, ...] = (4, 7)) -> GroupRecorder:
    """Of rank 1, whose global rank is the second."""
    return GroupRecorder(Recorder(), 1, ranks, "GLOO", None if folder is None else str(folder))


def written(folder: Path) -> dict[str, Any]:
    (path,) = folder.iterdir()
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def test_the_ring_holds_the_last_thousand_operations(tmp_path: Path) -> None:
    group = group_in(tmp_path)
    for _ in range(LENGTH + 5):
        group.begin(BARRIER, "gloo").finish()
    group.recorder.write("signal")
    assert [each["number"] for each in written(tmp_path)["operations"]] == list(range(6, LENGTH + 6))


def test_the_file_is_named_by_global_rank_and_process_and_tells_both_clocks(tmp_path: Path) -> None:
    group = group_in(tmp_path)
    path = group.recorder.write("signal")
    assert path == tmp_path / f"cgx-trace-rank7-{group.recorder.pid}.json"
    told = written(tmp_path)
    assert told["format"] == FORMAT
    assert told["clock"]["wall_ns"] > told["clock"]["monotonic_ns"] > 0
    assert told["groups"][0]["ranks"] == [4, 7]


def test_an_operation_tells_its_call_its_phases_and_whom_it_waited_for(tmp_path: Path) -> None:
    group = group_in(tmp_path)
    trail = group.begin(OpInfo("all_reduce", torch.float32, (3, 5), "AVG", 4, payload_nbytes=40), "GLOO SRA")
    trail.start()
    trail.add("encode", 0.5)
    with trail.waiting_for(0):
        pass
    trail.finish()
    group.recorder.write("signal")
    (told,) = written(tmp_path)["operations"]
    assert (told["operation"], told["dtype"], told["shape"], told["bits"]) == ("all_reduce", "float32", [3, 5], 4)
    assert (told["nbytes"], told["state"], told["phases_ns"]["encode"]) == (60, "done", 500_000_000)
    assert told["waited_for"]["rank"] == 4
    assert told["waiting_for"] is None
    assert told["submitted_ns"] <= told["started_ns"] <= told["finished_ns"]


def test_a_wait_that_fails_leaves_its_peer_on_record(tmp_path: Path) -> None:
    group = group_in(tmp_path)
    trail = group.begin(BARRIER, "gloo")
    with pytest.raises(CGXTimeoutError), trail.waiting_for(0):
        raise CGXTimeoutError("too late")
    trail.finish(CGXTimeoutError("too late"))
    group.recorder.write("failure")
    (told,) = written(tmp_path)["operations"]
    assert (told["state"], told["waiting_for"]["rank"]) == ("failed", 4)
    assert told["error"] == "CGXTimeoutError: too late"


def test_only_the_first_of_our_errors_of_a_group_is_written(tmp_path: Path) -> None:
    group = group_in(tmp_path)
    group.fail(ValueError("a caller's mistake"))
    assert not list(tmp_path.iterdir())
    group.fail(CGXTimeoutError("first"))
    (path,) = tmp_path.iterdir()
    path.unlink()
    group.fail(CGXTimeoutError("second"))
    assert not list(tmp_path.iterdir())
    assert group.failure == "CGXTimeoutError: first"


def test_without_a_folder_nothing_is_written() -> None:
    group = group_in(None)
    group.begin(BARRIER, "gloo")
    assert group.recorder.write("signal") is None


def test_a_folder_that_cannot_be_made_gives_one_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    group = group_in(tmp_path / "file" / "below")
    with caplog.at_level(logging.WARNING, "torch_cgx"):
        group.fail(CGXTimeoutError("what matters"))
        group.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "CGX_TRACE_DIR" in caplog.text


class FakeNative:
    """A group on shared memory as far as it is asked: operation 3 is the board's 30th, and done."""

    def record(self, number: int) -> Any:
        from torch_cgx._native import Record

        if number != 3:
            return None
        return Record(number=3, sequence=30, state=2, submitted_ns=1, started_ns=2, finished_ns=9, waited_for=0)

    def peer(self, rank: int) -> tuple[Any, str]:
        from torch_cgx._native import Peer

        return Peer(pid=5, life=1, noted=30, noted_at_ns=1, waits_on=-1), "barrier()"


def test_what_the_native_group_knows_is_kept_when_the_group_ends(tmp_path: Path) -> None:
    group = group_in(tmp_path)
    named = torch.nn.Module()
    named.group_name = "7"
    group.attach(named, "SHM", FakeNative())
    group.append(NativeEntry(group, 3, OpInfo("all_reduce", torch.float32, (8,), "SUM", 32)))
    group.close()
    del named
    group.recorder.write("signal")
    told = written(tmp_path)
    (operation,) = told["operations"]
    assert (operation["number"], operation["state"], operation["finished_ns"]) == (30, "done", 9)
    assert operation["waited_for"]["rank"] == 4
    assert (told["groups"][0]["name"], told["groups"][0]["peers"][0]["number"]) == ("7", 30)


@pytest.mark.parametrize("below", ["", "below"])
def test_a_trace_folder_that_is_a_file_is_refused(tmp_path: Path, below: str) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ValueError, match=r"CGX_TRACE_DIR.*a folder that can be written to"):
        Settings.from_environ({"CGX_TRACE_DIR": str(path / below)})


def test_a_trace_folder_may_have_to_be_made(tmp_path: Path) -> None:
    settings = Settings.from_environ({"CGX_TRACE_DIR": str(tmp_path / "new" / "folder")})
    assert settings.trace_folder == str(tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()
    assert "trace_folder" not in settings.fingerprint()


def test_a_failure_is_kept_while_another_thread_closes_the_group() -> None:
    group = group_in(None)

    class Closing:
        """Is closed by another thread while this one asks where ranks stand."""

        def peer(self, rank: int) -> tuple[_native.Peer, str]:
            if not group.closed:
                group.closed = True
                group._native = None
            return _native.Peer(), f"rank {rank} has called nothing"

        def record(self, number: int) -> None:
            return None

    group.attach(group, "TCP", cast(Any, Closing()))
    group.fail(PoisonedError("rank 4 called abort()"))
    assert [peer["call"] for peer in group.as_dict()["peers"]] == [
        "rank 0 has called nothing",
        "rank 1 has called nothing",
    ]
