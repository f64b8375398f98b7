"""The checker of order finds what it shall find: each wait that the CUDA path has is taken away once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.happens_before import Race
from tests.support.harness import needs_native
from tests.support.ordered_staging import OrderedSharedExchange, OrderedSharedGroup
from tests.support.standin import Meeting, NotedKernels, StandInDevice, StandInFuture, Stream
from torch_cgx.codecs import MaxMin
from torch_cgx.engines.computing import Reduction
from torch_cgx.engines.cuda.exchange import Arrival, to_host
from torch_cgx.engines.cuda.executor import CudaExecutor, Enqueued
from torch_cgx.group.calls import collective_call
from torch_cgx.group.cuda.side import CudaSide
from torch_cgx.group.futures import Completions
from torch_cgx.group.stream_work import StreamWork
from torch_cgx.kernels import Rounding
from torch_cgx.kernels.native import default_kernels
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.layout import Layer, make_layout, make_shares_layout

CPU = torch.device("cpu")
NUMEL = 4096


class Echo:
    """An exchange in which this rank's own payloads come back, as if a peer with the same values had sent them."""

    waits = False
    most_nbytes = None

    def __init__(self, device: StandInDevice) -> None:
        self._device, self._stream = device, Stream("exchanges")

    def begin(self, agreed: int) -> None: ...

    def start(self, outgoing: list[Tensor], incoming: list[Tensor], room_nbytes: int) -> Arrival:
        meeting = self._device.meet(self._stream, outgoing, incoming)
        with self._device.order.unseen():
            for mine, theirs in zip(outgoing, incoming, strict=True):
                theirs.copy_(mine)
        return meeting

    def set_timeout(self, timeout: Any) -> None: ...

    def close(self) -> None: ...


def nothing(*arguments: Any) -> None: ...


class Caller:
    """Makes values, has them reduced, waits, and reads them: all on the caller's stream."""

    def __init__(self, device: StandInDevice, *, widened: bool = False) -> None:
        self.device, self.widened = device, widened
        self.dtype = torch.float16 if widened else torch.float32
        kernels = NotedKernels(default_kernels(), device)
        self.executor = CudaExecutor(device, lambda: kernels, Echo(device), 0)  # type: ignore[arg-type]
        self.fields = {
            "layout": make_layout((Layer(NUMEL, MaxMin(4, 64)),), 2, 4, 2 * NUMEL),
            "topology": Topology.flat("SRA", 2),
            "scale": 1.0,
            "rounding": Rounding(),
            "agreed": 0,
        }

    def enqueued(self) -> tuple[Tensor, Enqueued]:
        with self.device.watching():
            values = torch.linspace(0, 1, NUMEL).to(self.dtype)
            operation = Reduction(values=values, residual=torch.zeros(NUMEL), **self.fields)  # type: ignore[arg-type]
            enqueued = self.executor.take(operation)
            self.executor.enqueue(operation, enqueued, widened=self.widened)
        return values, enqueued

    def work(self) -> StreamWork:
        values, enqueued = self.enqueued()
        return StreamWork(self.device, CPU, enqueued, [values], Completions("futures"))

    def read(self, work: StreamWork) -> None:
        with self.device.watching():
            (values,) = work.result()
            values.sum()
        self.device.order.check()


@pytest.mark.parametrize("widened", [False, True], ids=["in place", "in a wider copy"])
def test_an_operation_that_is_waited_for_is_in_order(widened: bool) -> None:
    device = StandInDevice()
    caller = Caller(device, widened=widened)
    for _ in range(2):
        work = caller.work()
        work.wait()
        caller.read(work)
    work = caller.work()
    assert torch.equal(work.get_future().wait()[0], work.result()[0])
    caller.read(work)
    work = caller.work()
    assert work.is_completed()
    caller.read(work)


