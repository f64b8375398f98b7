"""What of compressed FSDP2 needs no other process: arguments, their errors, layers of flat tensors, a group of one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_cgx
from torch_cgx.codecs import RAW, MaxMin, Rotated
from torch_cgx.config import Compression, Settings
from torch_cgx.group.compression import Override
from torch_cgx.plan.layout import Layer

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp.FSDPModule, "set_custom_all_gather"):
    pytest.skip("FSDP2 of this torch takes no communication of one's own", allow_module_level=True)

from torch_cgx.fsdp import Compressed, compress  # noqa: E402
from torch_cgx.fsdp.comms import AllGather, Groups, ReduceScatter, lay_out  # noqa: E402
from torch_cgx.fsdp.hsdp import Replicas, finest  # noqa: E402

FOUR, EIGHT, EXACT = Compression(4, 256), Compression(8, 256), Compression(32)
SETTINGS = Settings()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("cgx", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8), nn.Linear(8, 2048))


def sharded() -> nn.Module:
    net = make_net()
    fsdp.fully_shard(net[0])
    whole: nn.Module = fsdp.fully_shard(net)
    return whole


def bits_of(handle: Compressed) -> dict[str, tuple[int, int]]:
    """Of gradients and weights, of each parameter that is compressed."""
    found = {each.name: (each.grad.bits, each.weight.bits) for each in handle.parameters}
    return {name: bits for name, bits in found.items() if bits != (32, 32)}


# ---- arguments ----


@pytest.mark.usefixtures("alone")
def test_large_parameters_of_several_dimensions_are_compressed_and_no_others() -> None:
    net = sharded()
    assert bits_of(compress(net)) == {"0.weight": (4, 8), "3.weight": (4, 8)}
    assert bits_of(compress(net, min_numel=2049)) == {"3.weight": (4, 8)}
    assert set(bits_of(compress(net, min_numel=0))) == {"0.weight", "2.weight", "3.weight"}
    assert bits_of(compress(net, grad_bits=32, weight_bits=2))["0.weight"] == (32, 2)
    assert bits_of(compress(net, grad_bits=32, weight_bits=32)) == {}


@pytest.mark.usefixtures("alone")
def test_overrides_name_parameters_and_the_last_that_matches_holds() -> None:
    overrides = {"*.weight": {"grad_bits": 8}, "3.*": {"weight_bits": 32, "bucket_size": 64}}
    handle = compress(sharded(), overrides=overrides, bucket_size=128)
    assert bits_of(handle) == {"0.weight": (8, 8), "3.weight": (4, 32)}
    assert [each.grad.block for each in handle.parameters if each.name == "3.weight"] == [64]
    assert [each.grad.block for each in handle.parameters if each.name == "0.weight"] == [128]


@pytest.mark.usefixtures("alone")
def test_the_report_tells_of_every_parameter_in_the_order_of_the_model() -> None:
    lines = compress(sharded(), overrides={"3.*": {"grad_bits": 32}}).report().splitlines()
    assert lines[0].split() == ["parameter", "values", "grad", "bits", "weight", "bits", "bucket", "size"]
    assert [line.split()[0] for line in lines[1:]] == [name for name, _ in make_net().named_parameters()]
    assert lines[1].split() == ["0.weight", "2,048", "4", "8", "1024"]
    assert lines[2].split() == ["0.bias", "64", "32", "32"]
    assert lines[-2].split() == ["3.weight", "16,384", "32", "8", "1024"]


@pytest.mark.usefixtures("alone")
def test_one_quantizer_is_for_gradients_and_for_weights_of_so_few_bits_and_overrides_have_their_own() -> None:
    lines = compress(sharded(), quantizer="rotated").report().splitlines()
    assert lines[1].split() == ["0.weight", "2,048", "4", "rotated", "8", "1024"]
    assert lines[2].split() == ["0.bias", "64", "32", "32"]
    handle = compress(sharded(), grad_bits=2, weight_bits=4, quantizer="rotated", overrides={"3.*": {"grad_bits": 32}})
    lines = handle.report().splitlines()
    assert lines[1].split() == ["0.weight", "2,048", "2", "rotated", "4", "rotated", "1024"]
    assert lines[-2].split() == ["3.weight", "16,384", "32", "4", "rotated", "1024"]
    handle = compress(sharded(), overrides={"0.*": {"quantizer": "rotated", "bucket_size": 256}})
    chosen = {each.name: each.grad for each in handle.parameters}
    assert chosen["0.weight"] == Compression(4, 256, "rotated") and chosen["3.weight"] == Compression(4, 1024)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_bits": 9}, "grad_bits: expected 1 to 8 or 32, got 9"),
        ({"grad_bits": True}, "grad_bits: expected 1 to 8 or 32, got True"),
        ({"weight_bits": 0}, "weight_bits: expected 1 to 8 or 32, got 0"),
        ({"weight_bits": "8"}, "weight_bits: expected 1 to 8 or 32, got '8'"),
        ({"bucket_size": 0}, "bucket size: expected 1 to 65536 values, got 0"),
        ({"quantizer": "maxmax"}, "quantizer: expected 'maxmin' or 'rotated', got 'maxmax'"),
        ({"grad_bits": 5, "quantizer": "rotated"}, "grad_bits of the rotated quantizer: expected 1 to 4"),
        ({"weight_bits": 9, "quantizer": "rotated"}, "weight_bits of the rotated quantizer: expected 1 to 4"),
        ({"bucket_size": 96, "quantizer": "rotated"}, "bucket size of the rotated quantizer: expected one of 64, 128"),
        (
            {"overrides": {"0.*": {"quantizer": 1}}},
            "overrides['0.*']: quantizer: expected 'maxmin' or 'rotated', got 1",
        ),
        ({"min_numel": -1}, "min_numel: expected 0 or more values, got -1"),
        ({"overrides": [1]}, "overrides: expected a dict of dicts by patterns of names, got [1]"),
        ({"overrides": {"0.*": 8}}, "overrides['0.*']: expected a pattern and a dict with the keys"),
        ({"overrides": {"0.*": {"bits": 8}}}, "got 'bits'"),
        ({"overrides": {"0.*": {"grad_bits": 12}}}, "overrides['0.*']: grad_bits: expected 1 to 8 or 32, got 12"),
        ({"overrides": {"0.*": {"bucket_size": -1}}}, "overrides['0.*']: bucket size: expected 1 to 65536"),
        ({"overrides": {"attn.*": {"grad_bits": 8}}}, "got 'attn.*', which matches none of"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named_with_what_was_expected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        compress(sharded(), **options)
    assert message in str(raised.value)


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="got a Sequential without: call fully_shard first"):
        compress(make_net())
    with pytest.raises(ValueError, match=r"expected an nn\.Module, got dict"):
        compress({})  # type: ignore[arg-type]


def test_a_torch_without_the_extension_points_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fsdp.FSDPModule, "set_custom_all_gather")
    with pytest.raises(RuntimeError, match="expected a torch whose FSDP2 takes communication of one's own"):
        compress(make_net())


@pytest.mark.usefixtures("alone")
def test_one_rank_alone_trains_and_a_shared_parameter_answers_to_each_of_its_names() -> None:
    net = make_net()
    net.append(nn.Linear(2048, 8))
    net.append(net[3])
    whole = fsdp.fully_shard(net)
    handle = compress(whole, overrides={"5.weight": {"grad_bits": 2}})
    assert bits_of(handle)["3.weight"] == (2, 8)
    whole(torch.randn(4, 32)).sum().backward()
    assert all(p.grad is not None for p in whole.parameters())
    assert handle.groups == ()
    handle.remove()


# ---- layers ----


def test_a_share_is_laid_out_with_small_parameters_exact() -> None:
    layers = lay_out((4096, 15, 64, 0), (FOUR, EIGHT, EXACT, FOUR), SETTINGS)
    assert layers == (Layer(4096, MaxMin(4, 256)), Layer(15, RAW), Layer(64, RAW), Layer(0, RAW))
    skipping = Settings(skip_incomplete=True, minimal_numel=100)
    assert lay_out((4096, 64), (FOUR, EIGHT), skipping) == (Layer(4096, MaxMin(4, 256, True)), Layer(64, RAW))


class FakeGroup:
    """In the place of a cgx group: notes the layers that it is asked to carry."""

    def __init__(self) -> None:
        self.settings = SETTINGS
        self.asked: list[tuple[tuple[Layer, ...], dict[str, Any]]] = []
        self.waited = 0

    def carry(self, output: Tensor, input: Tensor, layers: tuple[Layer, ...], **more: Any) -> Any:
        self.asked.append((layers, more))
        return self

    all_gather_layers = reduce_scatter_layers = carry

    def wait(self) -> None:
        self.waited += 1


class FakeGroups(Groups):
    def of(self, group: Any) -> Any:
        return group


def fake_param(numel: int, trained: bool = True, state: str = "SHARDED", after_forward: int = 0) -> Any:
    return SimpleNamespace(
        _sharded_param_data=torch.empty(numel),
        _sharded_post_forward_param_data=torch.empty(after_forward),
        _sharded_local_tensor=torch.empty(numel),
        sharded_state=SimpleNamespace(name=state),
        padded_sharded_param_size=torch.Size((numel,)),
        sharded_param=SimpleNamespace(requires_grad=trained),
    )


def reduced(params: list[Any], numel: int) -> list[tuple[int, int]]:
    """(numel, bits) of each layer that a reduce-scatter of such a share consists of."""
    comm = ReduceScatter(params, [FOUR, EXACT, EIGHT][: len(params)], FOUR, FakeGroups())
    group = FakeGroup()
    comm(torch.empty(numel), torch.empty(2 * numel), group, "AVG")
    (layers, more) = group.asked[0]
    assert more["op"] == "AVG"
    assert group.waited == 1
    return [(layer.numel, layer.codec.bits) for layer in layers]


def test_a_reduce_scatter_is_of_all_parameters_or_of_those_that_are_trained_or_of_nobody_knows_which() -> None:
    params = [fake_param(1000), fake_param(10, trained=False), fake_param(500)]
    assert reduced(params, 1510) == [(1000, 4), (10, 32), (500, 8)]
    assert reduced(params, 1500) == [(1000, 4), (500, 8)]
    assert reduced(params, 1000) == [(1000, 32)]  # the most bits of any that may be in it
    assert reduced([], 777) == [(777, 4)]
    assert reduced([SimpleNamespace()], 777) == [(777, 4)]  # of another torch


def test_a_reduce_scatter_of_nobody_knows_what_takes_rotated_rather_than_maxmin_at_the_same_bits() -> None:
    group = FakeGroup()
    comm = ReduceScatter(
        [fake_param(1000), fake_param(500)], [Compression(4, 256, "rotated"), FOUR], FOUR, FakeGroups()
    )
    comm(torch.empty(1000), torch.empty(2000), group, "AVG")
    assert group.asked[0][0] == (Layer(1000, Rotated(4, 256)),)


def gathered(params: list[Any], numel: int) -> list[tuple[int, int]]:
    comm = AllGather(params, [FOUR, EXACT, EIGHT][: len(params)], FOUR, FakeGroups())
    group = FakeGroup()
    work = comm(torch.empty(2 * numel), torch.empty(numel), group, async_op=True)
    assert work is group
    assert group.waited == 0
    (layers, more) = group.asked[0]
    assert more["stochastic"] is True
    return [(layer.numel, layer.codec.bits) for layer in layers]


def test_an_all_gather_is_of_the_shards_that_the_parameters_have_at_that_moment() -> None:
    params = [fake_param(1000, after_forward=2000), fake_param(20, after_forward=40)]
    assert gathered(params, 1020) == [(1000, 4), (20, 32)]
    for param in params:
        param.sharded_state.name = "SHARDED_POST_FORWARD"
    assert gathered(params, 2040) == [(2000, 4), (40, 32)]
    assert gathered(params, 1020) == [(1020, 4)]
    assert gathered([], 777) == [(777, 4)]
    assert gathered([SimpleNamespace()], 777) == [(777, 4)]  # of another torch


def test_what_tensors_of_the_users_own_gather_is_exact_and_so_is_all_while_uncompressed() -> None:
    params = [fake_param(1000), fake_param(20)]
    with torch_cgx.uncompressed():
        assert gathered(params, 1020) == [(1020, 32)]
        assert reduced(params, 1020) == [(1020, 32)]
    params[1]._sharded_local_tensor.fsdp_pre_all_gather = lambda mesh: None
    assert gathered(params, 1020) == [(1020, 32)]


# ---- replicas ----


def test_layers_of_one_total_are_cut_where_either_is_and_keep_the_more_exact_quantizer() -> None:
    one = (Layer(100, MaxMin(4, 64)), Layer(20, RAW), Layer(0, RAW), Layer(80, MaxMin(4, 64)))
    other = (Layer(120, MaxMin(8, 64)), Layer(80, MaxMin(4, 32)))
    merged = (Layer(100, MaxMin(8, 64)), Layer(20, RAW), Layer(80, MaxMin(4, 32)))
    assert finest(one, other) == finest(other, one) == merged
    assert finest(merged, one) == merged
    assert finest(one, one) is one


def test_at_the_same_bits_rotated_loses_less_whatever_the_blocks_and_more_bits_lose_less_still() -> None:
    worst_first = (MaxMin(2, 512), MaxMin(2, 64), Rotated(2, 4096), Rotated(2, 64), MaxMin(3, 512), Rotated(3, 64), RAW)
    for worse, better in pairwise(worst_first):
        one, other = (Layer(8192, worse),), (Layer(8192, better),)
        assert finest(one, other) == finest(other, one) == other


class FakeReplicateGroup:
    def __init__(self) -> None:
        self.told: list[Override | None] = []
        self.override_compression = self.told.append


def test_the_replicate_group_is_told_of_layers_once_and_of_several_of_a_total_all_cuts_hold() -> None:
    group: Any = FakeReplicateGroup()
    exact_norm = (Layer(100, MaxMin(4, 64)), Layer(20, RAW))
    replicas = Replicas.of(group).claim(FOUR)
    assert group.told == [Override(FOUR)]
    replicas.expect(exact_norm)
    replicas.expect(exact_norm)
    assert group.told[1:] == [Override(FOUR, {120: exact_norm})]
    replicas.expect((Layer(60, MaxMin(4, 64)), Layer(60, MaxMin(4, 64))))
    assert [layer.numel for layer in group.told[-1].layers[120]] == [60, 40, 20]
    again = Replicas.of(group).claim(EIGHT)  # another model's
    again.expect((Layer(120, MaxMin(8, 64)),))
    merged = (Layer(60, MaxMin(8, 64)), Layer(40, MaxMin(8, 64)), Layer(20, RAW))
    assert group.told[-1] == Override(EIGHT, {120: merged})
    replicas.release()
    assert group.told[-1] == Override(EIGHT, {120: (Layer(120, MaxMin(8, 64)),)})
    again.release()
    again.release()
    assert group.told[-1] is None and len(group.told) == 7


def test_of_several_claims_at_the_same_bits_that_of_rotated_values_holds() -> None:
    group: Any = FakeReplicateGroup()
    four, rotated = Replicas.of(group).claim(FOUR), Replicas.of(group).claim(Compression(4, 1024, "rotated"))
    assert group.told[-1] == Override(Compression(4, 1024, "rotated"))
    four.expect((Layer(2048, MaxMin(4, 256)),))
    rotated.expect((Layer(2048, Rotated(4, 1024)),))
    assert group.told[-1].layers == {2048: (Layer(2048, Rotated(4, 1024)),)}
    rotated.release()
    assert group.told[-1] == Override(FOUR, {2048: (Layer(2048, MaxMin(4, 256)),)})
    four.release()
