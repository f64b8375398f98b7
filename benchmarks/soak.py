"""A long mixed load on one host, every result checked, and watched for what grows.

    python benchmarks/soak.py --minutes 20 --json FILE

Four ranks with several groups of each kind (shared memory, links, the hierarchy of two nodes of two; of all
ranks, of three, of two) draw from one seed, so that all of them make the same calls: operations of 1 byte to 256 MB,
exact and of 1 to 8 bits, several in flight over groups in random order, some waited for in another order than they were
begun in. Groups are made and destroyed meanwhile.

Exact results must be exact, compressed ones within their bound, and all ranks of a group must have the same bits.
Resident memory, descriptors and threads of the last quarter must be those of the second, and no segment may be
left in /dev/shm. Exit code 1: something was wrong, or grew.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from results import format_json, write_json

WORLD = 4
PERIOD = 17  # values repeat after so many: a prime, so that no block or chunk begins like another
MOST_NBYTES = 256 << 20
LARGE_NBYTES = 16 << 20
SHAPES = 200
LARGE_SHARE = 0.01  # of the shapes may be larger than LARGE_NBYTES
MOST_IN_FLIGHT = 6
GROUP_TIMEOUT_S = 300
STARTS_S = 60.0  # in which the ranks of another job have mapped their segments
ROUNDS_A_TEMPORARY_GROUP = 40
SAMPLE_S = 2.0
SAMPLES = 40  # of a short run, at most
ALLOWED_GROWTH_NBYTES = 32 << 20  # of resident memory, besides a twentieth: allocators keep something
CACHES_NBYTES = 160 << 20  # what layouts and plans may fill until each group has seen most shapes
CACHES_FILL_S = 600
KINDS = (
    "all_reduce",
    "all_reduce",
    "all_reduce",
    "coalesced",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "exchange",
    "barrier",
)
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Place:
    """A group, and how often it quantizes a contribution at most."""

    name: str
    group: Any
    ranks: tuple[int, ...]
    quantizations: int


@dataclass(frozen=True)
class Order:
    """One operation: the same on all ranks that take part."""

    number: int
    place: Place
    kind: str
    numel: int  # of one rank's part
    dtype: torch.dtype
    bits: int
    average: bool
    pause: bool  # this rank may come late


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the report to this file too")
    arguments = parser.parse_args()
    if arguments.minutes <= 0:
        parser.error(f"--minutes: expected more than 0, got {arguments.minutes:g}")
    report = soak(arguments.minutes * 60, arguments.seed)
    print(format_json(report))
    if arguments.json:
        write_json(arguments.json, report)
    for problem in report["problems"]:
        print(problem, file=sys.stderr)
    return 1 if report["problems"] else 0


def soak(seconds: float, seed: int) -> dict[str, Any]:
    from torch_cgx.cli.processes import run_ranks
    from torch_cgx.cli.progress import Progress

    search_path = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(search_path)
    before = segments()
    with Progress("soak") as progress:

        def show(rank: int, message: dict[str, Any]) -> None:
            if rank == 0:
                progress.update(min(1.0, message["share"]), f"{message['operations']} operations")

        ranks = run_ranks("soak:run", {"seconds": seconds, "seed": seed}, WORLD, show)
    problems = [problem for rank in ranks for problem in rank.pop("problems")]
    if left := left_behind(before):
        problems.append(f"left in /dev/shm: {sorted(left)}")
    return {"seconds": seconds, "seed": seed, "ranks": ranks, "problems": problems}


def segments() -> set[str]:
    """Return the names of groups' segments in /dev/shm, whoever made them."""
    return {path.name for path in Path("/dev/shm").glob("cgx-*")}


def left_behind(before: set[str]) -> set[str]:
    """Return the segments that were not there `before` and stay. Another job's lose their names as soon as it runs."""
    left, deadline = segments() - before, time.monotonic() + STARTS_S
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= segments()
    return left


