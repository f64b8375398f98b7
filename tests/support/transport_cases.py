"""What every transport must do, as functions of one rank of three; `test_transports` runs them.

Gloo's ranks come from the nursery, one job a case. MPI's come from mpirun, which takes seconds to start, so there
this file is the program: `python transport_cases.py FOLDER` runs all cases and leaves a file for each that went well.
"""

from __future__ import annotations

import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_cgx.errors import CGXError, CGXTimeoutError, PeerLostError
from torch_cgx.transports import TAGS, Transport, mpi, mpi_process
from torch_cgx.transports.factory import open_transport

WORLD = 3
TIMEOUT_S = 60.0  # which nothing here takes, but a rank that gets no processor
SHORT_S = 1.0
LENGTHS = (0, 1, 7, 1000, 4096, 65_537, 300_001, 1_000_001)
ENOUGH = "rank 1 has had enough"


@dataclass
class Ranks:
    """This rank, and how it opens transports with others."""

    name: str  # of the transport
    rank: int
    store: Any
    opened: list[Transport] = field(default_factory=list)

    @property
    def peers(self) -> list[int]:
        return [peer for peer in range(WORLD) if peer != self.rank]

    def open(self, what: str, ranks: Sequence[int] = range(WORLD), timeout_s: float = TIMEOUT_S) -> Transport:
        store = dist.PrefixStore(what, self.store)
        timeout = timedelta(seconds=timeout_s)
        transport = open_transport(self.name, store, ranks.index(self.rank), len(ranks), timeout, ranks)
        self.opened.append(transport)
        return transport

    def meet(self, what: str) -> None:
        self.store.set(f"{what}/{self.rank}", "")
        self.store.wait([f"{what}/{rank}" for rank in range(WORLD)], timedelta(seconds=TIMEOUT_S))

    def close(self) -> None:
        for transport in self.opened:
            transport.close()
            transport.close()
        self.opened.clear()


def content(sender: int, receiver: int, tag: int, nbytes: int, salt: int = 0) -> Tensor:
    first = (sender * 31 + receiver * 17 + tag * 7 + salt) % 251
    return ((torch.arange(nbytes) + first) % 251).to(torch.uint8)


def until_done(messages: list[Any]) -> None:
    """By polling alone, whichever comes first."""
    deadline = time.monotonic() + TIMEOUT_S
    while messages:
        messages = [message for message in messages if not message.done()]
        assert time.monotonic() < deadline, f"{len(messages)} messages are not done"
        time.sleep(0.001)


def swap_all(ranks: Ranks, transport: Transport, salt: int, order: str, polled: bool) -> None:
    """Every rank sends every peer a message of each length; each side starts them in an order of its own."""
    shuffle = random.Random(100 * ranks.rank + salt).shuffle
    tags = [*range(len(LENGTHS) - 1), TAGS - 1]
    mine = [(peer, tag, nbytes) for peer in ranks.peers for tag, nbytes in zip(tags, LENGTHS, strict=True)]
    arrived: dict[tuple[int, int], Tensor] = {}
    messages: list[Any] = []

    def send_all() -> None:
        shuffle(mine)
        for peer, tag, nbytes in mine:
            messages.append(transport.send(content(ranks.rank, peer, tag, nbytes, salt), peer, tag))

    def receive_all() -> None:
        shuffle(mine)
        for peer, tag, nbytes in mine:
            arrived[peer, tag] = torch.zeros(nbytes, dtype=torch.uint8)
            messages.append(transport.receive(arrived[peer, tag], peer, tag))

    send_first = order == "sends first" or (order == "each its own" and ranks.rank == 1)
    for start in (send_all, receive_all) if send_first else (receive_all, send_all):
        start()
    shuffle(messages)
    if polled:
        until_done(messages)
    for message in messages:
        message.wait()
    for peer, tag, nbytes in mine:
        assert torch.equal(arrived[peer, tag], content(peer, ranks.rank, tag, nbytes, salt)), (peer, tag, nbytes)


