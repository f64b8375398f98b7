"""Tensors of every odd kind, and the collectives that are called with them: on gloo and on cgx, side by side.

A case is a kind of tensor and a collective. `outcome` runs it and says what came of it; nothing here judges.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["COLLECTIVES", "KINDS", "dense", "expected", "outcome"]

NUMEL = 48  # more than the 16 from which on tensors are compressed


def _base(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return ((torch.arange(NUMEL) * 7 + rank * 3) % 11).to(dtype)


def _sparse(rank: int) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[rank, 40]]), torch.tensor([1.0, 2.0]), (NUMEL,))


def _quantized(rank: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(_base(rank), 0.1, 0, torch.quint8)


def _inference(rank: int) -> Tensor:
    with torch.inference_mode():
        return _base(rank) + 0


class _Named(Tensor):
    """A subclass that adds nothing."""


def _graph_node(rank: int) -> Tensor:
    return _base(rank).requires_grad_() * 2.0


# By name: a rank's tensor. What is a view shows whether its neighbours in memory stay.
KINDS: dict[str, Callable[[int], Tensor]] = {
    "plain": _base,
    "zero-size": lambda rank: torch.empty(0, 3),
    "0-dim": lambda rank: torch.tensor(float(rank + 1)),
    "transposed": lambda rank: _base(rank).view(6, 8).t(),
    "channels last": lambda rank: _base(rank).view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "every other": lambda rank: torch.cat([_base(rank), _base(rank)])[::2],
    "inner columns": lambda rank: torch.cat([_base(rank)] * 2).view(12, 8)[:, 1:5],
    "expanded": lambda rank: _base(rank)[:4].expand(12, 4),
    "overlapping": lambda rank: _base(rank).as_strided((20, 4), (1, 1)),
    "flipped": lambda rank: _base(rank).flip(0),
    "requires grad": lambda rank: _base(rank).requires_grad_(),
    "result with a graph": _graph_node,
    "parameter": lambda rank: torch.nn.Parameter(_base(rank)),
    "subclass": lambda rank: _base(rank).as_subclass(_Named),
    "inference": _inference,
    "float64": lambda rank: _base(rank, torch.float64),
    "bool": lambda rank: _base(rank) > 5,
    "int16": lambda rank: _base(rank, torch.int16),
    "uint16": lambda rank: _base(rank, torch.uint16),
    "float8": lambda rank: _base(rank).to(torch.float8_e4m3fn),
    "complex64": lambda rank: torch.complex(_base(rank), _base(rank + 1)),
    "complex32": lambda rank: torch.complex(_base(rank).half(), _base(rank + 1).half()),
    "conjugate view": lambda rank: torch.complex(_base(rank), _base(rank + 1)).conj(),
    "negative view": lambda rank: torch.complex(_base(rank), _base(rank + 1)).conj().imag,
    "imaginary part": lambda rank: torch.complex(_base(rank), _base(rank + 1)).imag,
    "sparse": _sparse,
    "sparse rows": lambda rank: _base(rank).view(6, 8).to_sparse_csr(),
    "quantized": _quantized,
    "meta": lambda rank: _base(rank).to("meta"),
    "mkldnn": lambda rank: _base(rank).to_mkldnn(),
    "nested": lambda rank: torch.nested.nested_tensor([_base(rank), _base(rank)[:5]]),
}


def _all_reduce(x: Tensor, group: Any) -> list[Tensor]:
    dist.all_reduce(x, group=group)
    return [x]


def _all_reduce_async(x: Tensor, group: Any) -> list[Tensor]:
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    work.wait()
    return [x]


def _coalesced(x: Tensor, group: Any) -> list[Tensor]:
    other = torch.full((20,), 2.0 + dist.get_rank(group))
    dist.all_reduce_coalesced([x, other], group=group)
    return [x, other]


def _twice_in_a_list(x: Tensor, group: Any) -> list[Tensor]:
    tensors = [x, x.view(-1)[:17] if x.is_contiguous() and x.layout is torch.strided else x]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def _reduce_scatter(x: Tensor, group: Any) -> list[Tensor]:
    out = torch.zeros_like(x, requires_grad=False)
    dist.reduce_scatter(out, [x, x], group=group)
    return [out, x]


def _reduce_scatter_into(x: Tensor, group: Any) -> list[Tensor]:
    dist.reduce_scatter(x, [x, x], group=group)
    return [x]


def _reduce_scatter_tensor(x: Tensor, group: Any) -> list[Tensor]:
    out = torch.zeros(x.numel() // 2, dtype=x.dtype)
    dist.reduce_scatter_tensor(out, x, group=group)
    return [out, x]


def _reduce_scatter_tensor_out(x: Tensor, group: Any) -> list[Tensor]:
    whole = torch.ones(2 * x.numel(), dtype=x.dtype)
    dist.reduce_scatter_tensor(x, whole, group=group)
    return [x]


def _reduce_scatter_within(x: Tensor, group: Any) -> list[Tensor]:
    half = x.numel() // 2
    dist.reduce_scatter_tensor(x[half:], x, group=group)
    return [x[half:]]


def _all_gather(x: Tensor, group: Any) -> list[Tensor]:
    out = [torch.zeros_like(x, requires_grad=False) for _ in range(2)]
    dist.all_gather(out, x, group=group)
    return out


def _all_gather_out(x: Tensor, group: Any) -> list[Tensor]:
    out = [x, torch.zeros_like(x, requires_grad=False)]
    dist.all_gather(out, torch.ones(x.shape, dtype=x.dtype), group=group)
    return out


def _all_gather_into_tensor(x: Tensor, group: Any) -> list[Tensor]:
    out = torch.zeros(2 * x.numel(), dtype=x.dtype)
    dist.all_gather_into_tensor(out, x, group=group)
    return [out]


def _broadcast(x: Tensor, group: Any) -> list[Tensor]:
    dist.broadcast(x, dist.get_global_rank(group, 0), group=group)
    return [x]


def _reduce(x: Tensor, group: Any) -> list[Tensor]:
    root = dist.get_global_rank(group, 0)
    dist.reduce(x, root, group=group)
    return [x] if dist.get_rank(group) == 0 else []


def _gather(x: Tensor, group: Any) -> list[Tensor]:
    here = dist.get_rank(group) == 0
    out = [torch.zeros_like(x, requires_grad=False) for _ in range(2)] if here else None
    dist.gather(x, out, dist.get_global_rank(group, 0), group=group)
    return out or []


def _scatter(x: Tensor, group: Any) -> list[Tensor]:
    out = torch.zeros_like(x, requires_grad=False)
    dist.scatter(out, [x, x] if dist.get_rank(group) == 0 else None, dist.get_global_rank(group, 0), group=group)
    return [out]


def _scatter_into(x: Tensor, group: Any) -> list[Tensor]:
    ones = torch.ones(x.shape, dtype=x.dtype)
    dist.scatter(x, [ones, ones] if dist.get_rank(group) == 0 else None, dist.get_global_rank(group, 0), group=group)
    return [x]


def _all_to_all(x: Tensor, group: Any) -> list[Tensor]:
    out = [torch.zeros_like(x, requires_grad=False) for _ in range(2)]
    dist.all_to_all(out, [x, x], group=group)
    return out


def _all_to_all_single(x: Tensor, group: Any) -> list[Tensor]:
    out = torch.zeros(x.shape, dtype=x.dtype)
    dist.all_to_all_single(out, x, group=group)
    return [out]


COLLECTIVES: dict[str, Callable[[Tensor, Any], list[Tensor]]] = {
    function.__name__[1:]: function
    for function in (
        _all_reduce,
        _all_reduce_async,
        _coalesced,
        _twice_in_a_list,
        _reduce_scatter,
        _reduce_scatter_into,
        _reduce_scatter_tensor,
        _reduce_scatter_tensor_out,
        _reduce_scatter_within,
        _all_gather,
        _all_gather_out,
        _all_gather_into_tensor,
        _broadcast,
        _reduce,
        _gather,
        _scatter,
        _scatter_into,
        _all_to_all,
        _all_to_all_single,
    )
}


def outcome(kind: str, collective: str, rank: int, group: Any) -> tuple[str, Any]:
    """ "values" with the tensors, as lists; or the name of what was raised, with its text."""
    try:
        found = COLLECTIVES[collective](KINDS[kind](rank), group)
        return "values", [_plain(x) for x in found]
    except Exception as error:
        return type(error).__name__, str(error)


def _plain(x: Tensor) -> Any:
    with torch.no_grad():
        x = x.detach()
        if x.device.type == "meta":
            return "meta"
        if x.is_nested or x.layout is not torch.strided:
            x = x.to_dense() if not x.is_nested else x.to_padded_tensor(-1.0)
        if x.is_quantized:
            x = x.int_repr()
        if x.dtype == torch.complex32:
            x = torch.view_as_real(x.resolve_conj()).float()
        if x.dtype in (torch.uint16, torch.float8_e4m3fn):
            x = x.resolve_conj().contiguous().view(torch.uint8)
        return x.resolve_conj().resolve_neg().clone().tolist()


def expected(kind: str, collective: str, rank: int) -> list[Any]:
    """What two ranks should get, worked out on copies."""
    mine = [dense(KINDS[kind](each)) for each in range(2)]
    total = mine[0] + mine[1]
    shape, numel = total.shape, total.numel()
    half = total.reshape(-1)[rank * (numel // 2) : (rank + 1) * (numel // 2)]
    ones = torch.ones(shape, dtype=total.dtype)
    found = {
        "all_reduce": [total],
        "all_reduce_async": [total],
        "coalesced": [total, torch.full((20,), 5.0)],
        "twice_in_a_list": [total, total.reshape(-1)[:17] if KINDS[kind](0).is_contiguous() else total],
        "reduce_scatter": [total, mine[rank]],
        "reduce_scatter_into": [total],
        "reduce_scatter_tensor": [half, mine[rank]],
        "reduce_scatter_tensor_out": [ones + ones],
        "reduce_scatter_within": [half],
        "all_gather": mine,
        "all_gather_out": [ones, ones],
        "all_gather_into_tensor": [torch.cat([each.reshape(-1) for each in mine])],
        "broadcast": [mine[0]],
        "reduce": [total] if rank == 0 else [],
        "gather": mine if rank == 0 else [],
        "scatter": [mine[0]],
        "scatter_into": [ones],
        "all_to_all": mine,
        "all_to_all_single": [torch.cat([each.reshape(2, -1)[rank] for each in mine]).view(shape)]
        if numel > 1
        else [total],
    }
    return [_plain(x) for x in found[collective]]


def dense(x: Tensor) -> Tensor:
    """Its values as an ordinary tensor."""
    x = x.detach()
    if x.layout is not torch.strided and not x.is_nested:
        x = x.to_dense()
    return x.as_subclass(Tensor).resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
