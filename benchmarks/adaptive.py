"""What policies save on gradients of real trainings, against 4 bits for every layer, and how long they take.

    python benchmarks/adaptive.py --data ../shared/data

Trains the examples' GPT and small ResNet in one process, and takes samples as the hook does with `AdaptiveBits()`:
means of the gradients at 16 steps of a period, measured by the kernels. At each step at which the hook would choose,
every policy chooses, for both kinds of budget. Ratios are what the policy itself knows. "Later error" checks it: the
squared error that the same choice has on gradients of single steps of the period that follows, which nobody has
averaged, as a share of what 4 bits for every layer have there.

Also times the policies, on 50, 500 and 5,000 layers: recorded ones, repeated and each scaled at random.

The folder of `--data` holds cifar10_subset.npz and tinyshakespeare.txt. With `--cache FILE` what was measured while
training is kept there, and the next run does not train.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from results import write_json
from torch_cgx.adaptive import POLICIES, AdaptiveBits, Budget, Candidate, LayerStats
from torch_cgx.adaptive.decision import limited
from torch_cgx.adaptive.layers import total_error, total_nbytes
from torch_cgx.adaptive.policies import Policy
from torch_cgx.config import Compression
from torch_cgx.ddp.buckets import KnownLayer
from torch_cgx.ddp.samples import Samples
from torch_cgx.kernels.native import default_kernels
from torch_cgx.layer_rules import Choices

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

STEPS = 640
SAMPLED = 16  # steps of a period, as the hook does
HELD_OUT = 8  # steps of the period that follows
REFERENCE = Compression(bits=4, block=1024)
OPTIONS = AdaptiveBits()
CANDIDATES = OPTIONS.candidates(REFERENCE)
DEFAULT = OPTIONS.policy
FEWER_BYTES, LESS_ERROR = 1.4, 4.0  # goals, of the GPT
LAYERS = (50, 500, 5000)
LIMIT_MS = 50.0  # goal, at 500 layers
REPEATS = 5
TOO_LONG_S = 20.0  # not repeated, nor tried on more layers

Recorded = dict[str, list["Window"]]


@dataclass(frozen=True)
class Window:
    """What is known when the hook would choose, and what it is then used for."""

    step: int
    layers: list[LayerStats]
    later: list[dict[tuple[int, int], float]]  # of each layer: the squared error by bits and block, mean of steps

    def as_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "layers": [asdict(layer) for layer in self.layers],
            "later": [[[*key, error] for key, error in errors.items()] for errors in self.later],
        }

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Window:
        layers = [
            LayerStats(**{**layer, "candidates": tuple(Candidate(**each) for each in layer["candidates"])})
            for layer in saved["layers"]
        ]
        later = [{(bits, block): error for bits, block, error in errors} for errors in saved["later"]]
        return cls(saved["step"], layers, later)

    def later_error(self, allocation: Sequence[Candidate]) -> float:
        return sum(errors[each.bits, each.block] for errors, each in zip(self.later, allocation, strict=True))


# ---- trainings ----


def train_gpt(data: Path) -> tuple[nn.Module, Iterator[float]]:
    from common import generator, rise_and_fall
    from gpt import GPT
    from gpt_train import load, loss_of

    context, batch = 128, 32
    text, vocabulary = load(data / "tinyshakespeare.txt")
    text = text[: len(text) * 9 // 10]
    model = GPT(len(vocabulary), context, layers=4, width=128, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = rise_and_fall(optimizer, STEPS)

    def steps() -> Iterator[float]:
        places = generator(0)
        while True:
            starts = torch.randint(len(text) - context, (batch,), generator=places)
            loss = loss_of(model, text[starts[:, None] + torch.arange(context + 1)])
            optimizer.zero_grad()
            loss.backward()
            yield float(loss.detach())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()

    return model, steps()


def train_resnet(data: Path) -> tuple[nn.Module, Iterator[float]]:
    from cifar_data import augmented, load, normalized
    from common import generator, rise_and_fall
    from resnet import MODELS

    cifar = load(data / "cifar10_subset.npz")
    model = MODELS["small"]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = rise_and_fall(optimizer, STEPS)

    def steps() -> Iterator[float]:
        noise = generator(0)
        while True:
            batch = torch.randint(len(cifar.train_images), (64,), generator=noise)
            x = normalized(augmented(cifar.train_images[batch], noise))
            loss = F.cross_entropy(model(x), cifar.train_labels[batch])
            optimizer.zero_grad()
            loss.backward()
            yield float(loss.detach())
            optimizer.step()
            schedule.step()

    return model, steps()


TRAININGS: dict[str, Callable[[Path], tuple[nn.Module, Iterator[float]]]] = {"GPT": train_gpt, "ResNet": train_resnet}


def record(name: str, data: Path) -> list[Window]:
    """Train, and at the end of each period measure what the hook would measure; then what comes after it."""
    torch.manual_seed(0)
    model, steps = TRAININGS[name](data)
    layers = free_layers(model)
    kernels = default_kernels()
    samples = Samples(layers, [4] * len(layers), REFERENCE.block)
    chosen_at = [OPTIONS.warmup]
    while chosen_at[-1] + OPTIONS.period < STEPS:
        chosen_at.append(chosen_at[-1] + OPTIONS.period)
    later_at = {
        step: number
        for number, (begin, end) in enumerate(pairwise([*chosen_at, STEPS]))
        for step in spread(begin, end, HELD_OUT)
    }
    stats: list[list[LayerStats]] = []
    later: list[list[Tensor]] = [[] for _ in chosen_at]
    for step, loss in zip(range(STEPS), steps, strict=False):
        if step in chosen_at:
            stats.append(samples.stats(samples.measure(CANDIDATES, kernels), CANDIDATES, skip_incomplete=False))
        period = OPTIONS.warmup if step < OPTIONS.warmup else OPTIONS.period
        if step >= 2 and step % (period // SAMPLED) == 0:
            for layer in layers:
                samples.add([layer], gradient(layer))
        if step in later_at:
            single = Samples(layers, [4] * len(layers), REFERENCE.block)
            single.load({layer.name: gradient(layer) for layer in layers})
            later[later_at[step]].append(single.measure(CANDIDATES, kernels)[:, 1:])
        if step % 80 == 0:
            print(f"{name}: step {step} of {STEPS}, loss {loss:.3f}", file=sys.stderr, flush=True)
    return [
        Window(step, known, [errors_of(row) for row in torch.stack(single).mean(0).tolist()])
        for step, known, single in zip(chosen_at, stats, later, strict=True)
    ]


def spread(begin: int, end: int, count: int) -> list[int]:
    """So many steps, none of which the hook takes a sample of."""
    return [begin + (end - begin) * number // count + (end - begin) // (2 * count) + 1 for number in range(count)]


def errors_of(row: Sequence[float]) -> dict[tuple[int, int], float]:
    return {(each.bits, each.block): error for each, error in zip(CANDIDATES, row, strict=True)}


def free_layers(model: nn.Module) -> list[KnownLayer]:
    """Those that the hook chooses bits for."""
    choices = Choices(REFERENCE, 1024, {})
    return [
        KnownLayer(name, parameter, 0, parameter.numel(), REFERENCE, is_free=True)
        for name, parameter in model.named_parameters()
        if choices.asked([name], parameter.shape, parameter.numel()) is None
    ]


def gradient(layer: KnownLayer) -> Tensor:
    assert layer.parameter.grad is not None
    return layer.parameter.grad.reshape(-1)


# ---- policies ----


def judge(windows: Sequence[Window], policy: str, layer_alpha: float | None, least: str) -> list[dict[str, Any]]:
    """What a policy chooses in each window, in terms of the reference."""
    found = []
    for window in windows:
        budget = Budget(least, REFERENCE.bits, REFERENCE.block)  # type: ignore[arg-type]
        allocation = POLICIES[policy]([limited(layer, budget, layer_alpha) for layer in window.layers], budget)
        uniform = budget.reference(window.layers)
        numel = sum(layer.numel for layer in window.layers)
        bits = sum(layer.numel * each.bits for layer, each in zip(window.layers, allocation, strict=True))
        found.append(
            {
                "step": window.step,
                "bytes": total_nbytes(allocation) / total_nbytes(uniform),
                "error": total_error(allocation) / total_error(uniform),
                "later_error": window.later_error(allocation) / window.later_error(uniform),
                "bits": bits / numel,
                "layers": {
                    layer.name: [each.bits, each.block] for layer, each in zip(window.layers, allocation, strict=True)
                },
            }
        )
    return found


def processor_ms(policy: Policy, layers: Sequence[LayerStats]) -> float:
    """Median over both budgets and some repeats: of processor time, which other work on the machine hardly changes."""
    times = []
    for least in ("bytes", "error") * REPEATS:
        start = time.process_time()
        policy(layers, Budget(least, REFERENCE.bits, REFERENCE.block))  # type: ignore[arg-type]
        times.append(time.process_time() - start)
        if times[-1] > TOO_LONG_S:
            break
    return 1e3 * median(times)


def many_layers(layers: Sequence[LayerStats], count: int) -> list[LayerStats]:
    draw = random.Random(0)
    found = []
    for number in range(count):
        layer, scale = draw.choice(layers), 10 ** draw.uniform(-3, 3)
        candidates = tuple(replace(each, error=each.error * scale) for each in layer.candidates)
        found.append(replace(layer, name=str(number), norm=layer.norm * scale**0.5, candidates=candidates))
    return found


def usable(layers: Sequence[LayerStats]) -> dict[str, Policy]:
    """Without those that need what is not installed."""
    found = {}
    for name, policy in POLICIES.items():
        try:
            policy(layers[:1], Budget(bits=REFERENCE.bits, block=REFERENCE.block))
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            found[name] = policy
    return found


def time_policies(policies: Mapping[str, Policy], layers: Sequence[LayerStats]) -> dict[str, list[float | None]]:
    """Milliseconds for each of LAYERS; None where fewer layers took too long already."""
    found: dict[str, list[float | None]] = {}
    for name, policy in policies.items():
        found[name] = []
        for count in LAYERS:
            too_long = any(each is None or each > 1e3 * TOO_LONG_S for each in found[name])
            found[name].append(None if too_long else processor_ms(policy, many_layers(layers, count)))
    return found


# ---- what is printed ----


def judge_all(
    recorded: Recorded, policies: Mapping[str, Policy]
) -> dict[str, dict[str, dict[str, list[dict[str, Any]]]]]:
    """By model, by row of its table, by what is to be least."""
    rows: dict[str, tuple[str, float | None]] = {}
    for name in policies:
        rows[name] = (name, None)
        if name == DEFAULT:
            rows[f"{name}, layer_alpha {OPTIONS.layer_alpha:g}"] = (name, OPTIONS.layer_alpha)
    return {
        model: {row: {least: judge(windows, *how, least) for least in ("bytes", "error")} for row, how in rows.items()}
        for model, windows in recorded.items()
    }


def table(rows: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    steps = " / ".join(str(each["step"]) for each in next(iter(rows.values()))["bytes"])
    lines = [
        f"| policy (chosen at steps {steps}) | least bytes: fewer bytes | later error | least error: less error "
        "| later error |",
        "|---|---:|---:|---:|---:|",
    ]
    for row, of in rows.items():
        fewest, least = of["bytes"], of["error"]
        cells = [
            row,
            " / ".join(f"{1 / each['bytes']:.2f}x" + ("*" if each["error"] > 1 + 1e-6 else "") for each in fewest),
            " / ".join(f"{each['later_error']:.2f}" for each in fewest),
            " / ".join(f"{1 / each['error']:.2f}x" + ("*" if each["bytes"] > 1 + 1e-6 else "") for each in least),
            " / ".join(f"{each['later_error']:.2f}" for each in least),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def notes(rows: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Average bits, and those of the last layer."""
    lines = []
    for row, of in rows.items():
        told = []
        for least in ("bytes", "error"):
            bits = " / ".join(f"{each['bits']:.2f}" for each in of[least])
            head = " / ".join(str(each["layers"]["head.weight"][0]) for each in of[least]) if has_head(of) else "exact"
            told.append(f"least {least}: {bits} bits a value, the head {head}")
        lines.append(f"- {row}: {'; '.join(told)}")
    return "\n".join(lines)


