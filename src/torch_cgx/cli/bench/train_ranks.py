"""One rank's part of `cgx bench train`: it trains a copy of the model for every contestant, in turn.

1. Every contestant warms up, long enough for those that start uncompressed or choose bits after some steps.
2. Rounds: some steps of every contestant, every other round in reverse order. The first step of a turn is not timed,
   because it waits for ranks that the turn before has delayed. All copies see the same batches, step by step.
3. After each turn, the loss on the held-out data, not timed. The ideal contestant has a second turn, with all ranks in
   step: see `turn_in_step`.

A contestant's own clock counts all its steps, including the warm-up, so that losses can be compared at equal time. The
parent prints, writes files and starts processes (train.py, processes.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_cgx.cli import gpus
from torch_cgx.cli.bench.train_contestants import (
    ADAPTIVE,
    CHOOSING,
    IDEAL,
    POWERSGD_AFTER,
    TIMEOUT_S,
    Contestant,
    enter,
)
from torch_cgx.cli.bench.train_models import MODELS, Source
from torch_cgx.cli.link import count_link_nbytes
from torch_cgx.cli.processes import Message, Report, join_world
from torch_cgx.cli.registry import CommandFailed

WARM_UP = 4
WARM_UPS = {ADAPTIVE: CHOOSING.warmup + 3, "powersgd": POWERSGD_AFTER + 3}


@dataclass(frozen=True, slots=True)
class Plan:
    """The training to run, identical on all ranks."""

    model: str
    contestants: tuple[str, ...]
    batch: int
    rounds: int
    steps: int  # timed steps per round
    bucket_size: int
    bucket_mb: float | None
    data: str | None
    device: str
    nodes: int


@dataclass(slots=True)
class Phases:
    """The seconds of each phase, for every step of the ideal contestant."""

    forward: list[float]
    backward: list[float]
    optimizer: list[float]
    ready: list[list[float]]  # of every grad bucket, after the start of backward

    def clear(self) -> None:
        for each in (self.forward, self.backward, self.optimizer, self.ready):
            each.clear()


class Trainer:
    def __init__(self, plan: Plan) -> None:
        kind = MODELS[plan.model]
        self.plan, self.place = plan, gpus.place_of(plan.device)
        device = self.place.put(torch.empty(0)).device
        try:
            self.source: Source = kind.source(Path(plan.data) if plan.data else None)
        except (OSError, ValueError) as error:
            raise CommandFailed(f"argument --data: {error}") from error
        self.held_out = tuple(self.place.put(part) for part in self.source.held_out())
        self.phases = Phases([], [], [], [])
        backend = "nccl" if plan.device == "cuda" else "gloo"
        self.contestants = [
            enter(name, kind, bucket_size=plan.bucket_size, bucket_mb=plan.bucket_mb, backend=backend, device=device)
            for name in plan.contestants
        ]

    def step(self, contestant: Contestant) -> float:
        """Train one step and return its seconds."""
        x, y = (self.place.put(part) for part in self.source.batch(contestant.steps, dist.get_rank(), self.plan.batch))
        contestant.watch.begin()
        stamps = [time.perf_counter_ns()]

        def stamp() -> None:
            self.place.finish()
            stamps.append(time.perf_counter_ns())

        loss = _loss(contestant.model, x, y)
        stamp()
        loss.backward()  # type: ignore[no-untyped-call]
        stamp()
        contestant.watch.settle(stamps[-1])
        contestant.optimizer.step()
        contestant.optimizer.zero_grad()
        stamp()
        if contestant.name == IDEAL:
            for phase, (start, end) in zip(
                (self.phases.forward, self.phases.backward, self.phases.optimizer),
                pairwise(stamps),
                strict=True,
            ):
                phase.append((end - start) * 1e-9)
            self.phases.ready.append([(handed - stamps[1]) * 1e-9 for handed in contestant.watch.handed_ns])
        seconds = (stamps[-1] - stamps[0]) * 1e-9
        contestant.seconds += seconds
        contestant.steps += 1
        return seconds

    def turn(self, contestant: Contestant) -> None:
        self.step(contestant)
        before = self._link_nbytes()
        start, processor = time.perf_counter(), time.process_time()
        busy_s = 0.0
        for _ in range(self.plan.steps):
            self.step(contestant)
            busy_s += contestant.watch.busy_s()
        contestant.step_s.append((time.perf_counter() - start) / self.plan.steps)
        contestant.processor_s.append((time.process_time() - processor) / self.plan.steps)
        contestant.busy_s.append(busy_s / self.plan.steps)
        after = self._link_nbytes()
        contestant.link_nbytes = [
            so_far + now - then for so_far, now, then in zip(contestant.link_nbytes, after, before, strict=True)
        ]

    def turn_in_step(self, contestant: Contestant) -> None:
        """Run a turn in which all ranks end each step together, like in a training run.

        That usually takes longer than steps that each rank ends alone, above all with fewer cores than ranks: a rank
        that got less processor time delays the others. The time includes the barrier.
        """
        self.step(contestant)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self.plan.steps):
            self.step(contestant)
            dist.barrier()
        contestant.in_step_s.append((time.perf_counter() - start) / self.plan.steps)

    @torch.no_grad()
    def judge(self, contestant: Contestant) -> None:
        """Record the loss on the held-out data. Skip the ideal contestant, whose copies diverge."""
        if contestant.name == IDEAL:
            return
        model = contestant.model.module
        model.train(False)
        contestant.curve.append((contestant.seconds, float(_loss(model, *self.held_out))))
        model.train()

    def _link_nbytes(self) -> tuple[int, int]:
        return count_link_nbytes(os.environ["GLOO_SOCKET_IFNAME"]) if self.plan.nodes > 1 else (0, 0)

    def buckets(self) -> list[Message]:
        """Return the ideal contestant's buckets. Each is ready at its median over all steps after the warm-up."""
        ideal = next(each for each in self.contestants if each.name == IDEAL)
        names = {id(parameter): name for name, parameter in ideal.model.module.named_parameters()}
        return [
            {
                "numel": sum(parameter.numel() for parameter in parameters),
                "layers": [names[id(parameter)] for parameter in parameters],
                "ready_s": median(ready_s),
            }
            for parameters, *ready_s in zip(ideal.watch.parameters, *self.phases.ready, strict=True)
        ]


