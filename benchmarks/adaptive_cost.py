"""What it costs to choose bits: the share of a training's time that adaptation takes, on two processes.

    python benchmarks/adaptive_cost.py

Trains the models of benchmarks/hook.py through the warm-up and one whole period of `AdaptiveBits()` (256 steps, at the
end of which bits are chosen), in turns: at 4 bits for every layer, with what `AdaptiveBits` chooses, and with a choice
that has to be 4 bits again, which is measured and decided all the same. Two answers:

1. Directly: what adaptation adds (taking samples; a choice, with its messages; making the layers' tables anew), summed
   over the period, as a share of the period's steps. In time by the clock, where a choice also waits for the other
   process, and in processor time, which other work on the machine changes less.
2. Whole steps of the copy that comes to the same 4 bits, against those of the plain one, by the clock. This has the
   noise of the machine in it, which is larger than what it looks for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hook import BITS, BUCKET_SIZE, MODELS, WORLD
from results import write_json

PLAIN, CHOOSES, SAME = "4 bits", "chooses", "chooses 4 bits"
GOAL = 0.01
PARTS = ("samples", "choice", "refresh")


class Clock:
    """Seconds in each part, step by step: by the clock, and of the processor."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[float]]] = []

    def begin_step(self) -> None:
        self.steps.append({part: [0.0, 0.0] for part in PARTS})

    def wrap(self, owner: Any, method: str, part: str) -> None:
        """Let a method of this object be timed."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, start_busy = time.perf_counter(), time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                spent = self.steps[-1][part]
                spent[0] += time.perf_counter() - start
                spent[1] += time.thread_time() - start_busy

        setattr(owner, method, timed)


def rank_main(output: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from torch_cgx import AdaptiveBits, CGXState, cgx_hook
    from torch_cgx.adaptive import POLICIES, Budget, Candidate, LayerStats

    def same(layers: Sequence[LayerStats], budget: Budget) -> list[Candidate]:
        """As much work as the default, for nothing."""
        POLICIES[AdaptiveBits().policy](layers, budget)
        return budget.reference(layers)

    POLICIES["same"] = same
    torch.set_num_threads(1)
    dist.init_process_group("cgx")
    kinds: dict[str, AdaptiveBits | None] = {
        PLAIN: None,
        CHOOSES: AdaptiveBits(),
        SAME: AdaptiveBits(policy="same"),
    }
    warmup, period = AdaptiveBits().warmup, AdaptiveBits().period
    results: dict[str, Any] = {}
    for name, (make, width, batch) in MODELS.items():
        copies, clocks = {}, {}
        for kind, adaptive in kinds.items():
            torch.manual_seed(0)
            group = dist.new_group(backend="cgx")
            model = DistributedDataParallel(make(nn), process_group=group, gradient_as_bucket_view=True)
            state = CGXState.from_model(
                model, compression_params={"bits": BITS, "bucket_size": BUCKET_SIZE}, adaptive=adaptive
            )
            model.register_comm_hook(state, cgx_hook)
            clocks[kind] = Clock()
            if adaptive is not None:
                clocks[kind].wrap(state._adaptation, "look_at", "samples")
                clocks[kind].wrap(state._adaptation, "begin_step", "choice")
                clocks[kind].wrap(state, "_refresh", "refresh")
            copies[kind] = (model, state, torch.optim.SGD(model.parameters(), 1e-3))
        x = torch.randn(batch, width)
        times: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        for number in range(warmup + period + 1):  # the choice is made when the next period begins
            for kind in list(kinds)[:: -1 if number % 2 else 1]:
                model, _, optimizer = copies[kind]
                clocks[kind].begin_step()
                dist.barrier()
                start, start_busy = time.perf_counter(), time.process_time()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                times[kind].append([time.perf_counter() - start, time.process_time() - start_busy])
        results[name] = {
            "period": period,
            "seconds": {kind: each[-period:] for kind, each in times.items()},
            "parts": {kind: clocks[kind].steps[-period:] for kind in kinds if kind != PLAIN},
            "reasons": {kind: copies[kind][1].report().choices[-1]["reason"] for kind in kinds if kind != PLAIN},
        }
    if dist.get_rank() == 0:
        output.write_text(json.dumps(results))
    dist.destroy_process_group()


def show(name: str, found: dict[str, Any]) -> None:
    seconds, parts = found["seconds"], found["parts"]
    for kind in (CHOOSES, SAME):
        told, shares = [], []
        for number, which in enumerate(("by the clock", "of the processor")):
            total = sum(step[number] for step in seconds[kind])
            samples = [step["samples"][number] for step in parts[kind]]
            chosen = sum(parts[kind][-1][part][number] for part in ("choice", "refresh"))
            shares.append(sum(step[part][number] for step in parts[kind] for part in PARTS) / total)
            told.append(
                f"{100 * shares[-1]:.2f} % {which} (of {1e3 * total / found['period']:.1f} ms a step; samples "
                f"{1e3 * sum(samples):.0f} ms in all, the choice {1e3 * chosen:.0f} ms)"
            )
        met = "met" if max(shares) < GOAL else "met by the processor's time only" if shares[1] < GOAL else "NOT met"
        print(f"{name}, {kind}: adaptation takes {', '.join(told)}; goal under {100 * GOAL:g} %: {met}")
        print(f"  {found['reasons'][kind]}")
    plain, same = ([step[0] for step in seconds[kind]] for kind in (PLAIN, SAME))
    typical = median(b / a for a, b in zip(plain, same, strict=True))
    print(
        f"{name}: whole steps {100 * (sum(same) / sum(plain) - 1):+.1f} % in sum, {100 * (typical - 1):+.1f} % in the "
        "median, where the choice is 4 bits again"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        rank_main(options.output)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
        command += [__file__, "--output", str(output)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        results = json.loads(output.read_text())
    for name, found in results.items():
        show(name, found)
    if options.json:
        write_json(options.json, {"bits": BITS, "bucket_size": BUCKET_SIZE, "models": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
