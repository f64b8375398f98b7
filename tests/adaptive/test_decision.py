"""What of choosing bits needs no other process: options, decisions, and what is measured on samples of gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_cgx import AdaptiveBits, CGXState, functional
from torch_cgx.adaptive.decision import Trial, contenders, decide
from torch_cgx.adaptive.layers import Candidate, LayerStats
from torch_cgx.codecs import MaxMin
from torch_cgx.config import EXACT, Compression
from torch_cgx.ddp import samples
from torch_cgx.ddp.buckets import KnownLayer
from torch_cgx.ddp.samples import Samples
from torch_cgx.kernels.native import default_kernels

REFERENCE = Compression(4, 1024)
DECAY = 0.9  # from one sampled step to the next


# ---- options ----


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy": "magic"}, "policy: expected one of dynamic_programming, .*; got 'magic'"),
        ({"bits_range": (0, 8)}, r"bits_range: expected two widths from 1 to 8, the lower first, got \(0, 8\)"),
        ({"bits_range": (2, 9)}, r"from 1 to 8, the lower first, got \(2, 9\)"),
        ({"bits_range": (5, 4)}, r"the lower first, got \(5, 4\)"),
        ({"bits_range": (2.0, 8)}, r"bits_range: .* got \(2\.0, 8\)"),
        ({"bits_range": (2, 4, 8)}, r"bits_range: expected two widths .* got \(2, 4, 8\)"),
        ({"bits_range": 4}, "bits_range: expected two widths .* got 4"),
        ({"period": 0}, "period: expected 1 step or more, got 0"),
        ({"period": 2.5}, "period: expected 1 step or more, got 2.5"),
        ({"warmup": 0}, "warmup: expected 1 step or more, got 0"),
        ({"alpha": 0.0}, "alpha: expected more than 0, got 0.0"),
        ({"least": "time"}, 'least: expected "bytes" or "error", got \'time\''),
        ({"layer_alpha": 0.5}, "layer_alpha: expected 1 or more, or None, got 0.5"),
        ({"target_step_time": 0.0}, 'target_step_time: expected seconds, "auto" or None, got 0.0'),
        ({"target_step_time": "soon"}, "target_step_time: expected seconds, \"auto\" or None, got 'soon'"),
    ],
)
def test_errors_name_what_is_allowed(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdaptiveBits(**given)


def test_a_state_says_what_adaptive_may_be() -> None:
    with pytest.raises(ValueError, match=r'adaptive: expected "auto", an AdaptiveBits or None, got \'fast\''):
        CGXState(adaptive="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected compression_params with 2 to 8 bits, as bits_range says; got 32"):
        CGXState(adaptive="auto", compression_params={"bits": 32})
    with pytest.raises(ValueError, match="expected compression_params with 6 to 8 bits, as bits_range says; got 4"):
        CGXState(adaptive=AdaptiveBits(bits_range=(6, 8)))


def test_options_survive_a_checkpoint() -> None:
    given = AdaptiveBits("greedy", (1, 6), 10, 3, 0.5, "error", None, 0.25)
    assert AdaptiveBits.of(given.as_dict()) == given
    assert AdaptiveBits.of(json.loads(json.dumps(given.as_dict()))) == given
    assert AdaptiveBits.of(given) is given
    assert AdaptiveBits.of(None) is None
    assert AdaptiveBits.of("auto") == AdaptiveBits(target_step_time="auto")


def test_candidates_are_the_reference_every_width_and_smaller_blocks_for_few_bits() -> None:
    found = AdaptiveBits(bits_range=(1, 8)).candidates(REFERENCE)
    assert found[0] == REFERENCE
    assert len(set(found)) == len(found)
    blocks = {bits: {each.block for each in found if each.bits == bits} for bits in range(1, 9)}
    assert blocks == {
        1: {1024, 256, 128, 32},
        **{bits: {1024, 256, 128} for bits in range(2, 7)},
        **{bits: {1024} for bits in (7, 8)},
    }
    assert {each.bits for each in AdaptiveBits(bits_range=(3, 5)).candidates(REFERENCE)} == {3, 4, 5}


def test_the_reference_is_a_candidate_even_outside_of_the_range() -> None:
    found = AdaptiveBits(bits_range=(2, 4)).candidates(Compression(8, 64))
    assert found == (Compression(8, 64), Compression(2, 64), Compression(3, 64), Compression(4, 64))


# ---- decisions ----


def layer(name: str, numel: int, scale: float, bits: Sequence[int] = range(2, 9)) -> LayerStats:
    """Four times less error for each bit more, as evenly spread values have it."""
    candidates = [
        Candidate(each, 1024, MaxMin(each, 1024).payload_nbytes(numel, 4), numel * scale * 4.0**-each) for each in bits
    ]
    return LayerStats(name, numel, (numel * scale) ** 0.5, tuple(candidates))


LAYERS = [layer("large and quiet", 1 << 16, 1e-4), layer("large", 1 << 16, 1.0), layer("small and loud", 4096, 30.0)]


def chosen(options: AdaptiveBits, trials: Sequence[Trial] = (), layers: Sequence[LayerStats] = LAYERS) -> Any:
    """Bits by name, bytes and error in terms of the reference's, and the reason."""
    decision = decide(layers, options, REFERENCE, trials)
    assert len(decision.compressions) == len(layers)
    bits = {each.name: how.bits for each, how in zip(layers, decision.compressions, strict=True)}
    if EXACT in decision.compressions:
        assert set(decision.compressions) == {EXACT}
        return bits, 8.0, 0.0, decision.reason
    taken = [each.at(how.bits, how.block) for each, how in zip(layers, decision.compressions, strict=True)]
    uniform = [each.at(4, 1024) for each in layers]
    nbytes = sum(each.nbytes for each in taken) / sum(each.nbytes for each in uniform)
    error = sum(each.error for each in taken) / sum(each.error for each in uniform)
    return bits, nbytes, error, decision.reason


