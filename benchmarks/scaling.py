"""Weak scaling: `cgx bench train` for every model, rate and number of nodes, one JSON file each.

    python benchmarks/scaling.py            # as root: it makes its hosts; 36 runs of one to eight minutes on two cores

What is there already is not measured again: remove a file to have it anew. benchmarks/page.py makes plots and tables of
the files. All nodes share this machine's processors, so a step takes longer the more of them there are, with or without
communication; what is compared is each step with the ideal one of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from results import newest_or_new, write_json

MODELS = ("gpt", "resnet", "vit", "mlp")
RATES = ("100mbit", "1gbit", "10gbit")
NODES = (2, 3, 4)
CONTESTANTS = ["--against", "gloo,fp16,powersgd", "--bits", "8,4,2,adaptive"]
BATCH = {"gpt": 4, "resnet": 4, "vit": 4, "mlp": 64}
ROUNDS = {"100mbit": 2, "1gbit": 3, "10gbit": 3}
STEPS = {2: 1, 3: 3, 4: 3}  # by nodes: where three share two cores, single steps differ too much
SLOW = "100mbit"  # where they wait for the link, and one step is like the other
LIMIT_S = 1800


@dataclass(frozen=True)
class Case:
    model: str
    rate: str
    nodes: int

    @property
    def path(self) -> Path:
        return newest_or_new(f"train-{self.model}-{self.rate}-{self.nodes}-nodes.json")

    @property
    def arguments(self) -> list[str]:
        where = ["--nodes", str(self.nodes), "--rate", self.rate, "--batch", str(BATCH[self.model])]
        turns = ["--rounds", str(ROUNDS[self.rate]), "--steps", str(1 if self.rate == SLOW else STEPS[self.nodes])]
        return [
            "bench",
            "train",
            "--model",
            self.model,
            *where,
            *turns,
            *CONTESTANTS,
            "--json",
            os.path.relpath(self.path),
        ]


def cases(models: list[str], rates: list[str], nodes: list[int]) -> list[Case]:
    return [Case(model, rate, count) for count in nodes for rate in rates for model in models]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--nodes", nargs="+", type=int, choices=NODES, default=list(NODES))
    options = parser.parse_args()
    missing = [case for case in cases(options.models, options.rates, options.nodes) if not case.path.exists()]
    for number, case in enumerate(missing, start=1):
        print(f"\n{number} of {len(missing)}: cgx {' '.join(case.arguments)}", flush=True)
        subprocess.run([sys.executable, "-m", "torch_cgx.cli", *case.arguments], check=True, timeout=LIMIT_S)
        write_json(case.path, json.loads(case.path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
