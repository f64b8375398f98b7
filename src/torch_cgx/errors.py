"""Exceptions for everything that can go wrong between ranks.

A caller's mistake raises `ValueError` or `TypeError` instead, with what was expected and what it got. All of these
subclass `RuntimeError`, because code around `torch.distributed` catches that and DDP turns exceptions into it.
"""

from __future__ import annotations


class CGXError(RuntimeError):
    """The base of all errors that torch_cgx raises about a group."""


class CGXTimeoutError(CGXError):
    """A peer did not do its part within the group's timeout."""


class PeerLostError(CGXError):
    """A peer's process has died or cannot be reached."""


class MismatchError(CGXError):
    """Ranks called with different operations, shapes, dtypes, settings or in different order."""


class PoisonedError(CGXError):
    """The group failed before, here or on a peer, and does no more work."""


class SharedMemoryError(CGXError):
    """A shared-memory segment could not be made, mapped or trusted."""


class TransportError(CGXError):
    """The transport that was asked for cannot work between these ranks."""


class ProgramError(CGXError):
    """A collective's program breaks a rule that the checker knows."""
