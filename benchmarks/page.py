"""Makes the plots and tables of docs/benchmarks.md about whole trainings from raw JSON: measures nothing.

    python benchmarks/page.py

Reads the newest speedup.json of benchmarks/results (the run of the front page), speedup-again-*.json (the same once
more, or with another batch or machine) and train-*.json (scaling.py), lets `cgx plan` predict more nodes than were
measured, and writes docs/speedup.png, docs/scaling-MODEL.png and what stands between the page's markers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markers import short_cpu, write_between
from results import newest, newest_of_each
from torch_cgx.cli.bench.train_plot import colour_of, draw_train
from torch_cgx.cli.bench.train_report import IDEAL, names_of
from torch_cgx.cli.plan.inputs import input_of_run, link_rate
from torch_cgx.cli.plan.model import Plan
from torch_cgx.cli.plan.sites import make_site
from torch_cgx.cli.table import format_markdown, format_nbytes, format_seconds

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
TITLES = {"gpt": "GPT", "resnet": "ResNet", "vit": "ViT", "mlp": "MLP"}
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
MORE_NODES = (8, 16, 32, 64, 128, 256, 512, 1024)
PLANNED = {"gloo": "exact", "fp16": "fp16", "cgx-8": "8 bits", "cgx-4": "4 bits", "cgx-2": "2 bits"}
MOST_COLUMNS = 50
Run = dict[str, Any]
Runs = Mapping[tuple[str, int], Run]  # of one model, by rate and nodes

# Prices of a node and hour that somebody might pay; typed in, not looked up. `--price` of `cgx plan` takes your own.
NODES_FOR_HIRE = (
    ("small virtual machine, 2 cores", "1gbit", 0.05),
    ("the same in two offices, joined by 100 Mbit/s", "100mbit", 0.05),
    ("the same with a fast network", "10gbit", 0.08),
)
COST_NODES, COST_HOURS = 8, 24.0
COSTED = ("exact", "fp16", "8 bits", "4 bits", "2 bits")


def load() -> dict[str, dict[tuple[str, int], Run]]:
    models: dict[str, dict[tuple[str, int], Run]] = {}
    for path in newest_of_each("train-*.json"):
        run = json.loads(path.read_text())
        models.setdefault(run["model"]["name"], {})[run["link"]["rate"], run["link"]["nodes"]] = run
    return models


def plan_of(runs: Runs, rate: str) -> Plan:
    """More nodes like those of the run with two, whose one core computes and communicates."""
    run = runs[rate, 2]
    site = make_site("cpu", 1, link_rate(rate), link_rate(rate), cores=1.0)
    return Plan(site, input_of_run(run).workload)


def draw_scaling(runs: Runs, path: Path) -> None:
    """A panel a rate: share of ideal scaling by nodes, measured and, dashed, predicted."""
    from matplotlib.figure import Figure

    rates = [rate for rate in RATES if (rate, 2) in runs]
    figure = Figure(figsize=(4.2 * len(rates), 4.2), layout="constrained")
    panels = figure.subplots(1, len(rates), squeeze=False, sharey=True)[0]
    for panel, rate in zip(panels, rates, strict=True):
        measured = {nodes: run for (each, nodes), run in sorted(runs.items()) if each == rate}
        plan = plan_of(runs, rate)
        for name in [cell["contestant"] for cell in measured[2]["cells"] if cell["contestant"] != IDEAL]:
            shares = {1: 100.0} | {nodes: 100 * cell_of(run, name)["ideal_share"] for nodes, run in measured.items()}
            style = {"color": colour_of(name), "linewidth": 1.5}
            panel.plot(list(shares), list(shares.values()), marker="o", markersize=4, label=names_of(name), **style)
            if name in PLANNED:
                predicted = [100 * plan.predict(PLANNED[name], nodes).share for nodes in MORE_NODES]
                panel.plot(MORE_NODES, predicted, linestyle="--", **style)
        panel.axhline(100, color=colour_of(IDEAL), linewidth=1)
        panel.set_xscale("log", base=2)
        ticks = (1, 2, 4, 8, 32, 128, 1024)
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.set_title(RATES[rate], fontsize=10)
        panel.set_xlabel("nodes: measured; 8 and more predicted (dashed)")
        panel.grid(True, alpha=0.3)
    panels[0].set_ylim(0, 115)
    panels[0].set_ylabel("speed, % of ideal scaling")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    model = runs[rates[0], 2]["model"]
    figure.suptitle(f"{TITLES[model['name']]}, {model['parameters'] / 1e6:.1f} million parameters", fontsize=11)
    figure.savefig(path, dpi=120, format="png")


def cell_of(run: Run, name: str) -> dict[str, Any]:
    return next(cell for cell in run["cells"] if cell["contestant"] == name)


def speedup_text(run: Run) -> str:
    header = ["gradients", "a step", "steps a second", "share of ideal", "exposed", "sent"]
    header += [f"loss after {run['equal_s']:.0f} s"]
    rows = []
    for cell in run["cells"]:
        loss, exposed = cell["loss_at_equal_time"], max(0.0, cell["exposed_s"])
        rows.append(
            [
                names_of(cell["contestant"]),
                format_seconds(cell["median_s"]),
                f"{cell['steps_per_s']:.2f}",
                f"{100 * cell['ideal_share']:.0f} %",
                "" if cell["contestant"] == IDEAL else format_seconds(exposed),
                format_nbytes(cell["sent_nbytes"]),
                "" if loss is None else f"{loss:.3f}",
            ]
        )
    return "\n".join(
        [
            "![speed and loss of one training](speedup.png)",
            "",
            command_of(run),
            "",
            format_markdown(header, rows),
            "",
            measured_when(run),
            "",
            *other_runs(run),
            *other_buckets(),
        ]
    )


def other_runs(first: Run) -> Iterator[str]:
    """All runs of this training that were kept, whatever their batch and machine: one alone might be a lucky one."""
    found = newest_of_each("speedup-again-*.json")
    if not found:
        return
    runs = {"above": first} | {path.stem.removeprefix("speedup-"): json.loads(path.read_text()) for path in found}
    names = [cell["contestant"] for cell in first["cells"] if cell["contestant"] != IDEAL]
    rows = [
        [
            f"{title}: {short_cpu(run['machine']['cpu'])}, {run['settings']['batch']}",
            format_seconds(cell_of(run, IDEAL)["median_s"]),
            *(percent(cell_of(run, name)) for name in names),
        ]
        for title, run in runs.items()
    ]
    yield "Share of ideal in every run that was kept; the batch decides how long a step is:"
    yield ""
    yield format_markdown(["run: processor, batch", "ideal step", *map(names_of, names)], rows)
    yield ""


def percent(cell: dict[str, Any]) -> str:
    return f"{100 * cell['ideal_share']:.1f} %"


def other_buckets() -> Iterator[str]:
    """Shares of the same training with DDP's own grad buckets, where that was measured."""
    for path in newest_of_each("speedup-default-buckets.json"):
        run = json.loads(path.read_text())
        shares = [
            f"{names_of(cell['contestant'])} {100 * cell['ideal_share']:.0f} %"
            for cell in run["cells"]
            if cell["contestant"] != IDEAL
        ]
        yield (
            "Grad buckets matter: small ones let exact communication begin sooner. With DDP's default (1 MB, then 25), "
            f"batch {run['settings']['batch']} and an ideal step of {format_seconds(cell_of(run, IDEAL)['median_s'])}, "
            f"another run, on the {short_cpu(run['machine']['cpu'])}, had these shares of ideal: {'; '.join(shares)}."
        )


