"""What compressed reduce-scatters and all-gathers must come to: worked out by the in-memory executor, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_cgx
from tests.support.gradients import DTYPES, digest, noise
from tests.support.harness import Rank
from torch_cgx.codecs import RAW, MaxMin
from torch_cgx.engines import memory
from torch_cgx.kernels import NEAREST, Rounding
from torch_cgx.kernels.native import default_kernels
from torch_cgx.plan.layout import Layer, make_shares_layout

# Layers of one share.
LAYERS = (Layer(300, MaxMin(2, 64)), Layer(40, RAW), Layer(123, MaxMin(8, 1024, True)), Layer(0, RAW))
NUMEL = sum(layer.numel for layer in LAYERS)


def quarter() -> Any:
    """The sum times a quarter, as FSDP asks for it; NCCL's, by its name."""
    return dist._make_nccl_premul_sum(0.25)  # type: ignore[attr-defined]


# By how a reduce-scatter is asked: the operation, and what the sum is multiplied by.
OPS: dict[str, tuple[Callable[[], Any], Callable[[int], float]]] = {
    "SUM": (lambda: dist.ReduceOp.SUM, lambda world: 1.0),
    "AVG": (lambda: dist.ReduceOp.AVG, lambda world: 1 / world),
    "PREMUL_SUM": (quarter, lambda world: 0.25),
}


def sum_of_shares(
    inputs: list[Tensor], rank: int, layers: tuple[Layer, ...], scale: float, rounding: Rounding = NEAREST
) -> Tensor:
    """What the in-memory executor makes of one tensor a rank, for this one."""
    world = len(inputs)
    values = [x.detach().clone(memory_format=torch.contiguous_format).view(-1) for x in inputs]
    shares = [x.view(world, -1)[peer].clone() for peer, x in enumerate(values)]
    layout = make_shares_layout(layers, world, inputs[0].element_size(), 1 << 22)
    memory.reduce_scatter(values, shares, layout, [default_kernels()] * world, scale=scale, rounding=rounding)
    return shares[rank]


def gathered_shares(inputs: list[Tensor], layers: tuple[Layer, ...], rounding: Rounding = NEAREST) -> Tensor:
    """What the in-memory executor makes of one share a rank, for all of them."""
    world = len(inputs)
    values = [torch.cat([x.detach().reshape(-1) for x in inputs]) for _ in inputs]
    layout = make_shares_layout(layers, world, inputs[0].element_size(), 1 << 22)
    memory.all_gather(values, layout, [default_kernels()] * world, rounding=rounding)
    return values[0]


def one_layer(numel: int, bits: int, block: int = 512) -> tuple[Layer, ...]:
    return (Layer(numel, MaxMin(bits, block)),)


def same(got: Tensor, expected: Tensor) -> None:
    """To the bit, whatever their shapes."""
    assert got.dtype == expected.dtype and digest(got) == digest(expected)


def expected_scatter(me: Rank, numel: int, bits: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    inputs = [noise(rank, me.world * numel, dtype) for rank in range(me.world)]
    return sum_of_shares(inputs, me.rank, one_layer(numel, bits), scale)


def expected_gather(me: Rank, numel: int, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return gathered_shares([noise(rank, numel, dtype) for rank in range(me.world)], one_layer(numel, bits))


def sweep(rank: int, world: int) -> list[str]:
    """Held to it: every width with every operation, types and sizes in turn. What was gathered, by digest."""
    gathers = []
    for bits in range(1, 9):
        for turn, (name, (op, scale)) in enumerate(OPS.items()):
            dtype = DTYPES[(bits + turn) % 3]
            numel = (16, 17, 513, 5001)[(bits + turn) % 4]
            x, share = noise(rank, world * numel, dtype), torch.full((numel,), torch.nan, dtype=dtype)
            whole = torch.full((world * numel,), torch.nan, dtype=dtype)
            with torch_cgx.compressed(bits, 64 if bits == 3 else None):
                dist.reduce_scatter_tensor(share, x, op=op())
                dist.all_gather_into_tensor(whole, noise(rank, numel, dtype))
            same(x, noise(rank, world * numel, dtype))
            layers = one_layer(numel, bits, 64 if bits == 3 else 512)
            inputs = [noise(peer, world * numel, dtype) for peer in range(world)]
            same(share, sum_of_shares(inputs, rank, layers, scale(world)))
            same(whole, gathered_shares([noise(peer, numel, dtype) for peer in range(world)], layers))
            assert not torch.equal(whole.view(world, -1)[rank], noise(rank, numel, dtype)), (name, bits)
            gathers.append(digest(whole))
    return gathers
