"""How fast a training is with adaptive="auto", against the best of fixed widths, between two hosts and within one.

    python benchmarks/adaptive_speed.py

Two processes train copies of the examples' GPT (10.7 million parameters), one with the hook at each width and one with
adaptive="auto"; first on two test hosts joined by a link of 1 Gbit/s, then on one host over shared memory. All copies
live in the same processes and are trained in turns, some steps each and every other round in reverse order, so that
what else the machine does hits all of them alike. The automatic one has made its trials and its choice before anything
is timed. Prints medians over the rounds, and the median of the ratios, round by round, to the best fixed width, with
its 95 % interval: where the machine is not quiet, that is wide, and the best of many widths is the luckiest of them.
Needs root for the test hosts; `--only host` does without.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from results import write_json

HERE = Path(__file__).resolve().parent
LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 6, 384, 6, 64, 65
BUCKET_SIZE = 1024
QUIET_LOAD = 0.5
AUTO = "auto"
TIMEOUT_S = 300.0
BLOCK = 4  # steps in turn, of which the first is not counted: it waits for whom the turn before has held up
CHOSEN_AFTER = 65  # steps: the trials, the samples and the first choice
PLACES: dict[str, dict[str, Any]] = {
    "link": {"contestants": ["exact", "8", "6", "4", "3", "2", "1", AUTO], "goal": 0.98},
    "host": {"contestants": ["exact", "4", AUTO], "goal": 0.97},
}


def run_rank(arguments: Mapping[str, Any], report: Any) -> dict[str, Any]:
    """What one process does; what it returns are seconds of a step by contestant, one figure a round."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from torch_cgx import CGXState, cgx_hook
    from torch_cgx.cli.processes import join_world

    sys.path.insert(0, str(HERE.parent / "examples"))
    from gpt import GPT

    torch.set_num_threads(1)
    join_world(TIMEOUT_S)
    text = torch.randint(VOCABULARY, (arguments["batch"], CONTEXT + 1))
    contestants = {}
    for name in arguments["contestants"]:
        torch.manual_seed(0)
        group = dist.new_group(backend="cgx")
        model = DistributedDataParallel(
            GPT(VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS), process_group=group, gradient_as_bucket_view=True
        )
        bits = {"exact": 32, AUTO: 4}.get(name) or int(name)
        state = CGXState.from_model(
            model,
            compression_params={"bits": bits, "bucket_size": BUCKET_SIZE},
            adaptive=AUTO if name == AUTO else None,
            measure_every=1 << 30,
        )
        model.register_comm_hook(state, cgx_hook)
        contestants[name] = (model, state, torch.optim.SGD(model.parameters(), 1e-2))

    def step(name: str) -> None:
        model, _, optimizer = contestants[name]
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def tell(fraction: float, stage: str) -> None:
        if dist.get_rank() == 0:
            report({"fraction": fraction, "stage": stage})

    for name in contestants:
        tell(0.0, f"warming up {name}")
        for _ in range(CHOSEN_AFTER if name == AUTO else 4):
            step(name)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(arguments["rounds"]):
        tell(number / arguments["rounds"], f"round {number + 1} of {arguments['rounds']}")
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            step(name)
            start = time.perf_counter()
            for _ in range(BLOCK - 1):
                step(name)
            seconds[name].append((time.perf_counter() - start) / (BLOCK - 1))
    reports = {name: state.report() for name, (_, state, _) in contestants.items()}
    dist.barrier()
    dist.destroy_process_group()
    return {
        "seconds": seconds,
        "bytes": {name: of.bytes_sent for name, of in reports.items()},
        "choices": list(reports[AUTO].choices),
    }


