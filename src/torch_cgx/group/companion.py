"""A cgx group beside a group of another backend, so that hooks compress even if the user cannot change the backend."""

from __future__ import annotations

from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_cgx.group.process_group import ProcessGroupCGX

__all__ = ["cgx_group_of"]


def cgx_group_of(group: Any) -> ProcessGroupCGX:
    """Return the group itself if its backend is cgx, else a new cgx group of the same ranks. All ranks call it.

    torch's own `new_group` with use_local_synchronization names a group by the number of groups in the process, so it
    waits forever if ranks are in different numbers of groups. This function counts in the group's own store.
    """
    if isinstance(group, ProcessGroupCGX):
        return group
    try:
        store, rank = distributed_c10d._get_process_group_store(group), dist.get_rank(group)
    except KeyError:
        raise ValueError(
            "process_group: expected a group of this process, got one that has been destroyed: make the CGXState on "
            "the new one"
        ) from None
    number = store.add(f"cgx beside/{rank}", 1)
    return ProcessGroupCGX(
        c10d.PrefixStore(f"cgx beside/{number}", store),
        rank,
        dist.get_world_size(group),
        _timeout_of(group),
        dist.get_process_group_ranks(group),
    )


def _timeout_of(group: Any) -> Any:
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return distributed_c10d.default_pg_timeout
