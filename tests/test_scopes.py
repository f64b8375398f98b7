"""`set_default`, `compressed` and `uncompressed`: what holds for a call that is made now, whoever makes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from torch_cgx import compressed, set_default, uncompressed
from torch_cgx.config import BITS_VARIABLE, BLOCK_VARIABLE, QUANTIZER_VARIABLE, Compression
from torch_cgx.scopes import asked_compression, compression, is_uncompressed, share_compression

EXACT = 32


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables before a test, and no defaults after it."""
    monkeypatch.delenv(BITS_VARIABLE, raising=False)
    monkeypatch.delenv(BLOCK_VARIABLE, raising=False)
    monkeypatch.delenv(QUANTIZER_VARIABLE, raising=False)
    yield
    set_default()
    assert compression() == Compression(EXACT, 512)
    assert share_compression().bits == EXACT and not is_uncompressed()


def test_nobody_asked_so_it_is_exact() -> None:
    assert compression() == Compression(EXACT, 512)


def test_the_variables_hold_from_the_next_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BITS_VARIABLE, "4")
    assert compression() == Compression(4, 512)
    monkeypatch.setenv(BLOCK_VARIABLE, "64")
    assert compression() == Compression(4, 64)
    monkeypatch.setenv(BITS_VARIABLE, "")
    assert compression() == Compression(EXACT, 64)
    monkeypatch.delenv(BITS_VARIABLE)
    monkeypatch.delenv(BLOCK_VARIABLE)


def test_a_default_takes_the_place_of_its_variable_and_none_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BITS_VARIABLE, "4")
    monkeypatch.setenv(BLOCK_VARIABLE, "64")
    set_default(bits=2)
    assert compression() == Compression(2, 64)
    set_default(bucket_size=1024)
    assert compression() == Compression(4, 1024)
    set_default(bits=8, bucket_size=128)
    assert compression() == Compression(8, 128)
    set_default(bits=EXACT)
    assert compression().bits == EXACT
    set_default()
    assert compression() == Compression(4, 64)
    monkeypatch.delenv(BITS_VARIABLE)
    monkeypatch.delenv(BLOCK_VARIABLE)


def test_a_quantizer_comes_from_the_block_or_the_default_or_the_variable_in_this_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as variables:
        variables.setenv(BITS_VARIABLE, "4")
        variables.setenv(QUANTIZER_VARIABLE, "rotated")
        assert compression() == Compression(4, 1024, "rotated")
        set_default(quantizer="maxmin")
        assert compression() == Compression(4, 512)
        with compressed(2, quantizer="rotated"):
            assert compression() == share_compression() == Compression(2, 1024, "rotated")
            with compressed(3):
                assert compression() == Compression(3, 1024, "rotated")
            with compressed(8, quantizer="maxmin"):
                assert compression() == Compression(8, 1024)
        set_default(bits=2)
        assert compression() == Compression(2, 1024, "rotated")
        with compressed(3, bucket_size=64):
            assert compression() == Compression(3, 64, "rotated")
        set_default(bits=8)  # right with another variable, which may be set before the next call
        with pytest.raises(ValueError, match="bits of the rotated quantizer: expected 1 to 4"):
            compression()
    assert compression() == Compression(8, 512)


def test_a_quantizer_that_cannot_be_is_refused_and_changes_nothing() -> None:
    set_default(bits=3, quantizer="rotated")
    for wrong, words in (
        ({"quantizer": "maxmax"}, "quantizer: expected 'maxmin' or 'rotated', got 'maxmax'"),
        ({"bits": 5, "quantizer": "rotated"}, "expected 1 to 4"),
        ({"bits": 2, "bucket_size": 100, "quantizer": "rotated"}, "expected one of 64, 128"),
    ):
        with pytest.raises(ValueError, match=words):
            set_default(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected 1 to 4"), compressed(8):
        raise AssertionError("it was entered")
    assert compression() == Compression(3, 1024, "rotated")


@pytest.mark.parametrize(
    ("wrong", "got"),
    [({"bits": 0}, "0"), ({"bits": 9}, "9"), ({"bits": 31}, "31"), ({"bucket_size": 0}, "0"), ({"bits": -1}, "-1")],
)
def test_a_default_out_of_range_is_refused_and_changes_nothing(wrong: dict[str, int], got: str) -> None:
    set_default(bits=3, bucket_size=32)
    with pytest.raises(ValueError, match=f"expected .* got {got}$"):
        set_default(**wrong)
    assert compression() == Compression(3, 32)


def test_a_variable_out_of_range_is_refused_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BITS_VARIABLE, "12")
    with pytest.raises(ValueError, match=f"{BITS_VARIABLE}='12'"):
        compression()
    with uncompressed():
        assert compression().bits == EXACT
    monkeypatch.delenv(BITS_VARIABLE)


