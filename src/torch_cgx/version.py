"""The version, compared between ranks when a group is created, and a check for another distribution beside ours."""

from __future__ import annotations

import logging
from functools import cache

__version__ = "1.0.0.dev0"  # read by pyproject.toml

DISTRIBUTION = "torch-cgx"
OTHER = "pytorch-cgx"
"""The original authors' program on PyPI, and our own before 1.0. Both install a package named torch_cgx."""

_log = logging.getLogger("torch_cgx")


def conflict() -> str | None:
    """Return what to uninstall if `OTHER` is installed beside our distribution, else None."""
    other = version_of(OTHER)
    if other is None or version_of(DISTRIBUTION) is None:  # None: these modules come from a source tree
        return None
    return (
        f"{OTHER} {other} is installed beside {DISTRIBUTION}, and both own the package torch_cgx: first run "
        f"`pip uninstall {OTHER}`, which removes files of both, then install {DISTRIBUTION} again with "
        "`pip install --force-reinstall --no-deps .` in its checkout"
    )


@cache
def warn_of_conflict() -> None:
    """Log `conflict`, once per process."""
    found = conflict()
    if found is not None:
        _log.warning(found)


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
