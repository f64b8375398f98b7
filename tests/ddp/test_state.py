"""What of the DDP hook needs no other process: choices, their errors, checkpoints, reports, and a group of one."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_cgx import AdaptiveBits, CGXState, cgx_hook
from torch_cgx.config import Compression
from torch_cgx.ddp import residuals
from torch_cgx.ddp.buckets import KnownBucket, KnownLayer
from torch_cgx.ddp.residuals import Residuals, add_residual, scale_of


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8), nn.Linear(8, 2048))


def bits_of(state: CGXState, net: nn.Module) -> dict[str, tuple[int, int]]:
    """(bits, block) of each parameter that is compressed."""
    chosen = {name: state._choices.of([name], p.shape, p.numel()) for name, p in net.named_parameters()}
    return {name: (each.bits, each.block) for name, each in chosen.items() if each.bits != 32}


def quantizers_of(state: CGXState, net: nn.Module) -> dict[str, str]:
    """The quantizer of each parameter that is compressed."""
    chosen = {name: state._choices.of([name], p.shape, p.numel()) for name, p in net.named_parameters()}
    return {name: each.quantizer for name, each in chosen.items() if not each.is_exact}


def test_large_layers_of_several_dimensions_are_compressed_and_no_others() -> None:
    net = make_net()
    expected = {"0.weight": (4, 1024), "3.weight": (4, 1024)}
    assert bits_of(CGXState(), net) == expected
    assert bits_of(CGXState(None, 1024, {"bits": 4, "bucket_size": 1024}), net) == expected
    assert bits_of(CGXState(None, 2048), net) == expected
    assert bits_of(CGXState(None, 2049), net) == {"3.weight": (4, 1024)}
    every = dict.fromkeys(("0.weight", "2.weight", "3.weight"), (8, 64))
    assert bits_of(CGXState(None, 0, {"bits": 8, "bucket_size": 64}), net) == every
    assert bits_of(CGXState(None, compression_params={"bits": 2}), net)["0.weight"] == (2, 1024)
    assert bits_of(CGXState(None, compression_params={"bits": 32}), net) == {}


def test_of_several_overrides_that_match_the_last_holds() -> None:
    net = make_net()
    overrides: dict[str, dict[str, int]] = {"*.weight": {"bits": 8}, "3.*": {"bits": 2, "bucket_size": 64}}
    state = CGXState.from_model(net, None, 0, {"bits": 4, "bucket_size": 512}, overrides=overrides)
    assert bits_of(state, net) == {"0.weight": (8, 512), "2.weight": (8, 512), "3.weight": (2, 64)}
    overrides["*"] = {"bits": 32}
    assert bits_of(CGXState.from_model(net, overrides=overrides), net) == {}


def test_a_quantizer_is_chosen_beside_bits_and_an_override_may_have_another() -> None:
    net = make_net()
    assert quantizers_of(CGXState(), net) == {"0.weight": "maxmin", "3.weight": "maxmin"}
    rotated = CGXState(compression_params={"bits": 2, "quantizer": "rotated"})
    assert quantizers_of(rotated, net) == {"0.weight": "rotated", "3.weight": "rotated"}
    assert bits_of(rotated, net) == {"0.weight": (2, 1024), "3.weight": (2, 1024)}
    overrides: dict[str, dict[str, int | str]] = {"3.*": {"bits": 8, "quantizer": "maxmin"}}
    mixed = CGXState.from_model(net, compression_params={"bits": 2, "quantizer": "rotated"}, overrides=overrides)
    assert quantizers_of(mixed, net) == {"0.weight": "rotated", "3.weight": "maxmin"}


def test_a_shared_parameter_answers_to_each_of_its_names() -> None:
    net = nn.ModuleDict({"embedding": nn.Linear(64, 64, bias=False), "lm_head": nn.Linear(64, 64, bias=False)})
    net["lm_head"].weight = net["embedding"].weight
    state = CGXState.from_model(net, overrides={"lm_head.weight": {"bits": 32}})
    names = state._names[id(net["embedding"].weight)]
    assert names == ["embedding.weight", "lm_head.weight"]
    assert state._choices.of(names, (64, 64), 4096).bits == 32


def test_names_are_those_of_the_users_module() -> None:
    compiled = torch.compile(make_net(), backend="eager")
    CGXState.from_model(compiled, overrides={"0.weight": {"bits": 8}})
    partly = nn.Sequential(nn.Linear(64, 64), compiled)
    CGXState.from_model(partly, overrides={"1.0.weight": {"bits": 8}})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compression_params": {"bits": 9}}, "compression_params: bits: expected 1 to 8 or 32, got 9"),
        ({"compression_params": {"bits": 0}}, "expected 1 to 8 or 32, got 0"),
        ({"compression_params": {"bits": "4"}}, "compression_params: expected a whole number for 'bits', got '4'"),
        ({"compression_params": {"bits": True}}, "expected a whole number for 'bits', got True"),
        ({"compression_params": {"bit": 4}}, "expected the keys 'bits', 'bucket_size' and 'quantizer', got 'bit'"),
        ({"compression_params": {"bucket_size": 0}}, "bucket size: expected 1 to 65536 values, got 0"),
        ({"compression_params": 4}, "with the keys 'bits', 'bucket_size' and 'quantizer', got 4"),
        ({"compression_params": {"quantizer": "maxmax"}}, "quantizer: expected 'maxmin' or 'rotated', got 'maxmax'"),
        (
            {"compression_params": {"quantizer": 2}},
            "compression_params: quantizer: expected 'maxmin' or 'rotated', got 2",
        ),
        (
            {"compression_params": {"bits": 5, "quantizer": "rotated"}},
            r"compression_params: bits of the rotated quantizer: expected 1 to 4 \(or 32: exact; .*got 5",
        ),
        (
            {"compression_params": {"bucket_size": 1000, "quantizer": "rotated"}},
            "expected one of 64, 128, 256, 512, 1024, 2048, 4096, got 1000",
        ),
        (
            {"compression_params": {"quantizer": "rotated"}, "overrides": {"0.*": {"bits": 8}}},
            r"overrides\['0\.\*'\]: bits of the rotated quantizer: .* got 8",
        ),
        (
            {"compression_params": {"quantizer": "rotated"}, "adaptive": "auto"},
            "adaptive: expected the quantizer 'maxmin', among whose widths it chooses, got 'rotated'",
        ),
        ({"overrides": {"0.*": {"bits": 3.5}}}, r"overrides\['0\.\*'\]: expected a whole number for 'bits', got 3\.5"),
        ({"overrides": {"nothing.*": {"bits": 8}}}, "got 'nothing.*', which matches none of 0.weight"),
        ({"layer_min_size": -1}, "layer_min_size: expected 0 or more values, got -1"),
        ({"start_step": -1}, "start_step: expected 0 or more, got -1"),
        ({"measure_every": 0}, "measure_every: expected 1 or more, got 0"),
        ({"grad_scaler": 1024.0}, "grad_scaler: expected a GradScaler, got float"),
    ],
)
def test_errors_name_what_is_allowed(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CGXState.from_model(make_net(), **given)


@pytest.mark.parametrize(
    ("first", "shown"),
    [
        (nn.Linear(2, 2), r"got Linear\. .*CGXState\.from_model\(model\)"),
        ({"bits": 4}, r"got dict\. .*compression_params=\.\.\."),
        (4, "got int"),
        ("cgx", "got str"),
        (dist.GroupMember.NON_GROUP_MEMBER, "new_group returns to ranks outside the group"),
    ],
)
def test_a_first_argument_that_is_no_process_group_is_refused_at_once(first: object, shown: str) -> None:
    with pytest.raises(TypeError, match=f"process_group: expected None .* or a process group.*{shown}"):
        CGXState(first)
    with pytest.raises(TypeError, match="process_group: expected None"):
        CGXState.from_model(make_net(), process_group=first)


def test_a_state_before_init_process_group_says_what_to_call_when_it_is_used() -> None:
    assert not dist.is_initialized()
    state = CGXState.from_model(make_net())  # allowed: it is bound to the default group when it is first used
    assert not state.report().layers
    with pytest.raises(ValueError, match=r"expected an initialized process group: call init_process_group first"):
        _ = state.group
    with pytest.raises(ValueError, match=r"call init_process_group first"):
        cgx_hook(state, _Bucket())  # type: ignore[arg-type]


class _Bucket:
    """As much of DDP's GradBucket as a hook looks at before it asks for its group."""

    def buffer(self) -> Tensor:
        return torch.zeros(4096)

    def index(self) -> int:
        return 0


