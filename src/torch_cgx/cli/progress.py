"""A progress bar on stderr: tqdm if it is installed and stderr is a terminal, else one line per stage.

Results are never written here: they go to stdout.
"""

from __future__ import annotations

import importlib.util
import sys
from types import TracebackType
from typing import Any


class Progress:
    def __init__(self, title: str) -> None:
        self._title = title
        self._stage = ""
        self._bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=100,
                desc=title,
                leave=False,
                file=sys.stderr,
                bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}",
            )

    def update(self, fraction: float, stage: str) -> None:
        """Show that `fraction` of the work is done and `stage` is running."""
        if self._bar is not None:
            self._bar.set_postfix_str(stage, refresh=False)
            self._bar.update(100 * fraction - self._bar.n)
        elif stage != self._stage:
            print(f"{self._title}: {100 * fraction:3.0f}%, {stage}", file=sys.stderr, flush=True)
        self._stage = stage

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
