"""Train one model twice on two processes, with gloo and with cgx at 4 bits, and compare.

    python examples/demo.py

starts `train` below under torchrun, first with backend gloo, then with backend cgx: the same script, seed,
data and order; the name of the backend and two environment variables are all that differs. It ends with a
table and with a picture of both loss curves, demo.png in the current folder.

The data are scikit-learn's handwritten digits, which come with the package. The model is a perceptron of
6.4 million parameters: far too large for the task, so that communication matters as it does with real ones.

How the columns are measured:
- a step: median time of a whole training step (forward, backward with the all_reduces, optimizer).
- in communication: what communication adds to the training. Every few steps, forward and backward are also
  run under `no_sync()`, which leaves the all_reduces out; the median difference, times the steps. An
  all_reduce that hides behind backward costs nothing by this measure; waiting for the other rank counts.
- a step without: a step less its communication. Both trainings compute the same, so it should be the same in
  both; where it is not (other work on the machine, most likely), the times of a step do not compare.
- bytes sent: by one rank for gradients in the whole training. cgx counts them (`torch_cgx.stats`). Gloo's
  all_reduce is a ring, in which each of n ranks sends (n - 1) / n of the data twice: with two ranks, that is
  the bytes of the gradients.
- accuracy: on a fifth of the digits that training never sees.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

PROCESSES = 2
STEPS = 160
PROBE_EVERY = 4
BATCH = 32  # per process
WARM_UP = 5  # steps that are not timed: DDP rebuilds its grad buckets, cgx allocates its shared memory
MUCH = 1.15  # computing that differs by more than this between the trainings is worth a warning
BACKENDS = ("gloo", "cgx")
SETTINGS: dict[str, dict[str, str]] = {
    "gloo": {},
    "cgx": {"CGX_COMPRESSION_QUANTIZATION_BITS": "4", "CGX_COMPRESSION_BUCKET_SIZE": "1024"},
}
NAMES = {"gloo": "gloo, 32 bits", "cgx": "cgx, 4 bits"}


def train(backend: str, output: Path) -> None:
    """One rank of one training; rank 0 writes what it measured."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from tqdm import tqdm

    import torch_cgx

    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    train_x, train_y, test_x, test_y = load_digits()

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 2048),
        torch.nn.ReLU(),
        torch.nn.Linear(2048, 2048),
        torch.nn.ReLU(),
        torch.nn.Linear(2048, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 10),
    )
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()
    order = torch.Generator().manual_seed(1)

    def forward_backward(x: torch.Tensor, y: torch.Tensor, *, communicate: bool = True) -> tuple[float, float]:
        """The loss, and the seconds it took."""
        start = time.perf_counter()
        with contextlib.nullcontext() if communicate else ddp.no_sync():
            loss = loss_of(ddp(x), y)
            loss.backward()
        return loss.item(), time.perf_counter() - start

    losses: list[float] = []
    step_s: list[float] = []
    exchanged_s: list[float] = []
    alone_s: list[float] = []
    bar = tqdm(
        range(STEPS),
        desc=f"training with {NAMES[backend]:<13}",
        unit="step",
        disable=rank != 0,
        mininterval=0.5 if sys.stderr.isatty() else 5.0,
    )
    if backend == "cgx":
        torch_cgx.reset_stats()
    for step in bar:
        # All ranks draw the same indices, and each takes its share of them.
        batch = torch.randint(len(train_x), (world, BATCH), generator=order)[rank]
        x, y = train_x[batch], train_y[batch]
        if step % PROBE_EVERY == 0:
            alone_s.append(forward_backward(x, y, communicate=False)[1])
            optimizer.zero_grad()

        start = time.perf_counter()
        loss, seconds = forward_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARM_UP:
            step_s.append(time.perf_counter() - start)
            exchanged_s.append(seconds)
        losses.append(loss)

    if backend == "cgx":
        sent_nbytes = torch_cgx.stats()["bytes_sent"]
    else:
        sent_nbytes = STEPS * 2 * (world - 1) / world * sum(4 * p.numel() for p in model.parameters())
    # A gather, because an all_reduce would be compressed.
    of_ranks = [torch.empty(STEPS) for _ in range(world)]
    dist.all_gather(of_ranks, torch.tensor(losses))
    with torch.inference_mode():
        accuracy = float((model(test_x).argmax(1) == test_y).float().mean())
    communication_s = max(0.0, median(exchanged_s) - median(alone_s))  # of one step
    if rank == 0:
        result = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "step_s": median(step_s),
            "alone_s": median(step_s) - communication_s,
            "communication_s": communication_s * STEPS,
            "sent_nbytes": sent_nbytes,
            "accuracy": accuracy,
            "losses": torch.stack(of_ranks).mean(0).tolist(),
        }
        output.write_text(json.dumps(result))