def test_uncompressed_is_exact_whatever_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BITS_VARIABLE, "4")
    with uncompressed():
        assert compression().bits == EXACT
        set_default(bits=2)
        assert compression().bits == EXACT
    assert compression().bits == 2
    monkeypatch.delenv(BITS_VARIABLE)


def test_uncompressed_nests() -> None:
    set_default(bits=4)
    with uncompressed():
        with uncompressed():
            assert compression().bits == EXACT
        assert compression().bits == EXACT
    assert compression().bits == 4


def test_uncompressed_ends_with_an_exception() -> None:
    set_default(bits=4)
    with pytest.raises(KeyError), uncompressed(), uncompressed():
        raise KeyError("a mistake of the user's")
    assert compression().bits == 4


def test_uncompressed_is_a_decorator_too() -> None:
    @uncompressed()
    def validate() -> int:
        return compression().bits

    set_default(bits=4)
    assert [validate(), validate(), compression().bits] == [EXACT, EXACT, 4]


def on_another_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(compression().bits))
    thread.start()
    thread.join()
    return found[0]


def test_other_threads_see_both() -> None:
    set_default(bits=5)
    assert on_another_thread() == 5
    with uncompressed():
        assert on_another_thread() == EXACT
    assert on_another_thread() == 5


def test_blocks_of_several_threads_may_overlap_in_any_way() -> None:
    set_default(bits=4)
    entered, leave = threading.Event(), threading.Event()

    def inside() -> None:
        with uncompressed():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=inside)
    with uncompressed():
        thread.start()
        assert entered.wait(10)
    assert compression().bits == EXACT
    leave.set()
    thread.join()
    assert compression().bits == 4


def test_many_threads_leave_nothing_behind() -> None:
    set_default(bits=4)
    wrong: list[int] = []

    def enter_and_leave() -> None:
        for _ in range(500):
            with uncompressed():
                if compression().bits != EXACT:
                    wrong.append(1)

    threads = [threading.Thread(target=enter_and_leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert compression().bits == 4


# ---- compressed ----


def test_only_a_compressed_block_compresses_reduce_scatters_and_all_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BITS_VARIABLE, "4")
    set_default(bits=2)
    assert share_compression().bits == EXACT
    with compressed(3, 64):
        assert share_compression() == compression() == asked_compression() == Compression(3, 64)
        assert not is_uncompressed()
    assert share_compression().bits == EXACT
    assert compression().bits == asked_compression().bits == 2
    monkeypatch.delenv(BITS_VARIABLE)


def test_the_innermost_block_holds_whichever_of_the_two_it_is() -> None:
    with compressed(4), uncompressed():
        assert share_compression().bits == compression().bits == EXACT and is_uncompressed()
        with compressed(8):
            assert share_compression().bits == compression().bits == 8 and not is_uncompressed()
        assert share_compression().bits == EXACT and is_uncompressed()
    with compressed(4), compressed(EXACT):
        assert share_compression().bits == EXACT and is_uncompressed()


def test_a_compressed_block_without_a_bucket_size_has_that_which_holds_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with compressed(4):
        assert compression() == Compression(4, 512)
    monkeypatch.setenv(BLOCK_VARIABLE, "64")
    with compressed(4):
        assert compression() == Compression(4, 64)
    with uncompressed(), compressed(4):
        assert compression() == Compression(4, 64)
    set_default(bucket_size=100)
    with compressed(4), compressed(3):
        assert compression() == Compression(3, 100)
    with compressed(4, 32), uncompressed(), compressed(3):
        assert compression() == Compression(3, 32)
    monkeypatch.delenv(BLOCK_VARIABLE)


@pytest.mark.parametrize("wrong", [{"bits": 0}, {"bits": 9}, {"bits": 4, "bucket_size": 0}, {"bits": 4.5}])
def test_a_compressed_block_out_of_range_is_refused_and_never_entered(wrong: dict[str, int]) -> None:
    with pytest.raises((ValueError, TypeError), match="expected"), compressed(**wrong):
        raise AssertionError("it was entered")
    assert share_compression().bits == EXACT


def test_compressed_ends_with_an_exception_and_is_a_decorator_too() -> None:
    with pytest.raises(KeyError), compressed(4), compressed(4):
        raise KeyError("a mistake of the user's")
    assert compression().bits == EXACT

    @compressed(4)
    def step() -> int:
        return share_compression().bits

    assert [step(), step(), share_compression().bits] == [4, 4, EXACT]


def test_compressed_blocks_of_several_threads_may_end_in_any_order() -> None:
    """Each ends its own, though they are alike."""
    entered, leave = threading.Event(), threading.Event()

    def inside() -> None:
        with compressed(4):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=inside)
    with compressed(3):
        thread.start()
        assert entered.wait(10)
        assert on_another_thread() == 4
    assert compression().bits == share_compression().bits == 4
    leave.set()
    thread.join()
    assert compression().bits == EXACT
