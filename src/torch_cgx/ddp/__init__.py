"""Communication hooks, which DDP calls for each grad bucket.

A hook decides which quantizer each layer gets and what is kept of it. Process groups do the rest.
"""

from __future__ import annotations

from torch_cgx.ddp.hook import cgx_hook
from torch_cgx.ddp.state import CGXState

__all__ = ["CGXState", "cgx_hook"]