def has_head(of: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    return all("head.weight" in each["layers"] for each in of["bytes"])


def time_table(times: Mapping[str, Sequence[float | None]]) -> str:
    lines = [
        f"| processor time of a choice | {' | '.join(f'{count:,} layers' for count in LAYERS)} |",
        "|---|" + "---:|" * len(LAYERS),
    ]
    for name, row in times.items():
        cells = [f"{each:,.1f} ms" if each is not None else "not tried" for each in row]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def goals(
    judged: Mapping[str, Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]],
    times: Mapping[str, Sequence[float | None]],
) -> Iterator[tuple[str, bool]]:
    """Each holds at all steps at which there is a choice, or does not hold."""
    for row, of in judged.get("GPT", {}).items():
        if not row.startswith(DEFAULT):
            continue
        ratio = 1 / max(each["bytes"] for each in of["bytes"])
        within = all(each["error"] <= 1 + 1e-6 for each in of["bytes"])
        told = f"GPT, {row}: at least {FEWER_BYTES}x fewer bytes at no more error, at every choice ({ratio:.2f}x)"
        yield told, ratio >= FEWER_BYTES and within
        ratio = 1 / max(each["error"] for each in of["error"])
        within = all(each["bytes"] <= 1 + 1e-6 for each in of["error"])
        told = f"GPT, {row}: at least {LESS_ERROR:g}x less error at no more bytes, at every choice ({ratio:.2f}x)"
        yield told, ratio >= LESS_ERROR and within
    for model, rows in judged.items():
        for row, of in rows.items():
            if row.startswith(DEFAULT):
                most = max(each["bytes"] for least in of.values() for each in least)
                yield f"{model}, {row}: never more bytes than uniform ({most:.3f} at most)", most <= 1 + 1e-9
    at_500 = times[DEFAULT][LAYERS.index(500)]
    assert at_500 is not None
    yield f"{DEFAULT}: under {LIMIT_MS:g} ms at 500 layers ({at_500:.1f} ms)", at_500 < LIMIT_MS