@pytest.mark.parametrize("widened", [False, True], ids=["in place", "in a wider copy"])
def test_a_side_stream_that_does_not_wait_for_the_caller_is_found(
    widened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = StandInDevice()
    monkeypatch.setattr(device, "hold_back", nothing)
    first = "aten.to" if widened else "encode"
    with pytest.raises(
        Race, match=rf"on caller, which writes it, and {first}\S* on side 1, which reads it, have .* byte"
    ):
        Caller(device, widened=widened).enqueued()


def test_steps_that_do_not_wait_for_the_exchange_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meeting, "wait", nothing)
    with pytest.raises(Race, match="exchange on exchanges, which writes it, and reduce on side 1, which reads it"):
        Caller(StandInDevice()).enqueued()


def test_a_caller_who_does_not_wait_is_found() -> None:
    caller = Caller(StandInDevice())
    work = caller.work()
    with pytest.raises(Race, match=r"reduce on side 1, which writes it, and aten.sum.* on caller, which reads it"):
        caller.read(work)


def test_an_event_of_the_end_that_comes_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(StandInDevice())
    run = caller.executor._run

    def too_early(operation: Reduction, kernels: Any) -> None:
        early = caller.device.record(caller.device.here)
        monkeypatch.setattr(caller.device, "record", lambda stream: early)
        run(operation, kernels)

    monkeypatch.setattr(caller.executor, "_run", too_early)
    work = caller.work()
    work.wait()
    with pytest.raises(Race, match="on side 1, which writes it"):
        caller.read(work)


def test_a_future_that_is_set_on_another_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(StandInDevice())
    work = caller.work()
    monkeypatch.setattr(work, "settle", lambda future: future.set_result(work.result()))
    work.get_future().wait()
    with pytest.raises(Race, match="on side 1, which writes it"):
        caller.read(work)


def test_values_that_the_side_stream_was_not_told_to_keep_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, untold = StandInDevice(), StandInDevice()
    monkeypatch.setattr(untold, "keep", nothing)
    for device in (kept, untold):
        caller = Caller(device)
        caller.enqueued()  # whose values nobody holds, and nobody waits for
        if device is kept:
            device.order.check()
        else:
            with pytest.raises(Race, match=r"memory of caller was freed while .* on side 1"):
                device.order.check()


