"""CUDA tensors on the stand-in device: who takes part in which communicator, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_cgx
from tests.support.gradients import BITS, is_exact, noise, within_bound
from tests.support.harness import Rank, describe, observe_ranks, run_ranks
from tests.support.on_device import CROSS, large_sum, start
from tests.support.standin import GlooForNccl, StandInGroup
from torch_cgx.group.bootstrap.handshake import Joining

pytestmark = pytest.mark.ranks


def start_with(me: Rank, kind: type[StandInGroup], name: str = "group") -> Any:
    """A group of this class."""

    def create(options: Any, backend_options: Any = None) -> StandInGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        return kind(options.store, options.group_rank, options.group_size, options.timeout, ranks)

    dist.Backend.register_backend(kind.__name__.lower(), create, extended_api=True, devices=["cpu"])
    me.start_group(kind.__name__.lower(), name=name)
    return dist.group.WORLD


# ---- coalesced calls ----


def filled(rank: int, *numels: int) -> list[Tensor]:
    return [torch.full((numel,), float(rank + 1)) for numel in numels]


def coalesced(me: Rank) -> None:
    group = start(me, "standin")
    inputs = filled(me.rank, 3, 5)
    outputs = [torch.zeros(me.world * 3), torch.zeros(me.world * 5)]
    with dist._coalescing_manager():
        for output, each in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, each)
    expected = [torch.cat([filled(rank, numel)[0] for rank in range(me.world)]) for numel in (3, 5)]
    assert all(map(torch.equal, outputs, expected))

    work = group.allgather_into_tensor_coalesced([torch.zeros_like(each) for each in outputs], inputs)
    assert all(map(torch.equal, work.get_future().wait(), expected))
    assert work.wait() and work.is_completed() and work.is_success()

    total = float(sum(range(1, me.world + 1)))
    inputs = filled(me.rank, me.world * 3, me.world * 5)
    outputs = [torch.zeros(3), torch.zeros(5)]
    with dist._coalescing_manager(async_ops=True) as works:
        for output, each in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, each)
    works.wait()
    assert [output.tolist() for output in outputs] == [[total] * 3, [total] * 5]

    opts = dist.ReduceScatterOptions()
    opts.reduceOp = dist.ReduceOp.MAX
    work = group.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
    assert work.get_future().wait() is not None
    assert [output.tolist() for output in outputs] == [[float(me.world)] * 3, [float(me.world)] * 5]


def test_coalesced_all_gathers_and_reduce_scatters_are_carried() -> None:
    run_ranks(coalesced, 2, None)


def coalesced_by_nccl(me: Rank) -> None:
    """Within NCCL's own coalescing nothing has happened before its end: no program can wait for an exchange there."""
    group = start(me, "standin")
    group.device.log.clear()
    tensors, alone = [noise(me.rank, 5000), noise(me.rank, 600)], noise(me.rank, 5000)
    group._start_coalescing(torch.device("cpu"))  # as dist._coalescing_manager(device=...) does
    works = [group.allreduce_coalesced(tensors), group.allreduce([alone])]
    group._end_coalescing(torch.device("cpu"))
    for work in works:
        work.wait()
    assert all(is_exact(each, me.world) for each in (*tensors, alone))
    named = [entry[0] for entry in group.device.log if entry[0] in ("coalesce", "coalesced", "exchange")]
    assert named == ["coalesce", "coalesced"]
    dist.all_reduce(alone)
    assert any(entry[0] == "exchange" for entry in group.device.log)
    for call in (group._start_coalescing, group._end_coalescing):
        with pytest.raises((RuntimeError, ValueError)):  # torch's, of a device that nobody serves
            call(torch.device("meta"))


def test_what_nccl_coalesces_is_exact() -> None:
    run_ranks(coalesced_by_nccl, 2, None, env={BITS: "4"})


# ---- who takes part ----


class Enrolled(StandInGroup):
    """Writes down which ranks each group of torch's is made of."""

    def _new_group(self, joining: Joining, name: str, ranks: Sequence[int]) -> GlooForNccl:
        self.enrolled = {**getattr(self, "enrolled", {}), name: list(ranks)}
        return super()._new_group(joining, name, ranks)


def communicators(me: Rank) -> list[list[int]]:
    group = start_with(me, Enrolled)
    dist.all_reduce(noise(me.rank, 5000))
    return sorted(group.enrolled.values())


