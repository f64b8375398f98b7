"""The decision from measurements on every layer's bits, with its reason. It is pure, so that it can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch_cgx.adaptive.budget import Budget
from torch_cgx.adaptive.layers import Candidate, LayerStats, total_error, total_nbytes
from torch_cgx.adaptive.options import AUTO, AdaptiveBits
from torch_cgx.adaptive.policies import POLICIES
from torch_cgx.config import EXACT, Compression

__all__ = ["Decision", "Trial", "contenders", "decide", "limited"]

_NO_LONGER = 1.01  # times the fastest: a smaller difference cannot be measured


@dataclass(frozen=True, slots=True)
class Trial:
    """The time of a step with the same compression for all layers."""

    compression: Compression
    nbytes: int  # of these layers' payloads
    seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """One compression per layer, in the layers' order."""

    compressions: tuple[Compression, ...]
    reason: str


def contenders(options: AdaptiveBits, reference: Compression) -> tuple[Compression, ...]:
    """Return what to try, from most to fewest bytes: fewer than the reference only with a target in seconds."""
    if options.target_step_time is None:
        return ()
    low, high = options.bits_range
    found = [EXACT, reference]
    if high > reference.bits:
        found.insert(1, replace(reference, bits=high))
    if options.target_step_time != AUTO and low < reference.bits:
        found.append(replace(reference, bits=low))
    return tuple(found)


def decide(
    layers: Sequence[LayerStats], options: AdaptiveBits, reference: Compression, trials: Sequence[Trial]
) -> Decision:
    """Choose bits as exact as the target time allows if there were trials, else as the budget asks."""
    if not layers:
        return Decision((), "no layer is free to choose")
    budget, layer_alpha, told = options.budget(reference), options.layer_alpha, ""
    if trials and options.target_step_time is not None:
        room, told = _room(trials, options.target_step_time)
        if room >= trials[0].nbytes:
            return Decision((EXACT,) * len(layers), f"exact: {told}")
        told = f"; {told}"
        reference_nbytes = next(trial.nbytes for trial in trials if trial.compression == reference)
        if room != reference_nbytes:  # more bytes are free, or fewer are asked for
            budget = replace(budget, least="error", alpha=room / reference_nbytes)
        if room < reference_nbytes:
            layer_alpha = None
    allowed = [limited(layer, budget, layer_alpha) for layer in layers]
    allocation = POLICIES[options.policy](allowed, budget)
    return Decision(
        tuple(Compression(each.bits, each.block) for each in allocation),
        _reason(layers, allocation, budget, options.policy) + told,
    )


def limited(layer: LayerStats, budget: Budget, layer_alpha: float | None) -> LayerStats:
    """Return the layer without candidates that lose too much of this layer alone."""
    if layer_alpha is None:
        return layer
    most = layer_alpha * layer.at(budget.bits, budget.block).error
    return replace(layer, candidates=tuple(each for each in layer.candidates if each.error <= most))


def _room(trials: Sequence[Trial], target: float | str) -> tuple[float, str]:
    """Return how many bytes meet the target, and what was measured. Time is interpolated linearly between trials.

    Real time grows faster with more bytes, because the first ones hide behind backward, so a step is never slower than
    the interpolation. Without a target in seconds, bytes that were not measured to be free are not spent.
    """
    limit = _NO_LONGER * min(trial.seconds for trial in trials)
    told = "a step takes " + ", ".join(f"{_ms(trial.seconds)} {_how(trial.compression)}" for trial in trials)
    if target != AUTO:
        told += f"; {_ms(float(target))} asked for" + (", which is not reached" if float(target) < limit else "")
        limit = max(limit, float(target))  # do not give up bits that gain no time
    if trials[0].seconds <= limit:
        return trials[0].nbytes, told
    for more, fewer in pairwise(trials):
        if fewer.seconds <= limit:
            if target == AUTO:
                return fewer.nbytes, told
            share = (limit - fewer.seconds) / (more.seconds - fewer.seconds)
            return fewer.nbytes + share * (more.nbytes - fewer.nbytes), told
    return trials[-1].nbytes, told


def _how(compression: Compression) -> str:
    return "exact" if compression == EXACT else f"with {compression.bits} bits"


def _reason(layers: Sequence[LayerStats], allocation: Sequence[Candidate], budget: Budget, policy: str) -> str:
    uniform = budget.reference(layers)
    numel = sum(layer.numel for layer in layers)
    bits = sum(layer.numel * each.bits for layer, each in zip(layers, allocation, strict=True)) / numel
    error = total_error(allocation) / total_error(uniform) if total_error(uniform) else 1.0
    return (
        f"{policy}, least {budget.least}: {bits:.2f} bits a value on average, "
        f"{total_nbytes(allocation) / total_nbytes(uniform):.2f} of the bytes and {error:.2f} of the squared error of "
        f"{budget.bits} bits everywhere"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
