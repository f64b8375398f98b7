"""Resident memory over many all_reduces of mixed sizes between two ranks that share no memory: it must not grow.

    python benchmarks/memory.py --operations 10000 --json benchmarks/results/memory.json

Prints, as JSON, each rank's resident bytes after a tenth, a half and all of the operations, and the most it ever had.
Not a test: it takes minutes. Each rank gets a CGX_NODE_ID of its own, so that payloads travel as messages.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import socket
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0


def measure(operations: int, in_flight: int) -> dict[str, Any]:
    context = get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    pipes, processes = [], []
    for rank in range(WORLD):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(rank, port, operations, in_flight, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    ranks = [pipe.recv() for pipe in pipes]  # raises EOFError where a rank has failed
    for process in processes:
        process.join()
    return {
        "operations": operations,
        "in_flight": in_flight,
        "sizes_nbytes": [LEAST_NBYTES, MOST_NBYTES],
        "bits": int(BITS),
        "seconds": round(time.monotonic() - started, 1),
        "ranks": ranks,
    }


def run_rank(rank: int, port: int, operations: int, in_flight: int, pipe: Connection) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CGX_NODE_ID": f"node-{rank}",
        "CGX_COMPRESSION_QUANTIZATION_BITS": BITS,
    }
    import torch
    import torch.distributed as dist

    import torch_cgx

    torch.set_num_threads(1)
    dist.init_process_group("cgx", rank=rank, world_size=WORLD)
    sizes = random.Random(7)  # the same on all ranks
    marks = {max(1, operations // 10), operations // 2, operations}
    resident_nbytes: dict[int, int] = {}
    buffers = torch.zeros(in_flight, MOST_NBYTES // 4)  # made once: what tensors of many sizes cost is not of interest
    pending: list[Any] = []
    for number in range(1, operations + 1):
        # Small and large ones alike: the logarithm is what is drawn evenly.
        nbytes = math.exp(sizes.uniform(math.log(LEAST_NBYTES), math.log(MOST_NBYTES)))
        x = buffers[len(pending), : int(nbytes) // 4].fill_(float(rank))
        pending.append((dist.all_reduce(x, async_op=True), x))
        if len(pending) == in_flight or number in marks:
            for work, reduced in pending:
                work.wait()
                assert reduced[0] == reduced[-1] == 1.0, "a constant is summed up exactly"
            pending.clear()
        if number in marks:
            gc.collect()
            resident_nbytes[number] = status_nbytes("VmRSS")
    figures = torch_cgx.stats()
    pipe.send(
        {
            "rank": rank,
            "resident_nbytes": resident_nbytes,
            "most_resident_nbytes": status_nbytes("VmHWM"),
            "compressed_operations": figures["compressed_operations"],
            "sent_nbytes": figures["bytes_sent"],
        }
    )
    dist.destroy_process_group()


def status_nbytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    sys.exit(main())
