"""The model of a training step's time for `cgx plan`. It reads no files and prints nothing.

    forward | backward: grad bucket after grad bucket becomes ready         | optimizer
                 | all_reduce 1 | all_reduce 2 |     | all_reduce 3 |<exposed>|

1. A grad bucket is ready when backward has passed its parameters. All_reduces run one after the other, in order.
2. The time of each one alone is simulated: `plan.simulate` runs the programs that would run.
3. If the processor also computes gradients, backward is delayed by the time of the all_reduce's kernels and messages.
4. The optimizer starts when backward and the last all_reduce are done.

docs/plan-validation.md tells where the constants come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2

from torch_cgx.cli.registry import widths_of
from torch_cgx.codecs import RAW, Codec, make_codec
from torch_cgx.config import DEFAULT_QUANTIZER
from torch_cgx.plan.costs import Costs, Speeds, Wire, choose
from torch_cgx.plan.simulate import Size, Timing
from torch_cgx.plan.simulate_classes import MOST_NODES, Cluster, simulate_cluster
from torch_cgx.plan.slicing import cuda_slice_nbytes, largest_slice_nbytes, link_lag

__all__ = ["CONTESTANTS", "EXACT", "FP16", "Bucket", "Plan", "Prediction", "Site", "Way", "Workload", "ddp_buckets"]

EXACT, FP16 = "exact", "fp16"
CONTESTANTS = (EXACT, FP16, *(f"{bits} bit{'s' * (bits > 1)}" for bits in range(8, 0, -1)))

_DDP_NBYTES, _DDP_FIRST_NBYTES = 25 << 20, 1 << 20
_ITEMSIZE = 4

_FUSION_NBYTES = 64 << 20  # CGX_FUSION_BUFFER_SIZE_MB
# The number of slices into which Gloo and NCCL cut an operation, and the fewest bytes of a slice. Both send one slice
# while they add up the one before.
_EXACT_SLICES = {"cpu": (2, 1 << 16), "gpu": (4, 1 << 20)}


@dataclass(frozen=True, slots=True)
class Bucket:
    numel: int
    ready_s: float  # after the start of backward


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of one rank without communication."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    buckets: tuple[Bucket, ...]  # in the order in which they become ready

    @property
    def ideal_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def numel(self) -> int:
        return sum(bucket.numel for bucket in self.buckets)

    @classmethod
    def of_step(cls, numels: Sequence[int], step_s: float) -> Workload:
        """Return a step with grad buckets of these sizes. Forward is a third of it; backward has constant speed."""
        backward_s, total, before = step_s * 2 / 3, sum(numels), 0
        buckets: list[Bucket] = []
        for numel in numels:
            before += numel
            buckets.append(Bucket(numel, backward_s * before / total))
        return cls(step_s - backward_s, backward_s, 0.0, tuple(buckets))


def ddp_buckets(numels: Sequence[int]) -> list[int]:
    """Return the sizes of DDP's grad buckets for float32 parameters: from the last one on, 1 MB first, then 25 MB each.

    A grad bucket is full when it has reached its size, so a large parameter makes a large bucket.
    """
    buckets: list[int] = []
    filling = 0
    for numel in reversed(numels):
        filling += numel
        if filling * _ITEMSIZE >= (_DDP_NBYTES if buckets else _DDP_FIRST_NBYTES):
            buckets.append(filling)
            filling = 0
    return [*buckets, filling] if filling else buckets


@dataclass(frozen=True, slots=True)
class Way:
    """The settings of cgx, as its variables state them."""

    algorithm: str = "AUTO"  # CGX_CROSS_REDUCTION_TYPE; on one node, SRA
    broadcast: bool = True  # CGX_INTRA_BROADCAST
    inner: str = "NCCL"  # CGX_INNER_COMMUNICATOR_TYPE
    cross: str = "NCCL"  # CGX_CROSS_COMMUNICATOR_TYPE


@dataclass(frozen=True, slots=True)
class Site:
    """A kind of node, and the links between such nodes."""

    ranks: int  # per node
    device: str  # cpu or gpu
    within: Mapping[str, Wire]  # by communicator
    between: Mapping[str, Wire]
    speeds: Speeds
    exact_within: Wire  # of the backend for exact and fp16: NCCL or Gloo
    exact_between: Wire
    cores: float = 2.0  # per rank. The engine of CPU tensors has one thread, which computes and moves bytes
    block: int = 1024
    quantizer: str = DEFAULT_QUANTIZER  # for the widths that it supports; the others are max-min
    tree: bool = False  # the exact backend has trees as well as rings, like NCCL, and uses the faster
    steals_kernels: bool = True  # one processor runs kernels and computes gradients
    steals_transport: bool = False  # one processor handles messages and computes gradients
    start_s: float = 0.0  # of an operation of cgx between nodes
    exact_start_s: float = 0.0  # of an operation of the exact backend between nodes
    most_nodes: int = MOST_NODES  # see `simulate_classes`


@dataclass(frozen=True, slots=True)
class Prediction:
    contestant: str
    nodes: int
    step_s: float
    ideal_s: float
    communication_s: float  # all_reduces, hidden or not
    link_nbytes: float  # sent by a node to others per step
    way: Way | None  # None: not cgx. Its algorithm is that of the largest grad bucket

    @property
    def share(self) -> float:
        """Return the share of ideal scaling."""
        return self.ideal_s / self.step_s

    @property
    def exposed_s(self) -> float:
        return self.step_s - self.ideal_s


@dataclass(frozen=True, slots=True)
class Plan:
    """Predictions for one training run on one kind of node."""

    site: Site
    workload: Workload

    def predict(self, contestant: str, nodes: int, way: Way | None = None) -> Prediction:
        """Predict a step. Without a way, use the fastest one with the first communicators."""
        if contestant not in CONTESTANTS:
            raise ValueError(f"contestant: expected {', '.join(CONTESTANTS)}, got {contestant}")
        if contestant in (EXACT, FP16):
            return self._step(contestant, nodes, None)
        ways = [way] if way else self._ways(nodes)
        return min((self._step(contestant, nodes, each) for each in ways), key=lambda found: found.step_s)

    def _ways(self, nodes: int) -> list[Way]:
        first = Way(inner=next(iter(self.site.within)), cross=next(iter(self.site.between)))
        several = nodes > 1 and self.site.ranks > 1
        return [first, replace(first, broadcast=False)] if several else [first]

    def duration(self, contestant: str, numel: int, nodes: int, way: Way | None = None) -> Timing:
        """Time one all_reduce of `numel` values alone. Without a way, the exact backend runs it."""
        site = self.site
        itemsize = 2 if contestant == FP16 else _ITEMSIZE
        codec = self._codec(contestant)
        nbytes = numel * itemsize
        if way is not None:
            operation = _Operation(self.cluster(contestant, numel, nodes, way), numel, itemsize, codec)
            return self._simulate_ours(operation, nodes, way)
        cluster, costs = Cluster(nodes, site.ranks, "RING", flat=True), self._exact_costs(nodes)
        goal, least = _EXACT_SLICES[site.device]
        slices = max(1, min(goal, round(nbytes / least)))
        timing = _simulate(_Operation(cluster, numel, itemsize, codec), slices, costs, site.most_nodes)
        if site.tree and nodes > 1:
            timing = min(timing, _tree(cluster, nbytes, costs), key=lambda each: each.seconds)
        if contestant != FP16 or cluster.world == 1:
            return timing
        cast_s = 2 * numel * _ITEMSIZE / site.speeds.copy  # to float16 before, and back after
        return replace(timing, seconds=timing.seconds + cast_s, kernel_s=timing.kernel_s + cast_s)

    def cluster(self, contestant: str, numel: int, nodes: int, way: Way) -> Cluster:
        """Return the nodes with the algorithm of an all_reduce: the way's, or the one that cgx would choose."""
        site = self.site
        cluster = Cluster(nodes, site.ranks, "SRA", shares=1 if way.broadcast else site.ranks)
        if way.algorithm != "AUTO":
            return replace(cluster, algorithm=way.algorithm)
        if nodes == 1:
            return cluster
        codec, shares = self._codec(contestant), cluster.shares
        payload = codec.payload_nbytes(numel, _ITEMSIZE)
        slice_nbytes = self._slice_nbytes(cluster, numel * _ITEMSIZE, payload)
        sizes = (numel * _ITEMSIZE / shares, payload / shares, codec.bits, slice_nbytes / shares)
        return replace(cluster, algorithm=choose(nodes, *sizes, self._costs(nodes, way)))

    def _slice_nbytes(self, cluster: Cluster, nbytes: int, payload_nbytes: int) -> int:
        """Return the most bytes of values per slice, as cgx cuts them."""
        if self.site.device == "gpu":
            return cuda_slice_nbytes(nbytes, _FUSION_NBYTES)
        largest = largest_slice_nbytes(
            cluster.n_chunks,
            cluster.world,
            linked=cluster.nodes > 1,
            values_nbytes=nbytes,
            payload_nbytes=payload_nbytes,
        )
        return max(1, min(_FUSION_NBYTES, largest))

    def _simulate_ours(self, operation: _Operation, nodes: int, way: Way) -> Timing:
        nbytes = operation.numel * operation.itemsize
        payload = operation.codec.payload_nbytes(operation.numel, operation.itemsize)
        slices = ceil(nbytes / self._slice_nbytes(operation.cluster, nbytes, payload))
        gpu = self.site.device == "gpu"
        lag = 1 if gpu else link_lag(operation.cluster.depth) if nodes > 1 else 0
        return _simulate(operation, slices, self._costs(nodes, way), self.site.most_nodes, rounds=gpu, lag=lag)

    def _exact_costs(self, nodes: int) -> Costs:
        """Return the costs of the exact backend. It sends and receives values in place, so it copies nothing."""
        site = self.site
        speeds = replace(site.speeds, copy=float("inf"))
        start_s = site.exact_start_s if nodes > 1 else 0.0
        return Costs(site.exact_within, site.exact_between, speeds, site.cores, start_s)

    def _costs(self, nodes: int, way: Way) -> Costs:
        site = self.site
        cores = site.cores if site.device == "gpu" else min(1.0, site.cores)
        start_s = site.start_s if nodes > 1 else 0.0
        return Costs(site.within[way.inner], site.between[way.cross], site.speeds, cores, start_s)

    def _codec(self, contestant: str) -> Codec:
        if contestant in (EXACT, FP16):
            return RAW
        bits, site = int(contestant.split()[0]), self.site
        quantizer = site.quantizer if bits in widths_of(site.quantizer) else DEFAULT_QUANTIZER
        return make_codec(quantizer, bits, site.block)

    def _step(self, contestant: str, nodes: int, way: Way | None) -> Prediction:
        work, site = self.workload, self.site
        late = done = communication = link = 0.0
        for bucket in work.buckets:
            took = self.duration(contestant, bucket.numel, nodes, way)
            # The processor time of earlier all_reduces has delayed this grad bucket.
            done = max(bucket.ready_s + late, done) + took.seconds
            if bucket is not work.buckets[-1]:  # the last one has no backward to delay
                late += site.steals_kernels * took.kernel_s + site.steals_transport * took.transport_s
            communication += took.seconds
            link += took.link_nbytes
        step_s = work.forward_s + max(work.backward_s + late, done) + work.optimizer_s
        if way is not None:
            largest = max(bucket.numel for bucket in work.buckets)
            way = replace(way, algorithm=self.cluster(contestant, largest, nodes, way).algorithm)
        return Prediction(contestant, nodes, step_s, work.ideal_s, communication, link, way)


