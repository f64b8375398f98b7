"""A group's operations on CUDA tensors.

`engine` has this machine's means for them, `exchanges` chooses the carrier of their payloads, and `reducer` runs them.
Which operations are compressed is decided in `group/compression.py`.
"""

from __future__ import annotations

from torch_cgx.group.cuda.engine import Engine, cuda_engine, cuda_problem
from torch_cgx.group.cuda.side import CudaSide, open_side

__all__ = ["CudaSide", "Engine", "cuda_engine", "cuda_problem", "open_side"]
