"""FSDP2 with compressed communication: `torch_cgx.fsdp.compress(model)`, after `fully_shard`.

Compressed reduce-scatters carry gradients, and compressed all-gathers carry weights. Optimizers and checkpoints are not
affected: sharded weights stay exact on their owner. `comms` has what FSDP calls, `internals` what is read from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torch_cgx import codecs
from torch_cgx.config import DEFAULT_QUANTIZER, Compression, at_least, shortened
from torch_cgx.fsdp.comms import AllGather, Groups, ReduceScatter, lay_out
from torch_cgx.fsdp.hsdp import Claim, Replicas
from torch_cgx.fsdp.internals import Unit, clean, names_of, names_of_modules, reduced_numels, units_of
from torch_cgx.group.process_group import ProcessGroupCGX
from torch_cgx.layer_rules import Choices

__all__ = ["Compressed", "Parameter", "compress"]

_KEYS = ("grad_bits", "weight_bits", "bucket_size", "quantizer")
_ONLY_MAXMIN = range(5, 9)  # bits


@dataclass(frozen=True, slots=True)
class Parameter:
    """The compression chosen for one parameter. A share of fewer than 16 values on a rank is exact regardless."""

    name: str
    numel: int  # on all ranks together
    grad: Compression
    weight: Compression


@dataclass(frozen=True, eq=False)
class Compressed:
    """A handle to what `compress` has installed on a model."""

    parameters: Sequence[Parameter]
    _installed: Sequence[tuple[Unit, AllGather, Claim | None]] = field(repr=False)

    @property
    def groups(self) -> tuple[ProcessGroupCGX, ...]:
        """Return the groups in use, for `torch_cgx.stats`: FSDP's own if their backend is cgx, else others."""
        replicas = [replicas.group for _, _, replicas in self._installed if replicas is not None]
        return tuple(dict.fromkeys([*self._installed[0][1].groups.all(), *replicas]))

    def report(self) -> str:
        """Return a table of all parameters: number of values, and bits of gradients and weights (32: exact)."""
        rows = [("parameter", "values", "grad bits", "weight bits", "bucket size")]
        for each in self.parameters:
            exact = each.grad.is_exact and each.weight.is_exact
            block = "" if exact else str((each.weight if each.grad.is_exact else each.grad).block)
            rows.append((each.name, f"{each.numel:,}", _bits(each.grad), _bits(each.weight), block))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
        )

    def remove(self) -> None:
        """Restore torch's own communication. All ranks must call it between the same two steps."""
        for unit, all_gather, replicas in self._installed:
            if unit.all_gather not in (all_gather, None):  # installed later, by `compress` or by someone else
                continue
            unit.communicate_as_torch_does()
            if replicas is not None:
                replicas.release()


