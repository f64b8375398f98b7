"""Does FSDP2 with weights at 8 bits and gradients at 4 end where exact FSDP2 ends? Paired runs on 2 and on 4 ranks.

    python benchmarks/fsdp_accuracy.py --data ../shared/data --doc docs/fsdp.md

Runs examples/fsdp_train.py, a GPT of 10.1 million parameters, for 500 steps with each seed exactly and compressed. Runs
of one seed and as many ranks have the same weights at the start and the same batches, and differ in compression alone,
so differences are taken seed by seed. A step reads as much text on 4 ranks as on 2. Tested is a running mean of the
weights, as in accuracy.py.
Prints a table in markdown: the mean loss on the held-out text as the sharded model computes it, its mean difference to
exact with the 95 % confidence interval (Student's t, as in accuracy.py), the same interval for the weights themselves,
as a checkpoint has them, and bytes. `--doc` writes it into a page, between its markers.

Each run is stored in the JSON file as soon as it is done, and is not repeated while its command line stays the same.
Seeds are the outermost loop, so that what is there after an interruption are whole pairs. On two quiet cores a run
takes two minutes on 2 ranks and four on 4, all of them an hour.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from accuracy import STUDENT, Task, interval, of_tenths, train, verdict
from markers import write_between
from results import newest_or_new, write_json

HERE = Path(__file__).resolve().parent
WORLDS = (2, 4)
EXACT, COMPRESSED = "exact", "weights 8, gradients 4 bits"
SETTINGS = {
    EXACT: ["--weight-bits", "32", "--grad-bits", "32"],
    COMPRESSED: ["--weight-bits", "8", "--grad-bits", "4", "--bucket-size", "1024"],
}
PIECES = 4  # of text in a step, of all ranks together
LEAST_PARAMETERS = 10_000_000
TASK = Task(
    "fsdp_train.py",
    "tinyshakespeare.txt",
    "validation_loss",
    "loss, nats",
    1,
    -1,
    0.03,
    "--backend cgx --device cpu --threads 1 --context 32 --layers 3 --width 528 --heads 6 --lr 1e-3 --average 0.98 "
    "--held-out 16384",
)
OF_WEIGHTS = "validation_loss_of_weights"
# FSDP2 frees its buffers after every block. With these glibc keeps the memory, and the kernel need not clear new pages
# for each: that saves up to a fifth of the time here, and changes no other figure.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
BEGIN, END = "<!-- fsdp accuracy: begin -->", "<!-- fsdp accuracy: end -->"
Runs = dict[str, dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "data", metavar="DIR")
    parser.add_argument("--seeds", type=int, default=5, help=f"how many, 2 to {len(STUDENT) + 1} (5)")
    parser.add_argument("--ranks", type=int, choices=WORLDS, action="append", help="only so many; may be given twice")
    parser.add_argument("--steps", type=int, default=500, help="of a run (500)")
    parser.add_argument("--json", type=Path, help="the file of runs (the newest in benchmarks/results)")
    parser.add_argument("--stored", action="store_true", help="run nothing: tell of the seeds that the JSON file has")
    parser.add_argument("--doc", type=Path, help="write the table into this file, between its markers")
    options = parser.parse_args()
    if not 2 <= options.seeds <= len(STUDENT) + 1:
        parser.error(f"--seeds {options.seeds}: expected 2 to {len(STUDENT) + 1}")
    options.json = options.json or newest_or_new("fsdp-accuracy.json")
    runs: Runs = json.loads(options.json.read_text())["runs"] if options.json.exists() else {}
    worlds = tuple(options.ranks or WORLDS)
    seeds = options.seeds
    if options.stored:
        seeds = whole_seeds(runs, worlds, options.seeds, options.steps)
        if seeds < 2:
            print(f"fsdp_accuracy: {options.json} has {seeds} whole seeds; an interval needs two", file=sys.stderr)
            return 1
    missing = [run for run in wanted(worlds, seeds) if not is_done(runs, *run, options.steps)]
    if missing and not TASK.path(options.data).is_file():
        print(f"fsdp_accuracy: not there: {TASK.path(options.data)}; --data names its folder", file=sys.stderr)
        return 1
    for number, (world, setting, seed) in enumerate(missing, start=1):
        result = run(world, setting, seed, options.steps, TASK.path(options.data))
        done = f"{key(world, setting, seed)}: {result[TASK.figure]:.4f} in {result['total_s']:.0f} s"
        print(f"{number} of {len(missing)}: {done}", file=sys.stderr, flush=True)
        runs[key(world, setting, seed)] = result
        write_json(options.json, {"runs": runs})
    text = f"{table(runs, worlds, seeds)}\n\n{verdicts(runs, worlds, seeds)}"
    print(text)
    if options.doc:
        write_between(options.doc, BEGIN, END, text)
    return 0


def wanted(worlds: tuple[int, ...], seeds: int) -> list[tuple[int, str, int]]:
    return [(world, setting, seed) for seed in range(seeds) for world in worlds for setting in SETTINGS]


def key(world: int, setting: str, seed: int) -> str:
    return f"{world} ranks, {setting}, seed {seed}"


def arguments_of(world: int, setting: str, seed: int, steps: int) -> list[str]:
    batch = ["--steps", str(steps), "--batch", str(PIECES // world)]
    return [*TASK.arguments.split(), *batch, *SETTINGS[setting], "--seed", str(seed)]


def is_done(runs: Runs, world: int, setting: str, seed: int, steps: int) -> bool:
    stored = runs.get(key(world, setting, seed))
    return stored is not None and stored["arguments"] == arguments_of(world, setting, seed, steps)


def whole_seeds(runs: Runs, worlds: tuple[int, ...], seeds: int, steps: int) -> int:
    """How many of the first seeds have all their runs."""
    for seed in range(seeds):
        if not all(is_done(runs, world, setting, seed, steps) for world in worlds for setting in SETTINGS):
            return seed
    return seeds


def run(world: int, setting: str, seed: int, steps: int, data: Path) -> dict[str, Any]:
    """Train once, and return what rank 0 reports with the losses thinned out."""
    arguments = arguments_of(world, setting, seed, steps)
    start = time.perf_counter()
    result = train(TASK.script, ["--data", str(data), *arguments], world, KEEP_MEMORY)
    total_s = round(time.perf_counter() - start, 1)
    check(result, setting, steps)
    losses = result.pop("losses")
    return {
        "arguments": arguments,
        "total_s": total_s,
        "first_loss": losses[0],
        "losses_of_tenths": of_tenths(losses),
        **result,
    }


def check(result: dict[str, Any], setting: str, steps: int) -> None:
    """That the run was what its row in the table says."""
    if result["parameters"] < LEAST_PARAMETERS or len(result["losses"]) != steps:
        raise RuntimeError(
            f"expected {steps} steps of a model of {LEAST_PARAMETERS:,} parameters or more, "
            f"got {len(result['losses'])} steps and {result['parameters']:,} parameters"
        )
    compressed = result["stats"].get("compressed_operations", 0)
    if (compressed > 0) != (setting == COMPRESSED):
        raise RuntimeError(f"{setting}: got {compressed:.0f} compressed collectives")


def figures(runs: Runs, world: int, setting: str, seeds: int, figure: str = TASK.figure) -> list[float]:
    return [runs[key(world, setting, seed)][figure] for seed in range(seeds)]


def differences(runs: Runs, world: int, seeds: int, figure: str = TASK.figure) -> list[float]:
    compressed, exact = (figures(runs, world, setting, seeds, figure) for setting in (COMPRESSED, EXACT))
    return [one - other for one, other in zip(compressed, exact, strict=True)]


def table(runs: Runs, worlds: tuple[int, ...], seeds: int) -> str:
    header = ("ranks", "what travels", "loss, nats", "difference to exact", "95 % interval", "of weights", "bytes sent")
    rows = [f"| {' | '.join(header)} |", "|---:|---|---:|---:|---:|---:|---:|"]
    for world in worlds:
        exact_nbytes = mean(figures(runs, world, EXACT, seeds, "bytes_sent"))
        for setting in SETTINGS:
            nbytes = mean(figures(runs, world, setting, seeds, "bytes_sent"))
            cells = [str(world), setting, f"{mean(figures(runs, world, setting, seeds)):.4f}"]
            if setting == EXACT:
                cells += ["", "", ""]
            else:
                values = differences(runs, world, seeds)
                cells += [f"{mean(values):+.4f}", between(values), between(differences(runs, world, seeds, OF_WEIGHTS))]
            cells.append(f"{nbytes / 1e6:,.0f} MB, 1/{exact_nbytes / nbytes:.1f}")
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def between(values: list[float]) -> str:
    low, high = interval(values)
    return f"{low:+.4f} to {high:+.4f}"


def verdicts(runs: Runs, worlds: tuple[int, ...], seeds: int) -> str:
    return "\n".join(f"- {verdict(f'{world} ranks', TASK, differences(runs, world, seeds))}" for world in worlds)


if __name__ == "__main__":
    sys.exit(main())
