"""The runs that `cgx plan` is held against on one machine (plan_validation.py): one JSON file each.

    python benchmarks/plan_runs.py [NAME ...]    # as root: it makes its hosts; some 32 runs of up to two minutes
    python benchmarks/plan_runs.py --list

1. The kernels, and allreduces of 64 MB and 64 KB at 10 Gbit/s on two nodes: what the machine's constants come from.
2. Allreduces of other sizes, rates, algorithms and numbers of nodes.
3. Training runs of the perceptron, whose steps are short, on all numbers of nodes at all rates, and of the GPT on two
   and four nodes; without the contestants that `cgx plan` does not know.

The set was chosen before any of its results was looked at: first a larger one, then, for lack of time, this part of
it. A run that is stored for this machine is not repeated:
remove its file (plan-*.json in benchmarks/results) to measure it again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from results import machine_of, newest_or_new, write_json
from torch_cgx.cli import machine

NODES = (2, 3, 4, 8)
RATES = ("1gbit", "10gbit", "100mbit")
KERNELS = "bench kernels --bucket-size 1024 --sizes 64M --dtypes float32 --bits 8,4,2 --against none --seconds 0.25"
ALLREDUCE = "bench allreduce --bucket-size 1024"
SIZES = {"100mbit": "4M", "1gbit": "4M,64M", "10gbit": "25M"}
CALIBRATION = {
    "kernels": KERNELS,
    "calibration-4-bits": f"{ALLREDUCE} --nodes 2 --nproc 1 --rate 10gbit --bits 4 --sizes 64M,64K --seconds 10",
    "calibration-exact": f"{ALLREDUCE} --nodes 2 --nproc 1 --rate 10gbit --bits 32 --sizes 64M,64K --seconds 10",
}
BATCH = {"mlp": 64, "gpt": 4}
# Rounds and steps of each. Eight nodes on two cores have long steps, and at 100 Mbit/s one step is like the other.
SLOW_TURNS = (3, 1)
TURNS = {"mlp": (8, 3), "gpt": (4, 2)}
MANY_TURNS = {"mlp": (5, 3), "gpt": (3, 2)}
MANY = 8
LIMIT_S = 600


def runs() -> dict[str, tuple[str, str]]:
    """Return by name of a run the arguments of `cgx` that make it, and the algorithm between nodes."""
    made = {name: (arguments, "SRA") for name, arguments in CALIBRATION.items()}
    for rate in RATES:
        for count in NODES:
            where = f"--nodes {count} --nproc 1 --rate {rate}"
            made[f"nodes-{count}x1-{rate}"] = (f"{ALLREDUCE} {where} --sizes {SIZES[rate]}", "SRA")
    for count in (8, 4):
        where = f"--nodes {count} --nproc 1 --rate 1gbit --sizes 4M,64M --against none"
        made[f"nodes-{count}x1-1gbit-grid"] = (f"{ALLREDUCE} {where}", "GRID")
    for count in NODES:
        made |= {f"mlp-{rate}-{count}-nodes": (training("mlp", rate, count), "SRA") for rate in RATES}
    made |= {f"gpt-1gbit-{count}-nodes": (training("gpt", "1gbit", count), "SRA") for count in (2, 4)}
    made["nodes-2x2-1gbit"] = (f"{ALLREDUCE} --nodes 2 --nproc 2 --rate 1gbit --sizes 4M,64M", "SRA")
    return made


def training(model: str, rate: str, count: int) -> str:
    rounds, steps = SLOW_TURNS if rate == "100mbit" else (MANY_TURNS if count == MANY else TURNS)[model]
    return (
        f"bench train --model {model} --nodes {count} --rate {rate} --batch {BATCH[model]} "
        f"--rounds {rounds} --steps {steps} --against gloo,fp16 --bits 8,4,2"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of runs (all)")
    parser.add_argument("--list", action="store_true", help="print the names of all runs, and stop")
    options = parser.parse_args()
    known = runs()
    unknown = set(options.names) - set(known)
    if unknown:
        parser.error(f"no such runs: {', '.join(sorted(unknown))}; --list prints all")
    if options.list:
        print("\n".join(known))
        return 0
    here = machine_of(machine.facts())
    for name in options.names or known:
        arguments, algorithm = known[name]
        path = newest_or_new(f"plan-{name}.json", here)
        if not path.exists():
            command = [*arguments.split(), "--json", os.path.relpath(path)]
            print(f"\nCGX_CROSS_REDUCTION_TYPE={algorithm} cgx {' '.join(command)}", flush=True)
            environment = {**os.environ, "CGX_CROSS_REDUCTION_TYPE": algorithm}
            python = [sys.executable, "-m", "torch_cgx.cli"]
            subprocess.run([*python, *command], check=True, timeout=LIMIT_S, env=environment)
            write_json(path, json.loads(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
