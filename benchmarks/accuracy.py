"""Does training on compressed gradients end where exact training ends? Paired runs of the examples, on two ranks.

    python benchmarks/accuracy.py --data ../shared/data --doc docs/benchmarks.md --plot docs/accuracy.png

Runs examples/cifar_train.py (a small ResNet, VGG and ViT), gpt_train.py and bert_train.py with each seed exactly, at 4
bits and with adaptive bits; the ResNet and the GPT also at 2 bits with and without error feedback, the GPT also at 4
bits with its embeddings at 8. Runs of one seed have the same weights at the start, the same data in the same order, and
differ in compression alone, so differences are taken seed by seed.
Prints a table in markdown: mean, mean difference to exact, and its 95 % confidence interval (Student's t, n - 1 degrees
of freedom). `--doc` writes it into a page, between its markers; `--plot` draws the differences.

Each run is stored in the JSON file as soon as it is done, and is not repeated while its command line stays the same.
On two quiet cores a run takes half a minute to a minute. The folder of `--data` holds cifar10_subset.npz and
tinyshakespeare.txt; the ViT's digits come with the package scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from markers import write_between
from results import newest_or_new, write_json

HERE = Path(__file__).resolve().parent
WORLD = 2
LIMIT_S = 1800  # of one run
# Half the width of a 95 % interval in standard errors, for 1, 2, 3, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
EXACT = "exact"
SETTINGS: dict[str, list[str]] = {
    EXACT: ["--bits", "32"],
    "4 bits": ["--bits", "4", "--bucket-size", "1024"],
    "adaptive": ["--bits", "4", "--bucket-size", "1024", "--adaptive"],
    "4 bits, embeddings 8": ["--bits", "4", "--bucket-size", "1024", "--embedding-bits", "8"],
    "2 bits, error feedback": ["--bits", "2", "--bucket-size", "1024", "--error-feedback"],
    "2 bits": ["--bits", "2", "--bucket-size", "1024"],
    "rotated, 4 bits": ["--bits", "4", "--quantizer", "rotated"],
    "rotated, 3 bits": ["--bits", "3", "--quantizer", "rotated"],
    "rotated, 2 bits": ["--bits", "2", "--quantizer", "rotated"],
}
ROTATED = ("rotated, 4 bits", "rotated, 3 bits", "rotated, 2 bits")
GOALS = ("4 bits", "adaptive", "4 bits, embeddings 8", *ROTATED)
WITH_EMBEDDINGS = "4 bits, embeddings 8"  # for models that have some
FEW = (EXACT, "4 bits", "adaptive", *ROTATED)
DIGITS = "digits"  # not a file: the example finds them in the package scikit-learn


@dataclass(frozen=True)
class Task:
    script: str
    data: str  # in the folder of --data, or DIGITS
    figure: str  # of the example's JSON
    unit: str
    scale: float  # what a figure is multiplied by for the table
    sign: int  # 1: more is better
    allowed: float  # the bad end of the interval at 4 bits must be closer than this, in units
    arguments: str
    settings: tuple[str, ...] = FEW

    def path(self, folder: Path) -> Path:
        return Path(DIGITS) if self.data == DIGITS else folder / self.data


# An average of the weights and a learning rate that falls to 0 make the end of a training much less noisy.
COMMON = ["--backend", "cgx", "--device", "cpu", "--threads", "1"]
TASKS = {
    "cifar": Task(
        "cifar_train.py",
        "cifar10_subset.npz",
        "accuracy",
        "accuracy, %",
        100,
        1,
        2.0,
        "--model small --epochs 20 --batch 64 --lr 0.1 --average 0.98",
        settings=tuple(setting for setting in SETTINGS if setting != WITH_EMBEDDINGS),
    ),
    "vgg": Task(
        "cifar_train.py",
        "cifar10_subset.npz",
        "accuracy",
        "accuracy, %",
        100,
        1,
        2.0,
        "--model vgg --epochs 8 --batch 32 --lr 0.05 --average 0.98",
    ),
    "vit": Task(
        "cifar_train.py",
        DIGITS,
        "accuracy",
        "accuracy, %",
        100,
        1,
        2.0,
        "--model vit --patch 2 --no-mirror --optimizer adamw --epochs 24 --batch 32 --lr 3e-3 --average 0.98",
    ),
    "gpt": Task(
        "gpt_train.py",
        "tinyshakespeare.txt",
        "validation_loss",
        "loss, nats",
        1,
        -1,
        0.03,
        "--epochs 2.2 --batch 16 --lr 3e-3 --context 64 --layers 2 --width 96 --average 0.98",
        settings=tuple(SETTINGS),
    ),
    "bert": Task(
        "bert_train.py",
        "tinyshakespeare.txt",
        "validation_loss",
        "loss, nats",
        1,
        -1,
        0.03,
        "--epochs 1.2 --batch 32 --lr 6e-3 --context 32 --layers 2 --width 64 --average 0.98",
    ),
}
Runs = dict[str, dict[str, Any]]
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
COLOURS = {"4 bits": "#30638e", "adaptive": "#00798c", "4 bits, embeddings 8": "#7ba7cc"}
OTHER_COLOUR = "#d1495b"  # of settings that have no goal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "data", metavar="DIR")
    parser.add_argument("--seeds", type=int, default=5, help=f"how many, 2 to {len(STUDENT) + 1}")
    parser.add_argument("--only", choices=TASKS, action="append", help="one task; may be given several times")
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="one setting, as --only")
    parser.add_argument("--json", type=Path, help="the file of runs (the newest in benchmarks/results)")
    parser.add_argument("--stored", action="store_true", help="run nothing: leave out what the JSON file has not whole")
    parser.add_argument("--doc", type=Path, help="write the table into this file, between its markers")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the differences; needs matplotlib")
    options = parser.parse_args()
    if not 2 <= options.seeds <= len(STUDENT) + 1:
        parser.error(f"--seeds {options.seeds}: expected 2 to {len(STUDENT) + 1}")
    options.json = options.json or newest_or_new("accuracy.json")
    asked = options.setting or SETTINGS
    tasks = {
        name: replace(task, settings=tuple(setting for setting in task.settings if setting in asked))
        for name, task in TASKS.items()
        if name in (options.only or TASKS)
    }
    runs: Runs = json.loads(options.json.read_text())["runs"] if options.json.exists() else {}
    if options.stored:
        tasks = stored(runs, tasks, options.seeds)

    wanted = [  # those that the goal is about first
        (task, setting, seed)
        for setting in SETTINGS
        for seed in range(options.seeds)
        for task in tasks
        if setting in tasks[task].settings
    ]
    missing = [run for run in wanted if not is_done(runs, *run)]
    files = sorted({TASKS[task].path(options.data) for task, _, _ in missing if TASKS[task].data != DIGITS})
    absent = [str(file) for file in files if not file.is_file()]
    if absent:
        print(f"accuracy: not there: {', '.join(absent)}; --data names the folder that has them", file=sys.stderr)
        return 1
    for number, (task, setting, seed) in enumerate(missing, start=1):
        result = run(task, setting, seed, options.data)
        figure = result[TASKS[task].figure]
        done = f"{task}, {setting}, seed {seed}: {figure:.4f} in {result['total_s']:.0f} s"
        print(f"{number} of {len(missing)}: {done}", file=sys.stderr, flush=True)
        runs[key(task, setting, seed)] = result
        write_json(options.json, {"world": WORLD, "runs": runs})
    text = f"{table(runs, tasks, options.seeds)}\n\n{verdicts(runs, tasks, options.seeds)}"
    print(text)
    if options.doc:
        write_between(options.doc, BEGIN, END, text)
    if options.plot:
        draw(runs, tasks, options.seeds, options.plot)
    return 0


def key(task: str, setting: str, seed: int) -> str:
    return f"{task}, {setting}, seed {seed}"


def arguments_of(task: str, setting: str, seed: int) -> list[str]:
    return [*COMMON, *TASKS[task].arguments.split(), *SETTINGS[setting], "--seed", str(seed)]


def is_done(runs: Runs, task: str, setting: str, seed: int) -> bool:
    stored = runs.get(key(task, setting, seed))
    return stored is not None and stored["arguments"] == arguments_of(task, setting, seed)


def stored(runs: Runs, tasks: dict[str, Task], seeds: int) -> dict[str, Task]:
    """What can be told without another run: settings of which there are all seeds, beside exact ones."""
    whole = {}
    for name, task in tasks.items():
        settings = [
            setting for setting in task.settings if all(is_done(runs, name, setting, seed) for seed in range(seeds))
        ]
        if EXACT in settings and len(settings) > 1:
            whole[name] = replace(task, settings=tuple(settings))
    return whole


def run(task: str, setting: str, seed: int, data: Path) -> dict[str, Any]:
    """Train once, and return what rank 0 reports with the losses thinned out."""
    arguments = arguments_of(task, setting, seed)
    start = time.perf_counter()
    result = train(TASKS[task].script, ["--data", str(TASKS[task].path(data)), *arguments], WORLD)
    total_s = round(time.perf_counter() - start, 1)
    losses = of_tenths(result.pop("losses"))
    return {"arguments": arguments, "total_s": total_s, "losses_of_tenths": losses, **result}


def train(script: str, arguments: list[str], world: int, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run an example under torchrun, and return what its rank 0 reports except the settings.

    Only the arguments decide what is compressed: CGX_* variables of this process are not passed on.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CGX_")}
    environ |= {"OMP_NUM_THREADS": "1", **(variables or {})}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command += [str(HERE.parent / "examples" / script), "--json", str(output), *arguments]
        finished = subprocess.run(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
        )
        if finished.returncode:
            raise RuntimeError(
                f"{script} {' '.join(arguments)} failed with exit code {finished.returncode}:\n{finished.stdout}"
            )
        result: dict[str, Any] = json.loads(output.read_text())
    result.pop("settings", None)
    return result


def of_tenths(losses: Sequence[float]) -> list[float]:
    """Return the mean loss of each tenth of a training run."""
    tenth = math.ceil(len(losses) / 10)
    return [round(mean(losses[begin : begin + tenth]), 4) for begin in range(0, len(losses), tenth)]


def figures(runs: Runs, task: str, setting: str, seeds: int) -> list[float]:
    return [runs[key(task, setting, seed)][TASKS[task].figure] * TASKS[task].scale for seed in range(seeds)]


def differences(runs: Runs, task: str, setting: str, seeds: int) -> list[float]:
    pairs = zip(figures(runs, task, setting, seeds), figures(runs, task, EXACT, seeds), strict=True)
    return [compressed - exact for compressed, exact in pairs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean."""
    half = STUDENT[len(values) - 2] * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def table(runs: Runs, tasks: dict[str, Task], seeds: int) -> str:
    rows = [
        "| training | gradients | mean | difference to exact | 95 % interval | bytes sent |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, task in tasks.items():
        digits = 2 if task.scale == 100 else 4
        exact_nbytes = mean(runs[key(name, EXACT, seed)]["bytes_sent"] for seed in range(seeds))
        for setting in task.settings:
            nbytes = mean(runs[key(name, setting, seed)]["bytes_sent"] for seed in range(seeds))
            cells = [f"{name} ({task.unit})", setting, f"{mean(figures(runs, name, setting, seeds)):.{digits}f}"]
            if setting == EXACT:
                cells += ["", ""]
            else:
                low, high = interval(differences(runs, name, setting, seeds))
                cells += [f"{(low + high) / 2:+.{digits}f}", f"{low:+.{digits}f} to {high:+.{digits}f}"]
            cells.append(f"{nbytes / 1e6:,.0f} MB, 1/{exact_nbytes / nbytes:.1f}")
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def verdicts(runs: Runs, tasks: dict[str, Task], seeds: int) -> str:
    return "\n".join(
        f"- {verdict(f'{name} at {setting}', task, differences(runs, name, setting, seeds))}"
        for name, task in tasks.items()
        for setting in task.settings
        if setting in GOALS
    )


def verdict(name: str, task: Task, values: Sequence[float]) -> str:
    """Whether the interval reaches zero or better, and its bad end is not too bad."""
    bad, good = sorted(task.sign * end for end in interval(values))
    met = good >= 0 and bad > -task.allowed
    return (
        f"goal for {name}: zero or better within the interval, its bad end closer than {task.allowed:g}: "
        f"{'met' if met else '**NOT met**'}"
    )


def draw(runs: Runs, tasks: dict[str, Task], seeds: int, path: Path) -> None:
    """Differences to exact with their intervals, in units of what is allowed, better to the right."""
    from matplotlib.figure import Figure

    rows = [(name, setting) for name, task in tasks.items() for setting in task.settings if setting != EXACT]
    figure = Figure(figsize=(8, 0.9 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    worst = 0.0
    for row, (name, setting) in enumerate(rows):
        task = tasks[name]
        bad, good = sorted(task.sign * end / task.allowed for end in interval(differences(runs, name, setting, seeds)))
        middle, colour = (bad + good) / 2, COLOURS.get(setting, OTHER_COLOUR)
        axes.errorbar([middle], [row], xerr=[[middle - bad], [good - middle]], fmt="o", capsize=3, color=colour)
        worst = min(worst, bad)
    axes.axvline(0.0, color="black", linewidth=1, label="exact")
    axes.axvline(-1.0, color="#edae49", linewidth=2, linestyle="--", label="the goal's bound")
    axes.set_xlim(1.08 * min(worst, -1.2), 1.2)
    axes.set_yticks(range(len(rows)), [f"{name}, {setting}" for name, setting in rows])
    axes.invert_yaxis()
    axes.set_xlabel("1 = 2 points of accuracy, or 0.03 nats; right is better")
    axes.grid(True, axis="x", alpha=0.3)
    axes.legend(loc="upper left")
    axes.set_title(f"Difference to exact training: mean of {seeds} seeds, 95 % interval", fontsize=11)
    figure.savefig(path, dpi=130, format="png")


if __name__ == "__main__":
    sys.exit(main())
