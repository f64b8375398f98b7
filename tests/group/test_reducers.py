"""What a request means is found once, not at every call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_cgx.codecs import RAW, MaxMin
from torch_cgx.config import Compression, Settings
from torch_cgx.group.bootstrap.topology import Chooser
from torch_cgx.group.context import GroupContext
from torch_cgx.group.futures import Completions
from torch_cgx.group.layer_table import LayerTable
from torch_cgx.group.requests import Counts, Meanings, Request, make_reduction
from torch_cgx.plan.algorithms import Topology
from torch_cgx.plan.layout import Layer

SLICE = 1 << 20


class Watched(tuple[Layer, ...]):
    """Layers that know how often somebody walks them."""

    walks = 0

    def _noted(self, name: str, *arguments: Any) -> Any:
        Watched.walks += 1
        return getattr(tuple, name)(self, *arguments)

    def __iter__(self) -> Iterator[Layer]:
        return self._noted("__iter__")  # type: ignore[no-any-return]

    def __hash__(self) -> int:
        return self._noted("__hash__")  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self._noted("__repr__")  # type: ignore[no-any-return]

    def __getitem__(self, index: Any) -> Any:
        return self._noted("__getitem__", index)


@pytest.fixture
def context() -> GroupContext:
    return GroupContext(0, 2, Settings(), LayerTable(), Completions("none"))


def request_of(layers: tuple[Layer, ...] | None, numel: int = 200) -> Request:
    x = torch.zeros(numel)
    return Request("all_reduce", x, [x], "AVG", Compression(4, 64), 1000, True, layers=layers)


def test_a_second_call_walks_no_layers(context: GroupContext) -> None:
    layers = Watched([Layer(150, MaxMin(4, 64)), Layer(50, RAW)])
    meanings, counts = Meanings(context, Chooser.fixed(Topology.flat("SRA", 2))), Counts()
    walks = []
    for _ in range(3):
        request = request_of(layers)
        meaning = meanings.of(request, SLICE)
        call = meanings.call(request, meaning)
        counts.add(request, meaning)
        make_reduction(request, meaning, context)
        walks.append(Watched.walks)
        assert call is meanings.call(request, meaning)
    assert walks[0] > 0 and walks == [walks[0]] * 3
    payload = MaxMin(4, 64).payload_nbytes(150, 4) + RAW.payload_nbytes(50, 4)
    sums = {"operations": 3, "compressed_operations": 3, "bytes_before": 3 * 800}
    assert counts.figures["bytes_after"] >= 3 * payload
    assert {name: counts.figures[name] for name in sums} == sums


def test_requests_that_differ_are_told_apart(context: GroupContext) -> None:
    meanings = Meanings(context, Chooser.fixed(Topology.flat("SRA", 2)))
    layers = (Layer(150, MaxMin(4, 64)), Layer(50, RAW))
    first = meanings.of(request_of(layers), SLICE)
    alike = meanings.of(request_of((*layers[:1], *layers[1:])), SLICE)
    assert (alike.agreed, alike.layout) == (first.agreed, first.layout)
    others = [request_of((Layer(100, MaxMin(4, 64)), Layer(100, RAW))), request_of(None)]
    others.append(request_of(layers))
    others[-1].reduction = "SUM"
    found = {first.agreed, *(meanings.of(other, SLICE).agreed for other in others)}
    assert len(found) == 4
    plain = request_of(None)
    before = meanings.of(plain, SLICE)
    for number, numel in enumerate((120, 80)):
        context.layers.register(0, number, numel, 2, 64)
    assert meanings.of(plain, SLICE).agreed != before.agreed, "registered layers have changed"


def test_exact_ones_are_not_counted_as_compressed(context: GroupContext) -> None:
    meanings, counts = Meanings(context, Chooser.fixed(Topology.flat("SRA", 2))), Counts()
    request = request_of((Layer(200, RAW),))
    counts.add(request, meanings.of(request, SLICE))
    assert counts.figures == {"operations": 1, "compressed_operations": 0, "bytes_before": 800, "bytes_after": 800}
