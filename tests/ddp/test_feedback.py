"""Error feedback over real ranks: nothing is lost, what compression leaves out of one average is in later ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_cgx
from tests.support.families import each_once
from tests.support.gradients import DTYPES
from tests.support.harness import OVER_GLOO, Rank, run_ranks
from tests.support.hooked import descend, gradients_of, in_memory_order
from tests.support.training import flat, same_on_all_ranks
from torch_cgx import CGXState, cgx_hook
from torch_cgx.ddp import state as hook_state

pytestmark = pytest.mark.ranks

OVER_LINKS = {"CGX_INNER_COMMUNICATOR_TYPE": "TCP"}
each_way = pytest.mark.parametrize(
    "variables",
    [{}, pytest.param(OVER_GLOO, marks=pytest.mark.matrix), OVER_LINKS],
    ids=["shared memory", "Gloo", "links"],
)
STEPS = 4


def make_wide(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Large enough that a float32 model is reduced in shares over messages too, a 16-bit one at once."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(96, 256), nn.Tanh(), nn.Linear(256, 64)).to(dtype)


def wide_loss(net: nn.Module, step: int, rank: int, scale: float = 1.0) -> Tensor:
    dtype = next(net.parameters()).dtype
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(100 * step + rank))
    loss: Tensor = net(x.to(dtype)).square().mean() * scale
    return loss


def params_of(quantizer: str) -> dict[str, int | str]:
    return {"bits": 2, "bucket_size": 64, "quantizer": quantizer}


def hooked(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[DistributedDataParallel, CGXState]:
    ddp = DistributedDataParallel(make_wide(dtype), bucket_cap_mb=0.05)  # several grad buckets, and new ones
    given = {"compression_params": params_of("maxmin"), "error_feedback": True, **options}
    state = CGXState.from_model(ddp, **given)
    ddp.register_comm_hook(state, cgx_hook)
    return ddp, state


def residuals_of(state: CGXState, module: nn.Module) -> list[Tensor]:
    """In the order of the parameters; zeros where nothing has been kept yet."""
    kept = state.state_dict()["residuals"]
    return [kept.get(name, torch.zeros(p.numel())) for name, p in module.named_parameters()]


def summed(x: Tensor) -> Tensor:
    wide = x.to(torch.float64, copy=True)
    dist.all_reduce(wide)
    return wide


def check_law(
    before: list[Tensor], gradients: list[Tensor], after: list[Tensor], module: nn.Module, world: int
) -> None:
    """sum of (x + old residual) over ranks = N * average + sum of new residuals."""
    names = [name for name, _ in module.named_parameters()]
    for name, old, own, new, parameter in zip(names, before, gradients, after, module.parameters(), strict=True):
        assert parameter.grad is not None
        into = summed(own.flatten().double() + old)
        average = in_memory_order(parameter.grad).double()
        kept = summed(new)
        largest = float(summed(own.flatten().double().abs() + old.abs()).max())
        rounding = world * torch.finfo(parameter.dtype).eps / 2 * average.abs()  # what the average is rounded to
        allowed = rounding + 1e-5 * largest + (1e-7 if parameter.dtype == torch.float16 else 0)
        assert ((world * average + kept - into).abs() <= allowed).all(), name
        if parameter.dim() == 1:
            assert not new.any(), f"{name} is exact"
        else:
            assert float(kept.abs().max()) > 0.01 * largest, f"{name}: nothing was kept"


def steps_conserve(me: Rank, quantizer: str) -> list[Tensor]:
    ends = []
    for dtype in DTYPES:
        ddp, state = hooked(dtype, compression_params=params_of(quantizer))
        for step in range(STEPS):
            before = residuals_of(state, ddp.module)
            own = gradients_of(ddp.module, wide_loss, step, me.rank)
            ddp.zero_grad()
            wide_loss(ddp, step, me.rank).backward()
            check_law(before, own, residuals_of(state, ddp.module), ddp.module, me.world)
            descend(ddp)
        ends.append(flat(ddp))
    for dtype, given, to_none in (
        (torch.float32, True, True),
        (torch.float32, False, False),
        (torch.bfloat16, True, True),
    ):
        skipped_weights_conserve(me, quantizer, dtype, given, to_none)
    return ends


class Skipping(nn.Module):
    """Its gradients are what the caller wants, of the weights that he uses."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(64, 32, dtype=dtype) for _ in range(3))

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        parts = [(weight * gradient).sum() for weight, gradient in pairs if gradient is not None]
        return torch.stack(parts).sum()


