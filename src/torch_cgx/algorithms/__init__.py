"""The algorithms: pure functions from (chunks, rank, world) to a program.

They know neither values nor bytes nor who carries them. A new one is one file here and one line in
`ALGORITHMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch_cgx.algorithms import scatter_reduce_allgather
from torch_cgx.program import Program

__all__ = ["ALGORITHMS", "Algorithm"]

# (which chunks are not empty, rank, world) -> the rank's program
Algorithm = Callable[[Sequence[bool], int, int], Program]

# By the names that CGX_INNER_REDUCTION_TYPE and CGX_CROSS_REDUCTION_TYPE have.
ALGORITHMS: Mapping[str, Algorithm] = {
    "SRA": scatter_reduce_allgather.program,
}
