"""Exact collectives of cgx against gloo: alternating in one run, medians.

    python benchmarks/exact_collectives.py [--ranks 2] [--json FILE]

Ranks of one host. Sizes are those of the whole tensor: what is gathered, or what is scattered.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from results import write_json

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20)
ROUNDS = 11  # of which the first is left out
ROUND_NBYTES, MOST_CALLS = 16 << 20, 50
TIMEOUT_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from torch_cgx.cli.processes import run_ranks

    search_path = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(search_path)
    rows = run_ranks("exact_collectives:run", {}, arguments.ranks, lambda rank, message: None)[0]["rows"]
    for row in rows:
        ratio = row["gloo_s"] / row["cgx_s"]
        print(
            f"{row['kind']:15} {row['nbytes']:9} B  cgx {row['cgx_s'] * 1e6:9.0f} us  "
            f"gloo {row['gloo_s'] * 1e6:9.0f} us  {ratio:5.1f}x"
        )
    if arguments.json:
        write_json(arguments.json, {"ranks": arguments.ranks, "rows": rows})


def run(arguments: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Time all kinds and sizes on one rank."""
    from torch_cgx.cli.processes import join_world

    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives
    torch.set_num_threads(1)
    join_world(TIMEOUT_S)
    groups = {"cgx": dist.new_group(backend="cgx"), "gloo": dist.new_group(backend="gloo")}
    rows = [time_kind(kind, nbytes, groups) for kind in KINDS for nbytes in SIZES]
    dist.destroy_process_group()
    return {"rows": rows}


def time_kind(kind: str, nbytes: int, groups: dict[str, Any]) -> dict[str, Any]:
    """Time rounds of calls, one group after the other: single ones would count that ranks come late from the other."""
    world = dist.get_world_size()
    part = torch.ones(max(1, nbytes // 4 // world))
    whole = torch.ones(part.numel() * world)
    exchanged = torch.empty_like(whole)
    samples: dict[str, list[float]] = {name: [] for name in groups}
    calls = max(2, min(MOST_CALLS, ROUND_NBYTES // nbytes))
    for _ in range(ROUNDS):
        for name, group in groups.items():
            begin = time.perf_counter()
            for call in range(calls):
                if kind == "all_reduce":
                    dist.all_reduce(whole, group=group)
                elif kind == "all_gather":
                    dist.all_gather_into_tensor(whole, part, group=group)
                elif kind == "reduce_scatter":
                    dist.reduce_scatter_tensor(part, whole, group=group)
                elif kind == "broadcast":
                    dist.broadcast(whole, call % world, group=group)
                else:
                    dist.all_to_all_single(exchanged, whole, group=group)
            samples[name].append((time.perf_counter() - begin) / calls)
            whole.fill_(1.0)
    return {"kind": kind, "nbytes": nbytes, **{f"{name}_s": median(times[1:]) for name, times in samples.items()}}


if __name__ == "__main__":
    main()
