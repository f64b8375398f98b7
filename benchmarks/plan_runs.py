"""The runs that `cgx plan` is held against on one machine (plan_validation.py): one JSON file each.

    python benchmarks/plan_runs.py            # as root: it makes its hosts; some 30 runs of up to eight minutes

1. The kernels, and allreduces of 64 MB and 64 KB at 10 Gbit/s: what the machine's constants come from.
2. Allreduces at lower rates, on two and three nodes.
3. Trainings there, without the contestants that `cgx plan` does not know, so that there is time for more rounds than in
   scaling.py.

A run that is stored for this machine is not repeated: remove its file (plan-*.json in benchmarks/results) to measure it
again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from results import machine_of, newest_or_new, write_json
from scaling import BATCH, LIMIT_S, MODELS, RATES, SLOW
from torch_cgx.cli import machine

NODES = (2, 3)
ROUNDS = {"mlp": 40}  # its steps are so short that ten rounds are over while a neighbour is busy
KERNELS = "bench kernels --bucket-size 1024 --sizes 64M --dtypes float32 --seconds 0.12"
ALLREDUCE = "bench allreduce --against gloo --bucket-size 1024 --nproc 1"
SIZES = {"100mbit": "4M", "1gbit": "4M,64M"}


def runs(models: list[str], rates: list[str], nodes: list[int]) -> dict[str, str]:
    """Names of files, and the arguments of `cgx` that make them."""
    made = {
        "kernels": KERNELS,
        "nodes-2x1-10gbit": f"{ALLREDUCE} --nodes 2 --rate 10gbit --sizes 64M,64K --seconds 10",
    }
    for count in nodes:
        for rate in rates:
            if rate in SIZES:
                made[f"nodes-{count}x1-{rate}"] = f"{ALLREDUCE} --nodes {count} --rate {rate} --sizes {SIZES[rate]}"
            for model in models:
                turns = "--rounds 3 --steps 1" if rate == SLOW else f"--rounds {ROUNDS.get(model, 10)} --steps 3"
                made[f"{model}-{rate}-{count}-nodes"] = (
                    f"bench train --model {model} --nodes {count} --rate {rate} --batch {BATCH[model]} {turns} "
                    "--against gloo,fp16 --bits 8,4,2"
                )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--nodes", nargs="+", type=int, choices=NODES, default=list(NODES))
    options = parser.parse_args()
    here = machine_of(machine.facts())
    for name, arguments in runs(options.models, options.rates, options.nodes).items():
        path = newest_or_new(f"plan-{name}.json", here)
        if not path.exists():
            command = [*arguments.split(), "--json", os.path.relpath(path)]
            print(f"\ncgx {' '.join(command)}", flush=True)
            subprocess.run([sys.executable, "-m", "torch_cgx.cli", *command], check=True, timeout=LIMIT_S)
            write_json(path, json.loads(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