def trials(**seconds: float) -> list[Trial]:
    """As `contenders` orders them: trials(exact=0.3, bits8=0.2, bits4=0.1)."""
    found = []
    for name, each in seconds.items():
        how = EXACT if name == "exact" else Compression(int(name.removeprefix("bits")), 1024)
        nbytes = (
            sum(4 * layer.numel for layer in LAYERS)
            if how == EXACT
            else sum(MaxMin(how.bits, how.block).payload_nbytes(layer.numel, 4) for layer in LAYERS)
        )
        found.append(Trial(how, nbytes, each))
    return found


@pytest.mark.parametrize("policy", ["dynamic_programming", "greedy"])
def test_loud_layers_get_more_bits_and_bytes_are_saved_at_no_more_error(policy: str) -> None:
    bits, nbytes, error, reason = chosen(AdaptiveBits(policy, layer_alpha=None))
    assert bits["large and quiet"] == 2 < bits["large"] < bits["small and loud"]
    assert nbytes < 0.8
    assert error <= 1
    bits, nbytes, error, _ = chosen(AdaptiveBits(policy, layer_alpha=None, least="error"))
    assert nbytes <= 1
    assert error < 0.5
    assert reason.startswith(f"{policy}, least bytes: ")


@pytest.mark.parametrize("policy", ["dynamic_programming", "greedy"])
def test_layer_alpha_limits_what_a_single_layer_may_lose(policy: str) -> None:
    free, few, _, _ = chosen(AdaptiveBits(policy, layer_alpha=None))
    limited, more, _, _ = chosen(AdaptiveBits(policy, layer_alpha=4.0))
    assert free["large and quiet"] == 2
    assert limited["large and quiet"] == 3  # a bit less is four times the error
    assert few < more < 1
    assert min(chosen(AdaptiveBits(policy, layer_alpha=3.9))[0].values()) == 4


def test_alpha_trades_error_for_bytes() -> None:
    _, fewest, error, _ = chosen(AdaptiveBits(alpha=4.0, layer_alpha=None))
    _, fewer, _, _ = chosen(AdaptiveBits(layer_alpha=None))
    assert fewest < fewer < 1 < error <= 4


def test_the_reason_tells_average_bytes_and_error() -> None:
    bits, nbytes, error, reason = chosen(AdaptiveBits())
    numel = sum(each.numel for each in LAYERS)
    average = sum(bits[each.name] * each.numel for each in LAYERS) / numel
    assert reason == (
        f"dynamic_programming, least bytes: {average:.2f} bits a value on average, {nbytes:.2f} of the bytes and "
        f"{error:.2f} of the squared error of 4 bits everywhere"
    )


def test_without_layers_there_is_nothing_to_choose() -> None:
    assert decide([], AdaptiveBits(), REFERENCE, ()).reason == "no layer is free to choose"


