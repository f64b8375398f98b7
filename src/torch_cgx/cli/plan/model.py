"""The model of a training step's time that `cgx plan` computes with. Reads no files and prints nothing.

    forward | backward: grad bucket after grad bucket becomes ready         | optimizer
                 | all_reduce 1 | all_reduce 2 |     | all_reduce 3 |<exposed>|

1. A grad bucket is ready when backward has come past its parameters; all_reduces run one after the other, in order.
2. How long each takes alone is simulated: `plan.simulate` runs the programs that would run.
3. What its kernels and messages take of a processor that computes gradients as well, backward is late by.
4. The optimizer starts when backward and the last all_reduce are done.

docs/plan.md says where the constants come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2

from torch_cgx.codecs import Identity, MaxMin
from torch_cgx.plan.simulate import Costs, Size, Speeds, Timing, Wire
from torch_cgx.plan.simulate_classes import MOST_NODES, Cluster, simulate_cluster

__all__ = ["CONTESTANTS", "EXACT", "FP16", "Bucket", "Plan", "Prediction", "Site", "Way", "Workload", "ddp_buckets"]

EXACT, FP16 = "exact", "fp16"
CONTESTANTS = (EXACT, FP16, *(f"{bits} bit{'s' * (bits > 1)}" for bits in range(8, 0, -1)))

_DDP_NBYTES, _DDP_FIRST_NBYTES = 25 << 20, 1 << 20
_ITEMSIZE = 4

# Into how many slices an operation is cut, and the least a slice has: as cgx does it on CUDA (group/cuda/reducer.py),
# and as Gloo and NCCL do it, who send a part while they add up the one before.
_GPU_SLICES = (4, 16 << 20)
# Between hosts on CPUs: about so many slices, of so many bytes at least. The costs of a message and of a slice that the
# model goes by were measured with slices like these, when Python drove them; the native engine cuts smaller ones.
_SLICES = 8
_SMALL_SLICE_NBYTES, _LEAST_SLICE_NBYTES = 2 << 20, 4 << 20
_RING_GAINS = 1.05  # times: what a RING has to gain, to be chosen
_EXACT_SLICES = {"cpu": (2, 1 << 16), "gpu": (4, 1 << 20)}


@dataclass(frozen=True, slots=True)
class Bucket:
    numel: int
    ready_s: float  # after the start of backward


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of one rank, as it is without communication."""

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
        """Grad buckets of these sizes: a third of the step is forward, and backward comes past values evenly."""
        backward_s, total, before = step_s * 2 / 3, sum(numels), 0
        buckets: list[Bucket] = []
        for numel in numels:
            before += numel
            buckets.append(Bucket(numel, backward_s * before / total))
        return cls(step_s - backward_s, backward_s, 0.0, tuple(buckets))


