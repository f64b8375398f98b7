"""Combining payloads on a device: the host does not wait, and kernels get tables that they know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_cgx.engines.combining import combine
from torch_cgx.kernels import Piece, Rounding
from torch_cgx.kernels.reference import ReferenceKernels


class _OnDevice(TorchDispatchMode):
    """Notes what would make the host wait: tensors of another device, and values that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = func(*args, **(kwargs or {}))
        tensors += [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        if any(each.device.type != "meta" for each in tensors) or "_local_scalar" in str(func):
            self.waits.append(str(func))
        return made


class _NoKernels:
    """On a device that has no memory."""

    name = "none"

    def __init__(self) -> None:
        self.tables: list[Any] = []

    def decode(self, pieces: Any, payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        self.tables.append(pieces)


@pytest.mark.parametrize("start", [0, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_combining_on_a_device_never_makes_the_host_wait(start: int, dtype: torch.dtype) -> None:
    pieces = (Piece(start, 200, 4, 64, 8, payload=0), Piece(start + 200, 40, 32, 1, 40, payload=200))
    values = torch.empty(start + 240, dtype=dtype, device="meta")
    payloads = [torch.empty(400, dtype=torch.uint8, device="meta") for _ in range(2)]
    kernels: Any = _NoKernels()
    with _OnDevice() as seen:
        combine(kernels, pieces, values, payloads, 1.0 / 3.0)
    assert seen.calls > 4 and seen.waits == []
    first, kernels.tables = kernels.tables, []
    combine(kernels, tuple(replace(piece) for piece in pieces), values, payloads, 1.0 / 3.0)
    assert [id(table) for table in first] == [id(table) for table in kernels.tables], "tables must be kept"
    assert all(isinstance(table, tuple) for table in first)


@pytest.mark.parametrize("huge", [[3e38, 3e38], [3.2e38, -3.2e38]], ids=["the sum", "the spread of a block"])
def test_what_overflows_is_nan_where_an_encoded_sum_is(huge: list[float]) -> None:
    """Ranks that send everything to all combine payloads. All others encode the sum, which knows no infinity."""
    kernels, rounding = ReferenceKernels(), Rounding(False, 0)
    pieces = (Piece(0, 210, 4, 64, 8, payload=0),)  # three blocks, a part of one, and eight raw values
    own = torch.linspace(-1, 1, 210)
    own[64], own[65] = huge[0], huge[1]
    payloads = [torch.zeros(256, dtype=torch.uint8) for _ in range(3)]
    kernels.encode(pieces, own, payloads[0], rounding)
    decoded = torch.zeros(210)
    kernels.decode(pieces, payloads[0], decoded)
    kernels.reduce(pieces, decoded, payloads[:1], payloads[1], 0.5, rounding)
    combined = torch.zeros(210)
    combine(kernels, pieces, combined, [payloads[0], payloads[0]], 0.5)
    assert torch.isnan(combined).nonzero().flatten().tolist() == list(range(64, 128))
    assert torch.equal(torch.isnan(combined), torch.isnan(decoded))
