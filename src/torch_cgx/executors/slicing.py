"""Into how large slices an operation over messages is cut: see `pipeline` for how they overlap."""

from __future__ import annotations

from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.schedule import AHEAD, staged_slices

__all__ = ["message_slice_nbytes", "usual_slice_nbytes"]

# Over messages an operation is cut into about so many slices, which overlap. More of them would leave the link idle for
# a shorter time at both ends, but each costs four messages and some Python: 64 MB at 10 Gbit/s took 38 ms in 8 slices
# and 52 in 16, and the same at 1 Gbit/s. Grad buckets of 8 MB, 43 MB in all, took each rank about 12 ms more of its
# processor in slices of 2 MB than in slices of 4, and a training has no cores to spare. Several slices are under way at
# once; their payloads must fit into so many fusion buffers' payloads.
_SLICES = 8
_SMALL_SLICE_NBYTES, _LEAST_SLICE_NBYTES = 2 << 20, 4 << 20
_STAGED_FUSION_BUFFERS = 2


def message_slice_nbytes(nbytes: int, fusion_nbytes: int, topology: Topology) -> int:
    """The most values, in bytes, of one slice of an operation over messages."""
    of_fusion_buffer = _STAGED_FUSION_BUFFERS * fusion_nbytes // staged_slices(topology, AHEAD)
    return max(1, min(of_fusion_buffer, usual_slice_nbytes(nbytes)))


def usual_slice_nbytes(nbytes: int) -> int:
    """Where memory does not matter: two slices of what is small, so that they overlap at all, then larger ones."""
    half, share = -(-nbytes // 2), -(-nbytes // _SLICES)
    return max(_SMALL_SLICE_NBYTES, min(_LEAST_SLICE_NBYTES, half), share)