# The ranks that use each weight, per step: always, by nobody or one rank in the middle, by all at last.
USERS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((0, 1, 2), (0, 1, 2), (0, 1, 2)),
    ((0, 1, 2), (), (1,)),
    ((0, 1, 2), (), (0, 2)),
    ((0, 1, 2), (0, 1, 2), ()),
    ((0, 1, 2), (0, 1, 2), (0, 1, 2)),
)


def skipped_weights_conserve(me: Rank, quantizer: str, dtype: torch.dtype, given: bool, to_none: bool) -> None:
    """What a rank has kept for a weight waits until that rank uses it: DDP ignores averages that nobody had part in."""
    ddp = DistributedDataParallel(Skipping(dtype), find_unused_parameters=True, bucket_cap_mb=0.01)
    model = ddp if given else ddp.module
    state = CGXState.from_model(model, compression_params=params_of(quantizer), error_feedback=True)
    ddp.register_comm_hook(state, cgx_hook)
    into, applied = torch.zeros(2, 3, 64 * 32, dtype=torch.float64)
    for step, users in enumerate(USERS):
        noise = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(100 * step + me.rank)).to(dtype)
        gradients = [noise[index] if me.rank in ranks else None for index, ranks in enumerate(users)]
        ddp.zero_grad(set_to_none=to_none)
        ddp(gradients).backward()
        for index, (weight, gradient) in enumerate(zip(ddp.module.weights, gradients, strict=True)):
            if gradient is not None:
                into[index] += gradient.flatten().double()
            if users[index]:
                assert weight.grad is not None
                applied[index] += weight.grad.flatten().double()
            else:
                assert weight.grad is None or not weight.grad.any()
        kept = torch.stack(residuals_of(state, ddp.module))
        missing = (summed(into) - me.world * applied - summed(kept)).abs().max()
        assert missing < (1e-4 if dtype == torch.float32 else 0.3), f"step {step}: {missing} of what was given is gone"


@each_way
def test_nothing_is_lost_in_any_dtype(variables: dict[str, str]) -> None:
    same_on_all_ranks(run_ranks(steps_conserve, 3, "cgx", "maxmin", env=variables))


@each_way
def test_nothing_is_lost_of_rotated_values_either(variables: dict[str, str]) -> None:
    same_on_all_ranks(run_ranks(steps_conserve, 3, "cgx", "rotated", env=variables))


def exact_steps_between(me: Rank) -> Tensor:
    """Steps before start_step and in uncompressed blocks neither use residuals nor change them."""
    ddp, state = hooked(start_step=1)
    for step in range(4):
        exact = step in (0, 2)
        before = residuals_of(state, ddp.module)
        ddp.zero_grad()
        own = gradients_of(ddp.module, wide_loss, step, me.rank)
        if step == 2:
            with torch_cgx.uncompressed():
                wide_loss(ddp, step, me.rank).backward()
        else:
            wide_loss(ddp, step, me.rank).backward()
        after = residuals_of(state, ddp.module)
        if exact:
            for old, gradient, new, parameter in zip(before, own, after, ddp.module.parameters(), strict=True):
                assert torch.equal(old, new)
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad.double(), summed(gradient) / me.world, rtol=1e-5, atol=1e-8)
        else:
            check_law(before, own, after, ddp.module, me.world)
        descend(ddp)
    return flat(ddp)


@each_way
def test_exact_steps_leave_residuals_alone(variables: dict[str, str]) -> None:
    same_on_all_ranks(run_ranks(exact_steps_between, 2, "cgx", env=variables))