def scaling_text(models: Mapping[str, Runs]) -> str:
    return "\n\n".join(part for model, runs in models.items() for part in model_text(model, runs))


def model_text(model: str, runs: Runs) -> Iterator[str]:
    first = next(iter(runs.values()))
    names = [cell["contestant"] for cell in first["cells"] if cell["contestant"] != IDEAL]
    yield f"### {TITLES[model]}"
    yield f"![share of ideal scaling by nodes](scaling-{model}.png)"
    yield f"    python benchmarks/scaling.py --models {model} && python benchmarks/page.py"
    places = sorted(runs, key=lambda place: (list(RATES).index(place[0]), place[1]))
    rows = [
        [
            RATES[rate],
            str(nodes),
            format_seconds(cell_of(runs[rate, nodes], IDEAL)["median_s"]),
            *(f"{100 * cell_of(runs[rate, nodes], name)['ideal_share']:.0f} %" for name in names),
        ]
        for rate, nodes in places
    ]
    header = ["link", "nodes", "ideal step", *map(names_of, names)]
    yield format_markdown(header, rows)
    losses = [
        [
            RATES[rate],
            str(nodes),
            f"{runs[rate, nodes]['equal_s']:.0f} s",
            *(format_loss(cell_of(runs[rate, nodes], name)) for name in names),
        ]
        for rate, nodes in places
        if nodes == 2
    ]
    if all(learns(cell) for run in runs.values() for cell in run["cells"]):
        yield "Loss on what was held out, when all had trained for the same time:"
        yield format_markdown(["link", "nodes", "after", *map(names_of, names)], losses)
    else:
        yield (
            "Losses are not compared: in so few steps this training, batch norms and momentum, is unsteady for all "
            "contestants."
        )


