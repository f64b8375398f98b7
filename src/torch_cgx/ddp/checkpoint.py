"""Hook states sent between ranks for checkpoints: tensors and plain values, never pickles that could run code."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_cgx.errors import MismatchError

__all__ = ["broadcast_state", "gather_states", "most_state_nbytes"]

_OF_A_VALUE = 16  # bytes per value, at most: its residual, and its share of the samples
_BESIDES = 256 << 20  # bytes of choices and names


def most_state_nbytes(model: nn.Module) -> int:
    """Return the most bytes that a model's hook state can have, as a bound on the lengths that peers announce."""
    return _OF_A_VALUE * sum(parameter.numel() for parameter in model.parameters()) + _BESIDES


def gather_states(state: Mapping[str, Any], most_nbytes: int) -> list[Any] | None:
    """Return all ranks' states, by rank, on rank 0, and None on the others. All ranks must call it."""
    device, world = _device(), dist.get_world_size()
    mine = _packed(state).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([mine.numel()], dtype=torch.int64, device=device))
    nbytes = [_bounded(int(length), rank, most_nbytes) for rank, length in enumerate(lengths)]
    padded = torch.zeros(max(nbytes), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    here = dist.get_rank() == 0
    found = [torch.empty_like(padded) for _ in range(world)] if here else None
    dist.gather(padded, found)
    if found is None:
        return None
    return [_unpacked(each[:length]) for each, length in zip(found, nbytes, strict=True)]


def broadcast_state(state: Mapping[str, Any] | None, most_nbytes: int) -> Any:
    """Return rank 0's state on all ranks, or None if it has none. All ranks must call it."""
    device, here = _device(), dist.get_rank() == 0
    packed = (
        _packed(state).to(device) if here and state is not None else torch.empty(0, dtype=torch.uint8, device=device)
    )
    length = torch.tensor([packed.numel()], dtype=torch.int64, device=device)
    dist.broadcast(length, 0)
    nbytes = _bounded(int(length), 0, most_nbytes)
    if nbytes == 0:
        return None
    arriving = packed if here else torch.empty(nbytes, dtype=torch.uint8, device=device)
    dist.broadcast(arriving, 0)
    return state if here else _unpacked(arriving)


def _device() -> torch.device:
    on_cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def _packed(state: Mapping[str, Any]) -> Tensor:
    file = io.BytesIO()
    torch.save(dict(state), file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    return torch.load(io.BytesIO(packed.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)


def _bounded(nbytes: int, rank: int, most_nbytes: int) -> int:
    if not 0 <= nbytes <= most_nbytes:
        raise MismatchError(
            f"rank {rank} has a state of {nbytes} bytes: expected at most {most_nbytes} of such a model"
        )
    return nbytes
