"""A trial of whether the ranks of a host can map each other's memory by process and file number."""

from __future__ import annotations

import json
import os

from torch_cgx.engines.cuda.direct_exchange import make_block, open_block
from torch_cgx.errors import SharedMemoryError
from torch_cgx.group.bootstrap.handshake import Joining
from torch_cgx.group.bootstrap.store_json import read_answer

__all__ = ["processes_that_share"]

_TRIAL_NBYTES = 4096


def processes_that_share(joining: Joining) -> tuple[int, ...] | None:
    """Let every rank map memory of every rank. Return their process ids, by rank; None if any rank cannot."""
    store, world = joining.prefixed("cuda blocks"), joining.world
    try:
        trial = make_block(_TRIAL_NBYTES)
    except SharedMemoryError:
        trial = None
    try:
        mine = {"pid": os.getpid(), "file": -1 if trial is None else trial.file}
        store.set(f"made/{joining.rank}", json.dumps(mine))
        made = [read_answer(store, f"made/{other}", {"pid": int, "file": int}) for other in range(world)]
        try:
            for theirs in made:
                open_block(theirs["pid"], theirs["file"], _TRIAL_NBYTES)
            problem = ""
        except SharedMemoryError as error:
            problem = str(error)
        store.set(f"opened/{joining.rank}", problem)
        problems = [bytes(store.get(f"opened/{other}")) for other in range(world)]
    finally:
        if trial is not None:
            os.close(trial.file)
    return None if any(problems) else tuple(int(theirs["pid"]) for theirs in made)
