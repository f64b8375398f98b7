"""The import name that existing training scripts know: `from cgx_utils import CGXState, cgx_hook`.

Nothing is defined here; names come from `torch_cgx`.
"""

from __future__ import annotations

from typing import NoReturn

from torch_cgx.version import __version__

_LATER = ("CGXState", "cgx_hook")


def __getattr__(name: str) -> NoReturn:
    if name in _LATER:
        # ImportError and not AttributeError: `from cgx_utils import ...` would replace the latter's text.
        raise ImportError(
            f"{name} is not in pytorch-cgx {__version__}: the communication hook comes in a later release. "
            'Without it, init_process_group("cgx") and CGX_COMPRESSION_QUANTIZATION_BITS=4 compress all '
            "gradients alike."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
