"""Resident memory over many all_reduces of mixed sizes between two ranks that share no memory: it must not grow.

    python benchmarks/memory.py --operations 10000 --json FILE

Prints, as JSON, each rank's resident bytes after a tenth, a half and all of the operations, and the most it ever had.
Not a test: it takes minutes. Each rank gets a CGX_NODE_ID of its own, so that payloads travel over links.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from results import format_json, write_json

HERE = Path(__file__).resolve().parent
LEAST_NBYTES, MOST_NBYTES = 64, 4 << 20
WORLD = 2
BITS = "4"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--in-flight", type=int, default=4, help="how many are started before the first is waited for")
    parser.add_argument("--json", type=Path, help="write the report to this file too")
    arguments = parser.parse_args()
    if arguments.operations < 10 or arguments.in_flight < 1:
        parser.error("expected at least 10 operations and 1 in flight")
    report = measure(arguments.operations, arguments.in_flight)
    print(format_json(report))
    if arguments.json:
        write_json(arguments.json, report)
    return 0


def measure(operations: int, in_flight: int) -> dict[str, Any]:
    from torch_cgx.cli.processes import run_ranks

    # Ranks are started as modules.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = time.monotonic()
    arguments = {"operations": operations, "in_flight": in_flight}
    ranks = run_ranks("memory:run_rank", arguments, WORLD, lambda rank, message: None)
    return {
        "operations": operations,
        "in_flight": in_flight,
        "sizes_nbytes": [LEAST_NBYTES, MOST_NBYTES],
        "bits": int(BITS),
        "seconds": round(time.monotonic() - started, 1),
        "ranks": ranks,
    }


def run_rank(arguments: Mapping[str, int], report: Any) -> dict[str, Any]:
    """Make one rank's all_reduces, and note its resident memory meanwhile."""
    operations, in_flight, rank = arguments["operations"], arguments["in_flight"], int(os.environ["RANK"])
    os.environ |= {"CGX_NODE_ID": f"node-{rank}", "CGX_COMPRESSION_QUANTIZATION_BITS": BITS}
    import torch
    import torch.distributed as dist

    import torch_cgx
    from torch_cgx.cli.processes import join_world

    torch.set_num_threads(1)
    join_world(timeout_s=300.0)
    group = dist.new_group(backend="cgx")
    sizes = random.Random(7)  # the same on all ranks
    marks = {max(1, operations // 10), operations // 2, operations}
    resident_nbytes: dict[int, int] = {}
    buffers = torch.zeros(in_flight, MOST_NBYTES // 4)  # made once: what tensors of many sizes cost is not of interest
    pending: list[Any] = []
    for number in range(1, operations + 1):
        # Small and large ones alike: the logarithm is what is drawn evenly.
        nbytes = math.exp(sizes.uniform(math.log(LEAST_NBYTES), math.log(MOST_NBYTES)))
        x = buffers[len(pending), : int(nbytes) // 4].fill_(float(rank))
        pending.append((dist.all_reduce(x, group=group, async_op=True), x))
        if len(pending) == in_flight or number in marks:
            for work, reduced in pending:
                work.wait()
                assert reduced[0] == reduced[-1] == 1.0, "a constant is summed up exactly"
            pending.clear()
        if number in marks:
            gc.collect()
            resident_nbytes[number] = status_nbytes("VmRSS")
    figures = torch_cgx.stats(group)
    dist.destroy_process_group()
    return {
        "rank": rank,
        "resident_nbytes": resident_nbytes,
        "most_resident_nbytes": status_nbytes("VmHWM"),
        "compressed_operations": figures["compressed_operations"],
        "sent_nbytes": figures["bytes_sent"],
    }


def status_nbytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    sys.exit(main())
