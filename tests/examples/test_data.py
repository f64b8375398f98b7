"""Read and judge what the examples train on: CIFAR-10's formats and SQuAD's."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pickle
import struct
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def load_module(path: Path) -> ModuleType:
    """A file that is not in a package, under a name that nobody else has."""
    name = f"examples_under_test_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


cifar_data = load_module(ROOT / "examples" / "cifar_data.py")
squad = load_module(ROOT / "examples" / "squad.py")


def some_images(count: int, seed: int) -> tuple[Any, Any]:
    """As an .npz has them: (n, 32, 32, 3)."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (count, 32, 32, 3), np.uint8), draw.integers(0, 10, count).astype(np.uint8)


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes bytes as Python 2 wrote its strings, as in the official files."""

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_string}  # type: ignore[attr-defined]  # noqa: RUF012


def write_batches(folder: Path, images: Any, labels: Any, test_images: Any, test_labels: Any) -> None:
    folder.mkdir(parents=True)
    parts = [*zip(np.array_split(images, 5), np.array_split(labels, 5), strict=True), (test_images, test_labels)]
    for name, (x, y) in zip([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"], parts, strict=True):
        rows = x.transpose(0, 3, 1, 2).reshape(len(x), -1)  # red, then green, then blue
        with (folder / name).open("wb") as file:
            Python2Pickler(file, protocol=2).dump({b"data": np.ascontiguousarray(rows), b"labels": y.tolist()})


@pytest.fixture
def arrays() -> tuple[Any, ...]:
    return (*some_images(25, 1), *some_images(6, 2))


def assert_holds(data: Any, arrays: tuple[Any, ...]) -> None:
    for images, labels, expected, expected_labels in ((*data[:2], *arrays[:2]), (*data[2:], *arrays[2:])):
        assert images.dtype == torch.uint8 and labels.dtype == torch.int64
        np.testing.assert_array_equal(images.permute(0, 2, 3, 1).numpy(), expected)
        np.testing.assert_array_equal(labels.numpy(), expected_labels)


def test_cifar_is_read_from_an_npz(tmp_path: Path, arrays: tuple[Any, ...]) -> None:
    np.savez(tmp_path / "it.npz", **dict(zip(cifar_data.ARRAYS, arrays, strict=True)))
    assert_holds(cifar_data.load(tmp_path / "it.npz"), arrays)


@pytest.mark.parametrize("inside", [True, False], ids=["the folder that holds them", "their folder"])
def test_cifar_is_read_from_the_standard_batches(tmp_path: Path, arrays: tuple[Any, ...], inside: bool) -> None:
    write_batches(tmp_path / cifar_data.FOLDER, *arrays)
    assert_holds(cifar_data.load(tmp_path if inside else tmp_path / cifar_data.FOLDER), arrays)


def test_data_that_are_not_there_are_an_error_that_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"test_batch.*--download"):
        cifar_data.load(tmp_path)
    np.savez(tmp_path / "it.npz", train_images=np.zeros(1))
    with pytest.raises(ValueError, match="has no train_labels, test_images, test_labels"):
        cifar_data.load(tmp_path / "it.npz")


def make_archive(folder: Path, arrays: tuple[Any, ...]) -> tuple[str, str]:
    """Its address and md5."""
    write_batches(folder / "official" / cifar_data.FOLDER, *arrays)
    archive = folder / "official.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "official" / cifar_data.FOLDER, cifar_data.FOLDER)
    return archive.as_uri(), hashlib.md5(archive.read_bytes()).hexdigest()


def test_a_downloaded_archive_is_unpacked_once(tmp_path: Path, arrays: tuple[Any, ...]) -> None:
    address, md5 = make_archive(tmp_path, arrays)
    cifar_data.download(tmp_path / "data", address, md5)
    assert_holds(cifar_data.load(tmp_path / "data"), arrays)
    cifar_data.download(tmp_path / "data", "file:///nowhere", md5)
    assert [path.name for path in (tmp_path / "data").iterdir()] == [cifar_data.FOLDER]


def test_a_downloaded_archive_that_is_another_is_refused(tmp_path: Path, arrays: tuple[Any, ...]) -> None:
    address, md5 = make_archive(tmp_path, arrays)
    with pytest.raises(ValueError, match=f"expected md5 {cifar_data.MD5}, got {md5}"):
        cifar_data.download(tmp_path / "data", address)
    assert list((tmp_path / "data").iterdir()) == []


def test_augmentation_moves_and_mirrors_whole_images() -> None:
    image = torch.arange(1, 3 * 32 * 32 + 1, dtype=torch.int32).view(1, 3, 32, 32)
    padded = torch.nn.functional.pad(image[0], (4, 4, 4, 4))
    possible = {
        view.numpy().tobytes()
        for row in range(9)
        for column in range(9)
        for cut in (padded[:, row : row + 32, column : column + 32],)
        for view in (cut.contiguous(), cut.flip(2).contiguous())
    }
    out = cifar_data.augmented(image.repeat(200, 1, 1, 1), torch.Generator().manual_seed(0))
    seen = {one.numpy().tobytes() for one in out}
    assert seen <= possible and len(seen) > 100


def test_augmentation_moves_small_images_less_and_leaves_mirroring_away() -> None:
    image = torch.arange(1, 3 * 8 * 8 + 1, dtype=torch.int32).view(1, 3, 8, 8)
    padded = torch.nn.functional.pad(image[0], (1, 1, 1, 1))
    possible = {
        padded[:, row : row + 8, column : column + 8].numpy().tobytes() for row in range(3) for column in range(3)
    }
    out = cifar_data.augmented(image.repeat(200, 1, 1, 1), torch.Generator().manual_seed(0), mirror=False)
    assert {one.numpy().tobytes() for one in out} == possible


def test_digits_are_those_of_scikit_learn_unless_a_folder_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    monkeypatch.chdir(tmp_path)
    digits = cifar_data.load(Path("digits"))
    images = torch.cat((digits.train_images, digits.test_images))
    official = datasets.load_digits()
    assert images.shape == (1797, 3, 8, 8) and images.dtype == torch.uint8 and len(digits.test_images) == 599
    assert torch.equal(
        (images / (255 / 16)).round().double(), torch.from_numpy(official.images)[:, None].expand_as(images)
    )
    assert torch.cat((digits.train_labels, digits.test_labels)).tolist() == official.target.tolist()
    Path("digits").mkdir()
    with pytest.raises(FileNotFoundError, match="data_batch_1"):
        cifar_data.load(Path("digits"))


CONTEXT = "The tower, built in 1759, had twenty-four candles. Its keeper trimmed them every half hour."


@pytest.fixture
def question() -> Any:
    return squad.Question("q1", "How many candles?", CONTEXT, [(CONTEXT.index("twenty-four"), "twenty-four")])


def write_squad(path: Path, start: int, text: str) -> Path:
    entry = {"id": "q1", "question": "How many?", "answers": [{"text": text, "answer_start": start}]}
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": [entry]}]}]}))
    return path


def test_a_squad_file_is_read(tmp_path: Path) -> None:
    start = CONTEXT.index("twenty")
    assert squad.load(write_squad(tmp_path / "it.json", start, "twenty-four")) == [
        squad.Question("q1", "How many?", CONTEXT, [(start, "twenty-four")])
    ]


def test_an_answer_that_is_not_where_the_file_says_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="answer to q1 is 'twenty', but at 4 there is 'tower,'"):
        squad.load(write_squad(tmp_path / "it.json", 4, "twenty"))


def test_the_tokens_of_an_answer_are_found_by_its_characters(question: Any) -> None:
    tokens = squad.Words([CONTEXT])(CONTEXT)
    first, last = squad.span(tokens, *question.answers[0])
    assert [CONTEXT[token.start : token.end] for token in tokens[first : last + 1]] == ["twenty", "-", "four"]
    assert squad.span(tokens, CONTEXT.index("wen"), "wen") == (first, first)


@pytest.mark.parametrize("stride", [1, 3, 7])
def test_windows_cover_a_long_context_and_know_where_the_answer_is(question: Any, stride: int) -> None:
    words = squad.Words([CONTEXT, question.text])
    windows = squad.windows_of([question], words, 16, stride)
    assert len(windows) > 1 and all(len(window.tokens) <= 16 for window in windows)
    seen = {place for window in windows for place in window.places if place}
    assert seen == {(token.start, token.end) for token in words(CONTEXT)}
    for window in windows:
        assert len(window.tokens) == len(window.segments) == len(window.places)
        shown = CONTEXT[min(place[0] for place in window.places if place) : max(p[1] for p in window.places if p)]
        if "twenty-four" in shown:
            assert CONTEXT[window.places[window.start][0] : window.places[window.end][1]] == "twenty-four"
        else:
            assert (window.start, window.end) == (0, 0)
    assert any(window.start for window in windows)


def test_a_short_context_is_one_window(question: Any) -> None:
    assert len(squad.windows_of([question], squad.Words([CONTEXT]), 64, 16)) == 1


def test_windows_that_would_skip_a_piece_of_the_context_are_refused(question: Any) -> None:
    with pytest.raises(ValueError, match=r"windows of 16 tokens leave 9 .* got stride 10"):
        squad.windows_of([question], squad.Words([CONTEXT]), 16, 10)


def test_the_answer_is_the_best_span_that_is_possible(question: Any) -> None:
    (window,) = squad.windows_of([question], squad.Words([CONTEXT]), 64, 16)
    starts, ends = torch.zeros(2, 64)
    starts[0] = ends[0] = 100  # [CLS] is no answer
    starts[window.end] = ends[window.start - 1] = 50  # nor one whose end is before its start
    starts[window.start], ends[window.end] = 60, 60
    assert squad.best_answer(window, starts, ends, CONTEXT) == (120.0, "twenty-four")


def test_answers_are_compared_without_case_articles_and_punctuation() -> None:
    assert squad.exact_match("The Railway.", ["canal", "railway"]) == 1.0
    assert squad.exact_match("railways", ["railway"]) == 0.0
    assert squad.f1("the old railway", ["a railway"]) == pytest.approx(2 / 3)
    assert squad.f1("canal", ["railway"]) == 0.0


def test_every_answer_of_the_file_that_comes_with_the_examples_is_whole_tokens() -> None:
    questions = squad.load(ROOT / "examples" / "data" / "qa.json")
    assert len(questions) == 40 and len({question.name for question in questions}) == 40
    words = squad.Words(question.context for question in questions)
    for question in questions:
        tokens = words(question.context)
        for start, text in question.answers:
            first, last = squad.span(tokens, start, text)
            assert question.context[tokens[first].start : tokens[last].end] == text
