"""Measure the squared error of codecs on gradients of real training runs, as a share of |x|^2.

    python benchmarks/codec_error.py --data ../shared/data --doc docs/codecs.md

Trains the five models of accuracy.py exactly, in one process that plays both ranks, for a third of the steps that
accuracy.py takes. At 5, 25, 50 and 90 % of the steps every codec encodes and decodes rank 0's gradient of every layer
that the hook would compress. `maxmin` and `rotated` are the library's own, by `torch_cgx.quantize`. The others are
plain torch, and their bits per value are those of their definition, with headers.

An error of several layers is the sum of their squared errors over the sum of their squares. Tables have its mean over
the four steps. Prints them in markdown, and whether the goals are met. `--doc` writes all into a page, between its
markers.

The folder of `--data` holds cifar10_subset.npz and tinyshakespeare.txt; the ViT's digits come with scikit-learn. With
`--cache FILE` recorded gradients are kept there, and the next run does not train. Training
takes 80 seconds of a core, and measuring 5.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_cgx
from markers import write_between
from results import newest_or_new, write_json

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

WORLD = 2
MOMENTS = (0.05, 0.25, 0.5, 0.9)  # of the steps
LEAST_NUMEL = 1024  # the hook's layer_min_size
TITLES = {"gpt": "GPT", "cifar": "ResNet", "vgg": "VGG", "vit": "ViT", "bert": "BERT"}
KINDS = ("embedding", "attention", "MLP", "convolution", "head")
OURS, OTHERS = "rotated, block 1024", ("max-min, block 1024", "max-min, block 128")
GOALS = {4: 5.0, 3: 6.5, 2: 9.0}  # times less error than max-min in blocks of 1024, on the GPT
BEGIN, END = "<!-- codec error: begin (python benchmarks/codec_error.py) -->", "<!-- codec error: end -->"

# ---- training runs ----


@dataclass(frozen=True)
class Training:
    """A training run in one process: `losses` are those of each rank's part of a step's batch, in turn."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    steps: int
    clip: bool
    losses: Callable[[int], Iterator[Tensor]]

    def gradients(self, step: int) -> Iterator[tuple[Tensor, ...]]:
        """Compute the gradients of one rank after the other."""
        for loss in self.losses(step):
            yield torch.autograd.grad(loss, list(self.model.parameters()))

    def apply(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()


def text_training(name: str, data: Path, seed: int, world: int, batch: int, context: int, steps: int) -> Training:
    """The GPT or the BERT as accuracy.py trains them. `batch` is that of all ranks, the same for any world."""
    import bert_train
    import gpt_train
    from common import generator, rise_and_fall
    from gpt import GPT

    text, vocabulary = gpt_train.load(data / "tinyshakespeare.txt")
    text = text[: len(text) * 9 // 10]
    torch.manual_seed(seed)
    is_gpt = name == "gpt"
    if is_gpt:
        model: nn.Module = GPT(len(vocabulary), context, layers=2, width=96, heads=4)
    else:
        model = bert_train.Bert(len(vocabulary), context, layers=2, width=64, heads=4)
    lr, decay = (3e-3, 0.1) if is_gpt else (6e-3, 0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.99), weight_decay=decay)

    def losses(step: int) -> Iterator[Tensor]:
        noise = generator(seed, step)
        starts = torch.randint(len(text) - context, (batch,), generator=noise)
        x = text[starts[:, None] + torch.arange(context + is_gpt)]
        if is_gpt:
            yield from (gpt_train.loss_of(model, part) for part in x.chunk(world))
            return
        seen, guess = bert_train.masked(x, len(vocabulary), noise)
        for part in zip(x.chunk(world), seen.chunk(world), guess.chunk(world), strict=True):
            yield bert_train.loss_of(model, *part, torch.device("cpu"))

    return Training(model, optimizer, rise_and_fall(optimizer, steps), steps, True, losses)


def image_training(name: str, data: Path, seed: int, world: int, batch: int, epochs: float) -> Training:
    """The ResNet, the VGG or the ViT as accuracy.py trains them. `batch` is that of all ranks."""
    import cifar_data
    from common import generator, rise_and_fall
    from resnet import MODELS
    from vgg import VGG
    from vit import ViT

    images = cifar_data.load(Path("digits") if name == "vit" else data / "cifar10_subset.npz")
    torch.manual_seed(seed)
    model = {"cifar": MODELS["small"], "vgg": partial(VGG, 32), "vit": partial(ViT, 8, 2)}[name]()
    parameters = model.parameters()
    if name == "vit":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, 3e-3, weight_decay=0.05)
    else:
        lr = 0.1 if name == "cifar" else 0.05
        optimizer = torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps_per_epoch = len(images.train_images) // batch
    steps = round(epochs * steps_per_epoch)

    def losses(step: int) -> Iterator[Tensor]:
        epoch, number = divmod(step, steps_per_epoch)
        order = torch.randperm(len(images.train_images), generator=generator(seed, epoch))
        chosen = order[number * batch : (number + 1) * batch]
        x = cifar_data.augmented(images.train_images[chosen], generator(seed, step, 1), mirror=name != "vit")
        parts = zip(cifar_data.normalized(x).chunk(world), images.train_labels[chosen].chunk(world), strict=True)
        yield from (F.cross_entropy(model(part), labels) for part, labels in parts)

    return Training(model, optimizer, rise_and_fall(optimizer, steps), steps, False, losses)


