"""cgx held against gloo: a short, seeded part of what `make fuzz` does for long (tests/fuzz/against_gloo.py)."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import against_gloo, collectives, models
from tests.fuzz.against_gloo import KINDS, attempt, compared, empty, script
from tests.fuzz.collectives import Call, Sequence

pytestmark = pytest.mark.ranks

SEED = 20
CALLS = 150
MODELS = 6


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.matrix if kind == "Gloo" else ()) for kind in KINDS]
)
def test_random_calls_and_models_end_on_cgx_as_they_do_on_gloo(kind: str) -> None:
    world = KINDS[kind].worlds[-1]
    sequence = collectives.draw(SEED, world, CALLS)
    drawn = tuple(models.draw(SEED + number) for number in range(MODELS))
    tried = attempt(kind, sequence, drawn)
    assert not tried.differences, "\n".join(found.text for found in tried.differences[:5])
    assert tried.calls == CALLS and tried.models == MODELS
    assert CALLS // 20 < tried.refused < CALLS // 2


def test_a_root_outside_of_the_group_is_refused_by_all_ranks_and_the_group_stays_usable() -> None:
    """Torch refuses it on the rank that brings tensors for it, which then tells the others nothing."""
    refused = tuple(Call(name, flaw="root") for name in ("gather", "scatter", "broadcast", "reduce"))
    for kind in ("SHM", "Gloo"):
        tried = attempt(kind, Sequence(2, ((0, 1),), (*refused, Call("all_reduce"))))
        assert not tried.differences, tried.differences
        assert tried.refused == len(refused)


def test_another_result_is_a_difference_and_so_is_an_error_but_not_a_documented_one() -> None:
    def differs(call: Call, gloo: tuple[object, ...], cgx: tuple[object, ...]) -> bool:
        found = compared(Sequence(2, ((0, 1),), (call,)), {(0, 0, 0): gloo}, {(0, 0, 0): cgx})
        return bool(found.differences)

    one, two = ("values", [torch.ones(2)], []), ("values", [torch.ones(2) * 2], [])
    plain = Call("all_reduce")
    assert not differs(plain, one, one)
    assert differs(plain, one, two)
    assert not differs(Call("all_reduce", op="AVG"), two, one)  # gloo's sum of two ranks
    assert differs(plain, one, ("refused", "ValueError: no"))
    assert differs(plain, ("refused", "ValueError: no"), ("lost", "MismatchError: lost step"))
    gaps = ("refused", "ValueError: all_reduce: expected a tensor without gaps or overlaps in memory")
    assert differs(plain, one, gaps)
    assert not differs(Call("all_reduce", layout="gaps"), one, gaps)


def test_the_same_seed_draws_the_same_and_every_operation_is_drawn() -> None:
    sequence = collectives.draw(1, 4, 2000)
    assert sequence == collectives.draw(1, 4, 2000) != collectives.draw(2, 4, 2000)
    assert models.draw(1) == models.draw(1) != models.draw(2)
    drawn = [call for step in sequence.steps for call in collectives.calls_of(step)]
    assert len(drawn) == 2000 and {call.operation for call in drawn} == set(collectives.SOURCES)
    assert {call.flaw for call in drawn} >= {flaw for flaws in collectives.FLAWS.values() for flaw in flaws}


def test_shrinking_leaves_the_calls_that_make_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(kind: str, sequence: Sequence) -> against_gloo.Tried:
        names = [call.operation for step in sequence.steps for call in collectives.calls_of(step)]
        differs = "scatter" in names and "barrier" in names[names.index("scatter") :]
        return against_gloo.Tried(differences=(against_gloo.Difference((0,), "differs"),) if differs else ())

    monkeypatch.setattr(against_gloo, "attempt", pretend)
    smallest = against_gloo.shrunk("SHM", collectives.draw(3, 2, 200), starts=400)
    assert smallest.steps == (
        Call("scatter", root=smallest.steps[0].root),
        Call("barrier", root=smallest.steps[1].root),
    )


def test_the_printed_script_is_a_program_of_its_own() -> None:
    for text in (
        script("2x2", collectives.draw(1, 4, 30), "a title"),
        script("SHM", empty(2), "a title", models.draw(1)),
    ):
        compile(text, "script", "exec")
        assert "fuzz" not in text