def many_in_flight_in_both_directions(ranks: Ranks) -> None:
    transport = ranks.open("world")
    for salt, order in enumerate(("sends first", "receives first", "each its own")):
        swap_all(ranks, transport, salt, order, polled=salt % 2 == 1)


def messages_of_one_tag_arrive_in_order(ranks: Ranks) -> None:
    transport = ranks.open("world")
    numbers = range(50)
    sent = [transport.send(torch.tensor([n], dtype=torch.uint8), peer, 5) for n in numbers for peer in ranks.peers]
    for n in numbers:
        for peer in ranks.peers:
            got = torch.zeros(1, dtype=torch.uint8)
            transport.receive(got, peer, 5).wait()
            assert got.item() == n
    for message in sent:
        message.wait()


def a_message_larger_than_a_part(ranks: Ranks) -> None:
    """As one of more than 2^30 bytes would go over MPI, but with parts of 10,000."""
    usual, mpi._PART_NBYTES = mpi._PART_NBYTES, 10_000
    try:
        swap_all(ranks, ranks.open("world"), 3, "each its own", polled=True)
    finally:
        mpi._PART_NBYTES = usual


def subgroups_of_any_ranks_beside_the_world(ranks: Ranks) -> None:
    world = ranks.open("world")
    members = (2, 0)
    if ranks.rank not in members:
        swap_all(ranks, world, 0, "each its own", polled=False)
        return
    pair = ranks.open("pair", members)
    peer = 1 - members.index(ranks.rank)
    other = members[peer]
    got = torch.zeros(5000, dtype=torch.uint8)
    messages = [
        pair.receive(got, peer, 1),
        pair.send(content(ranks.rank, other, 1, 5000, salt=9), peer, 1),
    ]
    swap_all(ranks, world, 0, "each its own", polled=False)
    for message in messages:
        message.wait()
    assert torch.equal(got, content(other, ranks.rank, 1, 5000, salt=9))


def the_user_s_own_traffic_is_not_met(ranks: Ranks) -> None:
    """The same peers and tags at the same time, on a group of the user's own; ours receive in between."""
    nbytes = 40_000
    transport = ranks.open("world")
    theirs = {peer: torch.zeros(nbytes, dtype=torch.uint8) for peer in ranks.peers}
    user: list[Any] = []
    if ranks.name == "MPI":
        world = mpi_process.load().COMM_WORLD
        user += [world.Isend(content(ranks.rank, p, 1, nbytes, 77).numpy(), p, 1) for p in ranks.peers]
        swap_all(ranks, transport, 0, "each its own", polled=False)
        user += [world.Irecv(theirs[p].numpy(), p, 1) for p in ranks.peers]
        for request in user:
            request.Wait()
    else:
        group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("user", ranks.store), ranks.rank, WORLD, timedelta(seconds=TIMEOUT_S)
        )
        payloads = [content(ranks.rank, p, 1, nbytes, 77) for p in ranks.peers]
        user += [group.send([payload], p, 1) for payload, p in zip(payloads, ranks.peers, strict=True)]
        swap_all(ranks, transport, 0, "each its own", polled=False)
        user += [group.recv([theirs[p]], p, 1) for p in ranks.peers]
        for work in user:
            work.wait()
    for peer in ranks.peers:
        assert torch.equal(theirs[peer], content(peer, ranks.rank, 1, nbytes, 77))
    ranks.meet("the user's traffic has ended")


def a_time_out_names_the_peer(ranks: Ranks) -> None:
    transport = ranks.open("world")
    ranks.meet("all are here")
    transport.timeout = timedelta(seconds=SHORT_S)
    caught: list[CGXError] = []
    if ranks.rank == 0:
        waited_for = transport.receive(torch.zeros(1000, dtype=torch.uint8), 2, 7)
        try:
            waited_for.wait()
        except CGXTimeoutError as error:
            caught.append(error)
    ranks.meet("one has timed out")
    if ranks.rank == 0:
        text = str(caught[0])
        assert re.search(r"rank 0 waited for message 7 of 1000 bytes from rank 2: Timed out after \d+\.\d s", text), (
            text
        )
        assert "restart all ranks" in text


