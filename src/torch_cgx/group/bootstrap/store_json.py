"""Entries of peers in a group's store: short JSON objects, never pickles, checked before anything in them is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch._C._distributed_c10d import Store

from torch_cgx.config import shortened
from torch_cgx.errors import MismatchError
from torch_cgx.version import __version__

__all__ = ["check_fields", "parse_answer", "read_answer", "strange_entry"]

MOST_NBYTES = 64 << 10  # the longest entry that any of our versions writes has about 2 KB
_NAMES = {str: "text", int: "a whole number", bool: "true or false", dict: "an object", list: "a list"}


def read_answer(store: Store, key: str, fields: Mapping[str, type] | None = None) -> dict[str, Any]:
    """Wait for a peer's entry under `key`, parse it as JSON, and check its fields' types."""
    return parse_answer(bytes(store.get(key)), key, fields)


def parse_answer(raw: bytes, key: str, fields: Mapping[str, type] | None = None) -> dict[str, Any]:
    if len(raw) > MOST_NBYTES:
        raise strange_entry(key, f"expected at most {MOST_NBYTES} bytes, got {len(raw)}")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise strange_entry(key, f"expected JSON, got {shortened(raw)} ({error})") from None
    if not isinstance(found, dict):
        raise strange_entry(key, f"expected an object, got {shortened(found)}")
    check_fields(found, key, fields or {})
    return found


def check_fields(answer: Mapping[str, Any], key: str, fields: Mapping[str, type]) -> None:
    for name, kind in fields.items():
        if type(answer.get(name)) is not kind:
            raise strange_entry(key, f"expected {_NAMES[kind]} for {name!r}, got {shortened(answer.get(name))}")


def strange_entry(key: str, what: str) -> MismatchError:
    """Return the error for a peer's entry that no torch_cgx of this version has written."""
    return MismatchError(
        f"a peer's entry {key!r} in the store is not what torch_cgx {__version__} writes: {what}. "
        "All ranks need the same version of torch_cgx, and the store must be theirs alone."
    )
