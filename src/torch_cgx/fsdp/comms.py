"""The all-gather and the reduce-scatter that FSDP2 calls in place of torch's own.

FSDP passes flat tensors without a layout. These classes find the layers in them, from what is known of the parameter
group, and the process groups do the rest. Each parameter group has its own pair.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torch_cgx import scopes
from torch_cgx.config import EXACT, Compression, Settings
from torch_cgx.fsdp.hsdp import Claim, fineness
from torch_cgx.fsdp.internals import gathered_numels, is_extended, is_trained, reduced_numels
from torch_cgx.group.companion import cgx_group_of
from torch_cgx.group.process_group import ProcessGroupCGX
from torch_cgx.plan.layout import Layer, layer_of

__all__ = ["AllGather", "Groups", "ReduceScatter", "lay_out"]

log = logging.getLogger("torch_cgx.fsdp")


class Groups:
    """The cgx group for each of FSDP's groups: that group itself, or one beside it that is made once."""

    def __init__(self) -> None:
        self._found: dict[Any, ProcessGroupCGX] = {}

    def of(self, group: Any) -> ProcessGroupCGX:
        found = self._found.get(group)
        if found is None or found.is_closed:
            found = self._found[group] = cgx_group_of(group)
        return found

    def all(self) -> tuple[ProcessGroupCGX, ...]:
        return tuple(self._found.values())


@lru_cache(maxsize=1024)
def lay_out(numels: tuple[int, ...], compressions: tuple[Compression, ...], settings: Settings) -> tuple[Layer, ...]:
    """Return the consecutive layers of one rank's share. Layers too small for a header are exact."""
    return tuple(layer_of(numel, chosen, settings) for numel, chosen in zip(numels, compressions, strict=True))


class _Comm:
    """The base of both: the parameters of a group in order, and the compression chosen for each."""

    def __init__(
        self, params: Sequence[Any], compressions: Sequence[Compression], whole: Compression, groups: Groups
    ) -> None:
        self._params = tuple(params)
        self._compressions = tuple(compressions)
        self._whole = whole  # for a flat tensor whose layers are not known
        self.groups = groups

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor in which FSDP lays out what it sends or receives."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Comm):
    """An all-gather of weights, rounded at random so that what all ranks compute with is right on average.

    Each owner keeps its weights exact, in memory that is not touched here.
    """

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        ours = self.groups.of(group)
        layers = self._layers(input_tensor.numel(), ours.settings)
        work = ours.all_gather_layers(output_tensor, input_tensor, layers, stochastic=True, asynchronous=async_op)
        return _returned(work, async_op)

    def _layers(self, numel: int, settings: Settings) -> tuple[Layer, ...]:
        if scopes.is_uncompressed() or is_extended(self._params):
            return lay_out((numel,), (EXACT,), settings)
        numels = gathered_numels(self._params)
        if numels is not None and sum(numels) == numel and numels:
            return lay_out(numels, self._compressions, settings)
        return lay_out((numel,), (self._whole,), settings)


class ReduceScatter(_Comm):
    """A reduce-scatter of gradients, rounded as the group rounds.

    With HSDP it also announces what will be averaged across replicas.
    """

    def __init__(
        self,
        params: Sequence[Any],
        compressions: Sequence[Compression],
        whole: Compression,
        groups: Groups,
        replicas: Claim | None = None,
    ) -> None:
        super().__init__(params, compressions, whole, groups)
        self.replicas = replicas
        self._has_warned = False

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        ours = self.groups.of(group)
        numel = output_tensor.numel()
        layers = self._layers(numel, ours.settings)
        if self.replicas is not None:
            self.replicas.expect(layers)
        if scopes.is_uncompressed():
            layers = lay_out((numel,), (EXACT,), ours.settings)
        work = ours.reduce_scatter_layers(output_tensor, input_tensor, layers, op=op, asynchronous=async_op)
        return _returned(work, async_op)

    def _layers(self, numel: int, settings: Settings) -> tuple[Layer, ...]:
        """Return the layers of a flat tensor, which holds only parameters that got gradients.

        FSDP does not say which those are, so they are found by adding up sizes. If no sizes add up, all of it is one
        layer, with the finest codec of any parameter that may be in it.
        """
        numels = reduced_numels(self._params)
        if numels:
            if sum(numels) == numel:
                return lay_out(numels, self._compressions, settings)
            trained = [number for number, param in enumerate(self._params) if is_trained(param)]
            if sum(numels[number] for number in trained) == numel:
                chosen = tuple(self._compressions[number] for number in trained)
                return lay_out(tuple(numels[number] for number in trained), chosen, settings)
        whole = max(self._compressions, key=lambda each: fineness(each.codec()), default=self._whole)
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a reduce-scatter has %d values a rank, and the parameters that require gradients have others: it "
                "counts as one layer of %d bits (set_reduce_scatter_unused_params(True) keeps all of them in it)",
                *(numel, whole.bits),
            )
        return lay_out((numel,), (whole,), settings)


def _returned(work: Any, async_op: bool) -> Any:
    """Return the work, or wait for it and return None, as torch.distributed does."""
    if async_op:
        return work
    work.wait()
    return None