class _Scaler:
    """What the state asks of a GradScaler."""

    def __init__(self) -> None:
        self.scale = 1024.0

    def get_scale(self) -> float:
        return self.scale


def scale_changes(me: Rank, on_device: bool) -> Tensor:
    """Scales that are powers of two change no bit of what training without a scaler does."""
    scaler = _Scaler()
    if on_device:
        told = torch.tensor(0.0)  # one tensor, changed in place
        hook_state.scale_of = lambda scaler: 1.0 if scaler is None else told.fill_(scaler.scale)  # type: ignore[assignment]
    plain, plain_state = hooked()
    scaled, scaled_state = hooked(grad_scaler=scaler)
    for step in range(5):
        scaler.scale = (1024.0, 1024.0, 512.0, 4096.0, 4096.0)[step]
        for ddp, scale in ((plain, 1.0), (scaled, scaler.scale)):
            ddp.zero_grad()
            wide_loss(ddp, step, me.rank, scale).backward()
            descend(ddp, 0.1 / scale)
        assert torch.equal(flat(plain), flat(scaled)), step
    unscaled = [kept / scaler.scale for kept in residuals_of(scaled_state, scaled.module)]
    assert all(map(torch.equal, unscaled, residuals_of(plain_state, plain.module)))
    assert any(kept.any() for kept in unscaled)
    return flat(scaled)


@pytest.mark.parametrize("on_device", [False, True], ids=["a number", "a tensor"])
def test_residuals_follow_the_scale_of_the_loss(on_device: bool) -> None:
    same_on_all_ranks(run_ranks(scale_changes, 2, "cgx", on_device))


def a_block_is_nan(me: Rank, dtype: torch.dtype, quantizer: str) -> None:
    ddp, state = hooked(dtype, compression_params=params_of(quantizer))
    for step in range(2):
        ddp.zero_grad()
        wide_loss(ddp, step, me.rank).backward()
    before = residuals_of(state, ddp.module)
    ddp.zero_grad()
    loss = wide_loss(ddp, 2, me.rank)
    weight = ddp.module.get_parameter("0.weight")
    poison = torch.zeros_like(weight)
    poison.view(-1)[70] = torch.nan  # in the second block of 64, on all ranks
    (loss + (weight * poison).sum()).backward()
    after = residuals_of(state, ddp.module)
    assert weight.grad is not None
    assert torch.isnan(weight.grad.view(-1)[64:128]).all()
    assert torch.isfinite(weight.grad.view(-1)[128:]).all() and torch.isfinite(weight.grad.view(-1)[:64]).all()
    assert before[0][64:128].any()
    assert torch.equal(before[0][64:128], after[0][64:128])
    assert not torch.equal(before[0][:64], after[0][:64])
    assert all(torch.isfinite(kept).all() for kept in after)


@pytest.mark.parametrize(("dtype", "quantizer"), each_once((torch.float32, torch.bfloat16), ("maxmin", "rotated")))
def test_a_block_that_is_nan_keeps_its_residual(dtype: torch.dtype, quantizer: str) -> None:
    run_ranks(a_block_is_nan, 2, "cgx", dtype, quantizer)


def error_over_steps(me: Rank, feedback: bool) -> float:
    """How far the sum of many averages of one gradient is from that of exact ones, relative to one of them."""
    ddp, _ = hooked(error_feedback=feedback)
    total = torch.zeros_like(flat(ddp))
    exact = torch.zeros_like(total, dtype=torch.float64)
    for rank in range(me.world):
        exact += torch.cat([g.flatten() for g in gradients_of(ddp.module, wide_loss, 0, rank)]).double() / me.world
    for _ in range(16):
        ddp.zero_grad()
        wide_loss(ddp, 0, me.rank).backward()
        total += torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
    return float((total.double() - 16 * exact).norm() / exact.norm())


def test_errors_do_not_add_up_with_feedback() -> None:
    (without, _), (with_feedback, _) = (run_ranks(error_over_steps, 2, "cgx", feedback) for feedback in (False, True))
    assert with_feedback < without / 4
