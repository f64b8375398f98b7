"""Carry out a group's operations on CUDA tensors.

`engine` is what this machine has for them, `exchanges` who carries their payloads, `reducer` what is done to them.
Which are compressed is decided in `group/compression.py`.
"""

from __future__ import annotations

from torch_cgx.group.cuda.engine import Engine, cuda_engine, cuda_problem
from torch_cgx.group.cuda.side import CudaSide, open_side

__all__ = ["CudaSide", "Engine", "cuda_engine", "cuda_problem", "open_side"]
