"""Question answering in SQuAD's format: from a JSON file to windows of tokens, and from scores back to answers.

A tokenizer is a function from a text to tokens, each with its number and its place in the text; see `Words`.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PAD, UNKNOWN, CLS, SEP = range(4)
LONGEST_ANSWER = 30  # tokens


class Token(NamedTuple):
    number: int
    start: int  # its first character in the text
    end: int  # one after its last


class Question(NamedTuple):
    name: str
    text: str
    context: str
    answers: list[tuple[int, str]]  # where each begins in the context, and its text


class Window(NamedTuple):
    """[CLS] question [SEP] a piece of the context [SEP], and where the answer is: at [CLS] if not in the piece."""

    question: int
    tokens: list[int]
    segments: list[int]  # 0 to the first [SEP], then 1
    places: list[tuple[int, int] | None]  # of context tokens: their characters in the context
    start: int
    end: int  # the answer's last token


class Special(NamedTuple):
    """The numbers of a tokenizer's own tokens."""

    pad: int = PAD
    cls: int = CLS
    sep: int = SEP


class Words:
    """Splits a text into words and signs, without regard to case; knows those of the texts that it was made from."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({word.group().lower() for text in texts for word in self.split(text)})
        self.numbers = {word: number for number, word in enumerate(known, start=SEP + 1)}
        self.vocabulary = len(known) + SEP + 1

    def __call__(self, text: str) -> list[Token]:
        return [
            Token(self.numbers.get(word.group().lower(), UNKNOWN), word.start(), word.end())
            for word in self.split(text)
        ]

    @staticmethod
    def split(text: str) -> Iterable[re.Match[str]]:
        return re.finditer(r"\w+|[^\w\s]", text)


def load(path: Path) -> list[Question]:
    """The questions of a file in the format of SQuAD 1.1."""
    questions = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            for entry in paragraph["qas"]:
                answers = [(answer["answer_start"], answer["text"]) for answer in entry["answers"]]
                if not answers:
                    raise ValueError(f"{path}: question {entry['id']} has no answer; expected SQuAD 1.1, not 2.0")
                for start, text in answers:
                    if context[start : start + len(text)] != text:
                        there = context[start : start + len(text)]
                        raise ValueError(
                            f"{path}: the answer to {entry['id']} is {text!r}, but at {start} there is {there!r}"
                        )
                questions.append(Question(str(entry["id"]), entry["question"], context, answers))
    return questions


def windows_of(
    questions: Sequence[Question],
    tokenize: Callable[[str], list[Token]],
    longest: int,
    stride: int,
    special: Special | None = None,
) -> list[Window]:
    """Every question with every piece of its context: pieces begin `stride` tokens apart, up to the context's end."""
    special = special or Special()
    windows = []
    for index, question in enumerate(questions):
        asked = [token.number for token in tokenize(question.text)]
        context = tokenize(question.context)
        room = longest - len(asked) - 3
        if not 0 < stride <= room:
            raise ValueError(
                f"question {question.name}: windows of {longest} tokens leave {room} for the context; expected at "
                f"least 1 and a stride of 1 to that, got stride {stride}"
            )
        first, last = span(context, *question.answers[0])
        head = [special.cls, *asked, special.sep]
        for begin in range(0, max(1, len(context) - room + stride), stride):
            piece = context[begin : begin + room]
            inside = begin <= first and last < begin + len(piece)
            windows.append(
                Window(
                    index,
                    [*head, *(token.number for token in piece), special.sep],
                    [0] * len(head) + [1] * (len(piece) + 1),
                    [*[None] * len(head), *((token.start, token.end) for token in piece), None],
                    first - begin + len(head) if inside else 0,
                    last - begin + len(head) if inside else 0,
                )
            )
    return windows


def span(tokens: Sequence[Token], start: int, text: str) -> tuple[int, int]:
    """The first and the last token that have a character of the answer."""
    touched = [number for number, token in enumerate(tokens) if token.start < start + len(text) and token.end > start]
    if not touched:
        raise ValueError(f"no token has a character of the answer {text!r}")
    return touched[0], touched[-1]


def collate(windows: Sequence[Window], pad: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, segments, which of them are real, and the answers' (start, end), as tensors."""
    longest = max(len(window.tokens) for window in windows)

    def filled(rows: Iterable[list[int]], value: int) -> Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows], device=device)

    return (
        filled((window.tokens for window in windows), pad),
        filled((window.segments for window in windows), 0),
        filled(([1] * len(window.tokens) for window in windows), 0).bool(),
        torch.tensor([(window.start, window.end) for window in windows], device=device),
    )


def best_answer(window: Window, starts: Tensor, ends: Tensor, context: str) -> tuple[float, str]:
    """The span of context tokens with the highest start score + end score, and that sum."""
    length = len(window.tokens)
    allowed = torch.tensor([place is not None for place in window.places])
    scores = starts[:length, None] + ends[None, :length]
    possible = (allowed[:, None] & allowed[None, :]).triu().tril(LONGEST_ANSWER - 1)
    place = int(scores.masked_fill(~possible, -torch.inf).argmax())
    first, last = window.places[place // length], window.places[place % length]
    assert first is not None and last is not None
    return float(scores.flatten()[place]), context[first[0] : last[1]]


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    return max(float(bare(answer) == bare(text)) for text in accepted)


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Of the words of the answer and of the accepted one that is most like it."""
    return max(overlap(bare(answer).split(), bare(text).split()) for text in accepted)


def overlap(words: list[str], expected: list[str]) -> float:
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected)) if common else 0.0


def bare(text: str) -> str:
    """As SQuAD compares: without case, punctuation, articles and spare spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
