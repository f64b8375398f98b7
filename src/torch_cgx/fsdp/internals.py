"""FSDP2's parameter groups and the layout of their tensors, for which it has no public names.

Only this module reads FSDP's private names, and only those that exist: if a version of torch has other names, modules
are still found, and each flat tensor counts as one layer. Nothing is compressed or sent here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = [
    "Unit",
    "clean",
    "gathered_numels",
    "is_extended",
    "is_trained",
    "names_of",
    "names_of_modules",
    "reduced_numels",
    "units_of",
]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and activation checkpointing


@dataclass(frozen=True, eq=False)
class Unit:
    """One parameter group: what one all-gather and one reduce-scatter carry."""

    module: Any  # the first FSDPModule that has it
    group: Any  # torch's FSDPParamGroup; None: this torch does not show it
    is_only: bool  # in its module: only then torch accepts custom communication
    params: tuple[Any, ...]  # its FSDPParams, in the order of its tensors

    def shard_groups(self) -> list[Any]:
        """Return the process groups that gather and reduce its shards, its mesh's own first."""
        found: list[Any] = []
        for mesh in (getattr(self.group, "mesh_info", None), getattr(self.group, "post_forward_mesh_info", None)):
            for name in ("shard_process_group", "reduce_scatter_process_group"):
                each = getattr(mesh, name, None)
                if each is not None and not any(each is other for other in found):
                    found.append(each)
        return found

    @property
    def replicate_group(self) -> Any:
        """Return the group that averages across replicas after each reduce-scatter, or None without HSDP."""
        found = getattr(getattr(self.group, "mesh_info", None), "replicate_process_group", None)
        return found if found is not None and found.size() > 1 else None

    def communicate_by(self, all_gather: Any, reduce_scatter: Any) -> None:
        if self.is_only:
            self.module.set_custom_all_gather(all_gather)
            self.module.set_custom_reduce_scatter(reduce_scatter)
        else:
            self.group._all_gather_comm, self.group._reduce_scatter_comm = all_gather, reduce_scatter

    def communicate_as_torch_does(self) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torchs

        self.communicate_by(torchs.DefaultAllGather(), torchs.DefaultReduceScatter())

    @property
    def all_gather(self) -> Any:
        """Return the installed all-gather, or None if this torch does not show it."""
        return getattr(self.group, "_all_gather_comm", None)

    @property
    def reduce_scatter(self) -> Any:
        """Return the installed reduce-scatter, or None if this torch does not show it."""
        return getattr(self.group, "_reduce_scatter_comm", None)


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of all modules that `fully_shard` has been applied to, in the order of the model."""
    units: list[Unit] = []
    states: list[Any] = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if any(state is other for other in states):  # fully_shard([one, other])
            continue
        states.append(state)
        groups = _param_groups(state)
        if groups is None:
            units.append(Unit(module, None, True, ()))
            continue
        for group in groups:
            unit = Unit(module, group, len(groups) == 1, _params(group))
            if unit.shard_groups():  # else it is replicated, by torch's replicate
                units.append(unit)
    return units


def _param_groups(state: Any) -> list[Any] | None:
    """Return a state's parameter groups, or None if this torch does not show them."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return None


def _params(group: Any) -> tuple[Any, ...]:
    """Return a group's parameters in the order of its tensors; empty if this torch does not show their names."""
    found = tuple(getattr(group, "fsdp_params", ()))
    return found if all(hasattr(each, name) for each in found for name in ("_module_info", "sharded_param")) else ()


def names_of_modules(model: nn.Module) -> dict[int, list[str]]:
    """Return the prefixes of parameters' names by the identity of their module; a shared one has several."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(clean(f"{name}." if name else ""))
    return names


def clean(name: str) -> str:
    """Return a name as it is in the user's own module."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_of(param: Any, prefixes: Mapping[int, Sequence[str]]) -> list[str]:
    """Return the names of an FSDPParam, whether or not it is the one that the module holds at this moment."""
    return list(dict.fromkeys(_names_of(param._module_info, prefixes)))


def _names_of(info: Any, prefixes: Mapping[int, Sequence[str]]) -> Iterator[str]:
    holders = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    for module, name in holders:
        for prefix in prefixes.get(id(module), ()):
            yield prefix + name


def gathered_numels(params: Sequence[Any]) -> tuple[int, ...] | None:
    """Return each parameter's number of values in this rank's share of an all-gather now, or None if unknown."""
    try:
        return tuple(
            param._sharded_post_forward_param_data.numel()
            if param.sharded_state.name == "SHARDED_POST_FORWARD"  # resharded to a part of the mesh, after a forward
            else param._sharded_param_data.numel()
            for param in params
        )
    except AttributeError:
        return None


def is_extended(params: Sequence[Any]) -> bool:
    """Return whether the user's own tensor types define what is gathered: their encoding, not weights."""
    return any(hasattr(getattr(param, "_sharded_local_tensor", None), "fsdp_pre_all_gather") for param in params)


def reduced_numels(params: Sequence[Any]) -> tuple[int, ...] | None:
    """Return each parameter's padded number of values in this rank's reduce-scatter share, or None if unknown."""
    try:
        return tuple(param.padded_sharded_param_size.numel() for param in params)
    except AttributeError:
        return None


def is_trained(param: Any) -> bool:
    return bool(getattr(getattr(param, "sharded_param", None), "requires_grad", True))
