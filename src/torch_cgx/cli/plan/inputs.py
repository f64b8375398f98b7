"""The description of a training run for `cgx plan`: numbers, a run of `cgx bench train`, or a module to build."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_cgx.cli.plan.model import Bucket, Workload, ddp_buckets
from torch_cgx.cli.registry import UsageError

__all__ = ["Input", "count", "link_rate", "read_run", "workload_of_model", "workload_of_numbers"]

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBGT]?)", re.IGNORECASE)
_THOUSANDS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_RATE = re.compile(r"(\d+(?:\.\d+)?)([mgt])bit", re.IGNORECASE)
_BITS = {"m": 1e6, "g": 1e9, "t": 1e12}


def count(text: str) -> int:
    """Return a count such as `335M` as a number, 335000000."""
    match = _COUNT.fullmatch(text.strip())
    number = float(match[1]) * _THOUSANDS[match[2].upper()] if match else 0.0
    if not 1 <= number <= 10**13:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: 1 to 10T, as in 25.6M, 335M, 7B (M = 1,000,000)")
    return int(number)


def link_rate(text: str) -> float:
    """Return a rate such as `10gbit` in bits per second, 1e10. Links inside a node are faster than test hosts allow."""
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) * _BITS[match[2].lower()] if match else 0.0
    if not 1e6 <= rate <= 1e14:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: allowed are 1mbit to 100tbit, as in 100mbit, 32gbit")
    return rate


@dataclass(frozen=True, slots=True)
class Input:
    """A training run, and the other facts that its source tells."""

    name: str
    workload: Workload
    ranks: int | None = None
    nodes: int | None = None
    inter_bit_per_s: float | None = None


def workload_of_numbers(numel: int, step_s: float) -> Input:
    """Return a workload of `numel` parameters, in layers small enough to fill grad buckets evenly."""
    layer = 1 << 18
    whole, rest = divmod(numel, layer)
    numels = [rest] * (rest > 0) + [layer] * whole
    return Input(f"{numel:,} parameters", Workload.of_step(ddp_buckets(numels), step_s))


def workload_of_model(text: str, step_s: float) -> Input:
    """Return the workload of the module that a function such as `my.module:build` returns.

    Parameters that need no gradient do not count.
    """
    name, colon, function = text.partition(":")
    if not colon or not name or not function:
        raise UsageError(f"argument --model: {text!r} is not allowed: a function of a module, as in my.module:build")
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(name), function)
        model = build()
        numels = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    except Exception as error:
        raise UsageError(
            f"argument --model: {text!r} failed with {type(error).__name__}: {error}; "
            "allowed is a function that takes nothing and returns a torch.nn.Module"
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if not numels:
        raise UsageError(f"argument --model: {text!r} has no parameters that need gradients; allowed are 1 or more")
    return Input(f"{text}, {sum(numels):,} parameters", Workload.of_step(ddp_buckets(numels), step_s))


def read_run(path: Path) -> Input:
    """Return the workload of a JSON file of `cgx bench train`."""
    try:
        run: Any = json.loads(path.read_text())
        if run["schema"] != "cgx-bench" or run["kind"] != "train":
            raise ValueError(f"schema {run['schema']!r}, kind {run['kind']!r}")
        return input_of_run(run)
    except (OSError, ValueError, KeyError, TypeError, argparse.ArgumentTypeError) as error:
        raise UsageError(
            f"argument --from-run: cannot use {str(path)!r} ({type(error).__name__}: {error}): "
            "allowed is a file that `cgx bench train --json` has written"
        ) from None


def input_of_run(run: dict[str, Any]) -> Input:
    phases, settings, link = run["phases"], run["settings"], run["link"]
    forward_s, backward_s, optimizer_s = (float(phases[f"{name}_s"]) for name in ("forward", "backward", "optimizer"))
    # In older files these times are of one step, which may have been slower than most.
    last_s = max((float(each["ready_s"]) for each in run["buckets"]), default=0.0)
    slower = max(1.0, last_s / backward_s) if backward_s > 0 else 1.0
    buckets = tuple(Bucket(int(each["numel"]), float(each["ready_s"]) / slower) for each in run["buckets"])
    workload = Workload(forward_s, backward_s, optimizer_s, buckets)
    if not buckets or workload.ideal_s <= 0:
        raise ValueError("no grad buckets, or a step of no time")
    rate = link_rate(link["rate"]) if link and link["rate"] else None
    name = f"{run['model']['name']}, {workload.numel:,} parameters, as measured"
    return Input(name, workload, int(settings["nproc"]), int(settings["nodes"] or 1), rate)
