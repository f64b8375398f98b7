"""Bits that choose themselves, over real ranks: everybody switches alike, whatever happens to one of them."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from tests.support.harness import Rank, names, observe_ranks, raised, run_ranks
from tests.support.hooked import descend, hook
from tests.support.training import flat, same_on_all_ranks
from torch_cgx import AdaptiveBits, CGXState, cgx_hook
from torch_cgx.adaptive.policies import POLICIES

pytestmark = pytest.mark.ranks

# DDP makes no new grad buckets then, so that a resumed training makes the same cuts from its first step on.
ALIKE: dict[str, Any] = {"find_unused_parameters": True}
OFTEN = AdaptiveBits(period=4, warmup=4)
KEPT = {"kept.weight": {"bits": 5, "bucket_size": 64}}
FREE = {"quiet.weight", "loud.weight", "head.weight"}


class Uneven(nn.Module):
    """Layers whose gradients differ by orders of magnitude, in another order than they are used in, which is that of
    DDP's grad buckets from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.quiet = nn.Linear(64, 128, bias=False)
        self.head = nn.Linear(8, 640, bias=False)
        self.loud = nn.Linear(128, 64, bias=False)
        self.kept = nn.Linear(64, 64, bias=False)
        self.small = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = 0.01 * torch.tanh(self.quiet(x))
        x = torch.tanh(self.loud(100 * x))
        x = self.small(x + torch.tanh(self.kept(x)))
        y: Tensor = self.head(x)
        return y


