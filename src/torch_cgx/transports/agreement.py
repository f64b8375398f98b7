"""How ranks that make a transport tell each other what they have found, so that all make it or none does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from torch_cgx.errors import TransportError
from torch_cgx.group.bootstrap.store_json import read_answer

__all__ = ["exchange", "raise_first_problem"]


def exchange(store: Store, key: str, rank: int, world: int, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank has to say, by rank; waits for all of them."""
    store.set(f"{key}/{rank}", json.dumps(mine))
    return [read_answer(store, f"{key}/{other}", {"problem": str}) for other in range(world)]


def raise_first_problem(transport: str, facts: Sequence[dict[str, Any]], global_ranks: Sequence[int]) -> None:
    """Raises on all ranks what the first rank with a `problem` reports."""
    for other, theirs in enumerate(facts):
        if theirs["problem"]:
            raise TransportError(
                f"the {transport} transport cannot be used: rank {global_ranks[other]} reports: {theirs['problem']}"
            )
