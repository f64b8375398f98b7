"""The schedule on which `AdaptiveBits` chooses new bits, and the agreement of all ranks on each choice.

1. Trials, if there is a target step time: the first steps are exact, at the most bits and at the reference in turn,
   and are timed.
2. Gradients are sampled at some steps of each period.
3. At the end of a period every rank measures the errors on its own samples. Rank 0 decides on the mean over ranks
   (`torch_cgx.adaptive.decision`) and broadcasts its decision, so that all ranks switch at the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from torch_cgx.adaptive.decision import Decision, Trial, contenders, decide
from torch_cgx.adaptive.options import AdaptiveBits
from torch_cgx.config import DEFAULT_QUANTIZER, Compression
from torch_cgx.ddp.buckets import KnownBucket
from torch_cgx.ddp.samples import Samples
from torch_cgx.errors import CGXError, MismatchError
from torch_cgx.group.process_group import ProcessGroupCGX
from torch_cgx.kernels.native import default_kernels

__all__ = ["Adaptation", "Choice"]

log = logging.getLogger("torch_cgx.adaptive")

_SAMPLED_STEPS = 16  # per period
_FIRST_CHOICE = 3  # there are no samples earlier
_FIRST_TRIAL = 3  # DDP rebuilds its grad buckets after the first step
_TRIAL_STEPS = 6  # per turn; the first is not counted, because programs are made in it
_TRIAL_ROUNDS = 2
_REASON_NBYTES = 1000
_SHOWN = 4  # names in a reason
_KEPT_CHOICES = 512  # the newest
_DONE, _FAILED = 1, 2


@dataclass(frozen=True, slots=True)
class Choice:
    """The compressions chosen at one step, by layer name."""

    step: int
    reason: str
    compressions: Mapping[str, Compression]

    def as_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "reason": self.reason,
            "layers": {name: [each.bits, each.block] for name, each in self.compressions.items()},
        }

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Choice:
        layers = {name: Compression(bits, block) for name, (bits, block) in saved["layers"].items()}
        return cls(int(saved["step"]), str(saved["reason"]), layers)


class Adaptation:
    """The bits of one state's layers over time. All ranks make the same calls at the same steps."""

    def __init__(self, options: AdaptiveBits, reference: Compression, start_step: int) -> None:
        if reference.quantizer != DEFAULT_QUANTIZER:
            raise ValueError(
                f"adaptive: expected the quantizer {DEFAULT_QUANTIZER!r}, among whose widths it chooses, got "
                f"{reference.quantizer!r}"
            )
        low, high = options.bits_range
        if not low <= reference.bits <= high:
            raise ValueError(
                f"adaptive: expected compression_params with {low} to {high} bits, as bits_range says; "
                f"got {reference.bits}"
            )
        self.options = options
        self.reference = reference
        self.choices: list[Choice] = []
        self.told: list[dict[str, Any]] = []  # the choices as dicts, for reports and checkpoints
        self._candidates = options.candidates(reference)
        self._tried = contenders(options, reference)
        self._samples: Samples | None = None
        self._others: Samples | None = None  # of layers that have since changed
        self._began_at: float | None = None  # this step's first grad bucket
        self._step_s: list[list[float]] = [[] for _ in self._tried]
        self._start_step = start_step
        self._resume(0)

    def _resume(self, step: int) -> None:
        """Schedule trials anew when a training run starts or resumes, because times depend on group and machine.

        Trials wait until `start_step`, because all steps before it are exact.
        """
        self._trials_from = max(step, self._start_step) + _FIRST_TRIAL
        self._trials_until = self._trials_from + _TRIAL_ROUNDS * _TRIAL_STEPS * len(self._tried)

    def compression(self, name: str, step: int) -> Compression:
        """Return the compression at this step of a layer whose bits may be chosen."""
        tried = self._on_trial(step)
        if tried is not None:
            return self._tried[tried]
        return self.choices[-1].compressions.get(name, self.reference) if self.choices else self.reference

    def begin_step(self, step: int, group: ProcessGroupCGX, device: torch.device) -> bool:
        """Begin a step at its first grad bucket, and return whether compressions change with it."""
        before = self._on_trial(step - 1)
        if device.type == "cuda" and (before, self._on_trial(step)) != (None, None):
            torch.cuda.synchronize(device)  # otherwise launches would be timed, not steps
        now = time.perf_counter()
        if before is not None and self._began_at is not None and (step - 1 - self._trials_from) % _TRIAL_STEPS:
            self._step_s[before].append(now - self._began_at)
        self._began_at = now
        if self._is_choice(step) and self._samples is not None:
            self._choose(step, group)
            self._began_at = None
            return True
        return self._on_trial(step) != before

    def look_at(self, step: int, bucket: KnownBucket, buckets: Sequence[KnownBucket], buffer: Tensor) -> None:
        """Sample these gradients if this is a sampled step."""
        if not self._is_sampled(step):
            return
        if self._samples is None or not self._samples.has(bucket.free_layers):
            before = self._samples or self._others
            pairs = [(layer, each.dtype.itemsize) for each in buckets for layer in each.free_layers]
            self._samples = Samples([layer for layer, _ in pairs], [size for _, size in pairs], self.reference.block)
            if before is not None:
                self._samples.take_over(before)
        self._samples.add(bucket.free_layers, buffer)

    def know_layers(self, numels: Mapping[str, int]) -> None:
        """Learn the model's layers, and set the samples aside if they are of other layers."""
        if self._samples is not None and not self._samples.fits(numels):
            self._others, self._samples = self._samples, None

    # ---- when ----

    def _on_trial(self, step: int) -> int | None:
        """Return the index of the contender that this step tries, or None outside of trials."""
        if not self._trials_from <= step < self._trials_until:
            return None
        return (step - self._trials_from) // _TRIAL_STEPS % len(self._tried)

    def _is_choice(self, step: int) -> bool:
        """Return whether bits are chosen at this step: a period after the warm-up ends, or the trials do."""
        if self._tried and step <= self._trials_until:
            return step == self._trials_until and step >= self.options.warmup
        since = step - max(self.options.warmup, _FIRST_CHOICE)
        return since >= 0 and since % self.options.period == 0

    def _is_sampled(self, step: int) -> bool:
        """Return whether this step is sampled: evenly spaced ones, after DDP has rebuilt its first grad buckets."""
        length = self.options.warmup if step < self.options.warmup else self.options.period
        return step >= 2 and step % max(1, length // _SAMPLED_STEPS) == 0

    # ---- choosing ----

    def _choose(self, step: int, group: ProcessGroupCGX) -> None:
        samples = self._samples
        assert samples is not None
        if not samples.names:
            self._keep(Choice(step, decide((), self.options, self.reference, ()).reason, {}))
            return
        kernels = default_kernels(group.settings.simd)
        measured = samples.measure(self._candidates, kernels, group.settings.skip_incomplete)
        seconds = [median(each) if each else 0.0 for each in self._step_s]
        table = torch.cat([measured.view(-1), torch.tensor(seconds, dtype=torch.float64, device="cpu")])
        _wait(group.allreduce([table]))
        table /= group.size()
        message = torch.zeros(1 + 2 * len(samples.names) + _REASON_NBYTES, dtype=torch.int32, device="cpu")
        if group.rank() == 0:
            message = self._message(table, samples, group.settings.skip_incomplete)
        _wait(group.broadcast([message]))
        self._obey(step, message, samples.names, group.rank())

    def _message(self, table: Tensor, samples: Samples, skip_incomplete: bool) -> Tensor:
        """Return rank 0's decision as a tensor, or the reason why it failed, so that no rank waits for it."""
        try:
            status, decision = _DONE, self._decide(table, samples, skip_incomplete)
        except Exception as error:
            status = _FAILED
            decision = Decision((self.reference,) * len(samples.names), f"{type(error).__name__}: {error}")
        reason = decision.reason.encode()[:_REASON_NBYTES].ljust(_REASON_NBYTES, b"\0")
        bits = [each.bits for each in decision.compressions]
        blocks = [each.block for each in decision.compressions]
        return torch.tensor([status, *bits, *blocks, *reason], dtype=torch.int32, device="cpu")

    def _decide(self, table: Tensor, samples: Samples, skip_incomplete: bool) -> Decision:
        count = len(samples.names)
        measured = table[: len(table) - len(self._tried)].view(count, -1)
        stats = samples.stats(measured, self._candidates, skip_incomplete)
        # A layer with a NaN on any rank keeps its bits.
        finite = [number for number, row in enumerate(stats) if row.norm == row.norm]
        trials = [
            Trial(compression, samples.nbytes(compression, skip_incomplete), seconds)
            for compression, seconds in zip(self._tried, table[len(table) - len(self._tried) :].tolist(), strict=True)
        ]
        if not finite:
            return Decision(tuple(self._kept(samples.names)), "every layer has NaN, and so its bits as they were")
        found = decide([stats[number] for number in finite], self.options, self.reference, trials)
        names = samples.names
        compressions = self._kept(names)
        for number, compression in zip(finite, found.compressions, strict=True):
            compressions[number] = compression
        reason = found.reason
        if len(finite) < count:
            without = [names[number] for number in range(count) if number not in finite]
            more = f" and {len(without) - _SHOWN} more" if len(without) > _SHOWN else ""
            reason += f"; with NaN, and so with their bits as they were: {', '.join(without[:_SHOWN])}{more}"
        return Decision(tuple(compressions), reason)

    def _kept(self, names: Sequence[str]) -> list[Compression]:
        """Return the current compressions of these layers."""
        chosen = self.choices[-1].compressions if self.choices else {}
        return [chosen.get(name, self.reference) for name in names]

    def _obey(self, step: int, message: Tensor, names: Sequence[str], rank: int) -> None:
        numbers = message.tolist()
        count = len(names)
        status, bits, blocks = numbers[0], numbers[1 : 1 + count], numbers[1 + count : 1 + 2 * count]
        try:
            reason = bytes(numbers[1 + 2 * count :]).rstrip(b"\0").decode(errors="replace")
            chosen = [Compression(width, block) for width, block in zip(bits, blocks, strict=True)]
        except ValueError as error:
            raise MismatchError(f"step {step}: rank 0 sent a choice of bits that cannot be: {error}") from None
        if status != _DONE:
            raise CGXError(f"step {step}: rank 0 could not choose bits: {reason}")
        self._keep(Choice(step, reason, dict(zip(names, chosen, strict=True))))
        if rank == 0:
            log.info("step %d: %s", step, reason)

    def _keep(self, choice: Choice) -> None:
        self.choices = [*self.choices[1 - _KEPT_CHOICES :], choice]
        self.told = [*self.told[1 - _KEPT_CHOICES :], choice.as_dict()]

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        return {
            "choices": list(self.told),
            "samples": None if self._samples is None else self._samples.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any], step: int) -> None:
        self.choices = [Choice.of(each) for each in saved["choices"]]
        self.told = [choice.as_dict() for choice in self.choices]
        self._samples = None if saved["samples"] is None else Samples.of(saved["samples"])
        self._began_at = None
        self._step_s = [[] for _ in self._tried]
        self._resume(step)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
