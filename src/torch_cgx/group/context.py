"""The context that all parts of one group share: its rank, its settings, and whether the group can still be used."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta

from torch_cgx.config import Settings
from torch_cgx.engines.recorder import GroupRecorder
from torch_cgx.errors import CGXError
from torch_cgx.group.futures import Completions
from torch_cgx.group.layer_table import LayerTable

__all__ = ["GroupContext"]


@dataclass(slots=True)
class GroupContext:
    """One rank's end of a group, as all its parts see it."""

    rank: int
    world: int
    settings: Settings
    layers: LayerTable
    completions: Completions
    recorder: GroupRecorder = field(default_factory=GroupRecorder.detached)
    timeout: timedelta = timedelta(minutes=30)
    # Held so that ledger entries and the operations that they announce have one order across threads.
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    forked: bool = False

    def check_usable(self) -> None:
        """Raise if the group has ended or belongs to this process's parent."""
        if self.forked:
            raise CGXError("a process group does not survive fork: call init_process_group in the child")
        if self.closed:
            raise CGXError("this process group has been destroyed: call init_process_group again")

    def milliseconds(self, asked: timedelta) -> int:
        """Return a call's timeout in milliseconds: `asked` or, if that is 0, the group's."""
        chosen = asked if asked > timedelta(0) else self.timeout
        return max(1, int(chosen.total_seconds() * 1000))
