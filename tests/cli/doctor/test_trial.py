"""The trial of `cgx doctor` on ranks that are none: which way has failed, and in which words."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from torch_cgx.cli.doctor import trial
from torch_cgx.cli.doctor.trial import Attempt, in_words, try_ways
from torch_cgx.cli.processes import RankFailed, TooSlow
from torch_cgx.config import Compression

Hear = Callable[[int, dict[str, Any]], None]
Run = Callable[[list[str], Hear], None]

TOLD = {"relative_error": 0.1, "same_bits": True, "median_s": 1e-3, "sent_nbytes": 5.0}


@pytest.fixture
def trying(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Run]], tuple[list[Attempt], list[str]]]:
    """Each start of processes is the next of these runs: the attempts, and the ways that were begun."""

    def start(runs: Sequence[Run]) -> tuple[list[Attempt], list[str]]:
        left = list(runs)

        def run_ranks(target: str, asked: dict[str, Any], nproc: int, hear: Hear, *, limit_s: float) -> None:
            assert nproc == 2 and limit_s > 0 and asked["bits"] == 4
            left.pop(0)(asked["ways"], hear)

        monkeypatch.setattr(trial, "run_ranks", run_ranks)
        begun: list[str] = []
        attempts = try_ways(Compression(32), begun.append)
        assert not left
        return attempts, begun

    return start


def well(ways: list[str], hear: Hear) -> None:
    for way in ways:
        hear(0, {"begun": way})
        hear(0, TOLD)


def fails_at_once(ways: list[str], hear: Hear) -> None:
    raise RankFailed(0, "no")


def fails_in_the_first(ways: list[str], hear: Hear) -> None:
    hear(0, {"begun": ways[0]})
    raise RankFailed(1, "it ended with exit code -7 and no result")


def fails_in_the_second(ways: list[str], hear: Hear) -> None:
    well(ways[:1], hear)
    hear(0, {"begun": ways[1]})
    raise TooSlow("no result within 90 s")


def fails_at_last(ways: list[str], hear: Hear) -> None:
    well(ways, hear)
    raise RankFailed(1, "at its end")


def test_all_ways_are_tried_in_the_same_processes(trying: Any) -> None:
    attempts, begun = trying([well])
    assert begun == ["shared memory", "TCP"] == [attempt.over for attempt in attempts]
    assert all(attempt.same_bits and not attempt.error for attempt in attempts)


@pytest.mark.parametrize(
    ("runs", "failed"),
    [
        ([fails_at_once], [True, True]),
        ([fails_in_the_first, well], [True, False]),
        ([fails_in_the_first, fails_at_once], [True, True]),
        ([fails_in_the_second], [False, True]),
        ([fails_at_last], [False, True]),
    ],
)
def test_a_failure_is_that_of_the_way_that_had_begun(runs: list[Run], failed: list[bool], trying: Any) -> None:
    attempts, _ = trying(runs)
    assert [attempt.over for attempt in attempts] == list(trial.WAYS)
    assert [bool(attempt.error) for attempt in attempts] == failed


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RankFailed(1, "it ended with exit code -7 and no result"), "/dev/shm ran full"),
        (RankFailed(1, "it ended with exit code -9 and no result"), "memory"),
        (RankFailed(1, "ranks hold different bits"), "rank 1 failed: ranks hold different bits"),
        (RuntimeError("Connection refused\nframe 1\nframe 2"), "Connection refused"),
        (TooSlow("no result within 90 s"), "no result within 90 s"),
        (PermissionError(1, "Operation not permitted"), "--quick"),
    ],
)
def test_a_failure_is_one_line_that_says_what_to_do(error: Exception, words: str) -> None:
    assert words in in_words(error) and "\n" not in in_words(error)


@pytest.mark.parametrize(
    ("compression", "tried"),
    [
        (Compression(), (4, 512, "maxmin")),
        (Compression(6, 64), (6, 64, "maxmin")),
        (Compression(32, 1024, "rotated"), (4, 1024, "rotated")),
        (Compression(2, 256, "rotated"), (2, 256, "rotated")),
    ],
    ids=str,
)
def test_what_is_in_force_is_tried_and_four_bits_where_that_is_exact(
    compression: Compression, tried: tuple[int, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, str]] = []

    def run_ranks(target: str, told: dict[str, Any], nproc: int, hear: Hear, *, limit_s: float) -> None:
        asked.append((told["bits"], told["bucket_size"], told["quantizer"]))
        well(told["ways"], hear)

    monkeypatch.setattr(trial, "run_ranks", run_ranks)
    attempts = try_ways(compression, lambda way: None)
    assert asked == [tried] and {attempt.bits for attempt in attempts} == {tried[0]}


def test_where_no_process_can_be_started_all_ways_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    attempts = try_ways(Compression(4), lambda way: None)
    assert len(attempts) == 2
    assert all("no process can be started" in attempt.error and "--quick" in attempt.error for attempt in attempts)
