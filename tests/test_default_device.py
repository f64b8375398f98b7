"""`torch.set_default_device` is for the user's tensors: ours say where they are made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_cgx
from torch_cgx.codecs import MaxMin
from torch_cgx.kernels import Kernels, Piece, Rounding
from torch_cgx.kernels.native import default_kernels
from torch_cgx.kernels.reference import ReferenceKernels
from torch_cgx.kernels.triton.table import make_table

PACKAGE = Path(torch_cgx.__file__).parent
FACTORIES = {
    *("Generator", "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor"),
    *("tril_indices", "triu_indices", "zeros"),
}
"""Functions of torch that heed the default device (and `Generator`, which must match them)."""


def without_a_device(source: str) -> Iterator[int]:
    """Yield the lines that call one of `FACTORIES` without saying where, or that hide it behind another name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            if FACTORIES & {alias.name for alias in node.names}:
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_torch and not any(keyword.arg in ("device", None) for keyword in node.keywords):
                yield node.lineno


def test_every_internal_tensor_has_a_device() -> None:
    """But for the commands: their processes are our own, where nobody sets a default."""
    sources = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "cli"]
    assert len(sources) > 50
    assert not [
        f"{path.relative_to(PACKAGE)}:{line}" for path in sources for line in without_a_device(path.read_text())
    ]


def test_the_search_finds_what_it_is_for() -> None:
    assert list(without_a_device("import torch\nx = torch.zeros(3)\ny = torch.zeros(3, device=d)\n")) == [2]
    assert list(without_a_device("from torch import Tensor\nfrom torch import arange\n")) == [2]


def quantized(stochastic: bool) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 1000, device="cpu")
    payload = torch_cgx.quantize(x, 4, 64, stochastic=stochastic, seed=1 if stochastic else None)
    torch_cgx.quantize(x, 4, 64, stochastic=True)  # draws a seed
    return payload, torch_cgx.dequantize(payload, 1000, torch.float32, 4, 64)


def coded(kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Encode and sum, with values that are sent raw too."""
    pieces = (Piece(0, 1000, 3, 64, 8, 0, MaxMin.kind),)
    values = torch.linspace(-1, 1, 1000, device="cpu").to(torch.bfloat16)
    payload = torch.zeros(1000, dtype=torch.uint8, device="cpu")
    residual = torch.zeros(1000, device="cpu")
    kernels.encode(pieces, values, payload, Rounding(True, 5), residual)
    kernels.sum(pieces, values, [payload, payload], 0.5)
    return values, residual


@pytest.mark.parametrize("name", ["nearest", "stochastic", "native kernels", "reference kernels", "tables"])
def test_quantizing_is_the_same_whatever_the_default_device(name: str) -> None:
    def run() -> tuple[Tensor, Tensor]:
        if name == "tables":  # of the Triton kernels
            return make_table((Piece(0, 1000, 3, 64, 8, 0, MaxMin.kind),), 4, True).main.tensors(torch.device("cpu"))
        if name.endswith("kernels"):
            return coded(ReferenceKernels() if name.startswith("reference") else default_kernels())
        return quantized(name == "stochastic")

    expected = run()
    with torch.device("meta"):
        inside = run()
    torch.set_default_device("meta")
    try:
        after = run()
    finally:
        torch.set_default_device(None)
    for wanted, *got in zip(expected, inside, after, strict=True):
        assert all(torch.equal(wanted, x) for x in got)
