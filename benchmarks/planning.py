"""How long a rank takes to plan an allreduce of a new shape: `python benchmarks/planning.py`.

Nothing is sent, and no other rank is there: a plan is made from what a rank knows. Each time all caches are empty.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from torch_cgx.codecs import MaxMin
from torch_cgx.engines.host.plans import make_plan
from torch_cgx.plan import layout, programs
from torch_cgx.plan.algorithms import Topology, hierarchical
from torch_cgx.plan.layout import Layer

NUMEL = (25 << 20) // 4  # a grad bucket of DDP
QUANTIZER = MaxMin(4, 1024)
RUNS = 7


def cases() -> Iterator[tuple[str, Topology, tuple[int, ...]]]:
    """Names, topologies, and by rank a number of what shares memory with it."""
    for world in (2, 8, 32):
        yield f"{world} ranks of one host", Topology.flat("SRA", world), (0,) * world
    for world in (2, 8, 32, 256):
        yield f"{world} hosts of one rank", Topology.flat("SRA", world), tuple(range(world))
    yield "32 hosts of one rank, RING", Topology.flat("RING", 32), tuple(range(32))
    for hosts, shares in ((4, 1), (4, 8), (32, 1), (32, 8)):
        nodes = tuple(rank // 8 for rank in range(8 * hosts))
        speakers = "one speaker" if shares == 1 else f"{shares} speakers"
        yield f"{hosts} hosts of 8 ranks, {speakers}", Topology("SRA", nodes, shares, compress_inside=False), nodes


def forget_plans() -> None:
    for module in (layout, programs, hierarchical):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def seconds_to_plan(topology: Topology, nodes: tuple[int, ...]) -> float:
    forget_plans()
    begin = time.perf_counter()
    make_plan(
        [Layer(NUMEL, QUANTIZER)], 0, topology, torch.float32, nodes=nodes, slice_nbytes=64 << 20, limit_nbytes=1 << 30
    )
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs")
    options = parser.parse_args()
    measured = {}
    print(f"to plan an allreduce of 25 MB at 4 bits, median of {RUNS} runs:")
    for name, topology, nodes in cases():
        measured[name] = [seconds_to_plan(topology, nodes) for _ in range(RUNS)]
        print(f"    {name:34}{statistics.median(measured[name]) * 1e3:8.1f} ms", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"seconds": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