def load_digits() -> Any:
    """(train x, train y, test x, test y); every fifth digit is for the test."""
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    test = torch.arange(len(x)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def launch(backend: str, folder: Path) -> dict[str, Any]:
    """Run `train` under torchrun, and return what rank 0 measured."""
    output = folder / f"{backend}.json"
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(PROCESSES),
    ]
    environ = {"OMP_NUM_THREADS": "1", **os.environ, **SETTINGS[backend]}
    subprocess.run([*torchrun, __file__, "--backend", backend, "--output", str(output)], env=environ, check=True)
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def print_table(results: dict[str, dict[str, Any]]) -> None:
    columns = [
        ("", 15),
        ("a step", 10),
        ("in communication", 18),
        ("a step without", 16),
        ("bytes sent", 12),
        ("accuracy", 10),
    ]
    print("".join(title.rjust(width) for title, width in columns))
    for backend, result in results.items():
        cells = [
            NAMES[backend],
            f"{result['step_s'] * 1e3:.1f} ms",
            f"{result['communication_s']:.2f} s",
            f"{result['alone_s'] * 1e3:.1f} ms",
            f"{result['sent_nbytes'] / 1e6:,.0f} MB",
            f"{result['accuracy']:.1%}",
        ]
        print("".join(cell.rjust(width) for cell, (_, width) in zip(cells, columns, strict=True)))


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    styles = (("#30638e", 3.0), ("#d1495b", 1.5))  # both can be seen where one lies on the other
    for (backend, result), (colour, width) in zip(results.items(), styles, strict=True):
        axes.plot(result["losses"], color=colour, alpha=0.2, linewidth=1)
        axes.plot(smooth(result["losses"]), color=colour, linewidth=width, label=NAMES[backend])
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (bold: running mean)")
    axes.set_title("The same training with gloo and with cgx")
    axes.legend()
    axes.grid(True, alpha=0.3)
    figure.savefig(path, dpi=130)


def smooth(values: list[float], keep: float = 0.8) -> list[float]:
    smoothed, mean = [], values[0]
    for value in values:
        mean = keep * mean + (1 - keep) * value
        smoothed.append(mean)
    return smoothed


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with gloo and with cgx on two processes, and compare.")
    parser.add_argument("--backend", choices=BACKENDS, help=argparse.SUPPRESS)  # with torchrun: one training
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        import torch.distributed as dist

        train(options.backend, options.output)
        dist.destroy_process_group()  # not in train, where DDP is still there: see common.leave
        return 0

    if any(importlib.util.find_spec(module) is None for module in ("sklearn", "tqdm", "matplotlib")):
        print("the demo needs more: pip install scikit-learn tqdm matplotlib", file=sys.stderr)
        return 1
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = {backend: launch(backend, Path(folder)) for backend in BACKENDS}
        except subprocess.CalledProcessError as error:
            print(f"demo: a training failed, see above (exit code {error.returncode})", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    picture = Path("demo.png").resolve()
    draw(results, picture)
    parameters = results["gloo"]["parameters"] / 1e6
    print(f"\n{STEPS} steps of a model of {parameters:.1f} million parameters on {PROCESSES} processes:\n")
    print_table(results)
    ratio = results["gloo"]["step_s"] / results["cgx"]["step_s"]
    print(f"\na step with cgx is {ratio:.2f} times as fast; loss curves: {picture}")
    alone_s = [result["alone_s"] for result in results.values()]
    if max(alone_s) > MUCH * min(alone_s):
        print(
            f"caution: computing alone took {max(alone_s) / min(alone_s):.2f} times as long in one training as in "
            "the other, so the times of a step do not compare: repeat this on a quiet machine"
        )
    print(f"all in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
