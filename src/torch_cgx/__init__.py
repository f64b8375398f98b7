"""torch_cgx: a torch.distributed backend, "cgx", whose allreduce sends 1 to 8 bits per value.

Importing it registers the backend (so does `import torch` alone, if this package is installed) and, under mpirun
or srun, sets RANK and WORLD_SIZE. The names below are the public interface.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import _torch_cgx_autoload
from torch_cgx.errors import (
    CGXError,
    CGXTimeoutError,
    MismatchError,
    PeerLostError,
    PoisonedError,
    SharedMemoryError,
    TransportError,
)
from torch_cgx.scopes import compressed, set_default, uncompressed
from torch_cgx.version import __version__

if TYPE_CHECKING:
    from torch_cgx.adaptive import AdaptiveBits
    from torch_cgx.compress_model import compress
    from torch_cgx.ddp import CGXState, cgx_hook
    from torch_cgx.functional import dequantize, payload_nbytes, quantize
    from torch_cgx.group.process_group import ProcessGroupCGX

__all__ = [
    "AdaptiveBits",
    "CGXError",
    "CGXState",
    "CGXTimeoutError",
    "MismatchError",
    "PeerLostError",
    "PoisonedError",
    "SharedMemoryError",
    "TransportError",
    "__version__",
    "cgx_hook",
    "compress",
    "compressed",
    "dequantize",
    "payload_nbytes",
    "quantize",
    "register_layer",
    "reset_stats",
    "set_default",
    "set_quantization_bits",
    "set_quantization_bucket_size",
    "stats",
    "uncompressed",
]


_LAZY = {
    "AdaptiveBits": "torch_cgx.adaptive",
    "CGXState": "torch_cgx.ddp",
    "compress": "torch_cgx.compress_model",
    "cgx_hook": "torch_cgx.ddp",
    "dequantize": "torch_cgx.functional",
    "payload_nbytes": "torch_cgx.functional",
    "quantize": "torch_cgx.functional",
}
"""The module that defines each public name; all of them import torch."""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that the command `cgx` prints its help without importing torch."""
    if name == "fsdp":
        return import_module("torch_cgx.fsdp")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def stats(group: Any = None) -> dict[str, float]:
    """Return what this rank has sent and where the time went, on a group with backend "cgx" (None: the default group).

    Returns:
        `operations` and `compressed_operations`; `bytes_before` and `bytes_after` (of tensors that were compressed);
            `bytes_sent` (to all peers); seconds: `encode_s`, `wait_s`, `reduce_s`, `decode_s`. Operations that only
            move values, such as a broadcast, add to the seconds alone.
    """
    return _cgx_group(group).stats()


def reset_stats(group: Any = None) -> None:
    """Reset the counters that `stats` returns."""
    _cgx_group(group).reset_stats()


def register_layer(bucket_idx: int, layer_idx: int, numel: int, bits: int, bucket_size: int) -> None:
    """Tell the default group about a layer of a grad bucket. For older scripts: `cgx_hook` does this automatically.

    If compression is on, an all_reduce on the default group with as many values as a grad bucket's layers together is
    then compressed layer by layer. All ranks must register identical layers.

    Args:
        bucket_idx: the number of the grad bucket.
        layer_idx: the layer's number in it.
        numel: how many values it has.
        bits: 1 to 8, or 32: exact.
        bucket_size: how many values share a minimum and a step.
    """
    _cgx_group(None).layers.register(bucket_idx, layer_idx, numel, bits, bucket_size)


def set_quantization_bits(bucket_idx: int, layer_idx: int, bits: int) -> None:
    """Change the bits of a layer that `register_layer` has registered."""
    _cgx_group(None).layers.set_bits(bucket_idx, layer_idx, bits)


def set_quantization_bucket_size(bucket_idx: int, layer_idx: int, bucket_size: int) -> None:
    """Change the bucket size of a layer that `register_layer` has registered."""
    _cgx_group(None).layers.set_block(bucket_idx, layer_idx, bucket_size)


def _cgx_group(group: Any) -> ProcessGroupCGX:
    """Return the group (None: the default one), or raise ValueError if its backend is not cgx."""
    import torch.distributed as dist

    from torch_cgx.group.process_group import ProcessGroupCGX

    if not dist.is_initialized():
        raise ValueError('expected an initialised process group: call init_process_group("cgx") first')
    chosen = group if group is not None else dist.group.WORLD
    if not isinstance(chosen, ProcessGroupCGX):
        raise ValueError(f'group: expected one with backend "cgx", got backend "{dist.get_backend(group)}"')
    return chosen


if not _torch_cgx_autoload.in_command:
    _torch_cgx_autoload.register()
