"""Checks that refuse tensors which Gloo or a kernel would misread, or write outside of.

Gloo treats a tensor as numel values from its first address on, whatever its strides. With `x[::2]` it would reduce the
wrong half, and with a view that overlaps itself it would write far beyond the end.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "check_in_place",
    "check_input",
    "check_output",
    "first_of",
    "laid_out_like",
    "overlap",
    "sharing_memory",
    "strides_hash",
]


# The dtypes that Gloo carries; most of torch's functions turn complex tensors into real ones before this.
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)


def check_in_place(operation: str, tensor: Tensor, *, sparse: bool = False) -> None:
    """Raise unless a tensor's memory can be sent, or written, as it lies."""
    if sparse and tensor.layout is torch.sparse_coo:
        return
    check_input(operation, tensor)
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(
            f"{operation}: expected values as they lie in memory, got a negative or conjugate view: call "
            ".resolve_neg() or .resolve_conj() first"
        )
    if not tensor.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise ValueError(
            f"{operation}: expected a tensor without gaps or overlaps in memory, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}: call .contiguous() first"
        )


def check_input(operation: str, tensor: Tensor) -> None:
    """Raise unless a tensor can be copied and then sent."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        got = "a nested one" if tensor.is_nested else str(tensor.layout)
        raise ValueError(
            f"{operation}: expected a dense tensor, got {got}: call .to_dense() or .to_padded_tensor() first"
        )

    if tensor.dtype not in _DTYPES and not tensor.is_complex():
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise TypeError(f"{operation}: expected a CPU tensor of {names} or complex numbers, got {tensor.dtype}")


def check_output(operation: str, tensor: Tensor) -> None:
    """Raise unless a result can be copied into a tensor."""
    check_input(operation, tensor)
    if not tensor.is_contiguous() and _may_overlap(tensor):
        raise ValueError(
            f"{operation}: expected an output whose values do not overlap in memory, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}: call .clone() first"
        )


def laid_out_like(operation: str, tensor: Tensor, other: Tensor) -> Tensor:
    """Return the tensor, or a copy of it whose values lie in memory as the other's do."""
    check_input(operation, tensor)
    if tensor.shape != other.shape:
        return tensor.detach().resolve_neg().resolve_conj().contiguous()
    if tensor.stride() == other.stride() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype, requires_grad=False).copy_(tensor.detach())


def strides_hash(tensor: Tensor) -> int:
    """Return 0 for a contiguous tensor, else a hash of its strides; identical in every process."""
    return 0 if tensor.is_contiguous() else zlib.crc32(repr(tensor.stride()).encode())


def first_of(operation: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the first tensor of a list, or raise ValueError if there is none."""
    if not tensors:
        raise ValueError(f"{operation}: expected at least one tensor, got an empty list")
    return tensors[0]


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copy into a tensor that may be an inference tensor, in or outside of inference mode."""
    if not target.is_inference():  # entering the mode takes longer than copying a small tensor
        target.copy_(source)
        return
    with torch.inference_mode():
        target.copy_(source)


def waited_for(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or wait for a functional collective's result and return that."""
    if type(tensor) is Tensor or not hasattr(tensor, "trigger_wait"):
        return tensor
    waited: Tensor = tensor.trigger_wait()
    return waited


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two dense tensors of one device share a byte, or may do so because views interleave."""
    (first, first_end), (second, second_end) = _span(a), _span(b)
    return first < second_end and second < first_end


def sharing_memory(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether it shares a byte with another one, or may do so because views interleave."""
    shared = [False] * len(tensors)
    # Compare addresses, not storages: two storages may lie in the same memory, as with numpy's views.
    places = [(str(tensor.device) if tensor.layout is torch.strided else str(id(tensor))) for tensor in tensors]
    spans = sorted(
        (place, *_span(tensor), number) for number, (place, tensor) in enumerate(zip(places, tensors, strict=True))
    )
    if not spans:
        return shared
    reaching = spans[0]  # the span so far that ends last
    for span in spans[1:]:
        if span[0] == reaching[0] and span[1] < reaching[2]:
            shared[span[3]] = shared[reaching[3]] = True
        if span[0] != reaching[0] or span[2] > reaching[2]:
            reaching = span
    return shared


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first value, and of the end of its last one."""
    if tensor.layout is not torch.strided:
        return 0, 1
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    start, reach = tensor.data_ptr(), tensor.numel() - 1
    if not tensor.is_contiguous():
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


def _may_overlap(tensor: Tensor) -> bool:
    """Return True unless every step along a dimension leads beyond all that smaller steps reach."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
