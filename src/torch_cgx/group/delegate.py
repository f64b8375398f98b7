"""Delegation to torch's own groups, Gloo and NCCL, with an entry in the group's ledger per call. No decisions.

Gloo does not notice when ranks make different calls, so every call is compared with those of the other ranks before
Gloo gets it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.profiler import record_function

from torch_cgx.engines.recorder import OpInfo, Trail
from torch_cgx.group.calls import collective_call, reduction_name
from torch_cgx.group.context import GroupContext
from torch_cgx.group.ledger import Ledger
from torch_cgx.group.ledger.starter import Nothing
from torch_cgx.group.sides import Side, Sides
from torch_cgx.group.work import DoneWork, PolledWork, TorchWork
from torch_cgx.tensors import check_in_place, check_input, check_output, first_of, laid_out_like, strides_hash

__all__ = ["TorchCall", "TorchDelegate"]


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A method of a torch group and its arguments. The last argument is its options."""

    side: Side
    method: str
    arguments: tuple[Any, ...]

    @property
    def is_asynchronous(self) -> bool:
        return getattr(self.arguments[-1], "asyncOp", True)

    def run(self) -> Any:
        return getattr(self.side.carrier, self.method)(*self.arguments)


class TorchDelegate:
    """The delegate that carries out collectives with torch's own groups."""

    def __init__(self, context: GroupContext, sides: Sides, ledger: Ledger) -> None:
        self._context = context
        self._sides = sides
        self._ledger = ledger
        self._under_way: weakref.WeakSet[TorchWork] = weakref.WeakSet()

    # ---- the collectives ----

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        first = first_of("broadcast", tensors)
        call = TorchCall(self._sides.of(first), "broadcast", (tensors, opts))
        _check("broadcast", tensors, in_place=True)
        info = OpInfo("broadcast", first.dtype, _shape(first), root=opts.rootRank)
        return self.carry(info, call, tensors, layout=strides_hash(first))

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        first = first_of("reduce", tensors)
        call = TorchCall(self._sides.of(first), "reduce", (tensors, opts))
        _check("reduce", tensors, in_place=True)
        info = OpInfo("reduce", first.dtype, _shape(first), reduction_name(opts.reduceOp), root=opts.rootRank)
        return self.carry(info, call, tensors, layout=strides_hash(first))

    def all_gather(self, outputs: Any, inputs: list[Tensor], opts: Any) -> Any:
        first = first_of("all_gather", inputs)
        call = TorchCall(self._sides.of(first), "allgather", (outputs, inputs, opts))
        into = [tensor for row in outputs for tensor in row]
        _check("all_gather", inputs, into)
        _check_rows("all_gather", outputs, inputs, self._context.world)
        return self.carry(OpInfo("all_gather", first.dtype, _shape(first)), call, into)

    def all_gather_into_tensor(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        call = TorchCall(self._sides.of(input), "_allgather_base", (output, input, opts))
        _check("all_gather_into_tensor", [input], [output])
        world = self._context.world
        if input.device.type == "cpu" and output.numel() != world * input.numel():
            raise ValueError(
                f"all_gather_into_tensor: expected an output of {world} times the {input.numel()} values of the "
                f"input, as many on every rank, got {output.numel()} values"
            )
        return self.carry(OpInfo("all_gather_into_tensor", input.dtype, _shape(input)), call, [output])

    def all_gather_coalesced(self, outputs: Any, inputs: list[Tensor], opts: Any) -> Any:
        first = first_of("all_gather_coalesced", inputs)
        call = TorchCall(self._sides.of(first), "allgather_coalesced", (outputs, inputs, opts))
        into = [tensor for row in outputs for tensor in row]
        _check("all_gather_coalesced", inputs, into)
        return self.carry(OpInfo("all_gather_coalesced", first.dtype), call, into)

    def gather(self, outputs: Any, inputs: list[Tensor], opts: Any) -> Any:
        first = first_of("gather", inputs)
        call = TorchCall(self._sides.of(first), "gather", (outputs, inputs, opts))
        into = [tensor for row in outputs for tensor in row]
        if first.is_complex():
            raise TypeError(f"gather: expected real numbers, got {first.dtype}: gather torch.view_as_real of it")
        _check("gather", inputs, into)
        return self.carry(OpInfo("gather", first.dtype, root=opts.rootRank), call, into)

    def scatter(self, outputs: list[Tensor], inputs: Any, opts: Any) -> Any:
        first = first_of("scatter", outputs)
        _check("scatter", outputs, in_place=True)
        # Copied if necessary instead of refused: only the root has inputs, and the other ranks would wait for it.
        inputs = [[laid_out_like("scatter", tensor, first) for tensor in row] for row in inputs]
        call = TorchCall(self._sides.of(first), "scatter", (outputs, inputs, opts))
        info = OpInfo("scatter", first.dtype, _shape(first), root=opts.rootRank)
        return self.carry(info, call, outputs, layout=strides_hash(first))

    def reduce_scatter(self, outputs: list[Tensor], inputs: Any, opts: Any) -> Any:
        call = TorchCall(self._sides.of(outputs[0]), "reduce_scatter", (outputs, inputs, opts))
        return self.carry(OpInfo("reduce_scatter", outputs[0].dtype), call, outputs)

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        call = TorchCall(self._sides.of(input), "_reduce_scatter_base", (output, input, opts))
        return self.carry(OpInfo("reduce_scatter_tensor", input.dtype, _shape(input)), call, [output])

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        first = first_of("all_to_all", inputs)
        call = TorchCall(self._sides.of(first), "alltoall", (outputs, inputs, opts))
        _check("all_to_all", inputs, outputs)
        return self.carry(OpInfo("all_to_all", first.dtype), call, outputs)

    def all_to_all_single(self, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, opts: Any) -> Any:
        call = TorchCall(self._sides.of(input), "alltoall_base", (output, input, output_sizes, input_sizes, opts))
        _check("all_to_all_single", [input], [output])
        world = self._context.world
        for name, tensor, sizes in (("input", input, input_sizes), ("output", output, output_sizes)):
            if not tensor.is_contiguous():
                raise ValueError(
                    f"all_to_all_single: expected a contiguous {name}, got strides {tensor.stride()} of shape "
                    f"{tuple(tensor.shape)}: call .contiguous() first"
                )
            if any(not hasattr(size, "__index__") for size in sizes or ()):
                raise TypeError(f"all_to_all_single: expected whole numbers as {name} split sizes, got {sizes}")
            if not sizes and tensor.numel() % world:
                raise ValueError(
                    f"all_to_all_single: expected an {name} of {world} equal parts, one per rank, "
                    f"got {tensor.numel()} values"
                )
        return self.carry(OpInfo("all_to_all_single", input.dtype), call, [output])

    # Messages between two ranks are not collectives. Only those two call, so nothing is entered.

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._context.check_usable()
        return self._sides.of(tensors[0]).carrier.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._context.check_usable()
        return self._sides.of(tensors[0]).carrier.recv(tensors, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        self._context.check_usable()
        return self._sides.of(tensors[0]).carrier.recv_anysource(tensors, tag)

    # ---- how a call is carried ----

    def under_way(self) -> list[TorchWork]:
        """Return the operations that have not been seen to end."""
        return [work for work in self._under_way if not work.done]

    def carry(self, info: OpInfo, call: TorchCall, result: list[Tensor], *, layout: int = 0) -> Any:
        """Enter a call in the ledger and hand it to the group that carries it."""
        if call.side.enqueues:
            return self._enqueue(info, call, result, layout)
        return self._start(info, call.run, call.is_asynchronous, result, layout)

    def compare(self, info: OpInfo, result: list[Tensor], *, asynchronous: bool = True) -> PolledWork:
        """Enter a call that has nothing to carry, and compare it with those of the other ranks by waiting for them."""
        return self._start(info, Nothing, asynchronous, result, 0)

    def note(self, info: OpInfo, result: list[Tensor]) -> PolledWork:
        """Enter a call that has nothing to carry, without waiting for other ranks."""
        with self._entering(info):
            with self._context.recorder.noting_failures():
                entry = self._ledger.enter(_announced(info, 0), asynchronous=True)
            trail = self._context.recorder.begin(info, "gloo", entry.number)
            with self._recording(info, trail):
                entry.has_ended()
                trail.finish()
        return DoneWork(result, self._context.completions)

    def _start(
        self, info: OpInfo, run: Callable[[], Any], asynchronous: bool, result: list[Tensor], layout: int
    ) -> TorchWork:
        context = self._context
        with self._entering(info):
            with context.recorder.noting_failures():
                entry = self._ledger.enter(_announced(info, layout), asynchronous=asynchronous)
            trail = context.recorder.begin(info, "gloo", entry.number)
            with self._recording(info, trail):
                inner = entry.start(run, asynchronous=asynchronous)
        work = TorchWork(inner, entry, result, context.completions, trail)
        self._under_way.add(work)
        return work

    def _enqueue(self, info: OpInfo, call: TorchCall, result: list[Tensor], layout: int) -> Any:
        """Enqueue a call with NCCL."""
        context = self._context
        with self._entering(info):
            with context.recorder.noting_failures():
                number = self._ledger.note(_announced(info, layout))
            trail = context.recorder.begin(info, call.side.carrier_name, number)
            with self._recording(info, trail):
                self._ledger.check(number)
                inner = call.run()
        trail.enqueued = True
        trail.finish()
        # NCCL's own handle is returned unwrapped: its wait with a time limit would abort the communicator, and it
        # completes on a stream. Work on the caller's own stream has no NCCL handle, and None would crash C++ callers.
        return DoneWork(result, context.completions) if inner is None else inner

    @contextmanager
    def _entering(self, info: OpInfo) -> Iterator[None]:
        """Hold the group's lock, if the call may be made."""
        context = self._context
        context.check_usable()
        if info.root >= context.world:  # torch refuses it on some ranks only, and those would enter nothing
            raise ValueError(f"{info.operation}: expected a root from 0 to {context.world - 1}, got {info.root}")
        with context.lock:
            yield

    @contextmanager
    def _recording(self, info: OpInfo, trail: Trail) -> Iterator[None]:
        try:
            with record_function(f"cgx::{info.operation}"):
                yield
        except Exception as error:
            trail.finish(error)
            self._context.recorder.fail(error)
            raise


def _announced(info: OpInfo, layout: int) -> Any:
    """Return the entry for the ledger. `layout` is a hash of anything else that must be identical on all ranks."""
    return collective_call(
        info.operation, info.dtype, info.shape, reduction=info.reduction, root=info.root, layout=layout
    )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _check(operation: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = (), *, in_place: bool = False) -> None:
    """Refuse tensors that Gloo would take unchecked. NCCL checks its tensors itself."""
    for tensor in inputs:
        if tensor.device.type == "cpu":
            (check_in_place if in_place else check_input)(operation, tensor)
    for tensor in outputs:
        if tensor.device.type == "cpu":
            check_output(operation, tensor)


def _check_rows(operation: str, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], world: int) -> None:
    """Refuse outputs that Gloo would refuse too, but only after the call has been entered."""
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
