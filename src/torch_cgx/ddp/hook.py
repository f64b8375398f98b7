"""The communication hook for DistributedDataParallel."""

# Without `from __future__ import annotations`: DDP compares the annotations with the types themselves.

import torch
from torch._C._distributed_c10d import GradBucket

from torch_cgx.ddp.state import CGXState

__all__ = ["cgx_hook"]


def cgx_hook(state: CGXState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a grad bucket, each layer compressed as the state says: `model.register_comm_hook(state, cgx_hook)`.

    Args:
        state: how to compress; one per model.
        bucket: the grad bucket that DDP passes.
    """
    if not isinstance(state, CGXState):
        raise TypeError(
            f"state: expected a CGXState, got {type(state).__name__}: write "
            "model.register_comm_hook(state, cgx_hook) with state = CGXState.from_model(model)"
        )
    return state.average(bucket)
