"""Chooses bits: which layer can bear how many. Neither quantizes nor sends; the hook measures for it and obeys it."""

from __future__ import annotations