def run(arguments: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """What each rank does."""
    from torch_cgx.cli.processes import join_world

    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives
    torch.set_num_threads(1)
    join_world(GROUP_TIMEOUT_S)
    me, seconds = dist.get_rank(), arguments["seconds"]
    places = make_places()
    dice = random.Random(arguments["seed"])
    shapes = draw_shapes(dice)
    own_dice = random.Random(me)
    counts: Counter[str] = Counter()
    samples: list[dict[str, int]] = []
    problems: list[str] = warm_up(places, own_dice)
    started = sampled = time.monotonic()
    for number in range(sys.maxsize):
        # Rank 0's clock decides for all, so that all leave after the same round.
        state = torch.tensor([time.monotonic() - started, float(bool(problems))])
        dist.broadcast(state[:1], 0)
        dist.all_reduce(state[1:], dist.ReduceOp.MAX)
        if state[0] >= seconds or state[1]:
            break
        orders = list(draw(dice, places, shapes, 20 * number))
        temporary = number % ROUNDS_A_TEMPORARY_GROUP == ROUNDS_A_TEMPORARY_GROUP - 1
        if temporary:
            place = Place("temporary", dist.new_group(backend="cgx"), tuple(range(WORLD)), 2)
            orders += draw(dice, [place], shapes, 20 * number + 10)
        problems += make_round(orders, own_dice, counts)
        if temporary:
            dist.destroy_process_group(place.group)
            counts["groups made and destroyed"] += 1
        if time.monotonic() - sampled > min(SAMPLE_S, seconds / SAMPLES):
            sampled = time.monotonic()
            samples.append(footprint())
            report({"share": float(state[0]) / seconds, "operations": counts["operations"]})
    problems += growth(me, samples, seconds)
    dist.destroy_process_group()
    return {"rank": me, "counts": dict(counts), "samples": samples, "problems": problems}


def make_places() -> list[Place]:
    """Groups by what carries them. CGX_NODE_ID, read when a group is made, tells ranks where they are."""
    me = dist.get_rank()
    everyone, places = tuple(range(WORLD)), []
    nodes = {"shared memory": "", "links": f"node-{me}", "hierarchy": f"node-{me // 2}"}
    for name, node in nodes.items():
        os.environ.pop("CGX_NODE_ID", None)
        if node:
            os.environ["CGX_NODE_ID"] = node
        for ranks in (everyone, everyone, everyone[:3], everyone[:2], everyone[2:]):
            group = dist.new_group(list(ranks), backend="cgx")
            places.append(Place(name, group, ranks, 3 if name == "hierarchy" else 2))
    os.environ.pop("CGX_NODE_ID", None)
    return places


def warm_up(places: list[Place], own_dice: random.Random) -> list[str]:
    """Bring every group to the most that it keeps: memory, by more than a fusion buffer, exact and compressed; threads.

    The last two orders start those that a group has for futures, and for what Gloo carries.
    """
    numel = (72 << 20) // 4
    orders = (("all_reduce", numel, 32), ("all_reduce", numel, 8), ("coalesced", 1000, 8), ("broadcast", 1000, 32))
    details: dict[str, Any] = {"dtype": torch.float32, "average": False, "pause": False}
    return [
        problem
        for number, place in enumerate(places)
        for kind, count, bits in orders
        for problem in make_round(
            [Order(number, place, kind=kind, numel=count, bits=bits, **details)], own_dice, Counter()
        )
    ]


def draw_shapes(dice: random.Random) -> list[dict[str, Any]]:
    """What operations are made of. A training has some hundred shapes, for which groups keep layouts and plans."""
    shapes = []
    for i in range(SHAPES):
        most = MOST_NBYTES if i < SHAPES * LARGE_SHARE else LARGE_NBYTES
        dtype = dice.choice(DTYPES)
        # Were the power 1, logarithms would be drawn evenly; so there are more small ones.
        nbytes = math.exp(math.log(most) * dice.random() ** 1.5)
        numel = max(1, int(nbytes) // dtype.itemsize)
        bits = dice.choice((1, 2, 3, 4, 5, 6, 7, 8, 32))
        shapes.append({"numel": numel, "dtype": dtype, "bits": bits, "average": dice.random() < 0.5})
    shapes[0]["numel"] = MOST_NBYTES // shapes[0]["dtype"].itemsize
    return shapes


def draw(dice: random.Random, places: list[Place], shapes: list[dict[str, Any]], first: int) -> Iterator[Order]:
    """A round: operations that are in flight together. Every rank draws all, and makes those of its groups."""
    for i in range(dice.randint(1, MOST_IN_FLIGHT)):
        place, kind, pause = dice.choice(places), dice.choice(KINDS), dice.random() < 0.02
        yield Order(number=first + i, place=place, kind=kind, pause=pause, **dice.choice(shapes))


def make_round(orders: list[Order], own_dice: random.Random, counts: Counter[str]) -> list[str]:
    me = dist.get_rank()
    mine = [order for order in orders if me in order.place.ranks]
    begun = []
    for order in mine:
        if order.pause and own_dice.random() < 0.5:
            time.sleep(own_dice.random() * 0.02)
        begun.append(Begun(order))
    own_dice.shuffle(begun)
    for each in begun:
        each.finish()
    problems = [problem for each in begun if (problem := each.problem()) is not None]
    problems += compare_bits(begun, orders)
    for order in mine:
        counts["operations"] += 1
        counts[f"{order.kind}, {order.place.name}"] += 1
        counts["values checked"] += order.numel if order.kind != "barrier" else 0
        counts["compressed"] += order.kind in ("all_reduce", "coalesced") and order.bits != 32
    return problems


class Begun:
    """An operation under way on this rank."""

    def __init__(self, order: Order) -> None:
        import torch_cgx

        self.order = order
        ranks, group = order.place.ranks, order.place.group
        self._index = ranks.index(dist.get_rank())
        world = len(ranks)
        reduction = dist.ReduceOp.AVG if order.average else dist.ReduceOp.SUM
        own = values(order, self._index, order.numel)
        self.results: list[Tensor] = [own]
        self._inputs: list[Tensor] = []
        torch_cgx.set_default(bits=order.bits)
        try:
            match order.kind:
                case "all_reduce":
                    self._work = dist.all_reduce(own, reduction, group, async_op=True)
                case "coalesced":
                    self.results = list(own.split([(order.numel + 2) // 3, order.numel - (order.numel + 2) // 3]))
                    self._work = dist.all_reduce_coalesced(self.results, reduction, group, async_op=True)
                case "reduce_scatter":
                    part = -(-order.numel // world)
                    self._inputs = [values(order, self._index, part * world)]
                    self.results = [torch.empty(part, dtype=order.dtype)]
                    self._work = dist.reduce_scatter_tensor(
                        self.results[0], self._inputs[0], reduction, group, async_op=True
                    )
                case "all_gather":
                    part = -(-order.numel // world)
                    self._inputs = [own[:part].clone()]
                    self.results = [torch.empty(part * world, dtype=order.dtype)]
                    self._work = dist.all_gather_into_tensor(self.results[0], self._inputs[0], group, async_op=True)
                case "broadcast":
                    self._work = dist.broadcast(own, ranks[order.number % world], group, async_op=True)
                case "exchange":
                    part = -(-order.numel // world)
                    self._inputs = [values(order, self._index, part * world)]
                    self.results = [torch.empty(part * world, dtype=order.dtype)]
                    self._work = dist.all_to_all_single(self.results[0], self._inputs[0], group=group, async_op=True)
                case _:
                    self.results = []
                    self._work = dist.barrier(group, async_op=True)
        finally:
            torch_cgx.set_default(bits=32)

    def finish(self) -> None:
        self._work.wait()

    def problem(self) -> str | None:
        off, allowed = self._difference()
        return None if off <= allowed else f"rank {dist.get_rank()}: {self.order}: off by {off}, allowed is {allowed}"

    def _difference(self) -> tuple[float, float]:
        """How far the result is off, and how far it may be."""
        order, world = self.order, len(self.order.place.ranks)
        each = [period(order, index) for index in range(world)]
        scale = 1 / world if order.average else 1.0
        total = torch.stack(each).sum(0) * scale
        rounded = 2.0**-7 * float(total.max()) if order.average and world == 3 else 0.0  # thirds
        match order.kind:
            case "all_reduce" | "coalesced":
                flat = self.results[0] if len(self.results) == 1 else torch.cat(self.results)
                spread = PERIOD * world * scale
                lossy = order.place.quantizations * 0.5 * spread / (2**order.bits - 1) + 2.0**-6 * spread
                return largest_difference(flat, total), rounded if order.bits == 32 else lossy
            case "reduce_scatter":
                mine = self.results[0]
                return largest_difference(mine, total.roll(-self._index * mine.numel())), rounded
            case "all_gather":
                parts = zip(self.results[0].chunk(world), each, strict=True)
                return max(largest_difference(part, wanted) for part, wanted in parts), 0.0
            case "exchange":
                part = self.results[0].numel() // world
                pairs = zip(self.results[0].chunk(world), each, strict=True)
                return max(largest_difference(got, wanted.roll(-self._index * part)) for got, wanted in pairs), 0.0
            case "broadcast":
                return largest_difference(self.results[0], each[order.number % world]), 0.0
            case _:
                return 0.0, 0.0


def period(order: Order, index: int) -> Tensor:
    """What one rank's values repeat: small whole numbers, whose sums are exact in every dtype."""
    shift = order.number % 11 + 5 * index
    return (torch.arange(PERIOD, dtype=torch.float64) * 3 + shift) % PERIOD


def values(order: Order, index: int, numel: int) -> Tensor:
    repeated = period(order, index).to(order.dtype)
    return repeated.repeat(-(-numel // PERIOD))[:numel].contiguous()


def largest_difference(result: Tensor, repeated: Tensor) -> float:
    whole = result.numel() // PERIOD * PERIOD
    worst = 0.0
    rest = result.numel() - whole
    for part, wanted in ((result[:whole].view(-1, PERIOD), repeated), (result[whole:], repeated[:rest])):
        if part.numel():
            worst = max(worst, float((part.float() - wanted.float()).abs().max()))
    return worst


def compare_bits(begun: list[Begun], orders: list[Order]) -> list[str]:
    """All ranks of a reduction must have the same bits: a sum over them, as integers, is compared over Gloo."""
    sums = torch.zeros(len(orders), 2, dtype=torch.int64)
    index = {order.number: i for i, order in enumerate(orders)}
    for each in begun:
        if each.order.kind in ("all_reduce", "coalesced"):
            sums[index[each.order.number]] = torch.tensor([checksum(each.results), 1])
    gathered = [torch.zeros_like(sums) for _ in range(WORLD)]
    dist.all_gather(gathered, sums)
    problems = []
    for i, order in enumerate(orders):
        seen = {int(rank[i, 0]) for rank in gathered if rank[i, 1]}
        if len(seen) > 1:
            problems.append(f"rank {dist.get_rank()}: {order}: ranks have different bits")
    return problems


def checksum(results: list[Tensor]) -> int:
    total = 0
    for place, result in enumerate(results):
        whole = result.view(torch.int16 if result.element_size() == 2 else torch.int32)
        total += (place + 1) * int(whole.sum(dtype=torch.int64))
    return total


def footprint() -> dict[str, int]:
    """What this process has, besides what nobody uses and the allocator keeps."""
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "resident_nbytes": int(status["VmRSS"].split()[0]) * 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
    }


def growth(me: int, samples: list[dict[str, int]], seconds: float) -> list[str]:
    """What the last quarter has more of than the second. A short run says less of memory: caches are still filling."""
    of_caches = CACHES_NBYTES * max(0.0, 1 - seconds / CACHES_FILL_S)
    if len(samples) < 8:
        return []
    quarter = len(samples) // 4
    problems = []
    for name in samples[0]:
        early = median(sample[name] for sample in samples[quarter : 2 * quarter])
        late = median(sample[name] for sample in samples[-quarter:])
        allowed = 1.05 * early + ALLOWED_GROWTH_NBYTES + of_caches if name == "resident_nbytes" else early + 1
        if late > allowed:
            problems.append(f"rank {me}: {name} grew from {early:.0f} in the second quarter to {late:.0f} in the last")
    return problems


if __name__ == "__main__":
    sys.exit(main())