def learns(cell: Mapping[str, Any]) -> bool:
    """Whether it was better than at the start, all the time."""
    curve = [loss for _, loss in cell["loss"]]
    return all(loss < curve[0] for loss in curve[1:])


def format_loss(cell: Mapping[str, Any]) -> str:
    loss = cell["loss_at_equal_time"]
    return "" if loss is None else f"{loss:.3f}"


def cost_text(runs: Runs) -> str:
    rows = []
    for name, rate, price in NODES_FOR_HIRE:
        plan = plan_of(runs, rate)
        found = {each: plan.predict(each, COST_NODES) for each in COSTED}
        ideal = COST_HOURS * COST_NODES * price
        costs = [f"{ideal / found[each].share:.2f} ({COST_HOURS / found[each].share:.0f} h)" for each in COSTED]
        rows.append([name, RATES[rate], f"{price:.2f}", f"{ideal:.2f}", *costs])
    header = ["node", "link", "price an hour", "ideal", *COSTED]
    parameters = next(iter(runs.values()))["model"]["parameters"] / 1e6
    run = newest("train-gpt-1gbit-2-nodes.json").relative_to(HERE.parent)
    return "\n\n".join(
        [
            f"Training a GPT of {parameters:.1f} million parameters on {COST_NODES} nodes, as long as takes "
            f"{COST_HOURS:.0f} hours if scaling is ideal, in any currency:",
            format_markdown(header, rows, left=2),
            f"    cgx plan --from-run {run} --gpus 1 --cores 1 --nodes {COST_NODES} --inter 1gbit --price 0.05",
        ]
    )


def command_of(run: Run) -> str:
    """As typed, with files by their names alone, in lines that fit on a page."""
    lines = [["    cgx"]]
    for word in (Path(each).name if "/" in each else each for each in run["command"]):
        if word.startswith("--") and sum(map(len, lines[-1])) > MOST_COLUMNS:
            lines.append(["       "])
        lines[-1].append(word)
    return " \\\n".join(" ".join(line) for line in lines)


def measured_when(run: Run) -> str:
    machine, goodput = run["machine"], run["link"]["goodput_bit_per_s"]
    return (
        f"Measured on {run['date'][:10]} on {machine['cores']} cores ({machine['cpu']}) that play both nodes, torch "
        f"{machine['torch']}; TCP goodput {goodput[0] / 1e6:.0f} and {goodput[1] / 1e6:.0f} Mbit/s, load average "
        f"before the start {run['load']:.1f}; {run['settings']['rounds']} rounds of {run['settings']['steps']} steps."
    )


def write(page: Path, name: str, text: str) -> None:
    begin, end = f"<!-- {name}: begin (python benchmarks/page.py) -->", f"<!-- {name}: end -->"
    write_between(page, begin, end, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--doc", type=Path, default=DOCS / "benchmarks.md")
    options = parser.parse_args()
    folder = options.doc.parent
    speedup = json.loads(newest("speedup.json").read_text())
    draw_train(speedup, folder / "speedup.png")
    write(options.doc, "speedup", speedup_text(speedup))
    models = load()
    for model, runs in models.items():
        draw_scaling(runs, folder / f"scaling-{model}.png")
    write(options.doc, "scaling", scaling_text(models))
    if "gpt" in models:
        write(options.doc, "cost", cost_text(models["gpt"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
