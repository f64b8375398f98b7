"""The import name that existing training scripts know: `from cgx_utils import CGXState, cgx_hook`.

Nothing is defined here; names come from `torch_cgx`.
"""

from __future__ import annotations

from torch_cgx.ddp import CGXState, cgx_hook

__all__ = ["CGXState", "cgx_hook"]
