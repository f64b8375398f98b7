"""`torch_cgx.compress(model)`: one call that compresses what a training run sends, with DDP or FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_cgx import fsdp
from torch_cgx.adaptive import AdaptiveBits
from torch_cgx.config import DEFAULT_QUANTIZER, shortened
from torch_cgx.ddp import CGXState, cgx_hook

__all__ = ["compress"]

_QUANTIZER = DEFAULT_QUANTIZER  # the default of `compress`; nobody depends on it yet, so it may change


def compress(
    model: nn.Module,
    *,
    bits: int = 4,
    quantizer: str = _QUANTIZER,
    bucket_size: int | None = None,
    overrides: Mapping[str, Mapping[str, int | str]] | None = None,
    layer_min_size: int = 1024,
    error_feedback: bool = False,
    adaptive: AdaptiveBits | Literal["auto"] | None = None,
    group: Any = None,
) -> CGXState | fsdp.Compressed:
    """Compress the gradients of a DistributedDataParallel model, or what FSDP2 sends for one. All ranks must call it.

    A DDP model gets `cgx_hook` with a `CGXState`, which is returned. A model with modules that `fully_shard` has been
    applied to goes to `torch_cgx.fsdp.compress`, with these bits for gradients and 8 for weights, and a `Compressed` is
    returned. Both have `report()`. For other options, create a `CGXState` or call `fsdp.compress`.

    Args:
        model: a DDP model without a communication hook, or one that `fully_shard` has been applied to.
        bits: 1 to 8, or 32: exact.
        quantizer: "maxmin", or "rotated" (1 to 4 bits).
        bucket_size: how many values share a header. None: 1024.
        overrides: "bits", "bucket_size" and "quantizer" for parameters whose names match a pattern, as in
            `{"*.attn.*": {"bits": 8}}`. If several patterns match, the last one counts.
        layer_min_size: layers with fewer values are exact, and so are one-dimensional ones (biases, norms).
        error_feedback: add what compression lost of a gradient to the next one. Not with FSDP2.
        adaptive: "auto" or an `AdaptiveBits`: choose bits for each layer while training. Not with FSDP2.
        group: the process group. None: the model's own. Not with FSDP2, which has its groups from its mesh.
    """
    inner = getattr(model, "_orig_mod", model)  # without torch.compile's wrapper
    codec = {"quantizer": quantizer} if bucket_size is None else {"quantizer": quantizer, "bucket_size": bucket_size}
    if isinstance(inner, DistributedDataParallel):
        state = CGXState.from_model(
            inner,
            group,
            layer_min_size=layer_min_size,
            compression_params={"bits": bits, **codec},
            overrides=overrides,
            error_feedback=error_feedback,
            adaptive=adaptive,
        )
        inner.register_comm_hook(state, cgx_hook)
        return state
    if isinstance(model, nn.Module) and any(isinstance(each, FSDPModule) for each in model.modules()):
        for name, given in (("error_feedback", error_feedback), ("adaptive", adaptive), ("group", group)):
            if given is not None and given is not False:
                raise ValueError(f"{name}: expected none with FSDP2, got {shortened(given)}")
        rules: dict[str, Any] = {"overrides": _of_gradients(overrides), "min_numel": layer_min_size, **codec}
        return fsdp.compress(model, grad_bits=bits, **rules)
    raise TypeError(
        f"model: expected a DistributedDataParallel model, or one with modules that fully_shard (FSDP2) has been "
        f"applied to, got {type(model).__name__}: wrap it first, as in model = DistributedDataParallel(model)"
    )


def _of_gradients(overrides: Any) -> Any:
    """Return overrides in the form that `fsdp.compress` takes. It also checks them."""
    if not isinstance(overrides, Mapping):
        return overrides
    return {
        pattern: {"grad_bits" if key == "bits" else key: value for key, value in given.items()}
        if isinstance(given, Mapping)
        else given
        for pattern, given in overrides.items()
    }