TRAININGS: dict[str, Callable[[Path], Training]] = {
    "gpt": lambda data: text_training("gpt", data, seed=0, world=WORLD, batch=32, context=64, steps=360),
    "cifar": lambda data: image_training("cifar", data, seed=0, world=WORLD, batch=128, epochs=6.7),
    "vgg": lambda data: image_training("vgg", data, seed=0, world=WORLD, batch=64, epochs=2.7),
    "vit": lambda data: image_training("vit", data, seed=0, world=WORLD, batch=64, epochs=8),
    "bert": lambda data: text_training("bert", data, seed=0, world=WORLD, batch=64, context=32, steps=196),
}


def is_compressed(parameter: Tensor) -> bool:
    return parameter.dim() > 1 and parameter.numel() >= LEAST_NUMEL


def kind_of(name: str, shape: torch.Size) -> str:
    """The kind of a layer of the examples' models, by its name and shape. The VGG's head has an MLP's layer first."""
    if len(shape) == 4:
        return "convolution"
    if name.startswith(("tokens", "positions")):
        return "embedding"
    if "attention" in name:
        return "attention"
    return "MLP" if "mlp" in name or name == "head.1.weight" else "head"


def record(training: Training) -> list[dict[str, Any]]:
    """Train, and return rank 0's gradients at the chosen moments."""
    snapshots = []
    chosen = {int(moment * training.steps) for moment in MOMENTS}
    for step in range(training.steps):
        of_ranks = list(training.gradients(step))
        if step in chosen:
            named = zip(training.model.named_parameters(), of_ranks[0], strict=True)
            layers = {name: gradient.clone() for (name, parameter), gradient in named if is_compressed(parameter)}
            snapshots.append({"step": step, "layers": layers})
        training.apply([torch.stack(parts).mean(0) for parts in zip(*of_ranks, strict=True)])
    return snapshots


# ---- codecs ----


@dataclass(frozen=True)
class Trial:
    """A codec under test: `run` returns what a layer decodes to, and the bytes that it was encoded to."""

    name: str
    bits: int
    run: Callable[[Tensor], tuple[Tensor, float]]


def ours(quantizer: str, bits: int, block: int, x: Tensor) -> tuple[Tensor, float]:
    payload = torch_cgx.quantize(x, bits, block, quantizer=quantizer)
    return torch_cgx.dequantize(payload, x.numel(), x.dtype, bits, block, quantizer=quantizer), payload.numel()


def least_squares(bits: int, block: int, x: Tensor) -> tuple[Tensor, float]:
    """Rotated, but with the scale of least squares: <x, y> / <y, y> times ours, for the rotation keeps products.

    In an incomplete block it is that of its real values.
    """
    decoded, nbytes = ours("rotated", bits, block, x)
    values, y = (F.pad(each, (0, -x.numel() % block)).view(-1, block) for each in (x, decoded))
    squares = y.square().sum(1, keepdim=True)
    scale = (values * y).sum(1, keepdim=True) / torch.where(squares > 0, squares, 1)
    return (y * scale).view(-1)[: x.numel()], nbytes


def maxmin_bf16(bits: int, block: int, x: Tensor) -> tuple[Tensor, float]:
    """Max-min with a block's minimum and unit in bfloat16."""
    blocks = in_blocks(x, block)
    low = blocks.amin(1, keepdim=True).bfloat16().float()
    unit = ((blocks.amax(1, keepdim=True) - low) / (2**bits - 1)).bfloat16().float()
    levels = ((blocks - low) / torch.where(unit > 0, unit, 1)).round().clamp(0, 2**bits - 1)
    return (low + unit * levels).view(-1)[: x.numel()], nbytes_of(x, bits, block, 4)


NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
E2M1 = tuple(sign * value for sign in (-1, 1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


def nf4(x: Tensor) -> tuple[Tensor, float]:
    blocks = in_blocks(x, 64)
    scale = blocks.abs().amax(1, keepdim=True).bfloat16().float()
    return by_table(blocks, scale, NF4).view(-1)[: x.numel()], nbytes_of(x, 4, 64, 2)


def mxfp4(x: Tensor) -> tuple[Tensor, float]:
    """E2M1 in blocks of 32, with the power of two that brings a block's largest value to between 4 and 8 (cut at 6)."""
    blocks = in_blocks(x, 32)
    exponent = blocks.abs().amax(1, keepdim=True).clamp_min(2.0**-126).log2().floor() - 2
    return by_table(blocks, exponent.exp2(), E2M1).view(-1)[: x.numel()], nbytes_of(x, 4, 32, 1)


def fp8(block: int, x: Tensor) -> tuple[Tensor, float]:
    blocks = in_blocks(x, block)
    scale = blocks.abs().amax(1, keepdim=True) / 448
    scaled = (blocks / torch.where(scale > 0, scale, 1)).to(torch.float8_e4m3fn)
    return (scaled.float() * scale).view(-1)[: x.numel()], nbytes_of(x, 8, block, 4)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Rows of `block` values, the last one filled up with its last value."""
    x = x.reshape(-1)
    return torch.cat((x, x[-1:].expand(-x.numel() % block))).view(-1, block)


def by_table(blocks: Tensor, scale: Tensor, table: Sequence[float]) -> Tensor:
    levels = torch.tensor(sorted(set(table)))
    nearest = torch.bucketize(blocks / torch.where(scale > 0, scale, 1), (levels[1:] + levels[:-1]) / 2)
    return scale * levels[nearest]


def nbytes_of(x: Tensor, bits: int, block: int, header_nbytes: int) -> float:
    return x.numel() * bits / 8 + -(-x.numel() // block) * header_nbytes


def key_of(name: str, bits: int) -> str:
    return f"{name}, {bits} {'bit' if bits == 1 else 'bits'}"


def trials() -> Iterator[Trial]:
    yield Trial("fp8 e4m3, block 128", 8, partial(fp8, 128))
    yield Trial("max-min, block 1024", 8, partial(ours, "maxmin", 8, 1024))
    for bits in (4, 3, 2, 1):
        yield Trial("max-min, block 1024", bits, partial(ours, "maxmin", bits, 1024))
        yield Trial("max-min, block 128", bits, partial(ours, "maxmin", bits, 128))
        yield Trial("max-min, block 128, bf16 headers", bits, partial(maxmin_bf16, bits, 128))
        if bits == 4:
            yield Trial("NF4, block 64", bits, nf4)
            yield Trial("MXFP4, block 32", bits, mxfp4)
        yield Trial(OURS, bits, partial(ours, "rotated", bits, 1024))
        yield Trial(f"{OURS}, least squares", bits, partial(least_squares, bits, 1024))


def measure(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of every layer: for each snapshot its squares, and the share of them that codecs lose."""
    codecs, snapshots, layers = list(trials()), [], []
    for snapshot in recorded["snapshots"]:
        layers, squares, errors = [], [], []
        for name, gradient in snapshot["layers"].items():
            x = gradient.reshape(-1)
            square = float(x.double().square().sum())
            tried = [trial.run(x) for trial in codecs]
            lost = [float((decoded - x).double().square().sum()) / square for decoded, _ in tried]
            squares.append(square)
            errors.append([float(f"{each:.4g}") for each in lost])
            nbytes = [nbytes for _, nbytes in tried]
            layers.append({"name": name, "kind": kind_of(name, gradient.shape), "numel": x.numel(), "nbytes": nbytes})
        snapshots.append({"step": snapshot["step"], "squares": squares, "errors": errors})
    return {"steps": recorded["steps"], "layers": layers, "snapshots": snapshots}


# ---- what is told ----


@dataclass(frozen=True)
class Report:
    """The figures of the JSON file. A codec is its number among `codecs`."""

    codecs: list[str]
    models: dict[str, Any]

    def number(self, name: str, bits: int) -> int:
        return self.codecs.index(key_of(name, bits))

    def has_kind(self, model: str, kind: str | None) -> bool:
        return any(kind in (None, layer["kind"]) for layer in self.models[model]["layers"])

    def errors(self, codec: int, model: str, kind: str | None = None) -> list[float]:
        """At each step: the squared error of all layers of a kind (None: of any), as a share of their squares."""
        found = self.models[model]
        chosen = [number for number, layer in enumerate(found["layers"]) if kind in (None, layer["kind"])]
        return [
            sum(each["errors"][number][codec] * each["squares"][number] for number in chosen)
            / sum(each["squares"][number] for number in chosen)
            for each in found["snapshots"]
        ]

    def bits_per_value(self, codec: int) -> float:
        layers = [layer for found in self.models.values() for layer in found["layers"]]
        return 8 * sum(layer["nbytes"][codec] for layer in layers) / sum(layer["numel"] for layer in layers)


def table(report: Report) -> str:
    """One row per codec: its error on every model, and on every kind of layer (the mean over models that have it)."""
    models = list(report.models)
    of_kinds = {kind: [name for name in models if report.has_kind(name, kind)] for kind in KINDS}
    of_kinds = {kind: names for kind, names in of_kinds.items() if names}
    header = ["codec", "bits per value", *(TITLES[name] for name in models), *of_kinds]
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    for codec, name in enumerate(report.codecs):
        cells = [name, f"{report.bits_per_value(codec):.2f}"]
        cells += [share(mean(report.errors(codec, model))) for model in models]
        for kind, names in of_kinds.items():
            cells.append(share(mean(error for model in names for error in report.errors(codec, model, kind))))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def share(value: float) -> str:
    return f"{value:.2g}" if value < 0.001 else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def verdicts(report: Report) -> Iterator[str]:
    for bits, goal in GOALS.items() if "gpt" in report.models else ():
        ours, theirs = (report.errors(report.number(name, bits), "gpt") for name in (OURS, OTHERS[0]))
        factors = [b / a for a, b in zip(ours, theirs, strict=True)]
        factor = mean(theirs) / mean(ours)
        yield (
            f"- GPT, {bits} bits: {factor:.1f} times less error than {OTHERS[0]} (by step: "
            f"{', '.join(f'{each:.1f}' for each in factors)}); the goal of {goal:g} is "
            f"{'met' if factor >= goal else '**NOT met**'}"
        )
    for other in OTHERS:
        yield f"- {comparison(report, other)}"


def comparison(report: Report, other: str) -> str:
    """Compare with `other` on every kind of layer of every model at every step, at 1 to 4 bits."""
    ratios: dict[str, float] = {}
    for bits in (4, 3, 2, 1):
        numbers = report.number(OURS, bits), report.number(other, bits)
        for model, found in report.models.items():
            for kind in KINDS:
                if report.has_kind(model, kind):
                    ours, theirs = (report.errors(number, model, kind) for number in numbers)
                    for a, b, snapshot in zip(ours, theirs, found["snapshots"], strict=True):
                        ratios[f"{TITLES[model]}'s {key_of(kind, bits)}, step {snapshot['step']}"] = a / b
    worse = [ratio for ratio in ratios.values() if ratio > 1]
    worst = max(ratios, key=lambda name: ratios[name])
    return (
        f"rotated against {other}, by model, kind of layer, step and bits: more error in {len(worse)} of {len(ratios)} "
        f"cases, at most {ratios[worst]:.2f} times as much ({worst})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "data", metavar="DIR")
    parser.add_argument("--only", choices=TRAININGS, action="append", help="one model; may be given several times")
    parser.add_argument("--cache", type=Path, help="keep gradients in this file, and take from it what is there")
    parser.add_argument("--json", type=Path, help="the file of figures (the newest in benchmarks/results)")
    parser.add_argument("--stored", action="store_true", help="measure nothing: tell what the JSON file has")
    parser.add_argument("--doc", type=Path, help="write the table into this file, between its markers")
    options = parser.parse_args()
    options.json = options.json or newest_or_new("codec-error.json")
    torch.set_num_threads(1)
    if not options.stored:
        recorded = torch.load(options.cache) if options.cache and options.cache.exists() else {}
        for name in options.only or TRAININGS:
            if name not in recorded:
                start = time.perf_counter()
                training = TRAININGS[name](options.data)
                recorded[name] = {"steps": training.steps, "snapshots": record(training)}
                print(f"{name}: {training.steps} steps in {time.perf_counter() - start:.0f} s", file=sys.stderr)
                if options.cache:
                    torch.save(recorded, options.cache)
        models = {name: measure(recorded[name]) for name in options.only or TRAININGS}
        codecs = [key_of(trial.name, trial.bits) for trial in trials()]
        write_json(options.json, {"world": WORLD, "codecs": codecs, "models": models})
    stored = json.loads(options.json.read_text())
    report = Report(stored["codecs"], stored["models"])
    text = f"{table(report)}\n\n" + "\n".join(verdicts(report))
    print(text)
    if options.doc:
        write_between(options.doc, BEGIN, END, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
