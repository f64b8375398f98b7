"""The JSON that `cgx bench train --json` writes, and the printed table.

The head is that of every benchmark (report.py), with kind "train". Further fields:

    settings    nproc (on each node), nodes, model, contestants, batch (per rank and step), rounds, steps (timed, per
                round), bucket_size (of cgx), bucket_mb (of DDP, null: its default), data (a file's name), device,
                omp_num_threads; in some older files crowded (more ranks than cores)
    model       name, parameters, layers: [name, values, dimensions] each
    phases      forward_s, backward_s, optimizer_s: medians of the ideal contestant (of all its steps, those in step
                too), of the slowest rank
    buckets     the grad buckets in the order in which DDP hands them over: numel, layers (names), ready_s (seconds
                after the start of backward, median of the ideal contestant's steps on rank 0)
    cells       one per contestant:
        contestant          ideal, gloo, nccl, fp16, powersgd, cgx-N (max-min), rotated-N, adaptive
        step_s              seconds of a step, one figure per round, of the slowest rank
        median_s            of step_s; steps_per_s = 1 / median_s
        ideal_share         median over rounds of the ideal contestant's step_s / this one's
        communication_s     seconds per step in which gradients are being averaged, median over rounds; null for ideal
        exposed_s           median_s - that of ideal
        hidden_s            communication_s - exposed_s, at least 0; null for ideal
        processor_s         processor seconds of rank 0 per step, all threads, median over rounds
        in_step_s           of ideal: median seconds of a step that all ranks end together; else null. Older files
                            have none, or have it only with more ranks than cores
        sent_nbytes         by one rank per step: a ring's share of the payloads
        link_nbytes         per step on the busiest node's link in its busier direction; null on one host
        loss                [seconds of its own clock, loss on the held-out data]: before the first step, after the
                            warm-up, and after each round; empty for ideal
        loss_at_equal_time  at the time that the contestant with the least time has trained; null for ideal
    equal_s     that time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from torch_cgx.cli.bench import report
from torch_cgx.cli.table import format_nbytes, format_seconds, format_table
from torch_cgx.config import DEFAULT_QUANTIZER, EXACT

IDEAL = "ideal"
Cell = dict[str, Any]


def merge(of_ranks: Sequence[Mapping[str, Any]], **head: Any) -> dict[str, Any]:
    """Return one report from the measurements of all ranks."""
    first = of_ranks[0]
    phases = {name: max(rank["phases"][name] for rank in of_ranks) for name in first["phases"]}
    cells = [_merge_cell([rank["cells"][index] for rank in of_ranks]) for index in range(len(first["cells"]))]
    (ideal,) = (cell for cell in cells if cell["contestant"] == IDEAL)
    ends = [cell["loss"][-1][0] for cell in cells if cell["loss"]]
    equal_s = min(ends) if ends else None
    for cell in cells:
        pairs = zip(ideal["step_s"], cell["step_s"], strict=True)
        cell["ideal_share"] = median(best / step for best, step in pairs)
        exposed_s = cell["exposed_s"] = cell["median_s"] - ideal["median_s"]
        if cell is ideal:
            cell["communication_s"] = None
        busy_s = cell["communication_s"]
        cell["hidden_s"] = None if busy_s is None else max(0.0, busy_s - max(0.0, exposed_s))
        cell["loss_at_equal_time"] = None if equal_s is None else loss_at(cell["loss"], equal_s)
        if not head["link"]:
            cell["link_nbytes"] = None
    return {
        "schema": report.SCHEMA,
        "schema_version": report.SCHEMA_VERSION,
        "kind": "train",
        **head,
        "model": first["model"],
        "phases": phases,
        "buckets": first["buckets"],
        "cells": cells,
        "equal_s": equal_s,
    }


def _merge_cell(of_ranks: Sequence[Mapping[str, Any]]) -> Cell:
    step_s = [max(times) for times in zip(*(cell["step_s"] for cell in of_ranks), strict=True)]
    busy_s = [max(times) for times in zip(*(cell["busy_s"] for cell in of_ranks), strict=True)]
    in_step_s = [max(times) for times in zip(*(cell["in_step_s"] for cell in of_ranks), strict=True)]
    return {
        "contestant": of_ranks[0]["contestant"],
        "step_s": step_s,
        "median_s": median(step_s),
        "steps_per_s": 1 / median(step_s),
        "communication_s": median(busy_s),
        "processor_s": median(of_ranks[0]["processor_s"]),
        "in_step_s": median(in_step_s) if in_step_s else None,
        "sent_nbytes": of_ranks[0]["sent_nbytes"],
        "link_nbytes": max(nbytes for cell in of_ranks for nbytes in cell["link_nbytes"]),
        "loss": of_ranks[0]["loss"],
    }


def loss_at(curve: Sequence[tuple[float, float]], seconds: float) -> float | None:
    """Return the loss at a time, interpolated between the points around it, or None before the first point."""
    for (start, first), (end, second) in pairwise(curve):
        if start <= seconds <= end:
            return first + (second - first) * (seconds - start) / (end - start)
    return curve[-1][1] if curve and seconds >= curve[-1][0] else None


def compression_of(contestant: str) -> tuple[str, int] | None:
    """Return the quantizer and the bits of a name such as `cgx-4` or `rotated-2`, or None if they are not fixed."""
    name, _, bits = contestant.rpartition("-")
    return (DEFAULT_QUANTIZER if name == "cgx" else name, int(bits)) if name else None


def names_of(contestant: str) -> str:
    """Return a readable name: `cgx, 4 bits` for `cgx-4`, or `cgx, rotated, 2 bits` for `rotated-2`."""
    compression = compression_of(contestant)
    if compression is None:
        return {"adaptive": "cgx, adaptive"}.get(contestant, contestant)
    quantizer, bits = compression
    kind = "" if quantizer == DEFAULT_QUANTIZER else f" {quantizer},"
    return "cgx, exact" if bits == EXACT.bits else f"cgx,{kind} {bits} bit{'s' * (bits > 1)}"


def format_train(result: Mapping[str, Any]) -> str:
    from torch_cgx.cli.bench.plot import where_text

    settings, machine, model = result["settings"], result["machine"], result["model"]
    phases = result["phases"]
    lines = [
        f"training {model['name']} ({model['parameters'] / 1e6:.1f} million parameters, batch {settings['batch']} a "
        f"process) on {where_text(dict(result))}",
        f"{machine['cpu']}, {machine['cores']} cores, kernels {machine['simd'] or 'in plain torch'}, "
        f"torch {machine['torch']}",
        f"ideal step: forward {format_seconds(phases['forward_s'])}, backward {format_seconds(phases['backward_s'])}, "
        f"optimizer {format_seconds(phases['optimizer_s'])}; {len(result['buckets'])} grad buckets",
    ]
    if result["link"]:
        there, back = (f"{bits / 1e6:.0f}" for bits in result["link"]["goodput_bit_per_s"])
        lines.append(f"TCP goodput of the link: {there} Mbit/s and, at the same time, {back} back")
    header = ["gradients", "step", "steps/s", "ideal", "busy", "exposed", "hidden", "CPU", "sent"]
    header += ["link"] if result["link"] else []
    equal = result["equal_s"]
    header += [f"loss at {equal:.0f} s" if equal is not None else "loss"]
    lines += ["", format_table(header, [_row(cell, bool(result["link"])) for cell in result["cells"]])]
    lines += report.caution(result)
    return "\n".join(lines)


def _row(cell: Cell, with_link: bool) -> list[str]:
    def seconds(value: float | None) -> str:
        return "" if value is None else format_seconds(max(0.0, value))

    loss = cell["loss_at_equal_time"]
    return [
        names_of(cell["contestant"]),
        format_seconds(cell["median_s"]),
        f"{cell['steps_per_s']:.2f}",
        f"{100 * cell['ideal_share']:.0f} %",
        seconds(cell["communication_s"]),
        seconds(cell["exposed_s"]) if cell["communication_s"] is not None else "",
        seconds(cell["hidden_s"]),
        format_seconds(cell["processor_s"]),
        format_nbytes(cell["sent_nbytes"]),
        *([format_nbytes(cell["link_nbytes"])] if with_link else []),
        "" if loss is None else f"{loss:.3f}",
    ]
