"""What groups must do over MPI, as functions of one rank of three; `test_mpi` runs them.

mpirun takes seconds to start, so this file is the program: `python mpi_cases.py FOLDER` runs all cases, each on a group
of its own, and leaves a file for each that went well.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from torch_cgx import CGXError, CGXTimeoutError, PeerLostError, compressed
from torch_cgx.group.bootstrap import mpi_process

WORLD = 3
TIMEOUT_S = 60.0  # which nothing here takes, but a rank that gets no processor
SHORT_S = 2.0
LENGTHS = (0, 1, 7, 1000, 4096, 65_537, 300_001, 1_000_001)
ENOUGH = "rank 1 has had enough"


@dataclass
class Ranks:
    """This rank, and where it meets the others."""

    name: str  # of the case
    rank: int
    store: Any

    @property
    def peers(self) -> list[int]:
        return [peer for peer in range(WORLD) if peer != self.rank]

    def start(self, timeout_s: float = TIMEOUT_S, carrier: str = "MPI") -> Any:
        """Start the world over MPI."""
        store = dist.PrefixStore(f"{self.name} world", self.store)
        dist.init_process_group(
            "cgx", store=store, rank=self.rank, world_size=WORLD, timeout=timedelta(seconds=timeout_s)
        )
        group: Any = dist.group.WORLD
        assert group.carrier == carrier, group.carrier
        return group

    def meet(self, what: str) -> None:
        self.store.set(f"{self.name} {what}/{self.rank}", "")
        keys = [f"{self.name} {what}/{rank}" for rank in range(WORLD)]
        self.store.wait(keys, timedelta(seconds=TIMEOUT_S))


def values(rank: int, numel: int, salt: int = 0) -> Tensor:
    return ((torch.arange(numel) * 7 + 31 * rank + salt) % 101).float()


def total(numel: int, salt: int = 0, ranks: tuple[int, ...] = tuple(range(WORLD))) -> Tensor:
    return sum((values(rank, numel, salt) for rank in ranks), torch.zeros(numel))


def exact_sums_of_all_lengths(ranks: Ranks) -> None:
    ranks.start()
    for numel in LENGTHS:
        x = values(ranks.rank, numel)
        dist.all_reduce(x)
        assert torch.equal(x, total(numel)), numel


def many_in_flight(ranks: Ranks, carrier: str = "MPI") -> None:
    """Sums, gathers, broadcasts from every rank and exchanges, waited for in an order of each rank's own."""
    ranks.start(carrier=carrier)
    pending: list[tuple[Any, Tensor, Tensor]] = []
    for salt, numel in enumerate(LENGTHS[1:] * 3):
        summed = values(ranks.rank, numel, salt)
        pending.append((dist.all_reduce(summed, async_op=True), summed, total(numel, salt)))
        gathered = torch.empty(WORLD * numel)
        work = dist.all_gather_into_tensor(gathered, values(ranks.rank, numel, salt), async_op=True)
        pending.append((work, gathered, torch.cat([values(rank, numel, salt) for rank in range(WORLD)])))
        root = salt % WORLD
        sent = values(ranks.rank, numel, salt)
        pending.append((dist.broadcast(sent, root, async_op=True), sent, values(root, numel, salt)))
        exchanged = torch.empty(WORLD * numel)
        work = dist.all_to_all_single(exchanged, values(ranks.rank, WORLD * numel, salt), async_op=True)
        parts = [values(rank, WORLD * numel, salt).chunk(WORLD)[ranks.rank] for rank in range(WORLD)]
        pending.append((work, exchanged, torch.cat(parts)))
    for work, found, expected in pending[:: 1 if ranks.rank == 1 else -1]:
        work.wait()
        assert torch.equal(found, expected), found.numel()


def mpi_within_nodes_and_sockets_between(ranks: Ranks) -> None:
    """The last rank has no peer over MPI, but must plan like those that have."""
    node = "a" if ranks.rank < WORLD - 1 else "b"
    with patch.dict(os.environ, {"CGX_NODE_ID": node, "CGX_CROSS_COMMUNICATOR_TYPE": "TCP"}):
        many_in_flight(ranks, carrier="TCP")  # between nodes


def subgroups_of_any_ranks_beside_the_world(ranks: Ranks) -> None:
    """Groups of the same ranks share a communicator, one of fewer ranks has its own: none meets others' messages."""
    ranks.start()
    again, pair = dist.new_group(), dist.new_group([0, 2])
    works = []
    for salt in range(8):
        for group, members in ((None, (0, 1, 2)), (again, (0, 1, 2)), (pair, (0, 2))):
            if ranks.rank in members:
                x = values(ranks.rank, 20_000 + salt, salt)
                works.append((dist.all_reduce(x, group=group, async_op=True), x, total(20_000 + salt, salt, members)))
    for work, found, expected in works:
        assert work is not None
        work.wait()
        assert torch.equal(found, expected)


def groups_come_and_go(ranks: Ranks) -> None:
    ranks.start()
    for salt in range(20):
        group = dist.new_group()
        x = values(ranks.rank, 1000, salt)
        dist.all_reduce(x, group=group)
        assert torch.equal(x, total(1000, salt))
        dist.destroy_process_group(group)


