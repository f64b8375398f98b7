"""The size of an operation's slices, and how far they overlap.

The engines, the simulator and the cost model all use these figures.
"""

from __future__ import annotations

__all__ = [
    "LINK_CHUNK_NBYTES",
    "LINK_SLICES",
    "MOST_LAG",
    "MOVED_CHUNK_NBYTES",
    "PIPELINE_PAYLOAD_NBYTES",
    "cuda_slice_nbytes",
    "largest_slice_nbytes",
    "link_lag",
]

# The most bytes of a slice's payload in shared memory. `largest_slice_nbytes` bounds its values too. A slice is small
# enough that encoded values are still in the cache when their sum is decoded over them, and that payloads stay there
# too. It is large enough that two synchronizations of all ranks per slice cost little. The payload's bound: 25 MB exact
# on two ranks took 3.6 ms at 1 MB and 4.5 at 4 (one run each). The values' bound is a weak choice among about five that
# were tried, on a noisy machine. On two ranks 1 to 8 MB made no difference. On four ranks and two cores 25 MB at 4 bits
# took 9.4 to 10.7 ms at 0.5 MB and 10.6 to 14.3 at 2 in one session, but 15 ms at 0.5 MB in another. Nothing shows that
# it matters to a busy main thread.
PIPELINE_PAYLOAD_NBYTES = 1 << 20

# Over links: bytes of values per chunk of a slice, so that a message has 32 KB at 4 bits, and the number of slices in
# flight. Between two hosts at 1 Gbit/s, 25 MB at 4 bits take longer while the main thread is busy in Python: 1.21 and
# 1.31x with a lag of 2 slices between the levels of SRA, 1.04 with 4, 1.20 with 8 (other work ran beside the last two).
# Payloads in flight must last longer than the scheduler takes to run this thread. At 10 Gbit/s 2 and 4 make no
# difference.
LINK_CHUNK_NBYTES = 256 << 10
LINK_SLICES = 8
MOST_LAG = 4
MOVED_CHUNK_NBYTES = 128 << 10  # the least from one rank to another, of values that are only moved through memory

# CUDA tensors: about how many slices an operation is cut into. Slices overlap: while one is exchanged, the next is
# encoded. Then the fewest bytes of values per slice, large enough that launching its kernels and exchanges costs
# little in comparison. Both are guesses, because nothing has been measured on a GPU.
_CUDA_SLICES = 4
_LEAST_CUDA_SLICE_NBYTES = 16 << 20


def link_lag(depth: int) -> int:
    """Return how many slices later the next level of a slice runs over links, for programs of this depth."""
    return max(1, min(MOST_LAG, LINK_SLICES // max(depth, 1)))


def largest_slice_nbytes(
    n_chunks: int, world: int, *, linked: bool, values_nbytes: int, payload_nbytes: int, moved: bool = False
) -> int:
    """Return the most bytes of values per slice, before any other limit.

    Over links a slice has `LINK_CHUNK_NBYTES` per chunk. In shared memory it has 4 MB on 2 ranks, 0.5 MB on 4, at
    least 0.25 MB and 2 KB per pair of ranks, but never more than `PIPELINE_PAYLOAD_NBYTES` of payload. `moved`: an
    exchange or a broadcast, which has places for all pairs of ranks. Many slices of those would take long to set up.
    """
    if linked:
        largest = LINK_CHUNK_NBYTES * n_chunks
    else:
        values = max((32 << 20) // world**3, 256 << 10, world**2 * (2 << 10))
        largest = min(values, PIPELINE_PAYLOAD_NBYTES * values_nbytes // max(payload_nbytes, 1))
    return max(largest, world * MOVED_CHUNK_NBYTES) if moved else largest


def cuda_slice_nbytes(values_nbytes: int, most: int) -> int:
    """Return the bytes of values per slice of a CUDA tensor."""
    return max(1, min(most, max(_LEAST_CUDA_SLICE_NBYTES, -(-values_nbytes // _CUDA_SLICES))))