@pytest.mark.parametrize("nodes", ["0110", "001"])
def test_where_nccl_serves_within_nodes_alone_its_communicators_do_too(nodes: str) -> None:
    env = {BITS: "4", CROSS: "GLOO"}
    places = {rank: {"CGX_NODE_ID": node} for rank, node in enumerate(nodes)}
    world = list(range(len(nodes)))
    for rank, enrolled in enumerate(run_ranks(communicators, len(nodes), None, env=env, rank_env=places)):
        here = [other for other in world if nodes[other] == nodes[rank]]
        assert enrolled == sorted([world, here] if len(here) > 1 else [world])


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"CGX_INTRA_BROADCAST": "0"}, marks=pytest.mark.matrix),
        pytest.param({"CGX_INTRA_COMPRESS": "0"}, marks=pytest.mark.matrix),
    ],
    ids=["one speaks", "all speak", "exact within"],
)
def test_nccl_within_two_nodes_and_gloo_between_has_the_bits_of_the_cpu_path(more: dict[str, str]) -> None:
    env = {BITS: "4", CROSS: "GLOO", **more}
    places = {rank: {"CGX_NODE_ID": node} for rank, node in enumerate("0101")}
    on_cpu = run_ranks(large_sum, 4, None, "cgx", env=env, rank_env=places)
    on_device = run_ranks(large_sum, 4, None, "standin", env=env, rank_env=places)
    assert on_device == on_cpu == [on_cpu[0]] * 4


# ---- in which order ----


class Handle:
    """Of an operation that the carrier was given: whoever waits for it is told in the log."""

    def __init__(self, device: Any, number: int, inner: Any) -> None:
        self._device, self._number, self._inner = device, number, inner

    def wait(self, *timeout: Any) -> bool:
        self._device.say("carried and done", self._device.here.name, self._number)
        return bool(self._inner.wait(*timeout))

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())


class Noted(GlooForNccl):
    """Writes down when, and for which stream, it is given something to carry."""

    carried = 0

    def _note(self, carry: Callable[..., Any], *arguments: Any) -> Handle:
        self.carried += 1
        self._device.say("carried", self._device.here.name, self.carried)
        return Handle(self._device, self.carried, carry(*arguments))


def noting(name: str) -> Callable[..., Handle]:
    def method(self: Noted, *arguments: Any) -> Handle:
        return self._note(getattr(super(Noted, self), name), *arguments)

    return method