@pytest.mark.parametrize("state", [None, CGXState, make_net()], ids=["None", "the class", "a model"])
def test_a_hook_that_is_registered_without_a_state_says_how_to_register_it(state: object) -> None:
    with pytest.raises(TypeError, match=r"state: expected a CGXState, got .*register_comm_hook\(state, cgx_hook\)"):
        cgx_hook(state, _Bucket())  # type: ignore[arg-type]


def test_overrides_without_names_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"overrides: .*CGXState\.from_model"):
        CGXState(None, overrides={"*": {"bits": 8}})


# ---- residuals ----


class _Scaler:
    """A GradScaler's scale, and who looks at it."""

    def __init__(self, scale: Tensor | None) -> None:
        self._scale = scale
        self.looks = 0

    def get_scale(self) -> float:
        self.looks += 1
        return 8.0 if self._scale is None else self._scale.item()


def test_the_host_does_not_look_at_a_scale_that_is_on_a_device() -> None:
    on_device = _Scaler(torch.tensor(2.0, device="meta"))  # to look at this one is an error
    assert scale_of(on_device) is on_device._scale and on_device.looks == 0
    assert scale_of(_Scaler(torch.tensor(2.0))) == 2.0
    assert scale_of(_Scaler(None)) == 8.0 and scale_of(None) == 1.0


