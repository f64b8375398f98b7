"""What the desynchronisation detector costs an operation.

    python benchmarks/detector_cost.py --json FILE --doc docs/reliability.md

Two ranks reduce 1 KB exactly, again and again, in turns with and without the detector, on the same group:

- over shared memory: the time of writing a call on the board, by calling it; and a whole all_reduce beside one of the
  same group whose every operation is noted twice, so that the difference is one note more;
- without the native library: the time of `Inquiry.note`, and a whole all_reduce that Gloo carries, with the comparison
  that goes before it, and Gloo's alone.

Medians over rounds, and the quartiles of the differences.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from markers import write_between
from results import write_json

NUMEL = 256  # 1 KB
ROUNDS, TURN = 40, 100
BEGIN, END = "<!-- detector: begin -->", "<!-- detector: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--doc", type=Path, help="write the result into this file, between its markers")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"machine": f"{os.cpu_count()} cores", "torch": torch.__version__}
    for where in ("shared memory", "Gloo"):
        queue = mp.get_context("spawn").SimpleQueue()
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        mp.spawn(rank_main, (where, store.port, queue), 2)
        found[where] = queue.get()
    if arguments.json:
        write_json(arguments.json, found)
    text = report(found)
    if arguments.doc:
        write_between(arguments.doc, BEGIN, END, text)
    print(text)
    return 0


def rank_main(rank: int, where: str, port: int, queue: Any) -> None:
    import torch_cgx  # noqa: F401  (where it is not installed, importing torch does not register it)

    torch.set_num_threads(1)
    if where == "Gloo":
        from torch_cgx import _native

        _native.shares_memory = lambda: False
    dist.init_process_group(
        "cgx",
        store=dist.TCPStore("127.0.0.1", port, None),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    found = over_shared_memory() if where == "shared memory" else over_gloo()
    if rank == 0:
        queue.put(found)
    dist.destroy_process_group()


def over_shared_memory() -> dict[str, float]:
    group: Any = dist.group.WORLD
    shared = group._parts.native
    call = prepared_call()
    x = torch.ones(NUMEL)

    def plain() -> None:
        dist.all_reduce(x)

    def noted_twice() -> None:
        shared.note(call)
        dist.all_reduce(x)

    found = {"note_us": alone_us(lambda: shared.note(call))}
    return found | compared(plain, noted_twice, x)


def over_gloo() -> dict[str, float]:
    group: Any = dist.group.WORLD
    call = prepared_call()
    x = torch.ones(NUMEL)

    def compared_first() -> None:
        dist.all_reduce(x)

    def not_compared() -> None:
        group._parts.gloo.allreduce([x]).wait()

    found = {"note_us": alone_us(lambda: group._parts.ledger.note(call))}
    return found | compared(not_compared, compared_first, x)


def prepared_call() -> Any:
    from torch_cgx.group.calls import collective_call

    return collective_call("all_reduce", torch.float32, (NUMEL,), reduction="SUM", bits=32)


def alone_us(act: Callable[[], object], times: int = 20_000) -> float:
    """The same number of times on all ranks: the board counts."""
    start = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - start) / times * 1e6


def compared(without: Callable[[], None], with_it: Callable[[], None], x: torch.Tensor) -> dict[str, float]:
    """Microseconds of an operation in turns of one and the other, and of their difference."""
    times: dict[str, list[float]] = {"without": [], "with": []}
    for round_ in range(ROUNDS + 2):
        order = (("without", without), ("with", with_it))
        for name, act in order if round_ % 2 else order[::-1]:
            x.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(TURN):
                act()
            if round_ >= 2:
                times[name].append((time.perf_counter() - start) / TURN * 1e6)
            x.fill_(1.0)
            act()
            if not (x == 2).all():
                raise AssertionError("the sum is wrong")
    differences = [b - a for a, b in zip(times["without"], times["with"], strict=True)]
    low, middle, high = statistics.quantiles(differences, n=4)
    return {
        "without_us": statistics.median(times["without"]),
        "with_us": statistics.median(times["with"]),
        "difference_us": middle,
        "difference_low_us": low,
        "difference_high_us": high,
    }


def report(found: dict[str, Any]) -> str:
    lines = [
        "| 1 KB, two ranks on one machine | the note alone | all_reduce without | with | difference (quartiles) |",
        "|---|---|---|---|---|",
    ]
    titles = {
        "shared memory": "shared memory: one note on the board more",
        "Gloo": "without the native library: Gloo's all_reduce, and the comparison before it",
    }
    for where, title in titles.items():
        each = found[where]
        spread = f"{each['difference_low_us']:.1f} to {each['difference_high_us']:.1f}"
        lines.append(
            f"| {title} | {each['note_us']:.2f} us | {each['without_us']:.1f} us | {each['with_us']:.1f} us | "
            f"{each['difference_us']:.1f} us ({spread}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