def test_layers_without_gradients_cost_as_few_bytes_as_can_be() -> None:
    silent = [layer(f"silent {number}", 4096, 0.0) for number in range(3)]
    decision = decide(silent, AdaptiveBits(), REFERENCE, ())
    assert {each.bits for each in decision.compressions} == {2}
    assert "1.00 of the squared error" in decision.reason


def test_what_is_tried_goes_from_the_most_bytes_to_the_fewest() -> None:
    eight, two = Compression(8, 1024), Compression(2, 1024)
    assert contenders(AdaptiveBits(), REFERENCE) == ()
    assert contenders(AdaptiveBits(target_step_time="auto"), REFERENCE) == (EXACT, eight, REFERENCE)
    assert contenders(AdaptiveBits(target_step_time=0.1), REFERENCE) == (EXACT, eight, REFERENCE, two)
    assert contenders(AdaptiveBits(target_step_time=0.1, bits_range=(4, 4)), REFERENCE) == (EXACT, REFERENCE)


AUTO = AdaptiveBits(target_step_time="auto")


def test_exact_is_chosen_where_it_is_as_fast() -> None:
    for exact in (0.08, 0.1, 0.1009):
        bits, *_, reason = chosen(AUTO, trials(exact=exact, bits8=0.12, bits4=0.1))
        assert set(bits.values()) == {32}
        assert reason == f"exact: a step takes {1e3 * exact:.1f} ms exact, 120.0 ms with 8 bits, 100.0 ms with 4 bits"
    bits, *_ = chosen(AUTO, trials(exact=0.102, bits8=0.1, bits4=0.1))
    assert 32 not in bits.values()


def test_bits_that_cost_no_time_are_not_saved() -> None:
    bits, *_, reason = chosen(AUTO, trials(exact=0.4, bits8=0.1, bits4=0.1))
    assert set(bits.values()) == {8}
    assert reason.endswith("; a step takes 400.0 ms exact, 100.0 ms with 8 bits, 100.0 ms with 4 bits")


def test_between_two_trials_time_grows_evenly_with_bytes() -> None:
    options = AdaptiveBits(target_step_time=0.15)
    tried = trials(exact=0.4, bits8=0.2, bits4=0.1, bits2=0.1)
    _, nbytes, error, reason = chosen(options, tried)
    middle = (tried[1].nbytes + tried[2].nbytes) / 2 / tried[2].nbytes
    assert 0.85 * middle < nbytes <= middle * (1 + 1e-9)
    assert error < 0.05
    assert reason.startswith("dynamic_programming, least error: ")
    assert reason.endswith("; 150.0 ms asked for")
    _, more, *_ = chosen(AdaptiveBits(target_step_time=0.19), tried)
    assert nbytes < more


def test_where_every_byte_costs_time_no_more_of_them_are_sent_than_with_the_reference() -> None:
    _, nbytes, error, _ = chosen(AUTO, trials(exact=5.0, bits8=2.0, bits4=1.0))
    assert nbytes <= 1.011
    assert error <= 1


def test_a_target_below_the_references_time_takes_fewer_bytes() -> None:
    tried = trials(exact=0.8, bits8=0.4, bits4=0.2, bits2=0.1)
    _, nbytes, error, _ = chosen(AdaptiveBits(target_step_time=0.15), tried)
    middle = (tried[2].nbytes + tried[3].nbytes) / 2 / tried[2].nbytes
    assert 0.85 * middle < nbytes <= middle * (1 + 1e-9)
    assert 1 < error < 4  # two bits everywhere: 16
    bits, *_, reason = chosen(AdaptiveBits(target_step_time=0.05), tried)
    assert set(bits.values()) == {2}
    assert "200.0 ms with 4 bits, 100.0 ms with 2 bits; 50.0 ms asked for" in reason


def test_a_target_that_nothing_reaches_gives_up_no_bits_that_gain_no_time() -> None:
    bits, *_, reason = chosen(
        AdaptiveBits(target_step_time=0.09), trials(exact=0.1, bits8=0.12, bits4=0.11, bits2=0.105)
    )
    assert set(bits.values()) == {32}
    assert reason.endswith("; 90.0 ms asked for, which is not reached")


# ---- samples ----

KERNELS = default_kernels()
CANDIDATES = AdaptiveBits(bits_range=(1, 8)).candidates(REFERENCE)