def measure(place: str, options: argparse.Namespace) -> dict[str, Any]:
    from torch_cgx.cli import machine
    from torch_cgx.cli.hosts import Hosts
    from torch_cgx.cli.link import measure_goodput
    from torch_cgx.cli.processes import run_ranks
    from torch_cgx.cli.progress import Progress

    load = machine.load()
    contestants = PLACES[place]["contestants"]
    if options.widths and place == "link":
        contestants = [*options.widths.split(","), AUTO]
    arguments = {
        "contestants": contestants,
        "batch": options.batch if place == "link" else options.host_batch,
        "rounds": options.rounds,
    }
    with Hosts(2, options.rate) if place == "link" else nullcontext() as hosts, Progress(place) as progress:
        nodes = hosts.nodes if hosts is not None else ()
        goodput = measure_goodput(*nodes) if nodes else None
        of_ranks = run_ranks(
            "adaptive_speed:run_rank",
            arguments,
            1 if nodes else 2,
            lambda rank, message: progress.update(message["fraction"], message["stage"]),
            nodes,
        )
    return {"goodput": goodput, "load": load, **arguments, **of_ranks[0]}


def show(place: str, rate: str, found: Mapping[str, Any]) -> None:
    seconds, goal = found["seconds"], PLACES[place]["goal"]
    fixed = [name for name in seconds if name != AUTO]
    best = min(fixed, key=lambda name: median(seconds[name]))
    where = f"two hosts, {rate}" if place == "link" else "one host, shared memory"
    print(f"\n{where}; {found['batch']} x {CONTEXT} tokens a process, {found['rounds']} rounds of {BLOCK - 1} steps")
    if found["goodput"]:
        print("TCP goodput of the link: " + ", ".join(f"{each / 1e6:.0f} Mbit/s" for each in found["goodput"]))
    print(
        "\n| gradients | bytes | a step | speed, best fixed width = 100 % | 95 % interval |\n|---|---:|---:|---:|---:|"
    )
    for name, times in seconds.items():
        how = name if name in ("exact", AUTO) else f"{name} bits"
        low, speed, high = relative(seconds, best, name)
        cells = [how, f"{found['bytes'][name] / 1e6:.2f} MB", f"{1e3 * median(times):.1f} ms", f"{100 * speed:.1f} %"]
        cells.append("" if name == best else f"{100 * low:.1f} to {100 * high:.1f} %")
        print(f"| {' | '.join(cells)} |")
    for choice in found["choices"]:
        bits = [how[0] for how in choice["layers"].values()]
        counts = ", ".join(f"{bits.count(each)} with {each}" for each in sorted(set(bits)))
        print(f"\nauto since step {choice['step']}: {choice['reason']}\nlayers by bits: {counts}")
    low, speed, high = relative(seconds, best, AUTO)
    print(
        f"goal: auto at least {100 * goal:.0f} % of the best fixed width ({best}): {100 * speed:.1f} %, "
        f"{100 * low:.1f} to {100 * high:.1f}: {'met' if speed >= goal else 'NOT met'}"
        + (" (the interval has both answers in it)" if low < goal <= high else "")
    )
    if found["load"] > QUIET_LOAD:
        print(f"caution: load average {found['load']:.1f} at the start, so other work shares in these times")


def relative(seconds: Mapping[str, list[float]], best: str, name: str) -> tuple[float, float, float]:
    """Speed against the best fixed width: the median of what single rounds say, between the ends of its interval."""
    ratios = sorted(a / b for a, b in zip(seconds[best], seconds[name], strict=True))
    # So many ratios lie below the true median, give or take 1.96 standard deviations of a coin's throws.
    aside = 0.98 * len(ratios) ** 0.5
    low = max(0, math.floor(len(ratios) / 2 - aside))
    return ratios[low], median(ratios), ratios[-1 - low]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=PLACES, help="one place")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--batch", type=int, default=4, help="pieces of text a process and step, on the link")
    parser.add_argument("--host-batch", type=int, default=4, help="the same on one host")
    parser.add_argument("--widths", help="of those on the link, as in 4,2 (all)")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Ranks are started as modules.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    results = {}
    for place in [options.only] if options.only else PLACES:
        results[place] = measure(place, options)
        show(place, options.rate, results[place])
    if options.json:
        write_json(options.json, {"rate": options.rate, "places": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
