"""Ranks that meet at a store, in which an earlier group may have left something: threads here, over one store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from torch_cgx.errors import CGXTimeoutError, MismatchError
from torch_cgx.group.bootstrap.rendezvous import meet

LONG = timedelta(seconds=60)


def together(store: HashStore, world: int, begin: Callable[[int], None] = lambda rank: None) -> list[str]:
    names = [""] * world

    def run(rank: int) -> None:
        begin(rank)
        names[rank] = meet(store, rank, world, LONG, range(world))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return names


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_get_one_name_and_the_next_meeting_another(world: int) -> None:
    store = HashStore()
    met = [together(store, world) for _ in range(5)]
    assert all(len(set(names)) == 1 and names[0] for names in met)
    assert len({names[0] for names in met}) == 5


@pytest.mark.parametrize("late", [0, 1, 2])
def test_one_that_comes_later_than_those_who_find_the_old_names_is_waited_for(late: int) -> None:
    store = HashStore()
    before = together(store, 3)
    others_wait = threading.Event()

    def begin(rank: int) -> None:
        if rank == late:
            others_wait.wait(0.2)

    names = together(store, 3, begin)
    assert len(set(names)) == 1 and names[0] not in before


def test_fewer_and_more_ranks_than_there_were() -> None:
    store = HashStore()
    names = [set(together(store, world)) for world in (3, 2, 4)]
    assert all(len(each) == 1 and "" not in each for each in names)
    assert len(set.union(*names)) == 3


def test_a_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(
        CGXTimeoutError, match=r"rank 4: Timed out after 0.2 s waiting for ranks 6, 7 to join the group. Look at that"
    ):
        meet(store, 0, 3, timedelta(seconds=0.2), (4, 6, 7))
    with pytest.raises(CGXTimeoutError, match=r"rank 6: Timed out after 0.2 s waiting for rank 7 to join the group"):
        meet(store, 1, 3, timedelta(seconds=0.2), (4, 6, 7))


def test_a_rank_that_says_hello_and_then_nothing_more_is_named_by_all() -> None:
    store, short = HashStore(), timedelta(seconds=1.5)
    begin = threading.Barrier(2)
    store.set("hello/2", "0" * 32)
    raised: list[str] = []

    def run(rank: int) -> None:
        begin.wait(60)
        with pytest.raises(CGXTimeoutError) as caught:
            meet(store, rank, 3, short, range(3))
        raised.append(str(caught.value))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [text.partition(" for ")[2][:6] for text in raised] == ["rank 2"] * 2


@pytest.mark.parametrize("foreign", [json.dumps({"a": 1}), json.dumps([]), json.dumps("x"), "{", "\0"])
def test_what_is_no_roster_is_waited_over(foreign: str) -> None:
    store = HashStore()
    store.set("roster", foreign)
    assert len(set(together(store, 2))) == 1


def test_an_answer_that_is_too_long_is_refused() -> None:
    store = HashStore()
    store.set("hello/1", "x" * 1000)
    with pytest.raises(MismatchError, match=r"the store's hello/1 has 1000 bytes, more than the 64"):
        meet(store, 0, 2, LONG, (0, 1))
