"""The JSON that `cgx bench --json` writes, and the numbers derived from raw samples.

All benchmarks share one schema. Within a version, fields are only added:

    schema          "cgx-bench"
    schema_version  1
    kind            "allreduce", described here; "kernels", in kernel_report.py; or "train", in train_report.py
    date            start of the run, ISO 8601, UTC
    command         the arguments after `cgx`
    machine         cpu, cores (that the run may use), os, python, torch, torch_cgx, native (library), simd
    load            load average of the minute before the start, which a preceding run also raises
    busy_cores      the number of busy cores in the half second before the start, below 0.5 on a quiet machine;
                    null if unknown, absent in older files
    settings        nproc (on each node), nodes, bits, bucket_size, quantizer, dtype, device, sizes, against, seconds,
                    busy, omp_num_threads; older files have no quantizer: it is maxmin
    link            null on one host; with --nodes:
        nodes, rate         rate as given, null for no limit
        node_cores          the cores that each node has for itself, null if all share all; absent in older files
        goodput_bit_per_s   of plain TCP from node 0 to 1 and from 1 to 0, at the same time, before the benchmark
    cells           one per size and backend:
        nbytes, numel       of the tensor on each rank
        backend, bits, bucket_size, quantizer   (bits 32: exact; the others null if they have no meaning)
        check
            relative_error      |result - sum in float64| / |sum in float64|, Euclidean norms
            relative_error_allowed          null except for rotated values
            max_error, max_error_allowed    of one value; the latter null for rotated values
            same_bits           on all ranks
            sent_nbytes         by rank 0 for one operation
            sent_from           "stats" (counted by torch_cgx) or "ring" (computed, for a ring all_reduce)
        ops_per_batch       consecutive operations of one batch
        batch_ns            nanoseconds of every batch, of its slowest rank
        op_ns               for every batch the nanoseconds of its operations on rank 0
        median_s            of batch_ns / ops_per_batch
        p95_s               of op_ns
        gb_per_s            1e-9 * nbytes / median_s
        ratio               {other backend: its median_s / this median_s}, in cells of backend cgx
        link_nbytes         with --nodes: of one operation, by the count of the busiest node's device in its busier
                            direction (with one header per train of packets that TCP hands over at once)
        limit_nbytes        with --nodes: the fewest payload bytes that a node must send, and receive (see least_nbytes)
        limit_share         with --nodes: (8 * limit_nbytes / the smaller goodput) / median_s
    busy            one per size and backend, with --busy; empty without:
        nbytes, backend
        clock               "native" (the operation's own stamps) or "callback" (an upper bound, see busy.py)
        quiet_ns, busy_ns   of every operation, of its slowest rank
        quiet_s, busy_s     their medians; ratio = busy_s / quiet_s
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from torch_cgx.config import DEFAULT_QUANTIZER, EXACT, Compression

SCHEMA = "cgx-bench"
SCHEMA_VERSION = 1
QUIET_LOAD = 0.5

Cell = dict[str, Any]


def caution(result: Mapping[str, Any]) -> list[str]:
    """Return a line of caution if the machine had other work when the run began."""
    busy = result.get("busy_cores")
    if busy is not None:
        what = f"{busy:.1f} cores were busy"
    else:
        busy = result["load"]
        what = f"load average {busy:.1f}"
    return [f"caution: {what} at the start, so other work shares in these times"] if busy > QUIET_LOAD else []


def quantizer_prefix(settings: Mapping[str, Any]) -> str:
    """Return `rotated `, or nothing for max-min, which is the meaning of files without a quantizer."""
    name = settings.get("quantizer", DEFAULT_QUANTIZER)
    return "" if name == DEFAULT_QUANTIZER else f"{name} "


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least `share` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


def least_nbytes(nodes: int, numel: int, itemsize: int, compression: Compression) -> float:
    """Return the fewest payload bytes that each node must send, and receive, for an all_reduce between nodes.

    That is 2 (N - 1) / N times the payload of the tensor: a node sends its values to the nodes that add them up, except
    the share that it adds up itself, and later the sums of that share to the N - 1 others. Gloo's ring on N ranks sends
    exactly that, and so does cgx with the encoded values. However many ranks a node has, one sum per node is enough. An
    algorithm that sends each rank's values separately gets less than 100 % even with the link full.
    """
    payload = min(numel * itemsize, compression.codec().payload_nbytes(numel, itemsize))
    return 2 * (nodes - 1) / nodes * payload


def merge_cells(
    of_ranks: Sequence[Sequence[Cell]], *, compression: Compression, link: dict[str, Any] | None = None
) -> list[Cell]:
    """Return one cell of the schema from all ranks' cells for the same measurement. `compression`: that of cgx."""
    cells = []
    for same in zip(*of_ranks, strict=True):
        first = same[0]
        nbytes, ops, world = first["nbytes"], first["ops_per_batch"], len(same)
        own = compression if first["backend"] == "cgx" else EXACT
        batch_ns = [max(map(sum, batches)) for batches in zip(*(cell["op_ns"] for cell in same), strict=True)]
        median_s = statistics.median(batch_ns) / ops * 1e-9
        sent_nbytes = first["check"]["sent_nbytes"]
        check = {
            **first["check"],
            "max_error": max(cell["check"]["max_error"] for cell in same),
            # Gloo's all_reduce is a ring: every rank sends (n - 1) / n of the tensor twice.
            "sent_nbytes": 2 * (world - 1) / world * nbytes if sent_nbytes is None else sent_nbytes,
            "sent_from": "ring" if sent_nbytes is None else "stats",
        }
        cells.append(
            {
                "nbytes": nbytes,
                "numel": first["numel"],
                "backend": first["backend"],
                "bits": own.bits,
                "bucket_size": None if own.is_exact else own.block,
                "quantizer": None if own.is_exact else own.quantizer,
                "check": check,
                "ops_per_batch": ops,
                "batch_ns": batch_ns,
                "op_ns": first["op_ns"],
                "median_s": median_s,
                "p95_s": quantile([ns for batch in first["op_ns"] for ns in batch], 0.95) * 1e-9,
                "gb_per_s": 1e-9 * nbytes / median_s,
            }
        )
        if link is not None:
            cell = cells[-1]
            itemsize = nbytes // cell["numel"]
            least = least_nbytes(link["nodes"], cell["numel"], itemsize, own)
            cell["link_nbytes"] = max(max(one["link_nbytes"]) for one in same)
            cell["limit_nbytes"] = least
            cell["limit_share"] = 8 * least / min(link["goodput_bit_per_s"]) / median_s
    for cell in cells:
        if cell["backend"] == "cgx":
            others = [other for other in cells if other["nbytes"] == cell["nbytes"] and other is not cell]
            cell["ratio"] = {other["backend"]: other["median_s"] / cell["median_s"] for other in others}
    return cells


def merge_busy(of_ranks: Sequence[Sequence[Cell]]) -> list[Cell]:
    cells = []
    for same in zip(*of_ranks, strict=True):
        quiet_ns, busy_ns = (
            [max(of_one) for of_one in zip(*(cell[key] for cell in same), strict=True)]
            for key in ("quiet_ns", "busy_ns")
        )
        quiet_s, busy_s = (statistics.median(samples) * 1e-9 for samples in (quiet_ns, busy_ns))
        cells.append(
            {
                **{key: same[0][key] for key in ("nbytes", "backend", "clock")},
                "quiet_ns": quiet_ns,
                "busy_ns": busy_ns,
                "quiet_s": quiet_s,
                "busy_s": busy_s,
                "ratio": busy_s / quiet_s,
            }
        )
    return cells