def run(arguments: Message, report: Report) -> Message:
    plan = Plan(**{**arguments, "contestants": tuple(arguments["contestants"])})
    join_world(TIMEOUT_S)
    result = _train(plan, _teller(report))
    # Only after the copies' DDP modules are gone. The last of them would otherwise end the Gloo group itself, and
    # would hold the GIL while it waits for Gloo's threads. One of those may need the GIL (pytorch issue 56297).
    dist.destroy_process_group()
    return result


def _train(plan: Plan, tell: Callable[[float, str], None]) -> Message:
    tell(0.0, "building models")
    trainer = Trainer(plan)
    warm_up(plan, trainer, tell)
    for number in range(plan.rounds):
        tell(0.2 + 0.8 * number / plan.rounds, f"round {number + 1} of {plan.rounds}")
        for contestant in trainer.contestants[:: -1 if number % 2 else 1]:
            trainer.turn(contestant)
            dist.barrier()
            trainer.judge(contestant)
            if contestant.name == IDEAL:
                trainer.turn_in_step(contestant)
    result = _result(plan, trainer)
    dist.barrier()
    return result


def warm_up(plan: Plan, trainer: Trainer, tell: Callable[[float, str], None]) -> None:
    for index, contestant in enumerate(trainer.contestants):
        tell(0.2 * index / len(trainer.contestants), f"warming up {contestant.name}")
        trainer.judge(contestant)
        for _ in range(WARM_UPS.get(contestant.name, WARM_UP)):
            trainer.step(contestant)
        dist.barrier()
        trainer.judge(contestant)
    trainer.phases.clear()


def _result(plan: Plan, trainer: Trainer) -> Message:
    world = dist.get_world_size()
    model = trainer.contestants[0].model.module
    timed = plan.rounds * plan.steps
    cells: list[dict[str, Any]] = [
        {
            "contestant": each.name,
            "step_s": each.step_s,
            "busy_s": each.busy_s,
            "processor_s": each.processor_s,
            "in_step_s": each.in_step_s,
            "sent_nbytes": each.sent_nbytes(world),
            "link_nbytes": [nbytes / timed for nbytes in each.link_nbytes],
            "loss": each.curve,
        }
        for each in trainer.contestants
    ]
    return {
        "model": {
            "name": plan.model,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "layers": [[name, each.numel(), each.dim()] for name, each in model.named_parameters()],
        },
        "phases": {
            "forward_s": median(trainer.phases.forward),
            "backward_s": median(trainer.phases.backward),
            "optimizer_s": median(trainer.phases.optimizer),
        },
        "buckets": trainer.buckets(),
        "cells": cells,
    }


def _loss(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _teller(report: Report) -> Callable[[float, str], None]:
    def tell(fraction: float, stage: str) -> None:
        if dist.get_rank() == 0:
            report({"fraction": fraction, "stage": stage})

    return tell
