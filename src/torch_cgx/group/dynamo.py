"""Keep torch.compile from tracing this package.

A compiled region reaches our Python code through C++ (DDP's collectives), and dynamo would then try to compile it.
Marking code objects costs microseconds. The documented `torch.compiler.disable` imports all of dynamo, which takes more
than a second.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["skip_package"]


def skip_package(package: str) -> None:
    """Mark all functions in those modules of a package that have been imported so far."""
    skip_code = _skip_code()
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for code in _codes_of_module(module):
                skip_code(code)


def _skip_code() -> Callable[[CodeType], object]:
    """Return the function that marks a code object, and everything it calls, in this release of torch."""
    try:
        frames: Any = importlib.import_module("torch._C._dynamo.eval_frame")
    except ImportError:  # a torch without dynamo has nothing to keep away
        return lambda code: None
    if hasattr(frames, "set_code_exec_strategy"):
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        return lambda code: frames.set_code_exec_strategy(code, strategy)
    return getattr(frames, "skip_code", lambda code: None)


def _codes_of_module(module: ModuleType) -> Iterator[CodeType]:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in list(members):
            for function in _functions_of(member):
                yield from _nested(function.__code__)


def _functions_of(member: Any) -> Iterator[FunctionType]:
    """Yield the functions behind methods, properties, and decorators that keep the wrapped function."""
    candidates = [member, *(getattr(member, name, None) for name in ("__func__", "fget", "fset", "__wrapped__"))]
    for candidate in candidates:
        if isinstance(candidate, FunctionType):
            yield candidate


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
