"""Question answering with BERT on a file in SQuAD's format, with gradients that travel at 4 bits a value.

    torchrun --standalone --nproc-per-node 2 examples/bert_qa.py
    mpirun -np 2 python examples/bert_qa.py --data train-v1.1.json --test-data dev-v1.1.json \\
        --pretrained bert-base-uncased --max-length 384 --stride 128 --epochs 2 --batch 12 --lr 3e-5

The first trains a small BERT from random weights until it knows the 40 answers in examples/data/qa.json by heart: it
shows the way, not what BERT can do. The second is the real thing: it needs the package transformers, a network (or a
model's folder in place of the name) and SQuAD 1.1. Prints exact match and F1, on `--test-data` or else on the
training's own file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common import Average, Journal, distribute, flags, join, leave, rise_and_fall, shuffled, total
from squad import Question, Special, Token, Window, Words, best_answer, collate, exact_match, f1, load, windows_of


class Bert(nn.Module):
    """A BERT encoder with a head that scores every token as the answer's start and as its end."""

    def __init__(self, vocabulary: int, longest: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, segments: Tensor, real: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.tokens(tokens) + self.positions(positions) + self.segments(segments))
        return self.head(self.encoder(x, src_key_padding_mask=~real))


class Pretrained(nn.Module):
    """A model of the package transformers, with the interface of `Bert`."""

    def __init__(self, name: str) -> None:
        from transformers import AutoModelForQuestionAnswering

        super().__init__()
        self.model = AutoModelForQuestionAnswering.from_pretrained(name)

    def forward(self, tokens: Tensor, segments: Tensor, real: Tensor) -> Tensor:
        scores = self.model(input_ids=tokens, token_type_ids=segments, attention_mask=real.long())
        return torch.stack((scores.start_logits, scores.end_logits), -1)


def pretrained_tokenizer(name: str) -> tuple[Callable[[str], list[Token]], Special]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name, use_fast=True)  # the fast ones tell where a token was

    def tokenize(text: str) -> list[Token]:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [Token(n, *place) for n, place in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)]

    return tokenize, Special(tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)


def train(options: argparse.Namespace) -> None:
    device = join(options)
    questions = load(options.data)
    tokenize: Callable[[str], list[Token]]
    if options.pretrained:
        tokenize, special = pretrained_tokenizer(options.pretrained)
        model: nn.Module = Pretrained(options.pretrained)
    else:
        tokenize = words = Words(text for question in questions for text in (question.text, question.context))
        special = Special()
        model = Bert(words.vocabulary, options.max_length, options.layers, options.width, options.heads)
    windows = windows_of(questions, tokenize, options.max_length, options.stride, special)
    steps_an_epoch = len(windows) // (options.batch * dist.get_world_size())
    if steps_an_epoch == 0:
        raise ValueError(
            f"--batch {options.batch} on {dist.get_world_size()} processes: there are {len(windows)} windows only"
        )

    steps = max(1, round(options.epochs * steps_an_epoch))
    model.to(device)
    ddp, state = distribute(model, options)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, weight_decay=0.01)
    schedule = rise_and_fall(optimizer, steps)
    average = Average(model, options.average)
    journal = Journal(options, state, steps, device)
    for step in range(steps):
        epoch, number = divmod(step, steps_an_epoch)
        if number == 0:
            batches = shuffled(len(windows), options.batch, options.seed, epoch)
        *inputs, answers = collate([windows[index] for index in next(batches)], special.pad, device)
        scores = ddp(*inputs)
        loss = (F.cross_entropy(scores[..., 0], answers[:, 0]) + F.cross_entropy(scores[..., 1], answers[:, 1])) / 2
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update()
        journal.step(loss)
    journal.stop()
    average.apply()
    if options.test_data:
        questions = load(options.test_data)
        windows = windows_of(questions, tokenize, options.max_length, options.stride, special)
    match, overlap = test(model, questions, windows, special.pad, device)
    journal.finish(model, exact_match=match, f1=overlap)


@torch.inference_mode()
def test(
    model: nn.Module, questions: list[Question], windows: list[Window], pad: int, device: torch.device
) -> tuple[float, float]:
    """Exact match and F1. Each rank answers its share of the questions; the surest of all windows' answers counts."""
    model.eval()
    mine = [window for window in windows if window.question % dist.get_world_size() == dist.get_rank()]
    answers: dict[int, tuple[float, str]] = {}
    for begin in range(0, len(mine), 32):
        batch = mine[begin : begin + 32]
        *inputs, _ = collate(batch, pad, device)
        for window, scores in zip(batch, model(*inputs).log_softmax(1).cpu(), strict=True):
            answer = best_answer(window, scores[:, 0], scores[:, 1], questions[window.question].context)
            answers[window.question] = max(answer, answers.get(window.question, answer))
    match = overlap = 0.0
    for index, (_, answer) in answers.items():
        accepted = [text for _, text in questions[index].answers]
        match += exact_match(answer, accepted)
        overlap += f1(answer, accepted)
    match, overlap, count = total(match, overlap, len(answers), device=device)
    return match / count, overlap / count


def main() -> None:
    parser = flags(__doc__, epochs=60, batch=8, lr=1e-3)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "qa.json", metavar="FILE")
    parser.add_argument("--test-data", type=Path, metavar="FILE")
    parser.add_argument("--pretrained", metavar="NAME", help="a model that transformers can load")
    parser.add_argument("--max-length", type=int, default=72, help="tokens of question and context together")
    parser.add_argument("--stride", type=int, default=24, help="tokens from one piece of a long context to the next")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    train(parser.parse_args())
    leave()


if __name__ == "__main__":
    main()
