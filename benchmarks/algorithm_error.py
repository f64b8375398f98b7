"""What SRA, GRID and RING lose of a sum, by bits: `python benchmarks/algorithm_error.py`.

Runs the programs of 16 ranks in one process, on normal values, and compares with the exact sum.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from torch_cgx.codecs import MaxMin
from torch_cgx.engines import memory
from torch_cgx.kernels.native import default_kernels
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.layout import Layer
from torch_cgx.plan.programs import layout_for

WORLD, NUMEL = 16, 1 << 18
ALGORITHMS = ("SRA", "GRID", "RING")


def error_of(algorithm: str, bits: int) -> float:
    """Return the norm of the error over the norm of the sum."""
    torch.manual_seed(bits)
    values = [torch.randn(NUMEL) for _ in range(WORLD)]
    exact = torch.stack(values).sum(0)
    topology = Topology.flat(algorithm, WORLD)
    layout = layout_for(topology, [Layer(NUMEL, MaxMin(bits, 1024))], 4, 64 << 20)
    memory.allreduce(values, layout, [default_kernels()] * WORLD, topology=topology)
    return float((values[0] - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    found = {bits: {algorithm: error_of(algorithm, bits) for algorithm in ALGORITHMS} for bits in range(1, 9)}
    print(f"error of a sum of {WORLD} ranks, in parts of its norm\nbits" + "".join(f"{name:>9}" for name in ALGORITHMS))
    for bits, errors in found.items():
        print(f"{bits:4}" + "".join(f"{errors[name]:9.4f}" for name in ALGORITHMS))
    if options.json:
        options.json.write_text(json.dumps({"errors": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