def known_layers(*numels: int) -> tuple[list[KnownLayer], int]:
    """Layers one after the other in a grad bucket, and the values of all of them."""
    found, start = [], 0
    for number, numel in enumerate(numels):
        parameter = nn.Parameter(torch.empty(0))
        found.append(KnownLayer(f"layer {number}", parameter, start, numel, REFERENCE, is_free=True))
        start += numel
    return found, start


def samples_of(layers: Sequence[KnownLayer], block: int = 1024, itemsize: int = 4) -> Samples:
    return Samples(layers, [itemsize] * len(layers), block)


def gradients(numel: int, seed: int = 0) -> Tensor:
    """Louder in some places than in others, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp(0.4 * torch.randn(-(-numel // 500), generator=generator)).repeat_interleave(500)[:numel]
    return torch.randn(numel, generator=generator) * scales * 1e-3


def error_of(x: Tensor, how: Compression) -> float:
    decoded = functional.dequantize(
        functional.quantize(x, how.bits, how.block), x.numel(), x.dtype, how.bits, how.block
    )
    return float((decoded.double() - x.double()).square().sum())


def check_rows(measured: Tensor, means: Sequence[Tensor], candidates: Sequence[Compression]) -> None:
    for row, mean in zip(measured, means, strict=True):
        expected = [float(mean.double().square().sum()), *(error_of(mean, each) for each in candidates)]
        torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)


def test_errors_of_whole_layers_are_those_of_the_codec() -> None:
    layers, numel = known_layers(5000, 1024, 16, 33000)
    x = gradients(numel)
    found = samples_of(layers)
    found.add(layers, x)
    check_rows(found.measure(CANDIDATES, KERNELS), [(1 - DECAY) * each.of(x) for each in layers], CANDIDATES)


def test_a_sample_is_a_running_mean_that_forgets() -> None:
    layers, numel = known_layers(3000, 2000)
    found, mean = samples_of(layers), torch.zeros(numel)
    for step in range(5):
        x = gradients(numel, step)
        for each in layers:  # each in a grad bucket of its own
            found.add([each], x)
        mean = DECAY * mean + (1 - DECAY) * x
    check_rows(found.measure(CANDIDATES, KERNELS), [each.of(mean) for each in layers], CANDIDATES)


@pytest.mark.parametrize("block", [64, 1024, 4096])
def test_samples_of_large_layers_tell_the_error_of_the_whole(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_NUMEL", 3 << 17)
    layers, numel = known_layers(1_000_003, 2000, 300_000)
    x = gradients(numel)
    found = samples_of(layers, block)
    looked_at = [each["mean"].numel() for each in found.state_dict().values()]
    assert looked_at == [1 << 17, 2000, 1 << 17]
    found.add(layers, x)
    candidates = [Compression(bits, block) for bits in (2, 4, 8)]
    measured = found.measure(candidates, KERNELS)
    for row, each in zip(measured, layers, strict=True):
        whole = (1 - DECAY) * each.of(x)
        expected = [float(whole.double().square().sum()), *(error_of(whole, how) for how in candidates)]
        torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64), rtol=0.35, atol=0)
    # Which of the layers is the louder, and which bits lose less, must not depend on luck.
    assert (measured[:, 1:].diff(dim=1) < 0).all()


def rows_by_rank(shuffled: bool) -> Tensor:
    """Of an embedding: a row's gradient is as large as its token is frequent."""
    generator = torch.Generator().manual_seed(3)
    scales = 1 / torch.arange(1, 8001)
    if shuffled:
        scales = scales[torch.randperm(len(scales), generator=generator)]
    return (torch.randn(8000, 128, generator=generator) * scales[:, None]).view(-1)


def loud_columns(shuffled: bool) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(1024, 1024, generator=generator) * 1e-3
    x[:, 700 if shuffled else 1000 :: 2000] *= 300
    return x.view(-1)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("make", [rows_by_rank, loud_columns])
def test_samples_of_uneven_layers_are_not_far_from_the_truth(
    make: Callable[[bool], Tensor], shuffled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "_MOST_NUMEL", 1 << 16)
    x = make(shuffled)
    layers, _ = known_layers(x.numel())
    found = samples_of(layers)
    found.add(layers, x)
    norm, error = found.measure([REFERENCE], KERNELS)[0].tolist()
    whole = (1 - DECAY) * x
    assert norm == pytest.approx(float(whole.double().square().sum()), rel=1e-3)
    assert 1 / 4 < error / error_of(whole, REFERENCE) < 4


