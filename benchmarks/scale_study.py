"""Compare the rotated codec's two scales by training: unbiased, or least squares.

    python benchmarks/scale_study.py --data ../shared/data --doc docs/codecs.md

A block's levels C times a scale is what a rotated block z decodes to. The unbiased scale is <z, z> / <z, C>, which
docs/wire_format.md defines. That of least squares is <z, C> / <C, C>, which has less error, but makes values smaller by
its own error, at each of the two stages of an allreduce.

Trains the GPT (AdamW) and the small ResNet (SGD with momentum) of accuracy.py in one process that plays 2, 8 or 64
ranks. They share the same global batch: the GPT's 64 pieces of 32 characters, the ResNet's 128 images. Gradients are
summed as SRA does: every rank's contribution is encoded except that of a chunk's owner, and their sum is encoded again,
all in the rotated domain. Rounding is to nearest, without error feedback, with the same signs at every step. The codec
is a few lines of torch here, so that both scales are at hand. Its blocks are those of the library, at 1024 values.

Runs of one seed have the same weights at the start and the same batches, and differ in compression alone. Figures are
those of a running mean of the weights. Bias is <decoded, exact> / <exact, exact> over all compressed layers, the mean
over steps: of the sum of contributions, of the second encoding alone, and of both together.

Each run is stored in the JSON file as soon as it is done, and is not repeated. It took 20 to 310 seconds, on a machine
with other work.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accuracy import of_tenths
from codec_error import Training, image_training, is_compressed, text_training
from markers import write_between
from results import newest_or_new, write_json

HERE = Path(__file__).resolve().parent
WORLDS = (2, 8, 64)
BITS = (2, 3)
BLOCK, SMALLEST = 1024, 64
SCALES = ("unbiased", "least squares")
EXACT = "exact"
CONTEXT = 32  # characters that the GPT sees
MOST_SEEDS = 10
DECAY = 0.98  # of the running mean of weights
MEASURED_EVERY = 10  # steps, from the first on
# Lloyd-Max magnitudes of the normal distribution, and the thresholds between them, to 7 digits.
MAGNITUDES = {2: (0.4527800, 1.5104176), 3: (0.2450942, 0.7560053, 1.3439093, 2.1519457)}
BEGIN, END = "<!-- scales: begin (python benchmarks/scale_study.py) -->", "<!-- scales: end -->"

# ---- the codec, on rows that are rotated blocks ----


@cache
def hadamard(numel: int) -> Tensor:
    """The orthonormal matrix of so many rows."""
    matrix = torch.ones(1, 1)
    while len(matrix) < numel:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(numel)


@cache
def signs(numel: int) -> Tensor:
    return torch.randint(2, (numel,), generator=torch.Generator().manual_seed(5)) * 2.0 - 1


def transform(rows: Tensor) -> Tensor:
    """Hadamard's transform of each row, as that of a matrix from both sides."""
    numel = rows.shape[1]
    left = 1 << (numel.bit_length() - 1) // 2
    return (hadamard(left) @ (rows.view(-1, left, numel // left) @ hadamard(numel // left))).view(-1, numel)


def rotate(rows: Tensor) -> Tensor:
    return transform(rows * signs(rows.shape[1]))


def back(rows: Tensor) -> Tensor:
    return transform(rows) * signs(rows.shape[1])


def decoded(rows: Tensor, bits: int, scale: str) -> Tensor:
    """Return what rotated blocks decode to."""
    magnitudes = torch.tensor(MAGNITUDES[bits])
    size = rows.abs()
    rms = rows.square().mean(1, keepdim=True).sqrt()
    if bits == 2:
        levels = torch.where(size > rms * magnitudes.mean(), *magnitudes.flip(0))
    else:
        thresholds = (magnitudes[1:] + magnitudes[:-1]) / 2
        levels = magnitudes[torch.bucketize(size / torch.where(rms > 0, rms, 1), thresholds)]
    product = (size * levels).sum(1, keepdim=True)
    if scale == "unbiased":
        factor = rows.square().sum(1, keepdim=True) / torch.where(product > 0, product, 1)
    else:
        factor = product / levels.square().sum(1, keepdim=True)
    return (levels * factor).copysign_(rows)


class Blocks:
    """Layers as rows of blocks, one matrix per size of block: whole ones, and powers of two for what is left."""

    def __init__(self, numels: Sequence[int]) -> None:
        self.numels = numels

    def pack(self, layers: Sequence[Tensor]) -> list[Tensor]:
        parts: dict[int, list[Tensor]] = {BLOCK: []}
        for layer in layers:
            values = layer.reshape(-1)
            whole = len(values) // BLOCK * BLOCK
            parts[BLOCK].append(values[:whole].view(-1, BLOCK))
            if rest := len(values) - whole:
                size = size_of(rest)
                parts.setdefault(size, []).append(F.pad(values[whole:], (0, size - rest)).view(1, size))
        return [torch.cat(rows) for rows in parts.values()]

    def unpack(self, packed: Sequence[Tensor]) -> Iterator[Tensor]:
        rows = {matrix.shape[1]: iter(matrix) for matrix in packed[1:]}
        begin = 0
        for numel in self.numels:
            whole = numel // BLOCK
            values = [packed[0][begin : begin + whole].reshape(-1)]
            begin += whole
            if rest := numel % BLOCK:
                values.append(next(rows[size_of(rest)])[:rest])
            yield torch.cat(values)


def size_of(numel: int) -> int:
    return max(SMALLEST, 1 << (numel - 1).bit_length())


# ---- ranks ----


@dataclass
class Bias:
    """Products of what was decoded with what it should be, one triple per measured step."""

    steps: list[tuple[float, float, float]] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def add(self, contributions: list[Tensor], encoded: list[Tensor], exact: list[Tensor]) -> None:
        of_exact = product(exact, exact)
        first, both = product(contributions, exact) / of_exact, product(encoded, exact) / of_exact
        second = product(encoded, contributions) / product(contributions, contributions)
        self.steps.append((first, second, both))
        self.errors.append(product(encoded, encoded) / of_exact - 2 * both + 1)

    def means(self) -> dict[str, float]:
        first, second, both = (round(mean(each), 4) for each in zip(*self.steps, strict=True))
        return {"of_sum": first, "of_second": second, "of_both": both, "error": round(mean(self.errors), 4)}


def product(a: list[Tensor], b: list[Tensor]) -> float:
    return sum(float(torch.dot(x.view(-1), y.view(-1))) for x, y in zip(a, b, strict=True))


def allreduce(of_ranks: Iterator[list[Tensor]], world: int, bits: int, scale: str, bias: Bias | None) -> list[Tensor]:
    """Return the decoded mean of all ranks' packed layers, as SRA makes it. Each rank owns some rows in a row."""
    total: list[Tensor] = []
    exact: list[Tensor] = []
    for rank, packed in enumerate(of_ranks):
        rotated = [rotate(rows) for rows in packed]
        if bias is not None:
            exact = [a + b for a, b in zip(exact, rotated, strict=True)] if exact else list(rotated)
        for number, rows in enumerate(rotated):
            owned = slice(-(-rank * len(rows) // world), -(-(rank + 1) * len(rows) // world))
            kept = rows[owned].clone()
            rotated[number] = decoded(rows, bits, scale)
            rotated[number][owned] = kept
        total = [a.add_(b) for a, b in zip(total, rotated, strict=True)] if total else rotated
    encoded = [decoded(rows, bits, scale) for rows in total]
    if bias is not None:
        bias.add(total, encoded, exact)
    return [back(rows) / world for rows in encoded]


def contributions(
    training: Training, step: int, blocks: Blocks, sums: Sequence[Tensor], losses: list[float]
) -> Iterator[list[Tensor]]:
    """Yield each rank's packed layers, and add all of its gradients to `sums` and its loss to `losses`."""
    parameters = list(training.model.parameters())
    for loss in training.losses(step):
        losses.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, parameters)
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient
        yield blocks.pack([gradient for gradient in gradients if is_compressed(gradient)])


def run(task: str, world: int, setting: str, seed: int, data: Path) -> dict[str, Any]:
    from common import Average

    training = TASKS[task].make(data, seed, world)
    average, bias, losses = Average(training.model, DECAY), Bias(), list[float]()
    parameters = list(training.model.parameters())
    blocks = Blocks([parameter.numel() for parameter in parameters if is_compressed(parameter)])
    start = time.perf_counter()
    for step in range(training.steps):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        of_ranks = contributions(training, step, blocks, sums, losses)
        if setting == EXACT:
            list(of_ranks)
            gradients = [total / world for total in sums]
        else:
            reduced = allreduce(of_ranks, world, *parsed(setting), None if step % MEASURED_EVERY else bias)
            layers = blocks.unpack(reduced)
            gradients = [next(layers).view_as(total) if is_compressed(total) else total / world for total in sums]
        training.apply(gradients)
        average.update()
    average.apply()
    return {
        **TASKS[task].judge(training.model, data),
        "steps": training.steps,
        "losses_of_tenths": of_tenths(losses),
        "seconds": round(time.perf_counter() - start),
        **({"bias": bias.means()} if bias.steps else {}),
    }


@torch.inference_mode()
def judge_text(model: nn.Module, data: Path) -> dict[str, float]:
    import gpt_train

    text, _ = gpt_train.load(data / "tinyshakespeare.txt")
    pieces = text[len(text) * 9 // 10 :].unfold(0, CONTEXT + 1, CONTEXT)
    model.eval()
    loss = sum(float(gpt_train.loss_of(model, piece, "sum")) for piece in pieces.split(64))
    return {"loss": loss / (len(pieces) * CONTEXT)}


@torch.inference_mode()
def judge_images(model: nn.Module, data: Path) -> dict[str, float]:
    """Accuracy in percent and loss, of images as they are and mirrored."""
    import cifar_data

    images = cifar_data.load(data / "cifar10_subset.npz")
    model.eval()
    right = loss = 0.0
    for x, labels in zip(images.test_images.split(500), images.test_labels.split(500), strict=True):
        x = cifar_data.normalized(x)
        scores = (model(x).softmax(1) + model(x.flip(3)).softmax(1)) / 2
        right += float((scores.argmax(1) == labels).sum())
        loss += float(F.nll_loss(scores.log(), labels, reduction="sum"))
    count = len(images.test_labels)
    return {"accuracy": 100 * right / count, "loss": loss / count}


@dataclass(frozen=True)
class Task:
    title: str
    figure: str
    digits: int
    make: Callable[[Path, int, int], Training]
    judge: Callable[[nn.Module, Path], dict[str, float]]
    is_same_for_all_worlds: bool  # exact training: no batch norm, whose statistics are those of a rank's own images


TASKS = {
    "gpt": Task(
        "GPT, AdamW: loss, nats",
        "loss",
        3,
        lambda data, seed, world: text_training("gpt", data, seed, world, batch=64, context=CONTEXT, steps=200),
        judge_text,
        True,
    ),
    "cifar": Task(
        "ResNet, SGD with momentum: accuracy, %",
        "accuracy",
        1,
        lambda data, seed, world: image_training("cifar", data, seed, world, batch=128, epochs=4),
        judge_images,
        False,
    ),
}


def setting_of(bits: int, scale: str) -> str:
    return f"{bits} bits, {scale}"


def parsed(setting: str) -> tuple[int, str]:
    bits, _, scale = setting.partition(" bits, ")
    return int(bits), scale


def key(task: str, world: int, setting: str, seed: int) -> str:
    """Exact runs without batch norm are the same for all worlds, and made with 2 ranks."""
    if setting == EXACT and TASKS[task].is_same_for_all_worlds:
        world = WORLDS[0]
    return f"{task}, {world} ranks, {setting}, seed {seed}"


# ---- what is told ----


def table(runs: dict[str, Any]) -> str:
    lines = [
        "| training | ranks | gradients | difference to exact, by seed | the same of the last training loss | bias of "
        "the sum | of the second encoding | of both | squared error |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, task in TASKS.items():
        for world in WORLDS:
            for setting in [setting_of(bits, scale) for bits in BITS for scale in SCALES]:
                pairs = [
                    (runs[key(name, world, setting, seed)], runs[key(name, world, EXACT, seed)])
                    for seed in range(MOST_SEEDS)
                    if key(name, world, setting, seed) in runs and key(name, world, EXACT, seed) in runs
                ]
                if not pairs:
                    continue
                cells = [task.title, str(world), setting]
                cells.append(", ".join(f"{a[task.figure] - b[task.figure]:+.{task.digits}f}" for a, b in pairs))
                cells.append(
                    ", ".join(f"{a['losses_of_tenths'][-1] - b['losses_of_tenths'][-1]:+.3f}" for a, b in pairs)
                )
                for part in ("of_sum", "of_second", "of_both", "error"):
                    cells.append(f"{mean(ours['bias'][part] for ours, _ in pairs):.3f}")
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def exact_figures(runs: dict[str, Any]) -> Iterator[str]:
    for name, task in TASKS.items():
        for world in WORLDS[:1] if task.is_same_for_all_worlds else WORLDS:
            figures = [
                f"{runs[key(name, world, EXACT, seed)][task.figure]:.{task.digits}f}"
                for seed in range(MOST_SEEDS)
                if key(name, world, EXACT, seed) in runs
            ]
            if figures:
                ranks = "any number of" if task.is_same_for_all_worlds else str(world)
                yield f"- exact, {task.title}, {ranks} ranks: {', '.join(figures)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "data", metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", choices=WORLDS, default=WORLDS)
    parser.add_argument("--bits", type=int, nargs="+", choices=BITS, default=BITS)
    parser.add_argument("--only", choices=TASKS, action="append", help="one task; may be given twice")
    parser.add_argument("--json", type=Path, help="the file of runs (the newest in benchmarks/results)")
    parser.add_argument("--stored", action="store_true", help="run nothing: tell what the JSON file has")
    parser.add_argument("--doc", type=Path, help="write the table into this file, between its markers")
    options = parser.parse_args()
    options.json = options.json or newest_or_new("scale-study.json")
    torch.set_num_threads(1)
    runs: dict[str, Any] = json.loads(options.json.read_text())["runs"] if options.json.exists() else {}
    wanted = [
        (task, world, setting, seed)
        for seed in options.seeds
        for world in options.ranks
        for task in options.only or TASKS
        for setting in (EXACT, *(setting_of(bits, scale) for bits in options.bits for scale in SCALES))
    ]
    for each in () if options.stored else wanted:
        if key(*each) not in runs:
            result = runs[key(*each)] = run(*each, options.data)
            print(f"{key(*each)}: {json.dumps(result)}", file=sys.stderr, flush=True)
            write_json(options.json, {"runs": runs})
    text = "\n".join([table(runs), "", *exact_figures(runs)])
    print(text)
    if options.doc:
        write_between(options.doc, BEGIN, END, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