@dataclass(frozen=True, slots=True)
class _Operation:
    """An all_reduce."""

    cluster: Cluster
    numel: int
    itemsize: int
    codec: Codec


@lru_cache(maxsize=4096)
def _simulate(
    operation: _Operation, slices: int, costs: Costs, most: int, *, rounds: bool = False, lag: int = 1
) -> Timing:
    cluster, codec, itemsize = operation.cluster, operation.codec, operation.itemsize
    values = operation.numel / slices / cluster.n_chunks
    payload = codec.payload_nbytes(operation.numel, itemsize) / slices / cluster.n_chunks
    size = Size(values * itemsize, payload, values * itemsize, codec.is_exact)
    return simulate_cluster(cluster, size, slices, costs, most=most, rounds=rounds, lag=lag)


def _tree(cluster: Cluster, nbytes: float, costs: Costs) -> Timing:
    """Time NCCL's trees between nodes and chains within, by a formula instead of a program.

    Two trees carry half of the values each, up and then down, in parts that overlap. They send as many bytes as a ring,
    but have only the latencies of their depth.
    """
    near, far = costs.within, costs.between
    hops = 2 * ceil(log2(cluster.nodes)), 2 * (cluster.ranks - 1)
    latency = sum(count * (wire.latency_s + 2 * wire.message_s) for count, wire in zip(hops, (far, near), strict=True))
    link = 2 * nbytes
    slowest = max(link / far.bytes_per_s, link / near.bytes_per_s if cluster.ranks > 1 else 0.0)
    kernel = nbytes / costs.speeds.sum
    return Timing(costs.start_s + latency + slowest + kernel, kernel, 0.0, (link,), link)