def test_raw_tails_have_no_error() -> None:
    layers, numel = known_layers(3000)
    found = samples_of(layers)
    found.add(layers, gradients(numel))
    exact, cut = found.measure([Compression(4, 4096), REFERENCE], KERNELS, skip_incomplete=True)[0, 1:].tolist()
    assert exact == 0
    assert 0 < cut < float(found.measure([REFERENCE], KERNELS)[0, 1])


def test_large_layers_are_looked_at_in_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_NUMEL", 1 << 14)
    layers, numel = known_layers(1 << 18)
    for part in torch.arange(numel).chunk(16):  # as many pieces are looked at
        x = torch.zeros(numel)
        x[part] = 1.0
        found = samples_of(layers)
        found.add(layers, x)
        (norm,) = found.measure([REFERENCE], KERNELS)[:, 0].tolist()
        assert norm == pytest.approx(len(part) * (1 - DECAY) ** 2, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_two_bytes_are_measured_in_float32(dtype: torch.dtype) -> None:
    layers, numel = known_layers(5000, 3000)
    x = gradients(numel).to(dtype)
    found = samples_of(layers, itemsize=2)
    found.add(layers, x)
    check_rows(found.measure(CANDIDATES, KERNELS), [(1 - DECAY) * each.of(x).float() for each in layers], CANDIDATES)
    assert found.nbytes(EXACT, False) == 2 * numel
    tailed = MaxMin(4, 1024, skip_incomplete=True)
    assert found.nbytes(REFERENCE, True) == tailed.payload_nbytes(5000, 2) + tailed.payload_nbytes(3000, 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_layer_with_nan_has_a_row_of_nan_and_is_well_in_the_next_window(bad: float) -> None:
    layers, numel = known_layers(3000, 4000)
    found = samples_of(layers)
    x = gradients(numel)
    broken = x.clone()
    broken[3500] = bad
    found.add(layers, broken)
    found.add(layers, x)
    measured = found.measure(CANDIDATES, KERNELS)
    assert measured[1].isnan().all()
    check_rows(measured[:1], [(1 - DECAY**2) * layers[0].of(x)], CANDIDATES)
    found.add(layers, x)
    again = found.measure(CANDIDATES, KERNELS)
    check_rows(again[1:], [(1 - DECAY) * layers[1].of(x)], CANDIDATES)


def test_stats_have_bytes_as_they_travel_and_the_norm() -> None:
    layers, numel = known_layers(5000)
    found = samples_of(layers)
    x = gradients(numel)
    found.add(layers, x)
    measured = found.measure(CANDIDATES, KERNELS)
    (stats,) = found.stats(measured, CANDIDATES, skip_incomplete=False)
    assert (stats.name, stats.numel) == ("layer 0", 5000)
    assert stats.norm == pytest.approx((1 - DECAY) * float(x.norm()), rel=1e-5)
    for how, candidate in zip(CANDIDATES, stats.candidates, strict=True):
        assert (candidate.bits, candidate.block) == (how.bits, how.block)
        assert candidate.nbytes == functional.quantize(x, how.bits, how.block).numel()


def test_without_free_layers_there_is_nothing_to_measure() -> None:
    found = samples_of([])
    found.add([], torch.zeros(10))
    assert found.names == []
    assert found.measure(CANDIDATES, KERNELS).shape == (0, 1 + len(CANDIDATES))
    assert found.stats(found.measure(CANDIDATES, KERNELS), CANDIDATES, False) == []


def test_samples_go_on_from_a_checkpoint_as_though_nothing_had_been(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_NUMEL", 1 << 14)
    layers, numel = known_layers(100_000, 3000)
    through = samples_of(layers)
    through.add(layers, gradients(numel))
    again = Samples.of(through.state_dict())
    assert again.has(layers)
    for each in (through, again):
        each.add(layers, gradients(numel, 1))
    assert torch.equal(again.measure(CANDIDATES, KERNELS), through.measure(CANDIDATES, KERNELS))
    others, _ = known_layers(100_001, 3000)
    assert not again.has(others)
    anew = samples_of(others)
    anew.take_over(again)
    norms = anew.measure(CANDIDATES, KERNELS)[:, 0].tolist()
    assert norms[0] == 0 and norms[1] == again.measure(CANDIDATES, KERNELS)[1, 0]