def loss_of(net: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    y: Tensor = net(x)
    return nn.functional.mse_loss(y, x.repeat(1, 10))


def steps(ddp: DistributedDataParallel, rank: int, first: int, end: int) -> None:
    for step in range(first, end):
        ddp.zero_grad()
        loss_of(ddp, step, rank).backward()
        descend(ddp)


def made(adaptive: Any = OFTEN, ddp_options: dict[str, Any] | None = None, **options: Any) -> Any:
    """The model with the hook, and the hook's state."""
    ddp = DistributedDataParallel(Uneven(), **(ddp_options or {}))
    return ddp, hook(ddp, adaptive=adaptive, **{"overrides": KEPT, **options})


def choices_of(state: CGXState) -> list[dict[str, Any]]:
    return [dict(each) for each in state.report().choices]


def over_several_periods(me: Rank) -> Any:
    """Also in small grad buckets, and with error feedback; that twice."""
    ends: list[Any] = []
    small: dict[str, Any] = {"bucket_cap_mb": 0.01}
    for ddp_options, options in (({}, {}), (small, {"error_feedback": True}), (small, {"error_feedback": True})):
        ddp, state = made(
            AdaptiveBits(period=3, warmup=4, bits_range=(1, 8)),
            ddp_options,
            **options,
        )
        steps(ddp, me.rank, 0, 12)
        choices = choices_of(state)
        assert [each["step"] for each in choices] == [4, 7, 10]
        assert all(each["layers"].keys() == FREE for each in choices)
        layers = {layer.name: layer for layer in state.report().layers}
        assert {name: layers[name].bits for name in FREE} == {n: bits for n, (bits, _) in choices[-1]["layers"].items()}
        assert layers["kept.weight"].bits == 5
        assert {layer.bits for name, layer in layers.items() if name not in {*FREE, "kept.weight"}} == {32}
        assert choices[-1]["reason"] in str(state.report())
        assert all(torch.isfinite(parameter).all() for parameter in ddp.parameters())
        kept = {name for name, residual in state.state_dict()["residuals"].items() if residual.any()}
        assert kept == ({*FREE, "kept.weight"} if options else set())
        ends.append((flat(ddp), choices))
    _, (bits, second), (bits_again, second_again) = ends
    assert torch.equal(bits, bits_again) and second == second_again, "alike, yet not the same"
    return ends


def test_all_ranks_and_all_runs_hold_the_same_choices_and_parameters(backend: str) -> None:
    results = run_ranks(over_several_periods, 2, backend)
    same_on_all_ranks([[end for end, _ in result] for result in results])
    assert [choices for _, choices in results[0]] == [choices for _, choices in results[1]]


def bytes_of_a_step(me: Rank) -> list[dict[str, float]]:
    """What the group counts at a step: uniform, with fewest bytes, and with least error."""
    found = []
    fewest = AdaptiveBits(period=100, warmup=6, layer_alpha=None)
    for adaptive in (None, fewest, replace(fewest, least="error")):
        ddp, state = made(adaptive)
        steps(ddp, me.rank, 0, 7)
        torch_cgx.reset_stats(state.group)
        steps(ddp, me.rank, 7, 8)
        found.append({**torch_cgx.stats(state.group), "reported": state.report().bytes_sent})
    return found


def test_what_is_chosen_is_what_is_sent() -> None:
    for uniform, fewest, least in run_ranks(bytes_of_a_step, 2, "cgx"):
        for each in (uniform, fewest, least):
            assert each["bytes_before"] == uniform["bytes_before"]
            assert each["bytes_after"] == each["reported"]
        assert fewest["bytes_sent"] < uniform["bytes_sent"]
        assert least["bytes_sent"] <= uniform["bytes_sent"]
        assert fewest["bytes_after"] < least["bytes_after"] <= uniform["bytes_after"]


def resumed(me: Rank, at: int, ddp_options: dict[str, Any]) -> None:
    through, state = made(OFTEN, ddp_options)
    steps(through, me.rank, 0, 14)

    broken, before = made(OFTEN, ddp_options)
    steps(broken, me.rank, 0, at)
    file = io.BytesIO()
    torch.save({"model": broken.module.state_dict(), "hook": before.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    module = Uneven()
    module.load_state_dict(saved["model"])
    ddp = DistributedDataParallel(module, **ddp_options)
    after = hook(ddp, adaptive=OFTEN, overrides=KEPT)
    after.load_state_dict(saved["hook"])
    assert choices_of(after) == choices_of(before)
    steps(ddp, me.rank, at, 14)
    assert len(choices_of(state)) == 3
    assert choices_of(after) == choices_of(state)
    assert torch.equal(flat(ddp), flat(through))


@pytest.mark.parametrize("at", [2, 6, 8], ids=["before the first choice", "inside of a period", "when a choice is due"])
def test_a_resumed_training_makes_the_same_choices(at: int) -> None:
    run_ranks(resumed, 2, "cgx", at, {**ALIKE, "bucket_cap_mb": 0.01})


def pickled(me: Rank) -> Tensor:
    """Without names until they are given again, as scripts do that save the whole DDP object."""
    through, state = made(OFTEN, ALIKE)
    steps(through, me.rank, 0, 10)
    ddp, before = made(OFTEN, ALIKE)
    steps(ddp, me.rank, 0, 6)
    again = pickle.loads(pickle.dumps(ddp))
    after = again._comm_hooks[0][1]
    assert choices_of(after) == choices_of(before) != []
    after.attach(again)
    again.register_comm_hook(after, cgx_hook)
    steps(again, me.rank, 6, 10)
    assert choices_of(after) == choices_of(state)
    return flat(again)


def test_a_pickled_ddp_object_keeps_its_choices() -> None:
    same_on_all_ranks(run_ranks(pickled, 2, "cgx"))


def unnamed(me: Rank) -> Tensor:
    """A state that never hears names, goes on in grad buckets that are made anew."""
    ddp = DistributedDataParallel(Uneven())
    state = CGXState(adaptive=OFTEN)
    ddp.register_comm_hook(state, cgx_hook)
    steps(ddp, me.rank, 0, 6)
    again = DistributedDataParallel(ddp.module, bucket_cap_mb=0.02)
    other = pickle.loads(pickle.dumps(state))
    again.register_comm_hook(other, cgx_hook)
    steps(again, me.rank, 6, 14)
    assert [each["step"] for each in choices_of(other)] == [4, 8, 12]
    return flat(again)


def test_a_state_without_names_goes_on_in_other_grad_buckets() -> None:
    same_on_all_ranks(run_ranks(unnamed, 2, "cgx"))


def nan_on_one_rank(me: Rank) -> Any:
    """In the window before the second choice."""
    ddp, state = made()
    for step in range(13):
        ddp.zero_grad()
        loss = loss_of(ddp, step, me.rank)
        if step == 6 and me.rank == 1:
            loss = loss + torch.nan * ddp.module.loud.weight[0, 0]
        loss.backward()
        if step != 6:
            descend(ddp)
    return choices_of(state)


def test_a_layer_with_nan_on_one_rank_keeps_its_bits_and_the_reason_says_so() -> None:
    choices, others = run_ranks(nan_on_one_rank, 2, "cgx")
    assert choices == others
    first, second, third = choices
    assert second["layers"]["loud.weight"] == first["layers"]["loud.weight"]
    assert second["reason"].endswith("; with NaN, and so with their bits as they were: loud.weight")
    assert "NaN" not in first["reason"] + third["reason"]
    assert all(each["layers"].keys() == FREE for each in choices)


def failing_policy(me: Rank) -> None:
    ddp, _ = made()
    if me.rank == 0:

        def broken(layers: Any, budget: Any) -> Any:
            raise KeyError("no such layer")

        POLICIES["dynamic_programming"] = broken
    steps(ddp, me.rank, 0, 6)


def test_a_policy_that_fails_on_rank_0_raises_on_all_ranks() -> None:
    for outcome in observe_ranks(failing_policy, 2, "cgx", group_timeout_s=10.0):
        raised(outcome, "RuntimeError", "CGXError")  # DDP keeps the text and not the type
        names(outcome, r"step 4: rank 0 could not choose bits: KeyError: 'no such layer'")


def automatic(me: Rank, start_step: int) -> Any:
    ddp, state = made("auto", start_step=start_step)
    seen = []
    for step in range(66):
        steps(ddp, me.rank, step, step + 1)
        bits = {layer.bits for layer in state.report().layers if layer.name in FREE}
        seen.append(bits.pop() if len(bits) == 1 else None)
    return flat(ddp), seen, choices_of(state)


def test_auto_tries_exact_the_most_bits_and_the_reference_and_tells_their_times() -> None:
    results = run_ranks(automatic, 2, "cgx", 5, timeout_s=60)
    same_on_all_ranks([end for end, _, _ in results])
    assert results[0][1:] == results[1][1:]
    _, seen, choices = results[0]
    tried = [32] * 6 + [8] * 6 + [4] * 6
    assert seen[:8] == [4] * 8
    assert seen[8:44] == tried + tried
    assert seen[44:64] == [4] * 20
    (choice,) = choices
    assert choice["step"] == 64
    for words in ("ms exact", "ms with 8 bits", "ms with 4 bits"):
        assert words in choice["reason"]
    bits = {bits for bits, _ in choice["layers"].values()}
    assert bits == {32} or max(bits) <= 8


def resumed_before_the_start(me: Rank) -> list[int]:
    """Exact steps must not be timed as though they were compressed."""
    ddp, before = made("auto", start_step=10)
    steps(ddp, me.rank, 0, 2)
    ddp, state = made("auto", start_step=10)
    state.load_state_dict(before.state_dict())
    seen = []
    for step in range(2, 26):
        steps(ddp, me.rank, step, step + 1)
        seen.append(next(layer.bits for layer in state.report().layers if layer.name == "loud.weight"))
    return seen


def test_trials_wait_for_the_first_compressed_step_of_a_resumed_training() -> None:
    for seen in run_ranks(resumed_before_the_start, 2, "cgx"):
        assert seen == [4] * 11 + [32] * 6 + [8] * 6 + [4]


def nothing_to_choose(me: Rank, adaptive: Any) -> Any:
    ddp, state = made(adaptive, overrides={"*.weight": {"bits": 6}})
    steps(ddp, me.rank, 0, 66)
    assert {layer.bits for layer in state.report().layers if layer.name in FREE} == {6}
    return flat(ddp), choices_of(state)


def test_without_a_free_layer_training_goes_on() -> None:
    for adaptive in ("auto", OFTEN):
        results = run_ranks(nothing_to_choose, 2, "cgx", adaptive, timeout_s=60)
        same_on_all_ranks([end for end, _ in results])
        assert {(each["reason"], len(each["layers"])) for each in results[0][1]} == {("no layer is free to choose", 0)}


def alone(me: Rank) -> None:
    ddp, state = made()
    steps(ddp, me.rank, 0, 9)
    assert [each["step"] for each in choices_of(state)] == [4, 8]
    assert all(each["layers"].keys() == FREE for each in choices_of(state))


def test_a_group_of_one_chooses_too(backend: str) -> None:
    run_ranks(alone, 1, backend)


def measured_anew(me: Rank) -> None:
    """A layer's error in the report is that of its present bits."""
    ddp, state = made(AdaptiveBits(period=100, warmup=5, bits_range=(4, 8), least="error", alpha=3.0))
    steps(ddp, me.rank, 0, 5)
    before = {layer.name: layer.relative_error for layer in state.report().layers if layer.name in FREE}
    steps(ddp, me.rank, 5, 6)
    after = {layer.name: layer for layer in state.report().layers if layer.name in FREE}
    for name, layer in after.items():
        assert layer.bits == 8
        assert layer.relative_error is not None and layer.relative_error < 0.3 * before[name]


def test_errors_in_the_report_are_those_of_the_bits_beside_them() -> None:
    run_ranks(measured_anew, 2, "cgx")