def the_user_s_own_traffic_is_not_met(ranks: Ranks) -> None:
    """Messages of the user's, of any tag, under way between the same ranks; he takes whatever comes."""
    ranks.start()
    mpi = mpi_process.load()
    world = mpi.COMM_WORLD
    sent = [values(ranks.rank, 40_000, peer).numpy() for peer in range(WORLD)]
    user = [world.Isend(sent[peer], peer, tag) for tag, peer in enumerate(ranks.peers)]
    x = values(ranks.rank, 300_001)
    work = dist.all_reduce(x, async_op=True)
    for _ in ranks.peers:
        theirs, status = torch.zeros(40_000), mpi.Status()
        world.Recv(theirs.numpy(), mpi.ANY_SOURCE, mpi.ANY_TAG, status)
        assert torch.equal(theirs, values(status.Get_source(), 40_000, ranks.rank))
    for request in user:
        request.Wait()
    assert work is not None
    work.wait()
    assert torch.equal(x, total(300_001))


def a_time_out_names_the_peer(ranks: Ranks) -> None:
    ranks.start(SHORT_S)
    dist.all_reduce(values(ranks.rank, 1000))
    ranks.meet("all are here")
    if ranks.rank == 0:
        raises(
            CGXTimeoutError,
            r"Timed out after \d+ ms waiting for rank [12] in operation 2, all_reduce",
            lambda: dist.all_reduce(values(0, 1000)),
        )
    ranks.meet("one has timed out")


def a_peer_that_has_left_is_named(ranks: Ranks) -> None:
    ranks.start()
    dist.all_reduce(values(ranks.rank, 1000))
    if ranks.rank == 1:
        dist.destroy_process_group()
    else:
        raises(
            PeerLostError,
            "lost rank 1 in .* it has left the group",
            lambda: dist.all_reduce(values(ranks.rank, 300_001)),
        )
    ranks.meet("all have noticed")


def other_threads_run_during_a_wait(ranks: Ranks) -> None:
    """Rank 1 calls what rank 0 waits for only when a thread of rank 0 tells it to, while the main thread waits."""
    ranks.start()
    if ranks.rank == 0:
        told = threading.Timer(0.2, lambda: ranks.store.set(f"{ranks.name} go", ""))
        told.start()
    elif ranks.rank == 1:
        ranks.store.wait([f"{ranks.name} go"])
    x = values(ranks.rank, 5000)
    dist.all_reduce(x)
    assert torch.equal(x, total(5000))


def closing_ends_a_wait_in_another_thread(ranks: Ranks) -> None:
    group = ranks.start(10 * TIMEOUT_S)
    ended: list[CGXError] = []
    if ranks.rank == 0:
        # So that something lies with MPI that nobody takes.
        waiter = threading.Thread(target=lambda: ended.append(error_of(lambda: dist.all_reduce(values(0, 300_001)))))
        waiter.start()
        time.sleep(0.3)
        group.abort()
        waiter.join(TIMEOUT_S)
        assert len(ended) == 1
    ranks.meet("it has ended")


def compressed_sums_are_alike(ranks: Ranks) -> None:
    ranks.start()
    for bits in range(1, 9):
        x = values(ranks.rank, 100_003)
        with compressed(bits=bits):
            dist.all_reduce(x)
        gathered = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(gathered, x)
        assert all(torch.equal(each, x) for each in gathered)


def error_of(run: Callable[[], object]) -> CGXError:
    try:
        run()
    except CGXError as error:
        return error
    raise AssertionError("no error")


def raises(kind: type[CGXError], words: str, run: Callable[[], object]) -> None:
    error = error_of(run)
    assert isinstance(error, kind) and re.search(words, str(error)), repr(error)


CASES: dict[str, Callable[[Ranks], None]] = {
    case.__name__: case
    for case in (
        exact_sums_of_all_lengths,
        many_in_flight,
        mpi_within_nodes_and_sockets_between,
        subgroups_of_any_ranks_beside_the_world,
        groups_come_and_go,
        the_user_s_own_traffic_is_not_met,
        compressed_sums_are_alike,
        other_threads_run_during_a_wait,
        a_time_out_names_the_peer,
        a_peer_that_has_left_is_named,
        closing_ends_a_wait_in_another_thread,
    )
}


def main(folder: str) -> None:
    """All cases over MPI; then rank 1 raises while the others wait for it, which must end the whole job."""
    import torch_cgx  # noqa: F401  (sets RANK from the launcher's variables)

    rank = int(os.environ["RANK"])
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    for name, case in CASES.items():
        case(Ranks(name, rank, store))
        if dist.is_initialized():
            dist.destroy_process_group()
        with open(os.path.join(folder, f"{name}.{rank}"), "w"):  # what ranks print gets mixed up
            pass
    ranks = Ranks("end", rank, store)
    ranks.start(10 * TIMEOUT_S)
    ranks.meet("all are here")
    if rank == 1:
        raise KeyError(ENOUGH)
    dist.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    main(sys.argv[1])