def ddp_buckets(numels: Sequence[int]) -> list[int]:
    """DDP's grad buckets of float32 parameters of these sizes: from the last one on, 1 MB first, then 25 MB each.

    A grad bucket is full when it has reached its size, so a large parameter makes a large one.
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
    """How cgx is set up: what its variables say."""

    algorithm: str = "SRA"  # CGX_CROSS_REDUCTION_TYPE; on one node CGX_INNER_REDUCTION_TYPE
    broadcast: bool = True  # CGX_INTRA_BROADCAST
    inner: str = "NCCL"  # CGX_INNER_COMMUNICATOR_TYPE
    cross: str = "NCCL"  # CGX_CROSS_COMMUNICATOR_TYPE


@dataclass(frozen=True, slots=True)
class Site:
    """A kind of node, and what joins such nodes."""

    ranks: int  # of each node
    device: str  # cpu or gpu
    within: Mapping[str, Wire]  # by communicator
    between: Mapping[str, Wire]
    speeds: Speeds
    exact_within: Wire  # of the exact backend and of fp16's: NCCL or Gloo
    exact_between: Wire
    cores: float = 2.0  # of each rank, beside those that compute gradients
    block: int = 1024
    tree: bool = False  # the exact backend has trees as well as rings, as NCCL does, and takes the faster
    steals_kernels: bool = True  # kernels and gradients are computed by one processor
    steals_transport: bool = False  # messages and gradients are
    start_s: float = 0.0  # of an operation of cgx between nodes
    exact_start_s: float = 0.0  # and of the exact backend
    most_nodes: int = MOST_NODES  # see `simulate_classes`

    def ways(self, nodes: int) -> Iterator[Way]:
        """With the first communicators."""
        first = Way(inner=next(iter(self.within)), cross=next(iter(self.between)))
        for algorithm in ("SRA", "RING"):
            yield replace(first, algorithm=algorithm)
            if nodes > 1 and self.ranks > 1:
                yield replace(first, algorithm=algorithm, broadcast=False)


@dataclass(frozen=True, slots=True)
class Prediction:
    contestant: str
    nodes: int
    step_s: float
    ideal_s: float
    communication_s: float  # all_reduces, hidden or not
    link_nbytes: float  # that a node sends to others in a step
    way: Way | None  # None: not of cgx

    @property
    def share(self) -> float:
        """Of ideal scaling."""
        return self.ideal_s / self.step_s

    @property
    def exposed_s(self) -> float:
        return self.step_s - self.ideal_s


@dataclass(frozen=True, slots=True)
class Plan:
    """Predictions for one training on one kind of node."""

    site: Site
    workload: Workload

    def predict(self, contestant: str, nodes: int, way: Way | None = None) -> Prediction:
        """Without a way, the fastest with the first communicators."""
        if contestant not in CONTESTANTS:
            raise ValueError(f"contestant: expected {', '.join(CONTESTANTS)}, got {contestant}")
        if contestant in (EXACT, FP16):
            return self._step(contestant, nodes, None)
        return self._step(contestant, nodes, way or self.best_way(contestant, nodes))

    def best_way(self, contestant: str, nodes: int) -> Way:
        """The fastest by SRA; or by RING, which quantizes once a node and so loses more, where that gains a twentieth.

        Looked for at 8, 4, 2 and 1 bits; other bits do as the nearest of these.
        """
        bits = int(contestant.split()[0])
        name = "8 bits" if bits > 5 else "4 bits" if bits > 3 else "2 bits" if bits > 1 else "1 bit"
        ways = list(self.site.ways(nodes))
        if nodes * self.site.ranks == 1:
            return ways[0]

        def seconds(way: Way) -> float:
            return self._step(name, nodes, way).step_s * (_RING_GAINS if way.algorithm == "RING" else 1.0)

        return min(ways, key=seconds)

    def duration(self, contestant: str, numel: int, nodes: int, way: Way | None = None) -> Timing:
        """One all_reduce of so many values by itself; without a way, by the exact backend."""
        site = self.site
        if way is None:
            cluster = Cluster(nodes, site.ranks, "RING", flat=True)
            costs = self._exact_costs(nodes)
        else:
            cluster = Cluster(nodes, site.ranks, way.algorithm, shares=1 if way.broadcast else site.ranks)
            costs = self._costs(nodes, way)
        itemsize = 2 if contestant == FP16 else _ITEMSIZE
        quantizer = _quantizer(contestant, site.block)
        nbytes = numel * itemsize
        if way is None or site.device == "gpu":
            goal, least = _GPU_SLICES if way is not None else _EXACT_SLICES[site.device]
            slices = max(1, min(goal, round(nbytes / least)))
        elif nodes == 1:
            slices = 1  # the executor of shared memory runs whole programs
        else:
            slices = ceil(nbytes / _slice_nbytes(nbytes))
        rounds = site.device == "gpu" and way is not None
        timing = _simulate(cluster, numel, slices, itemsize, quantizer, costs, site.most_nodes, rounds)
        if way is None and site.tree and nodes > 1:
            timing = min(timing, _tree(cluster, numel * itemsize, costs), key=lambda each: each.seconds)
        if contestant != FP16 or cluster.world == 1:
            return timing
        cast_s = 2 * numel * _ITEMSIZE / site.speeds.copy  # to float16 before, and back after
        return replace(timing, seconds=timing.seconds + cast_s, kernel_s=timing.kernel_s + cast_s)

    def _exact_costs(self, nodes: int) -> Costs:
        """What is exact is sent from where it lies, and received there: nothing is copied."""
        site = self.site
        speeds = replace(site.speeds, copy=float("inf"))
        start_s = site.exact_start_s if nodes > 1 else 0.0
        return Costs(site.exact_within, site.exact_between, speeds, site.cores, start_s)

    def _costs(self, nodes: int, way: Way) -> Costs:
        """Between nodes, CPU tensors have SHM within a node only in name: it is the loopback of what goes between."""
        site = self.site
        loopback = site.device == "cpu" and nodes > 1 and way.inner == "SHM"
        within = site.within[way.cross if loopback else way.inner]
        return Costs(within, site.between[way.cross], site.speeds, site.cores, site.start_s if nodes > 1 else 0.0)

    def _step(self, contestant: str, nodes: int, way: Way | None) -> Prediction:
        work, site = self.workload, self.site
        late = done = communication = link = 0.0
        for bucket in work.buckets:
            took = self.duration(contestant, bucket.numel, nodes, way)
            # What all_reduces before took of the processor has made this grad bucket late.
            done = max(bucket.ready_s + late, done) + took.seconds
            if bucket is not work.buckets[-1]:  # the last one has no backward to disturb
                late += site.steals_kernels * took.kernel_s + site.steals_transport * took.transport_s
            communication += took.seconds
            link += took.link_nbytes
        step_s = work.forward_s + max(work.backward_s + late, done) + work.optimizer_s
        return Prediction(contestant, nodes, step_s, work.ideal_s, communication, link, way)


@lru_cache(maxsize=4096)
def _simulate(
    cluster: Cluster,
    numel: int,
    slices: int,
    itemsize: int,
    quantizer: Identity | MaxMin,
    costs: Costs,
    most: int,
    rounds: bool,
) -> Timing:
    values = numel / slices / cluster.n_chunks
    payload = quantizer.payload_nbytes(numel, itemsize) / slices / cluster.n_chunks
    size = Size(values * itemsize, payload, values * itemsize, quantizer.bits == 32)
    return simulate_cluster(cluster, size, slices, costs, most=most, rounds=rounds)


def _tree(cluster: Cluster, nbytes: float, costs: Costs) -> Timing:
    """NCCL's trees between nodes and chains within, the one thing here that is a formula and no program.

    Two trees carry half of the values each, up and then down, in parts that overlap: as many bytes as a ring, but the
    latencies of the depth alone.
    """
    near, far = costs.within, costs.between
    hops = 2 * ceil(log2(cluster.nodes)), 2 * (cluster.ranks - 1)
    latency = sum(count * (wire.latency_s + 2 * wire.message_s) for count, wire in zip(hops, (far, near), strict=True))
    link = 2 * nbytes
    slowest = max(link / far.bytes_per_s, link / near.bytes_per_s if cluster.ranks > 1 else 0.0)
    kernel = nbytes / costs.speeds.sum
    return Timing(costs.start_s + latency + slowest + kernel, kernel, 0.0, (link,), link)


def _quantizer(contestant: str, block: int) -> Identity | MaxMin:
    return Identity() if contestant in (EXACT, FP16) else MaxMin(int(contestant.split()[0]), block)


def _slice_nbytes(nbytes: int) -> int:
    """Return the size of a slice: half of a small operation, so that two overlap, and a share of a large one."""
    half, share = -(-nbytes // 2), -(-nbytes // _SLICES)
    return max(_SMALL_SLICE_NBYTES, min(_LEAST_SLICE_NBYTES, half), share)
