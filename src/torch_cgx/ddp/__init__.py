"""Communication hooks: what DDP calls for each grad bucket.

They say which layer gets which quantizer and what is kept of it; groups do the rest.
"""

from __future__ import annotations

from torch_cgx.ddp.hook import cgx_hook
from torch_cgx.ddp.state import CGXState

__all__ = ["CGXState", "cgx_hook"]
