"""Checks of a `CGXState`'s arguments and checkpoints. Errors name the argument, or the place in the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_cgx.config import at_least, shortened

__all__ = ["check_process_group", "check_saved", "check_settings", "version_of"]

_SAVED = ("version", "step", "settings", "rank", "world", "residuals", "residual_scale", "adaptive")
_SAMPLE = ("numel", "itemsize", "positions", "mean", "squares")


def check_process_group(given: object) -> None:
    """Raise TypeError unless this is a process group, or None for the default one."""
    if given is None or isinstance(given, dist.ProcessGroup):
        return
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        what = "what new_group returns to ranks outside the group. Make the state on the ranks of the group only"
    elif isinstance(given, nn.Module):
        what = f"{type(given).__name__}. A model goes into CGXState.from_model(model)"
    else:
        what = f"{type(given).__name__}. All else goes by name: CGXState(layer_min_size=..., compression_params=...)"
    raise TypeError(f"process_group: expected None (the default group) or a process group, got {what}")


def check_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with whole numbers as int. Others check what the settings mean."""
    overrides = _mapping("overrides", settings["overrides"])
    for name in ("stochastic", "error_feedback"):
        value = settings[name]
        if not isinstance(value, bool) and not (value is None and name == "stochastic"):
            allowed = "True, False or None" if name == "stochastic" else "True or False"
            raise ValueError(f"{name}: expected {allowed}, got {shortened(value)}")
    return {
        **settings,
        "layer_min_size": at_least("layer_min_size", settings["layer_min_size"], 0, " values"),
        "start_step": at_least("start_step", settings["start_step"], 0),
        "overrides": overrides,
    }


def version_of(saved: object) -> int | None:
    """Return a checkpoint's version, or None if it has none that is an int."""
    version = saved.get("version") if isinstance(saved, Mapping) else None
    return version if type(version) is int else None


def check_saved(saved: object, settings: Mapping[str, Any], version: int) -> None:
    """Raise ValueError, before anything changes, unless this is what `state_dict` returns."""
    saved = _mapping("state_dict", saved)
    if version_of(saved) != version:
        raise ValueError(f"state_dict: expected version 1 to {version}, got {shortened(saved.get('version'))}")
    _keys("state_dict", saved, _SAVED)
    theirs = _mapping("state_dict: settings", saved["settings"])
    if theirs.keys() != settings.keys():
        raise ValueError(f"state_dict: expected settings {list(settings)}, got {shortened(list(theirs))}")
    for name, value in theirs.items():
        _no_tensor(f"state_dict: settings: {name}", value)
    check_settings(theirs)
    for name, least in (("step", 0), ("rank", 0), ("world", 1)):
        at_least(f"state_dict: {name}", saved[name], least)
    residuals = _mapping("state_dict: residuals", saved["residuals"])
    for name, residual in residuals.items():
        _tensor(f"state_dict: residuals[{name!r}]", residual)
    scale = saved["residual_scale"]
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"state_dict: residual_scale: expected a number above 0, got {shortened(scale)}")
    if saved["adaptive"] is not None:
        _check_adaptive(_mapping("state_dict: adaptive", saved["adaptive"]))


def _no_tensor(where: str, value: object) -> None:
    """Raise ValueError if settings contain a tensor: comparing it with this state's settings gives no plain bool."""
    if isinstance(value, Tensor):
        raise ValueError(f"{where}: expected plain values, got a tensor of {value.dtype}, shape {tuple(value.shape)}")
    within = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    for each in within if isinstance(within, (list, tuple, set, frozenset)) else ():
        _no_tensor(where, each)


def _check_adaptive(saved: Mapping[str, Any]) -> None:
    where = "state_dict: adaptive"
    _keys(where, saved, ("choices", "samples"))
    if not isinstance(saved["choices"], (list, tuple)):
        raise ValueError(f"{where}: choices: expected a list, got {shortened(saved['choices'])}")
    for choice in saved["choices"]:
        _keys(f"{where}: choices", _mapping(f"{where}: choices", choice), ("step", "reason", "layers"))
        at_least(f"{where}: step of a choice", choice["step"], 0)
        for name, pair in _mapping(f"{where}: layers of a choice", choice["layers"]).items():
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise ValueError(f"{where}: layer {name!r}: expected [bits, bucket size], got {shortened(pair)}")
    if saved["samples"] is None:
        return
    for name, sample in _mapping(f"{where}: samples", saved["samples"]).items():
        here = f"{where}: sample of {name!r}"
        if _mapping(here, sample).keys() != set(_SAMPLE):
            raise ValueError(f"{here}: expected the keys {', '.join(_SAMPLE)}, got {shortened(list(sample))}")
        numel = at_least(f"{here}: numel", sample["numel"], 1)
        at_least(f"{here}: itemsize", sample["itemsize"], 1)
        mean = _tensor(f"{here}: mean", sample["mean"])
        _tensor(f"{here}: squares", sample["squares"])
        positions = sample["positions"]
        if positions is None:
            fits = mean.numel() == numel
        else:
            inside = _tensor(f"{here}: positions", positions, torch.int64)
            fits = inside.numel() == mean.numel() > 0 and int(inside.min()) >= 0 and int(inside.max()) < numel
        if not fits or sample["squares"].numel() != 2 or mean.dim() != 1:
            raise ValueError(
                f"{here}: expected a mean of as many values as it has positions, all below {numel}; got others"
            )


def _mapping(where: str, given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"{where}: expected a dict with strings as keys, got {shortened(given)}")
    return given


def _keys(where: str, given: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    missing = [key for key in keys if key not in given]
    if missing:
        raise ValueError(f"{where}: expected the keys {', '.join(keys)}, got none of the name {missing[0]!r}")


def _tensor(where: str, given: object, dtype: torch.dtype | None = None) -> Tensor:
    dense = isinstance(given, Tensor) and given.layout is torch.strided and not given.is_nested
    if not dense or not isinstance(given, Tensor) or (given.dtype != dtype if dtype else not given.is_floating_point()):
        raise ValueError(
            f"{where}: expected a dense tensor of {dtype or 'floating-point numbers'}, got {shortened(given)}"
        )
    return given