def read(cache: Path | None) -> Recorded:
    if cache is None or not cache.exists():
        return {}
    return {name: [Window.of(each) for each in saved] for name, saved in json.loads(cache.read_text()).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "data", metavar="DIR")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="what was measured while training")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recorded = read(options.cache)
    for name in TRAININGS:
        if name not in recorded:
            recorded[name] = record(name, options.data)
            if options.cache:
                saved = {each: [window.as_dict() for window in windows] for each, windows in recorded.items()}
                options.cache.write_text(json.dumps(saved))
    policies = usable(recorded["GPT"][0].layers)
    judged = judge_all(recorded, policies)
    for model, rows in judged.items():
        layers = recorded[model][0].layers
        print(f"{model}: {len(layers)} layers, {sum(layer.numel for layer in layers):,} values\n")
        print(f"{table(rows)}\n\n{notes(rows)}\n")
    times = time_policies(policies, recorded["GPT"][0].layers)
    print(f"{time_table(times)}\n")
    print("*: beyond the budget, as far as the policy knew")
    for told, met in goals(judged, times):
        print(f"goal: {told}: {'met' if met else 'NOT met'}")
    if options.json:
        write_json(options.json, {"choices": judged, "processor_ms": times, "layers": LAYERS})
    return 0


if __name__ == "__main__":
    sys.exit(main())
