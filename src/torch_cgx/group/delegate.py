"""The collectives that torch's own engines carry: signatures, and what each says on the board. No decisions.

Method names and argument orders are those of `torch.distributed.ProcessGroup`, which Python and, through trampolines,
C++ (DDP, functional collectives) call. Every method that has a trampoline must be overridden: torch's own would call
Gloo while it holds the GIL, which Gloo's threads wait for while they hold Gloo's lock, to free tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from torch_cgx.group.calls import reduction_name
from torch_cgx.group.futures import Completions
from torch_cgx.tensors import check_in_place, check_input, check_output, first_of, laid_out_like, strides_hash

__all__ = ["CarriedCollectives", "unwaited"]


class CarriedCollectives(dist.ProcessGroup):
    """Everything but what is made of allreduces, in terms of `_carry`."""

    _completions: Completions

    def _backend(self, tensor: Tensor) -> Any:
        raise NotImplementedError

    def _check_usable(self) -> None:
        raise NotImplementedError

    def _carry(
        self,
        operation: str,
        run: Any,
        dtype: torch.dtype | None,
        shape: tuple[int, ...] | None,
        result: list[Tensor],
        *,
        reduction: str | None = None,
        root: int = -1,
        layout: int = 0,
    ) -> Any:
        raise NotImplementedError

    def _together(self, parts: list[Any], result: list[Tensor]) -> Any:
        """One handle on the operations of a coalesced call."""
        raise NotImplementedError

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not isinstance(opts, c10d.BroadcastOptions):
            root, opts = opts, c10d.BroadcastOptions()
            opts.rootRank = root or 0
        first = first_of("broadcast", tensors)
        run = partial(self._backend(first).broadcast, tensors, opts)
        _check("broadcast", tensors, in_place=True)
        layout = strides_hash(first)
        return self._carry("broadcast", run, first.dtype, _shape(first), tensors, root=opts.rootRank, layout=layout)

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> Any:
        if isinstance(tensors, Tensor):
            root, opts = opts, c10d.ReduceOptions()
            opts.rootRank = root
            if more:
                opts.reduceOp = more[0]
            tensors = [tensors]
        first = first_of("reduce", tensors)
        run = partial(self._backend(first).reduce, tensors, opts)
        _check("reduce", tensors, in_place=True)
        reduction = reduction_name(opts.reduceOp)
        how = {"reduction": reduction, "root": opts.rootRank, "layout": strides_hash(first)}
        return self._carry("reduce", run, first.dtype, _shape(first), list(tensors), **how)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = opts if isinstance(opts, c10d.AllgatherOptions) else c10d.AllgatherOptions()
        first = first_of("all_gather", inputs)
        run = partial(self._backend(first).allgather, outputs, inputs, opts)
        into = [t for row in outputs for t in row]
        _check("all_gather", inputs, into)
        _check_rows("all_gather", outputs, inputs, self.size())
        return self._carry("all_gather", run, first.dtype, _shape(first), into)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        run = partial(self._backend(input)._allgather_base, output, input, opts)
        _check("all_gather_into_tensor", [input], [output])
        if input.device.type == "cpu" and output.numel() != self.size() * input.numel():
            raise ValueError(
                f"all_gather_into_tensor: expected an output of {self.size()} times the {input.numel()} values of the "
                f"input, as many on every rank, got {output.numel()} values"
            )
        return self._carry("all_gather_into_tensor", run, input.dtype, _shape(input), [output])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = unwaited(c10d.AllgatherOptions, opts)
        parts = [self._allgather_base(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return self._together(parts, list(outputs))

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllgatherOptions()
        first = first_of("all_gather_coalesced", inputs)
        run = partial(self._backend(first).allgather_coalesced, outputs, inputs, opts)
        into = [t for row in outputs for t in row]
        _check("all_gather_coalesced", inputs, into)
        return self._carry("all_gather_coalesced", run, first.dtype, None, into)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        first = first_of("gather", inputs)
        opts = opts if isinstance(opts, c10d.GatherOptions) else c10d.GatherOptions()
        run = partial(self._backend(first).gather, outputs, inputs, opts)
        into = [t for row in outputs for t in row]
        if first.is_complex():
            raise TypeError(f"gather: expected real numbers, got {first.dtype}: gather torch.view_as_real of it")
        _check("gather", inputs, into)
        return self._carry("gather", run, first.dtype, None, into, root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        first = first_of("scatter", outputs)
        opts = opts if isinstance(opts, c10d.ScatterOptions) else c10d.ScatterOptions()
        _check("scatter", outputs, in_place=True)
        # Copied where need be, not refused: the root alone has them, and the others would wait for it.
        inputs = [[laid_out_like("scatter", t, first) for t in row] for row in inputs]
        run = partial(self._backend(first).scatter, outputs, inputs, opts)
        how = {"root": opts.rootRank, "layout": strides_hash(first)}
        return self._carry("scatter", run, first.dtype, _shape(first), list(outputs), **how)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else c10d.AllToAllOptions()
        first = first_of("all_to_all", inputs)
        run = partial(self._backend(first).alltoall, outputs, inputs, opts)
        _check("all_to_all", inputs, outputs)
        return self._carry("all_to_all", run, first.dtype, None, list(outputs))

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None
    ) -> Any:
        opts = opts if opts is not None else c10d.AllToAllOptions()
        run = partial(self._backend(input).alltoall_base, output, input, output_split_sizes, input_split_sizes, opts)
        _check("all_to_all_single", [input], [output])
        for name, tensor, sizes in (("input", input, input_split_sizes), ("output", output, output_split_sizes)):
            if not tensor.is_contiguous():
                raise ValueError(
                    f"all_to_all_single: expected a contiguous {name}, got strides {tensor.stride()} of shape "
                    f"{tuple(tensor.shape)}: call .contiguous() first"
                )
            if any(not hasattr(size, "__index__") for size in sizes or ()):
                raise TypeError(f"all_to_all_single: expected whole numbers as {name} split sizes, got {sizes}")
            if not sizes and tensor.numel() % self.size():
                raise ValueError(
                    f"all_to_all_single: expected an {name} of {self.size()} equal parts, one a rank, "
                    f"got {tensor.numel()} values"
                )
        return self._carry("all_to_all_single", run, input.dtype, None, [output])

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    # Messages between two ranks are no collectives: only those two call, so nothing is noted.

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._check_usable()
        return self._backend(tensors[0]).send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._check_usable()
        return self._backend(tensors[0]).recv(tensors, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        self._check_usable()
        return self._backend(tensors[0]).recv_anysource(tensors, tag)


def unwaited(kind: Any, given: Any) -> Any:
    """Options of a part of a coalesced call: those that were given, but that each part shall have a handle."""
    options = kind()  # by torch's default the caller does not wait at once
    for name in ("reduceOp", "timeout"):
        if hasattr(given, name):
            setattr(options, name, getattr(given, name))
    return options


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _check(operation: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = (), *, in_place: bool = False) -> None:
    """What Gloo takes without a look; NCCL looks at its tensors itself."""
    for tensor in inputs:
        if tensor.device.type == "cpu":
            (check_in_place if in_place else check_input)(operation, tensor)
    for tensor in outputs:
        if tensor.device.type == "cpu":
            check_output(operation, tensor)


def _check_rows(operation: str, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], world: int) -> None:
    """Refuse outputs that Gloo would refuse too, but only after the call has been noted."""
    first = inputs[0]
    if first.device.type != "cpu":  # NCCL gathers shares of different sizes too
        return
    for row in outputs:
        if len(row) != world * len(inputs):
            raise ValueError(f"{operation}: expected {world * len(inputs)} outputs, one per rank, got {len(row)}")
        for tensor in row:
            if tensor.shape != first.shape or tensor.dtype != first.dtype:
                raise ValueError(
                    f"{operation}: expected outputs like the input, {first.dtype} of shape {tuple(first.shape)}, as on "
                    f"every rank, got {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