for name in ("allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "_reduce_scatter_base"):
    setattr(Noted, name, noting(name))


class Ordered(StandInGroup):
    def _new_group(self, joining: Joining, name: str, ranks: Sequence[int]) -> GlooForNccl:
        store = joining.prefixed(name)
        kind = Noted if name == "nccl" else GlooForNccl
        return kind(self.device, store, ranks.index(joining.rank), len(ranks), joining.timeout)


def unordered(log: list[tuple[Any, ...]]) -> list[str]:
    """Operations of one communicator that begin, on the device, before an earlier one of the other is done."""
    known: dict[str, set[str]] = {}  # by stream: what is done before whatever it is given next
    events: dict[int, set[str]] = {}
    begun: list[str] = []
    arrivals: list[str] = []  # exchanges that nobody has waited for
    found = []
    for what, *facts in log:
        if what == "record":
            events[facts[0]] = set(known.get(facts[1], ()))
        elif what == "hold back":
            known.setdefault(facts[0], set()).update(events[facts[1]])
        elif what in ("exchange", "carried"):
            here = known.get(facts[0], set())
            found += [f"{what} before {other}" for other in begun if not other.startswith(what) and other not in here]
            begun.append(f"{what} {len(begun)}" if what == "exchange" else f"carried {facts[1]}")
            arrivals += begun[-1:] if what == "exchange" else []
        elif what == "arrived":
            known.setdefault(facts[0], set()).add(arrivals.pop(0))
        elif what == "carried and done":
            known.setdefault(facts[0], set()).add(f"carried {facts[1]}")
    assert any(each.startswith("exchange") for each in begun) and any(each.startswith("carried") for each in begun)
    return found


def take_turns(me: Rank) -> None:
    group = start_with(me, Ordered)
    group.device.log.clear()
    whole, share = noise(me.rank, 400), torch.zeros(100)

    def exact() -> Any:
        with torch_cgx.uncompressed():
            return dist.all_reduce(noise(me.rank, 300), async_op=True)

    carried: list[Callable[[], Any]] = [
        exact,
        exact,
        lambda: dist.broadcast(whole.clone(), 0, async_op=True),
        lambda: dist.all_gather([torch.zeros(100) for _ in range(4)], share, async_op=True),
        lambda: group.allreduce_coalesced([torch.ones(4), torch.ones(5)]),
        lambda: group.allgather_into_tensor_coalesced([torch.zeros(400)] * 2, [share] * 2),
        lambda: group.reduce_scatter_tensor_coalesced([share.clone(), share.clone()], [whole] * 2),
    ]
    waiting = []
    for carry in carried:
        x = noise(me.rank, 5000)
        waiting += [dist.all_reduce(x, async_op=True), carry()]
    for work in waiting:
        work.wait()
    within_bound(x, me.world, 4, quantizations=3)
    dist.all_reduce(x)
    log = list(group.device.log)
    assert unordered(log) == []
    assert sum(entry[0] == "carried" for entry in log) == len(carried) + 2
    # What NCCL lets go of when it is waited for here, before its caller does, is kept.
    assert [entry for entry in log if entry[0] == "keep" and entry[1] == 300] == [("keep", 300, "side 2")] * 2


def test_nccl_s_own_operations_and_those_of_a_divided_exchange_take_turns_on_the_device() -> None:
    env = {BITS: "4", CROSS: "GLOO"}
    places = {rank: {"CGX_NODE_ID": node} for rank, node in enumerate("0011")}
    run_ranks(take_turns, 4, None, env=env, rank_env=places)


def carry_after_a_failure(me: Rank) -> None:
    group = start(me, "standin")
    dist.all_reduce(noise(me.rank, 5000))
    group.kernels.fails_at = "encode"
    work = dist.all_reduce(noise(me.rank, 5000), async_op=True)
    # Ranks 0 and 2 speak for their nodes, and encode nothing before the others have, who hang up.
    text = "failed" if me.rank in (0, 2) else "illegal memory access"
    with torch_cgx.uncompressed(), pytest.raises(torch_cgx.CGXError, match=text):
        dist.all_reduce(noise(me.rank, 5000))
    assert not work.is_success()  # type: ignore[union-attr]


@pytest.mark.matrix
def test_what_nccl_would_carry_after_a_failed_exchange_fails_too() -> None:
    env = {BITS: "4", CROSS: "GLOO"}
    places = {rank: {"CGX_NODE_ID": node} for rank, node in enumerate("0011")}
    run_ranks(carry_after_a_failure, 4, None, env=env, rank_env=places)


class AtOnce(GlooForNccl):
    """As NCCL's group: what the caller waits for at once runs on the caller's stream, and has no handle."""

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        work = super().broadcast(tensors, opts)
        assert work.wait()
        return work if opts.asyncOp else None


class WithoutHandles(StandInGroup):
    def _new_group(self, joining: Joining, name: str, ranks: Sequence[int]) -> GlooForNccl:
        store = joining.prefixed(name)
        return AtOnce(self.device, store, ranks.index(joining.rank), len(ranks), joining.timeout)


def wait_at_once(me: Rank) -> None:
    group = start_with(me, WithoutHandles)
    opts, x = dist.BroadcastOptions(), torch.ones(3)
    opts.asyncOp = False
    work = group.broadcast([x], opts)
    assert work.wait() and work.is_completed() and work.get_future().wait() == [x]
    dist.broadcast(x, 0)


def test_what_nccl_has_no_handle_for_gets_one() -> None:
    run_ranks(wait_at_once, 1, None)


# ---- ranks without a GPU ----


class Mixed(StandInGroup):
    """Rank 1 has no GPU."""

    def _cuda_problem(self) -> str:
        return "torch finds no GPU" if self._rank == 1 else ""


def without_a_gpu(me: Rank) -> None:
    group = start_with(me, Mixed)
    x = noise(me.rank, 5000)
    dist.all_reduce(x)
    within_bound(x, me.world, 4)
    gathered = [torch.zeros(2) for _ in range(me.world)]
    dist.all_gather(gathered, torch.full((2,), float(me.rank)))
    assert [float(each[0]) for each in gathered] == list(map(float, range(me.world)))
    assert not hasattr(group, "device"), "the CUDA side was opened"
    with FakeTensorMode():
        on_gpu = torch.empty(100, device="cuda")
    for call in (
        partial(dist.all_reduce, on_gpu),
        partial(group.broadcast, [on_gpu]),
        partial(group._reduce_scatter_base, on_gpu, on_gpu),
        partial(group.send, [on_gpu], 0, 1),
    ):
        with pytest.raises(torch_cgx.MismatchError, match=r"CPU tensors alone.*rank 1 \(torch finds no GPU\)$"):
            call()
    dist.barrier()


def test_a_group_with_a_rank_that_has_no_gpu_serves_cpu_tensors_and_names_it_for_others() -> None:
    outcomes = observe_ranks(without_a_gpu, 3, None, env={BITS: "4"})
    assert all(outcome.ok for outcome in outcomes), describe(outcomes)
    assert "serves CPU tensors alone on this group; without CUDA: rank 1 (torch finds no GPU)" in outcomes[0].log


def nobody_has(me: Rank) -> None:
    me.start_group("cgx")
    with FakeTensorMode():
        on_gpu = torch.empty(100, device="cuda")
    with pytest.raises(torch_cgx.MismatchError, match=r"rank 0 \(torch finds no GPU\), rank 1 \(torch finds no GPU\)"):
        dist.all_reduce(on_gpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_group_without_any_gpu_says_so() -> None:
    for outcome in observe_ranks(nobody_has, 2, None):
        assert outcome.ok, outcome.trace
        assert "CPU tensors alone" not in outcome.log
