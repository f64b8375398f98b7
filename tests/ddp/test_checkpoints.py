"""The hook's state across restarts, under AMP, and what it reports of real ranks."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.harness import Rank, run_ranks
from tests.support.hooked import checked_step, descend, hook
from tests.support.training import flat, loss_of, make_net, same_on_all_ranks
from torch_cgx import CGXState, cgx_hook

pytestmark = pytest.mark.ranks

# DDP makes no new grad buckets then, so that a resumed training makes the same cuts from its first step on.
ALIKE = {"find_unused_parameters": True}
GIVEN = {"compression_params": {"bits": 2, "bucket_size": 64}, "error_feedback": True}


def steps(ddp: DistributedDataParallel, rank: int, first: int, end: int) -> None:
    for step in range(first, end):
        ddp.zero_grad()
        loss_of(ddp, step, rank).backward()
        descend(ddp)


def resumed(me: Rank) -> list[Tensor]:
    through = DistributedDataParallel(make_net(), **ALIKE)  # type: ignore[arg-type]
    hook(through, overrides={"first.*": {"bits": 3}}, **GIVEN)
    steps(through, me.rank, 0, 6)

    broken = DistributedDataParallel(make_net(), **ALIKE)  # type: ignore[arg-type]
    state = hook(broken, overrides={"first.*": {"bits": 3}}, **GIVEN)
    steps(broken, me.rank, 0, 3)
    file = io.BytesIO()
    torch.save({"model": broken.module.state_dict(), "hook": state.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    module = make_net()
    module.load_state_dict(saved["model"])
    again = DistributedDataParallel(module, **ALIKE)  # type: ignore[arg-type]
    state = hook(again)
    state.load_state_dict(saved["hook"])
    steps(again, me.rank, 3, 6)
    assert torch.equal(flat(again), flat(through))
    assert state.report().step == 6

    without = make_net()
    without.load_state_dict(saved["model"])
    forgetful = DistributedDataParallel(without, **ALIKE)  # type: ignore[arg-type]
    hook(forgetful, overrides={"first.*": {"bits": 3}}, **GIVEN)
    steps(forgetful, me.rank, 3, 6)
    assert not torch.equal(flat(forgetful), flat(through)), "residuals made no difference"
    return [flat(again)]


def test_a_resumed_training_ends_with_the_same_bits() -> None:
    same_on_all_ranks(run_ranks(resumed, 2, "cgx"))


def loaded_elsewhere(me: Rank) -> None:
    ddp = DistributedDataParallel(make_net())
    state = hook(ddp, **GIVEN)
    steps(ddp, me.rank, 0, 2)
    saved = state.state_dict()
    assert saved["residuals"]["first.weight"].any()
    everybody: list[Any] = [None] * me.world
    dist.all_gather_object(everybody, saved)

    for wrong, words in (
        ({**saved, "world": 8}, rf"dropped the residuals of 6 layers: they are of rank {me.rank} of 8, and this is"),
        (everybody[1 - me.rank], rf"they are of rank {1 - me.rank} of 2, and this is rank {me.rank} of 2"),
    ):
        other = CGXState.from_model(ddp)
        with pytest.warns(UserWarning, match=words):
            other.load_state_dict(wrong)
        kept = other.state_dict()
        assert (kept["step"], kept["settings"], kept["residuals"]) == (2, saved["settings"], {})


def test_residuals_of_another_rank_or_world_are_dropped_with_a_warning() -> None:
    run_ranks(loaded_elsewhere, 2, "cgx")


def pickled_ddp(me: Rank) -> Tensor:
    """As scripts do that save the whole DDP object: its hook is registered again, with the state that came along."""
    through = DistributedDataParallel(make_net(), **ALIKE)  # type: ignore[arg-type]
    hook(through, **GIVEN)
    steps(through, me.rank, 0, 4)

    ddp = DistributedDataParallel(make_net(), **ALIKE)  # type: ignore[arg-type]
    hook(ddp, **GIVEN)
    steps(ddp, me.rank, 0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pickle.loads(pickle.dumps(ddp))
    _, state = again._comm_hooks[0]
    assert isinstance(state, CGXState)
    state.attach(again)
    again.register_comm_hook(state, cgx_hook)
    steps(again, me.rank, 2, 4)
    assert torch.equal(flat(again), flat(through))
    assert state.report().step == 4
    return flat(again)


def test_a_pickled_ddp_object_goes_on(backend: str) -> None:
    same_on_all_ranks(run_ranks(pickled_ddp, 2, backend))


def amp_loss(net: nn.Module, step: int, rank: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(net, step, rank)


def amp(me: Rank) -> list[Tensor]:
    ddp = DistributedDataParallel(make_net())
    state = hook(ddp)
    for step in range(2):
        checked_step(ddp, state, amp_loss, me.rank, me.world, step)
        descend(ddp)
    ends = [flat(ddp)]

    for view in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        ddp = DistributedDataParallel(make_net(), gradient_as_bucket_view=view)
        state = hook(ddp, grad_scaler=scaler, **GIVEN)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(ddp, step, me.rank)
            if step == 2 and me.rank == 1:
                loss = loss * 1e38
            scaler.scale(loss).backward()
            before = flat(ddp)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, flat(ddp)) == (step == 2), step
            scales.append(scaler.get_scale())
        assert scales == [2.0**12, 2.0**13, 2.0**12, 2.0**12, 2.0**13]
        assert torch.isfinite(flat(ddp)).all()
        kept = state.state_dict()
        assert kept["residual_scale"] == 2.0**12  # that of the last step
        assert all(torch.isfinite(each).all() for each in kept["residuals"].values())
        ends.append(flat(ddp))
    return ends


def test_amp_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    same_on_all_ranks(run_ranks(amp, 2, "cgx"))


def nan_in(me: Rank, layer: str, view: bool) -> str:
    """Rank 1 has a NaN in one layer's gradient, at steps 2 and 3."""
    ddp = DistributedDataParallel(make_net(), gradient_as_bucket_view=view)
    state = hook(ddp)
    parameter = ddp.module.get_parameter(layer)
    for step in range(4):
        ddp.zero_grad()
        loss = loss_of(ddp, step, me.rank)
        if step >= 2 and me.rank == 1:
            poison = torch.zeros_like(parameter)
            poison.view(-1)[-1] = torch.nan
            loss = loss + (parameter * poison).sum()
        loss.backward()
        if step < 2:
            assert "NaN" not in str(state.report())
    report = state.report()
    plain = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert (
        plain["rank"] == me.rank
        and plain["step"] == 4
        and plain["layers"].keys() == dict(ddp.module.named_parameters()).keys()
    )
    for name, values in plain["layers"].items():
        assert (values["relative_error"] is None) == (values["bits"] == 32)
        assert (values["nonfinite_step"] is not None) == (name == layer)
    assert plain["bytes_sent"] < plain["bytes_exact"] / 2
    return str(report)


@pytest.mark.parametrize("layer", ["first.weight", "last.bias"])
@pytest.mark.parametrize("view", [False, True], ids=["copied", "bucket view"])
def test_a_nan_is_named_with_its_layer_and_rank(layer: str, view: bool) -> None:
    first, second = run_ranks(nan_in, 2, "cgx", layer, view)
    from_another = f"{layer}: NaN or infinity in the average, first at step 2, from another rank: see its report"
    own = f"{layer}: NaN or infinity in the gradient of rank 1, first at step {3 if view else 2}"
    assert first.splitlines()[-1] == from_another
    assert second.splitlines()[-1] == own
    header, row, *_ = first.splitlines()
    assert header.split()[:3] == ["layer", "values", "bits"]
    assert row.split()[:4] == ["first.weight", "2,048", "4", "8,192"]