@pytest.mark.parametrize("forgotten", ["nothing", "values", "share"])
def test_of_a_reduce_scatter_the_side_stream_keeps_values_and_share(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = StandInDevice()
    caller = Caller(device)
    caller.fields["topology"] = Topology.flat("REDUCE_SCATTER", 2)
    caller.fields["layout"] = make_shares_layout((Layer(NUMEL // 2, MaxMin(4, 64)),), 2, 4, 2 * NUMEL)
    keep = device.keep
    lengths = {"values": NUMEL, "share": NUMEL // 2}
    monkeypatch.setattr(
        device, "keep", lambda tensor, stream: tensor.numel() == lengths.get(forgotten) or keep(tensor, stream)
    )

    def enqueue() -> None:
        with device.watching():
            values = torch.linspace(0, 1, NUMEL)
            share = values[: NUMEL // 2].clone()
            operation = Reduction(values=values, share=share, **caller.fields)  # type: ignore[arg-type]
            caller.executor.enqueue(operation, caller.executor.take(operation), widened=False)

    enqueue()  # whose tensors nobody holds, and nobody waits for
    if forgotten == "nothing":
        device.order.check()
    else:
        with pytest.raises(Race, match=r"memory of caller was freed while .* on side 1"):
            device.order.check()


def test_payloads_that_are_freed_before_the_exchange_is_over_are_found() -> None:
    device = StandInDevice()
    side, exchanges = Stream("side 1"), Stream("exchanges")
    with device.using(side):
        payload = device.empty(64, CPU)
        meeting = device.meet(exchanges, [payload], [])
        meeting.stashed = None  # as if NCCL did not hold it
        del payload
    with pytest.raises(Race, match="memory of side 1 was freed while exchange on exchanges, which reads it"):
        device.order.check()


@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_callback_uses_is_kept_for_its_stream(keeps: bool) -> None:
    """As hooks do with residuals, which are made on the caller's stream."""
    device = StandInDevice()
    caller = Caller(device)
    side = CudaSide(_engine(device), None, None)
    work, caller_stream = caller.work(), device.here

    def finish(done: Any) -> Tensor:
        with device.order.unseen():
            lost = torch.ones(NUMEL)
        device.order.allocated(lost, caller_stream)
        if keeps:
            side.record_use(lost)
        return done.value()[0] + lost

    made = work.get_future().then(finish)
    assert isinstance(made, StandInFuture) and made.wait().numel() == NUMEL
    if not keeps:
        # It was freed inside of the callback, before anybody could have waited for its stream.
        with pytest.raises(Race, match=r"memory of caller was freed while .* on callback 1"):
            device.order.check()
    else:
        caller.read(work)


def _engine(device: StandInDevice) -> Any:
    from torch_cgx.group.cuda import Engine

    return Engine("cpu", lambda: None, device, default_kernels)


class Idle:
    """A native executor that carries nothing, and says that it has."""

    limit_nbytes = 1 << 20

    def submit(self, prepared: Any, address: int, *more: Any, **options: Any) -> tuple[int, int]:
        return 1, 0

    def wait(self, number: int, slice_ms: int) -> bool:
        return True


def some_call(agreed: int) -> Any:
    return collective_call("all_to_all_single", layout=agreed)


def staged(device: StandInDevice, after: Callable[[Arrival, Tensor], None]) -> None:
    """One exchange through the host of a payload that the current stream has just made, and what follows."""
    executor: Any = Idle()
    exchange = OrderedSharedExchange(device, executor, some_call, 0, 2, timedelta(seconds=9))
    with device.using(Stream("side 1")):
        outgoing, incoming = device.empty(64, CPU), device.empty(64, CPU)
        outgoing.fill_(1)
        arrival = exchange.start([outgoing[:0], outgoing], [incoming[:0], incoming], 64)
        after(arrival, incoming)
    del arrival, incoming, outgoing
    device.order.check()


def read_after_waiting(arrival: Arrival, incoming: Tensor) -> None:
    arrival.wait()
    incoming.clone()


@needs_native
def test_a_staged_exchange_is_in_order() -> None:
    staged(StandInDevice(), read_after_waiting)


@needs_native
def test_a_host_that_sends_before_the_device_has_copied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device = StandInDevice()
    monkeypatch.setattr(device, "synchronize", nothing)
    with pytest.raises(
        Race, match=r"aten.copy_.* on side 1, which writes it, and the native executor on the host, which writes it"
    ):
        staged(device, read_after_waiting)


@needs_native
def test_payloads_that_nobody_waits_for_are_found() -> None:
    def wait_for_none(arrival: Any, incoming: Tensor) -> None:
        for host, payload in arrival.copies:
            payload.copy_(host)

    with pytest.raises(Race, match=r"the native executor on the host, which writes it, and aten.copy_.* on side 1"):
        staged(StandInDevice(), wait_for_none)


def test_pinned_memory_that_is_freed_under_the_executor_is_found() -> None:
    device = StandInDevice()
    shared: Any = OrderedSharedGroup(Idle(), device)  # type: ignore[arg-type]
    host = device.pinned(64)
    shared.submit(None, host.data_ptr())  # whom nobody waits for
    del host
    with pytest.raises(Race, match="pinned memory was freed while the native executor on the host"):
        device.order.check()


def test_copying_to_the_host_and_waiting_for_it_lets_the_host_read() -> None:
    device = StandInDevice()
    shared: Any = OrderedSharedGroup(Idle(), device)  # type: ignore[arg-type]
    with device.using(Stream("side 1")):
        payload, host = device.empty(64, CPU), device.pinned(64)
        to_host(device, [payload], [host])
        number, _ = shared.submit(None, host.data_ptr())
        assert shared.wait(number, 1)
        host.copy_(payload)  # what was there has left
    device.order.check()


def test_reads_need_no_order_and_neither_do_different_bytes() -> None:
    device = StandInDevice()
    values = torch.zeros(100)
    halves = values.clone().split(50)
    one, other = Stream("one"), Stream("other")
    for stream in (one, other):
        device.order.enqueue(stream, "look", reads=[values])
    for stream, half in zip((one, other), halves, strict=True):
        device.order.enqueue(stream, "write", writes=[half])
    with pytest.raises(Race, match="write on one, which writes it, and look on other, which reads it, have 4 bytes"):
        device.order.enqueue(other, "look", reads=[halves[0][49:]])