def a_peer_that_has_left_is_named(ranks: Ranks) -> None:
    transport = ranks.open("world")
    swap_all(ranks, transport, 0, "sends first", polled=False)
    ranks.meet("all have swapped")
    if ranks.rank == 1:
        ranks.close()
    else:
        try:
            transport.receive(torch.zeros(10, dtype=torch.uint8), 1, 4).wait()
        except PeerLostError as error:
            assert f"rank {ranks.rank} waited for message 4 of 10 bytes from rank 1" in str(error), error
        else:
            raise AssertionError("no error")
    ranks.meet("all have noticed")


def other_threads_run_during_a_wait(ranks: Ranks) -> None:
    """Rank 1 answers what rank 0 sends only while it is already waiting for the answer."""
    transport = ranks.open("world")
    ball = torch.zeros(1, dtype=torch.uint8)
    if ranks.rank == 0:
        waiter = threading.Thread(target=transport.receive(ball, 1, 2).wait)
        waiter.start()
        time.sleep(0.1)
        transport.send(torch.ones(1, dtype=torch.uint8), 1, 1).wait()
        waiter.join()
        assert ball.item() == 1
    elif ranks.rank == 1:
        transport.receive(ball, 0, 1).wait()
        transport.send(ball, 0, 2).wait()


def closing_ends_a_wait_in_another_thread(ranks: Ranks) -> None:
    transport = ranks.open("world", timeout_s=10 * TIMEOUT_S)
    ended: list[CGXError] = []

    def wait() -> None:
        try:
            transport.receive(torch.zeros(10, dtype=torch.uint8), ranks.peers[0], 3).wait()
        except CGXError as error:
            ended.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.1)
    ranks.meet("all wait")
    transport.close()
    waiter.join(TIMEOUT_S)
    assert len(ended) == 1
    for start in (transport.send, transport.receive):
        try:
            start(torch.zeros(1, dtype=torch.uint8), ranks.peers[0], 0)
        except CGXError as error:
            assert "destroyed" in str(error)
        else:
            raise AssertionError("a closed transport took a message")


CASES: dict[str, Callable[[Ranks], None]] = {
    case.__name__: case
    for case in (
        many_in_flight_in_both_directions,
        messages_of_one_tag_arrive_in_order,
        a_message_larger_than_a_part,
        subgroups_of_any_ranks_beside_the_world,
        the_user_s_own_traffic_is_not_met,
        a_time_out_names_the_peer,
        a_peer_that_has_left_is_named,
        other_threads_run_during_a_wait,
        closing_ends_a_wait_in_another_thread,
    )
}


def run_case(name: str, transport: str, rank: int, store: Any) -> None:
    ranks = Ranks(transport, rank, dist.PrefixStore(name, store))
    try:
        CASES[name](ranks)
    finally:
        ranks.close()


def main(folder: str) -> None:
    """All cases over MPI; then rank 1 raises while the others wait for it, which must end the whole job."""
    import torch_cgx  # noqa: F401  (sets RANK from the launcher's variables)

    rank = int(os.environ["RANK"])
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    for name in CASES:
        run_case(name, "MPI", rank, store)
        with open(os.path.join(folder, f"{name}.{rank}"), "w"):  # what ranks print gets mixed up
            pass
    ranks = Ranks("MPI", rank, dist.PrefixStore("end", store))
    transport = ranks.open("world", timeout_s=10 * TIMEOUT_S)
    ranks.meet("all are here")
    if rank == 1:
        raise KeyError(ENOUGH)
    transport.receive(torch.zeros(1, dtype=torch.uint8), 1, 0).wait()


if __name__ == "__main__":
    main(sys.argv[1])