def test_residuals_are_multiplied_on_the_device_where_the_scale_is() -> None:
    residuals = Residuals()
    (a, b), scale = torch.ones(2, 3), torch.tensor(4.0)
    flat = residuals.lay_out([a, b], ["a", "b"])
    flat.fill_(1.0)
    residuals.rescale(scale)
    assert flat.tolist() == [4.0] * 6 and residuals.scale == 4.0
    scale.fill_(2.0)
    assert residuals.scale == 4.0, "it was changed in place"
    residuals.rescale(scale)
    assert flat.tolist() == [2.0] * 6
    residuals.rescale(0.5)
    assert flat.tolist() == [0.5] * 6

    residuals.put({"a": torch.full((3,), 3.0), "b": torch.full((3,), 5.0)}, 2.0)
    residuals.rescale(scale.fill_(8.0))
    named = residuals.named({id(a): "a"}.get)
    assert (named["a"].tolist(), named["b"].tolist()) == ([12.0] * 3, [20.0] * 3)
    assert residuals.lay_out([a], ["a"]).tolist() == [12.0] * 3
    residuals.rescale(scale.fill_(4.0))
    assert residuals.lay_out([b, a], ["b", "a"]).tolist() == [10.0] * 3 + [6.0] * 3


def test_residuals_are_kept_by_parameter_when_grad_buckets_are_made_anew() -> None:
    a, b, c = (nn.Parameter(torch.zeros(n)) for n in (3, 4, 5))
    residuals = Residuals()
    first = residuals.lay_out([a, b, c], ["a", "b", "c"])
    first.copy_(torch.arange(12.0))
    second = residuals.lay_out([c, a], ["c", "a"])
    third = residuals.lay_out([b], ["b"])
    assert second.tolist() == [7, 8, 9, 10, 11, 0, 1, 2]
    assert third.tolist() == [3, 4, 5, 6]
    residuals.rescale(4.0)
    assert second.tolist() == [28, 32, 36, 40, 44, 0, 4, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_adding_a_residual_loses_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, residual = torch.randn(1000).to(dtype), torch.randn(1000)
    exact = x.double() + residual
    buffer = x.clone()
    lost = add_residual(buffer, residual)
    kept = buffer.double() + (0 if lost is None else lost)
    torch.testing.assert_close(kept, exact, rtol=1e-6, atol=1e-7)
    assert (lost is None) == (dtype == torch.float32)
    full = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
    lost = add_residual(full, torch.full((4,), float(torch.finfo(dtype).max)))
    assert torch.isinf(full).all()
    assert lost is None or not lost.any()


# ---- checkpoints, without a group ----


def trained_like(net: nn.Module, **options: Any) -> CGXState:
    """A state with residuals, as though it had made three steps."""
    options = {"error_feedback": True, "overrides": {"0.*": {"bits": 2}}, **options}
    state = CGXState.from_model(net, None, 512, {"bits": 3, "bucket_size": 256}, **options)
    state._residuals.put({"0.weight": torch.randn(2048), "3.weight": torch.randn(16384)}, 8.0)
    state._step = 3
    return state


def test_a_state_dict_holds_plain_types_and_tensors_and_comes_back() -> None:
    net = make_net()
    saved = trained_like(net).state_dict()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    state = CGXState.from_model(net)
    state.load_state_dict(torch.load(file, weights_only=True))
    again = state.state_dict()
    assert again.keys() == saved.keys()
    assert all(again[key] == saved[key] for key in saved if key != "residuals")
    for name, kept in saved["residuals"].items():
        assert torch.equal(again["residuals"][name], kept)
    assert bits_of(state, net) == {"0.weight": (2, 256), "2.weight": (3, 256), "3.weight": (3, 256)}
    saved["settings"]["compression_params"]["bits"] = 7
    saved["residuals"]["0.weight"].zero_()
    assert again["settings"]["compression_params"]["bits"] == 3
    assert state.state_dict()["residuals"]["0.weight"].any()


def test_loading_refuses_what_is_no_state_of_this_version() -> None:
    with pytest.raises(ValueError, match="expected version 1 to 3, got None"):
        CGXState().load_state_dict({})
    with pytest.raises(ValueError, match="expected version 1 to 3, got 99"):
        CGXState().load_state_dict({**CGXState().state_dict(), "version": 99})


# What `state_dict` returned before there were other quantizers.
OF_VERSION_2: dict[str, Any] = {
    "version": 2,
    "step": 3,
    "settings": {
        "layer_min_size": 512,
        "compression_params": {"bits": 3, "bucket_size": 256},
        "overrides": {"0.*": {"bits": 2}},
        "stochastic": None,
        "error_feedback": True,
        "start_step": 0,
        "adaptive": None,
    },
    "rank": 0,
    "world": 1,
    "residuals": {"0.weight": torch.ones(2048)},
    "residual_scale": 8.0,
    "adaptive": None,
}
# And before bits could choose themselves.
OF_VERSION_1: dict[str, Any] = {
    **{key: value for key, value in OF_VERSION_2.items() if key != "adaptive"},
    "version": 1,
    "settings": {key: value for key, value in OF_VERSION_2["settings"].items() if key != "adaptive"},
}


@pytest.mark.parametrize("saved", [OF_VERSION_1, OF_VERSION_2], ids=["version 1", "version 2"])
def test_what_an_older_release_saved_loads_with_maxmin(saved: dict[str, Any]) -> None:
    net = make_net()
    state = CGXState.from_model(net, compression_params={"bits": 3, "bucket_size": 256, "quantizer": "rotated"})
    with pytest.warns(UserWarning, match="compression_params .*'rotated'} becomes .*'maxmin'}"):
        state.load_state_dict(saved)
    assert bits_of(state, net) == {"0.weight": (2, 256), "2.weight": (3, 256), "3.weight": (3, 256)}
    assert set(quantizers_of(state, net).values()) == {"maxmin"}
    again = state.state_dict()
    assert again["step"] == 3 and torch.equal(again["residuals"]["0.weight"], torch.ones(2048))


def test_settings_that_come_to_the_same_are_loaded_without_a_word() -> None:
    given = {"bits": 3, "bucket_size": 256, "quantizer": "maxmin"}
    state = CGXState.from_model(
        make_net(), None, 512, given, overrides={"0.*": {"bits": 2, "bucket_size": 256}}, error_feedback=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.load_state_dict(OF_VERSION_2)


def test_a_state_dict_has_the_quantizer() -> None:
    net = make_net()
    options: dict[str, Any] = {"overrides": {"3.*": {"quantizer": "maxmin"}}}
    saved = CGXState.from_model(net, compression_params={"bits": 2, "quantizer": "rotated"}, **options).state_dict()
    state = CGXState.from_model(net)
    with pytest.warns(UserWarning, match="settings are now those of the checkpoint"):
        state.load_state_dict(saved)
    assert quantizers_of(state, net) == {"0.weight": "rotated", "3.weight": "maxmin"}


def test_residuals_of_layers_that_the_model_does_not_have_are_dropped_with_a_warning() -> None:
    saved = trained_like(make_net(), overrides=None).state_dict()
    other = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8), nn.Linear(8, 1024))
    state = CGXState.from_model(other)
    with pytest.warns(UserWarning, match=r"dropped the residuals of 1 layers .* 3\.weight"):
        state.load_state_dict(saved)
    assert state.state_dict()["residuals"].keys() == {"0.weight"}
    unnamed = CGXState()
    unnamed.load_state_dict(saved)  # what fits is not known yet
    with pytest.warns(UserWarning, match=r"dropped the residuals of 1 layers .* 3\.weight"):
        unnamed.attach(other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_state_can_be_copied_and_pickled_without_its_group(copied: Any) -> None:
    net = make_net()
    state = trained_like(net, start_step=2, measure_every=7)
    state.process_group = object()  # cannot be pickled, nor asked for its ranks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = copied(state)
        assert other.process_group is None
        assert other.measure_every == 7
        other.attach(net)
        assert other.state_dict()["settings"] == state.state_dict()["settings"]
        assert all(map(torch.equal, *(s.state_dict()["residuals"].values() for s in (state, other))))
        assert other._step == 3


# ---- reports ----

NUMEL = 20481 + 10 + 60000 + 128


def known_bucket(
    values: Tensor, block: int = 64, skip_incomplete: bool = False, quantizer: str = "maxmin"
) -> KnownBucket:
    """Layers of 20481 (the last block has one value), 10 (exact), 60000 (exact) and 128 values."""
    layers, start = [], 0
    for number, (numel, bits) in enumerate(((20481, 4), (10, 32), (60000, 32), (128, 2))):
        parameter = nn.Parameter(torch.zeros(numel))
        layers.append(KnownLayer(f"layer {number}", parameter, start, numel, Compression(bits, block, quantizer)))
        start += numel
    assert values.numel() == start == NUMEL
    return KnownBucket(torch.float32, layers, True, skip_incomplete)


@pytest.mark.parametrize("skip_incomplete", [False, True])
# With 8, looking at everything is cheaper.
@pytest.mark.parametrize(("block", "quantizer"), [(8, "maxmin"), (64, "maxmin"), (64, "rotated")])
def test_a_quick_look_sees_every_value_that_is_not_finite(block: int, quantizer: str, skip_incomplete: bool) -> None:
    values = torch.randn(NUMEL)
    known = known_bucket(values, block, skip_incomplete, quantizer)
    assert (len(known._positions) == 0) == (block == 8)
    assert not known.may_be_nonfinite(values, compressed=True)
    assert not known.may_be_nonfinite(values, compressed=False)
    last = NUMEL - 128
    blocks = [slice(start, start + block) for start in (0, 20480 - block, last, NUMEL - block)] + [slice(20480, 20481)]
    raw = [slice(n, n + 1) for n in (20481, 20490, 20491, 50000, last - 1)]
    for bad in blocks + raw:
        for what in (torch.nan, torch.inf, -torch.inf):
            broken = values.clone()
            broken[bad] = what
            assert known.may_be_nonfinite(broken, compressed=True), bad
    broken = values.clone()
    broken[70] = torch.inf
    assert known.may_be_nonfinite(broken, compressed=False)


def test_where_a_nan_comes_from() -> None:
    values = torch.randn(NUMEL)
    known = known_bucket(values)
    view = values.clone()
    for layer in known.layers:
        layer.parameter.grad = layer.of(view)  # as gradient_as_bucket_view has it
    view[20482] = torch.nan
    assert not known.watching
    known.look_at_average(view, 5, looked_at_own=False)
    assert known.watching
    layer = known.layers[1]
    assert (layer.nonfinite_step, layer.nonfinite_here, layer.nonfinite_elsewhere) == (5, None, False)
    known.look_at_average(view, 6, looked_at_own=True)
    assert not known.watching
    assert (layer.nonfinite_step, layer.nonfinite_here, layer.nonfinite_elsewhere) == (5, None, True)
    known.look_at_own(view, 7)
    assert layer.nonfinite_here == 7
    assert all(each.nonfinite_step is None and each.nonfinite_here is None for each in known.layers if each != layer)


def test_a_measured_error_is_that_of_the_quantizer() -> None:
    values = torch.cat([torch.randn(20481), torch.zeros(NUMEL - 20481)])
    known = known_bucket(values)
    assert not known.measured
    known.measure(values)
    assert known.measured
    errors = [layer.relative_error for layer in known.layers]
    assert errors[1:3] == [None, None] and errors[3] == 0.0
    assert errors[0] is not None and 0.01 < errors[0] < 0.15
    before = errors[0]
    values[3] = torch.nan
    known.measure(values)
    assert known.layers[0].relative_error == before


def test_a_report_says_the_quantizer_where_it_is_not_maxmin() -> None:
    state = CGXState()
    state._buckets[0] = known_bucket(torch.zeros(NUMEL), quantizer="rotated")
    report = state.report()
    assert [layer.quantizer for layer in report.layers] == ["rotated", None, None, "rotated"]
    first, second, *_ = str(report).splitlines()[1:]
    assert first.split() == ["layer", "0", "20,481", "4", "rotated", "81,924", "11,568"]
    assert second.split() == ["layer", "1", "10", "exact", "40", "40"]
    assert report.as_dict()["layers"]["layer 3"]["quantizer"] == "rotated"
    state._buckets[0] = known_bucket(torch.zeros(NUMEL))
    assert str(state.report()).splitlines()[1].split()[:5] == ["layer", "0", "20,481", "4", "81,924"]


class _Writer:
    """In the place of a SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag] = value


def test_tensorboard_gets_bits_under_the_quantizers_name() -> None:
    state, writer = CGXState(), _Writer()
    state._buckets[0] = known_bucket(torch.zeros(NUMEL), quantizer="rotated")
    state.log_to(writer)
    assert writer.scalars["cgx/rotated_bits/layer 0"] == 4 and writer.scalars["cgx/bits/layer 1"] == 32
    assert "cgx/bits/layer 0" not in writer.scalars


def test_a_state_without_a_step_reports_nothing() -> None:
    report = CGXState().report()
    assert str(report) == "no grad bucket has been reduced yet"
    assert json.loads(json.dumps(report.as_dict()))["layers"] == {}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_one_trains_as_without_a_hook(alone: None) -> None:
    net, plain = make_net(), make_net()
    ddp = DistributedDataParallel(net)
    state = CGXState.from_model(ddp, error_feedback=True)
    ddp.register_comm_hook(state, cgx_hook)
    x = torch.randn(4, 32)
    for _ in range(2):
        ddp.zero_grad()
        plain.zero_grad()
        ddp(x).square().sum().backward()
        plain(x).square().sum().backward()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert torch.equal(p.grad, q.grad)
    assert state.report().step == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [({"layer_min_size": 10**6}, 1), ({"layer_min_size": 10**6, "compression_params": {"bits": 32}}, 0), ({}, 0)],
    ids=["all layers are small", "exact on purpose", "some are compressed"],
)
def test_a_state_that_compresses_no_layer_of_its_model_says_so_once(
    alone: None, caplog: pytest.LogCaptureFixture, options: dict[str, Any], told: int
) -> None:
    ddp = DistributedDataParallel(make_net())
    ddp.register_comm_hook(CGXState.from_model(ddp, **options), cgx_hook)
    for _ in range(2):
        ddp(torch.ones(4, 32)).sum().backward()
    words = "CGXState compresses no layer of this model: all are one-dimensional, have fewer than 1000000 values"
    assert sum(words in message for message in caplog.messages) == told
    assert len(caplog.messages) == told


def test_an_override_that_matches_exact_layers_only_is_told(caplog: pytest.LogCaptureFixture) -> None:
    asked = {"*.bias": {"bits": 8}, "1.*": {"bits": 32}, "0.*": {"bits": 2}, "2.weight": {"bits": 4}}
    CGXState.from_model(make_net(), overrides=asked)
    assert caplog.messages == [
        "overrides: '*.bias', '2.weight' have no effect: layers of one dimension or of fewer than 1024 values "
        "(layer_min_size) are exact"
    ]


def test_a_report_reaches_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    values = torch.randn(NUMEL)
    state = CGXState()
    state._buckets[0] = known_bucket(values)
    state._buckets[0].measure(values)
    state._step = 12
    writer = tensorboard.SummaryWriter(str(tmp_path))
    state.log_to(writer)
    writer.close()
    events = loader.EventAccumulator(str(tmp_path)).Reload()
    (ratio,) = events.Scalars("cgx/ratio")
    assert ratio.step == 12 and ratio.value == pytest.approx(state.report().ratio)
    (bits,) = events.Scalars("cgx/bits/layer 0")
    assert bits.value == 4
    (error,) = events.Scalars("cgx/relative_error/layer 0")
    assert error.value == pytest.approx(state.report().layers[0].relative_error)


def test_rank_0_logs_each_choice_of_bits_with_its_reason(alone: None, caplog: pytest.LogCaptureFixture) -> None:
    ddp = DistributedDataParallel(make_net())
    state = CGXState.from_model(ddp, adaptive=AdaptiveBits(period=2, warmup=3))
    ddp.register_comm_hook(state, cgx_hook)
    with caplog.at_level(logging.INFO, "torch_cgx.adaptive"):
        for _ in range(6):
            ddp(torch.ones(4, 32)).sum().backward()
    told = [f"step {each['step']}: {each['reason']}" for each in state.report().choices]
    assert [each["step"] for each in state.report().choices] == [3, 5]
    assert [record.getMessage() for record in caplog.records if record.name == "torch_cgx.adaptive"] == told


@pytest.mark.parametrize("hold", [residuals.hold_back, residuals._hold_back_unseen], ids=["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_kept_for_parameters_without_a_gradient_is_held_back(hold: Any, dtype: torch.dtype) -> None:
    spans = [slice(0, 4), slice(4, 8), slice(10, 12), slice(12, 14)]
    gradient = torch.zeros(14, dtype=dtype)
    gradient[6], gradient[8], gradient[13] = 1.0, 2.0, float("nan")
    residual = torch.arange(14.0) + 1
    held = hold(gradient, residual, spans)
    assert held.tolist() == [1, 2, 3, 4, *[0] * 6, 11, 12, 0, 0]
    assert (residual + held).tolist() == [number + 1 for number in range(14)] and not (residual * held).any()
    gradient.fill_(1)
    assert residuals.hold_back(gradient, residual, spans) is None
