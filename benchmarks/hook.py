"""What the hook costs: DDP steps with `cgx_hook` against steps with the same bits and no layers, on two processes.

    python benchmarks/hook.py

Trains two copies of a model in turns, each on a cgx group of its own: one without a hook, its grad buckets compressed
whole by CGX_COMPRESSION_QUANTIZATION_BITS, one with the hook, layer by layer. Prints the medians of whole steps
(forward, backward with the all_reduces, optimizer) and the median of the ratios of neighbouring steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from results import write_json

BITS, BUCKET_SIZE, WORLD, WARM_UP = 4, 1024, 2, 10
KINDS = ("no hook", "hook")


def many_small(nn: Any) -> Any:
    """200 layers in one grad bucket."""
    return nn.Sequential(*[nn.Linear(48, 48, bias=False) for _ in range(200)])


def few_large(nn: Any) -> Any:
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 512))


MODELS: dict[str, tuple[Callable[[Any], Any], int, int]] = {  # how to make it, values of an input, batch
    "200 small layers": (many_small, 48, 64),
    "3 large layers": (few_large, 512, 64),
}


def rank_main(steps: int, output: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from torch_cgx import CGXState, cgx_hook

    torch.set_num_threads(1)
    os.environ["CGX_COMPRESSION_QUANTIZATION_BITS"] = str(BITS)
    os.environ["CGX_COMPRESSION_BUCKET_SIZE"] = str(BUCKET_SIZE)
    dist.init_process_group("cgx")
    results = {}
    for name, (make, width, batch) in MODELS.items():
        copies = {}
        for kind in KINDS:
            torch.manual_seed(0)
            group = dist.new_group(backend="cgx")
            model = DistributedDataParallel(make(nn), process_group=group, gradient_as_bucket_view=True)
            if kind == "hook":
                state = CGXState.from_model(model, compression_params={"bits": BITS, "bucket_size": BUCKET_SIZE})
                model.register_comm_hook(state, cgx_hook)
            copies[kind] = (model, torch.optim.SGD(model.parameters(), 1e-3))
        x = torch.randn(batch, width)
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(steps + WARM_UP):
            for kind in KINDS if number % 2 else KINDS[::-1]:
                model, optimizer = copies[kind]
                dist.barrier()
                start = time.perf_counter()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if number >= WARM_UP:
                    times[kind].append(time.perf_counter() - start)
        results[name] = times
    if dist.get_rank() == 0:
        output.write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        rank_main(options.steps, options.output)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
        command += [__file__, "--steps", str(options.steps), "--output", str(output)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        results = json.loads(output.read_text())
    for name, times in results.items():
        plain, hooked = (times[kind] for kind in KINDS)
        ratio = median(b / a for a, b in zip(plain, hooked, strict=True))
        medians = ", ".join(f"{kind} {median(times[kind]) * 1e3:.2f} ms" for kind in KINDS)
        print(f"{name}: {medians}; the hook's step takes {(ratio - 1) * 100:+.1f} %")
    if options.json:
        write_json(options.json, {"bits": BITS, "bucket_size": BUCKET_SIZE, "seconds": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