def compress(
    model: nn.Module,
    *,
    grad_bits: int = 4,
    weight_bits: int = 8,
    bucket_size: int = 1024,
    quantizer: str = DEFAULT_QUANTIZER,
    overrides: Mapping[str, Mapping[str, int | str]] | None = None,
    min_numel: int = 1024,
) -> Compressed:
    """Compress what FSDP2 sends for a model.

    All ranks must call it with identical arguments, after `fully_shard` and before a step. A later call replaces what
    an earlier one installed. With HSDP the mesh must have backend cgx, and all all_reduces on its group of replicas are
    compressed. One-dimensional parameters (biases, norms) are exact.

    Args:
        model: a model with modules that `fully_shard` has been applied to.
        grad_bits: 1 to 8, or 32: exact. Gradients are rounded as CGX_COMPRESSION_STOCHASTIC says.
        weight_bits: the same for weights, which are rounded at random, without bias, at every all-gather.
        bucket_size: how many values share a header.
        quantizer: for gradients and weights: "maxmin", or "rotated", which takes 1 to 4 bits and a bucket size that is
            a power of two from 64 to 4096. Weights of 5 to 8 bits use max-min with either, because it is enough there.
        overrides: the same four for parameters whose names match a pattern, as in
            `{"*.attn.*": {"grad_bits": 8, "weight_bits": 8, "bucket_size": 512}}`. If several patterns match, the last
            one counts.
        min_numel: parameters with fewer values, on all ranks together, are exact.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected an nn.Module, got {type(model).__name__}")
    if not hasattr(FSDPModule, "set_custom_all_gather") or not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            f"torch_cgx.fsdp: expected a torch whose FSDP2 takes communication of one's own (2.9 or newer), "
            f"got {torch.__version__}"
        )
    grads, weights = _read_choices(grad_bits, weight_bits, bucket_size, quantizer, overrides, min_numel)
    units = units_of(model)
    if not units:
        raise ValueError(
            f"model: expected one with modules sharded by fully_shard (FSDP2), got a {type(model).__name__} without: "
            f"call fully_shard first"
        )
    chosen = _choose(model, units, grads, weights)
    if _compresses_gradients(chosen, grads.default):
        for unit in units:
            _check_replicas(unit)
    installed = _install(units, chosen, grads.default, weights.default)
    order = {clean(name): number for number, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    parameters = sorted((each for row in chosen for each in row), key=lambda each: order.get(each.name, len(order)))
    return Compressed(tuple(parameters), installed)


def _install(
    units: Sequence[Unit], chosen: Sequence[Sequence[Parameter]], grad: Compression, weight: Compression
) -> list[tuple[Unit, AllGather, Claim | None]]:
    before = [unit.all_gather for unit in units if isinstance(unit.all_gather, AllGather)]
    groups = before[0].groups if before else Groups()
    # Create groups now and not at their first use, so that their errors are raised here.
    for unit in units:
        for group in unit.shard_groups():
            if group.size() > 1:
                groups.of(group)
    for unit in units:
        if isinstance(unit.reduce_scatter, ReduceScatter) and unit.reduce_scatter.replicas is not None:
            unit.reduce_scatter.replicas.release()
    # If only overrides ask for bits, one of them turns compression on; the layers say where it applies.
    across_all = next((each for each in (grad, *(p.grad for row in chosen for p in row)) if not each.is_exact), grad)
    claims: dict[Any, Claim] = {}
    installed = []
    for unit, row in zip(units, chosen, strict=True):
        across = unit.replicate_group if _compresses_gradients(chosen, grad) else None
        if across is not None and across not in claims:
            claims[across] = Replicas.of(across).claim(across_all)
        mine = None if across is None else claims[across]
        gather = AllGather(unit.params, [each.weight for each in row] if unit.params else (), weight, groups)
        grads = tuple(each.grad for each in row) if unit.params else ()
        numels = reduced_numels(unit.params)
        if mine is not None and numels:  # a mesh of replicas alone has no reduce-scatter to announce them
            mine.expect(lay_out(numels, grads, mine.group.settings))
        unit.communicate_by(gather, ReduceScatter(unit.params, grads, grad, groups, mine))
        installed.append((unit, gather, mine))
    return installed


def _compresses_gradients(chosen: Sequence[Sequence[Parameter]], default: Compression) -> bool:
    return not default.is_exact or any(not each.grad.is_exact for row in chosen for each in row)


def _check_replicas(unit: Unit) -> None:
    group = unit.replicate_group
    if group is not None and not isinstance(group, ProcessGroupCGX):
        raise ValueError(
            f'model: expected a mesh with backend "cgx", because FSDP itself averages across replicas (HSDP); got '
            f'backend "{torch.distributed.get_backend(group)}": call init_process_group("cgx") before init_device_mesh'
        )


def _choose(model: nn.Module, units: Sequence[Unit], grads: Choices, weights: Choices) -> list[list[Parameter]]:
    """Return each unit's parameters in order."""
    prefixes = names_of_modules(model)
    named = [[(names_of(param, prefixes), param.sharded_param) for param in unit.params] for unit in units]
    if not any(named):  # this torch does not show them
        named[0] = [([clean(name)], parameter) for name, parameter in model.named_parameters()]
    names = [name for row in named for found, _ in row for name in found]
    grads.check_patterns(names)
    return [
        [
            Parameter(
                found[0] if found else "",  # its module has left the model
                parameter.numel(),
                grads.of(found, parameter.shape, parameter.numel()),
                weights.of(found, parameter.shape, parameter.numel()),
            )
            for found, parameter in row
        ]
        for row in named
    ]


def _read_choices(
    grad_bits: int,
    weight_bits: int,
    bucket_size: int,
    quantizer: str,
    overrides: Mapping[str, Mapping[str, int | str]] | None,
    min_numel: int,
) -> tuple[Choices, Choices]:
    """Return the rules for gradients and for weights."""
    usual: dict[str, int | str] = dict(zip(_KEYS, (grad_bits, weight_bits, bucket_size, quantizer), strict=True))
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ValueError(f"overrides: expected a dict of dicts by patterns of names, got {shortened(overrides)}")
    asked: dict[str, dict[str, int | str]] = {}
    for pattern, given in (overrides or {}).items():
        where = f"overrides[{pattern!r}]"
        if not isinstance(pattern, str) or not isinstance(given, Mapping):
            raise ValueError(f"{where}: expected a pattern and a dict with the keys {_KEYS}, got {shortened(given)}")
        unknown = [key for key in given if key not in _KEYS]
        if unknown:
            raise ValueError(f"{where}: expected the keys {_KEYS}, got {shortened(unknown[0])}")
        asked[pattern] = {**usual, **given}
    least = at_least("min_numel", min_numel, 0, " values")
    rules = []
    for kind in ("grad", "weight"):
        others = {pattern: _compression(f"overrides[{pattern!r}]: ", kind, given) for pattern, given in asked.items()}
        rules.append(Choices(_compression("", kind, usual), least, others))
    return rules[0], rules[1]


def _compression(where: str, kind: str, given: Mapping[str, Any]) -> Compression:
    bits, quantizer = given[f"{kind}_bits"], given["quantizer"]
    try:
        codecs.family(quantizer)
        if kind == "weight" and bits in _ONLY_MAXMIN:
            quantizer = DEFAULT_QUANTIZER
        return Compression(bits, given["bucket_size"], quantizer)
    except ValueError as error:
        of = f"{kind}_" if str(error).startswith("bits") else ""
        raise ValueError(f"{where}{of}{error}") from None


def _bits(compression: Compression) -> str:
    named = compression.quantizer != DEFAULT_QUANTIZER and not compression.is_exact
    return f"{compression.bits} {compression.quantizer}" if named else str(compression.bits)
