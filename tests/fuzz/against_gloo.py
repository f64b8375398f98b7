"""`python -m tests.fuzz.against_gloo --calls 5000 --models 200`: hold cgx against gloo, over every kind of group.

Each start of ranks draws one sequence of torch.distributed calls, or a few DDP models, performs it on gloo groups and
then on cgx groups of the same ranks, and compares what came of each call. A difference prints its seed and a script of
its own, shrunk as far as it still shows the difference. Nothing is compressed here, so results must be equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.fuzz import collectives, models, performing
from tests.fuzz.collectives import Both, Call, Sequence, Step, calls_of
from tests.fuzz.models import Model
from tests.support.harness import OVER_GLOO, Rank, close, describe, observe_ranks

__all__ = ["KINDS", "Difference", "Kind", "Tried", "attempt", "script", "shrunk"]

GROUP_TIMEOUT_S = 30.0  # ranks may have to wait for a processor
CALLS_PER_START = 50
MODELS_PER_START = 8
SHRINKING_STARTS = 60


@dataclass(frozen=True)
class Kind:
    """A kind of group, and how ranks get one."""

    worlds: tuple[int, ...]
    environ: dict[str, str] = field(default_factory=dict)
    nodes: str = ""  # by rank: the name of its node


KINDS = {
    "SHM": Kind((2, 3, 4)),
    "Gloo": Kind((2, 3), OVER_GLOO),
    "TCP": Kind((2, 3), {"CGX_INNER_COMMUNICATOR_TYPE": "TCP"}),
    "2x2": Kind((4,), nodes="0011"),
}


@dataclass(frozen=True)
class Documented:
    """A difference that the documentation names."""

    gloo: str  # "values" or "refused"
    cgx: str
    applies: Callable[[Call], bool]
    says: str = ""  # part of the message of who refuses


def _lies_oddly(call: Call) -> bool:
    return {call.layout, call.into} & {"gaps", "expanded", "transposed", "channels_last"} != set()


def _stacks(call: Call) -> bool:
    return not call.form and not call.flaw


DOCUMENTED: tuple[Documented, ...] = (
    # docs/errors.md: tensors that gloo would read wrong, or write outside of, are refused.
    Documented("values", "refused", _lies_oddly, "expected a tensor without gaps or overlaps"),
    Documented("values", "refused", _lies_oddly, "expected a contiguous"),
    # The form of stacked shares, which torch documents, and gloo does not know.
    Documented(
        "refused", "values", lambda call: call.operation in ("reduce_scatter_tensor", "coalescing") and _stacks(call)
    ),
)


@dataclass(frozen=True)
class Difference:
    """A call, or a model, that ends otherwise on cgx than on gloo."""

    where: tuple[int, ...]  # step, thread and number of a call; the number of a model
    text: str


@dataclass(frozen=True)
class Tried:
    """What one start of ranks found."""

    calls: int = 0
    refused: int = 0
    models: int = 0
    differences: tuple[Difference, ...] = ()

    def __add__(self, other: Tried) -> Tried:
        return Tried(
            self.calls + other.calls,
            self.refused + other.refused,
            self.models + other.models,
            self.differences + other.differences,
        )


# ---- in the ranks ----


def is_averaged(call: Call) -> bool:
    """Whether cgx has an average where gloo has none. Of whole numbers, neither has."""
    return call.op == "AVG" and call.dtype not in ("bool", "uint8", "int8", "int16", "int32", "int64")


def plan_of(sequence: Sequence, backend: str) -> list[Any]:
    """Return what `Performance` takes.

    Gloo has no average: its sum is divided when results are compared. It takes a tensor for as many values from its
    first address on, whatever its strides are: so it gets contiguous ones. Its barrier raises, or hangs, when a call
    before it was refused: so it gets an all_reduce.
    """

    def planned(call: Call) -> dict[str, Any]:
        if backend == "gloo":
            call = replace(call, layout="repeated" if call.layout == "expanded" else "contiguous", into="contiguous")
        source = collectives.source(call)
        if backend == "gloo" and call.operation == "barrier":
            source = (
                collectives.source(replace(call, operation="all_reduce", dtype="float32", shape=(1,))) + "; out = []"
            )
        if backend == "gloo" and is_averaged(call):
            source = source.replace("ReduceOp.AVG", "ReduceOp.SUM").replace("'avg'", "'sum'")
        return {
            "team": call.team,
            "way": call.way,
            "after": call.waited_after,
            "late": call.late,
            "source": source,
        }

    threads = [((step,),) if isinstance(step, Call) else (step.first, step.second) for step in sequence.steps]
    return [[[planned(call) for call in thread] for thread in step] for step in threads]


def compare_in_rank(me: Rank, sequence: Sequence, drawn: tuple[Model, ...], bit_for_bit: bool) -> Tried:
    import torch.distributed as dist

    me.start_group("cgx")
    ours = [dist.group.WORLD, *(dist.new_group(list(team)) for team in sequence.teams[1:])]
    theirs = [dist.new_group(list(team), backend="gloo") for team in sequence.teams]
    outcomes = {}
    for backend, groups in (("gloo", theirs), ("cgx", ours)):
        performance = performing.Performance(sequence.teams, groups, me.rank, _noting(backend))
        outcomes[backend] = performance.perform(plan_of(sequence, backend))
    tried = compared(sequence, outcomes["gloo"], outcomes["cgx"])
    for number, model in enumerate(drawn):
        trained = {}
        for backend, group in (("gloo", theirs[0]), ("cgx", ours[0])):
            _noting(backend)(f"model {number}")
            try:
                trained[backend] = ("values", models.train(model, group, me.rank, me.world))
            except Exception as error:
                trained[backend] = performing.judge(error)
        difference = models_differ(trained["gloo"], trained["cgx"], bit_for_bit)
        found = (Difference((number,), difference),) if difference else ()
        tried += Tried(models=1, refused=int(trained["gloo"][0] == "refused"), differences=found)
    return tried


def _noting(backend: str) -> Callable[[str], None]:
    return lambda text: print(f"{backend}: {text}", flush=True)


def compared(sequence: Sequence, gloo: dict[Any, Any], cgx: dict[Any, Any]) -> Tried:
    differences = []
    for key in sorted(gloo):
        step = sequence.steps[key[0]]
        call = step if isinstance(step, Call) else (step.first, step.second)[key[1]][key[2]]
        theirs, ours = gloo[key], cgx.get(key, ("nothing", ""))
        if theirs[0] == "lost":
            differences.append(Difference(key, f"gloo itself fails, so this call may not be drawn: {theirs[1]}"))
        elif ours[0] == "nothing":
            continue  # never made, after a call that has cost a group
        elif ours[0] != theirs[0]:
            if not any(_is_documented(entry, call, theirs, ours) for entry in DOCUMENTED):
                text = f"gloo: {theirs[0]} {str(theirs[1])[:300]}\n cgx: {ours[0]} {str(ours[1])[:300]}"
                differences.append(Difference(key, text))
        elif ours[0] == "values":
            share = len(sequence.teams[call.team]) if is_averaged(call) else 1
            if not performing.same(ours[1], theirs[1], share) or not performing.same(ours[2], theirs[2]):
                differences.append(Difference(key, f"gloo: {str(theirs[1:])[:300]}\n cgx: {str(ours[1:])[:300]}"))
    refused = sum(outcome[0] == "refused" for outcome in gloo.values())
    return Tried(len(gloo), refused, differences=tuple(differences))


def _is_documented(entry: Documented, call: Call, theirs: tuple[str, Any], ours: tuple[str, Any]) -> bool:
    message = str((theirs if theirs[0] == "refused" else ours)[1])
    return (entry.gloo, entry.cgx) == (theirs[0], ours[0]) and entry.applies(call) and entry.says in message


def models_differ(gloo: tuple[str, Any], cgx: tuple[str, Any], bit_for_bit: bool) -> str:
    """Return how two trainings differ, or "". Sums of floats may have another order, and so be rounded otherwise."""
    if gloo[0] != cgx[0]:
        return f"gloo: {gloo[0]} {str(gloo[1])[:300]}\n cgx: {cgx[0]} {str(cgx[1])[:300]}"
    if gloo[0] != "values":
        return ""
    for (name, theirs), (_, ours) in zip(gloo[1], cgx[1], strict=True):
        rounded = not bit_for_bit and theirs is not None and theirs.is_floating_point()
        tolerance = 1e-3 if rounded else 0.0
        if not performing.same(ours, theirs, tolerance=tolerance):
            return f"{name}\ngloo: {str(theirs)[:300]}\n cgx: {str(ours)[:300]}"
    return ""


# ---- starting ranks ----


def attempt(kind: str, sequence: Sequence, drawn: tuple[Model, ...] = ()) -> Tried:
    """Compare in fresh ranks. A rank that hangs or dies is a difference, too."""
    group, world = KINDS[kind], sequence.world
    # Over Gloo, it makes the exact sums. Of two ranks, they have one order.
    bit_for_bit = world == 2 or kind == "Gloo"
    if not bit_for_bit:
        drawn = tuple(models.widened(model) for model in drawn)
    outcomes = observe_ranks(
        compare_in_rank,
        world,
        None,
        sequence,
        drawn,
        bit_for_bit,
        env=group.environ,
        rank_env={rank: {"CGX_NODE_ID": node} for rank, node in enumerate(group.nodes[:world])},
        group_timeout_s=GROUP_TIMEOUT_S,
        timeout_s=4 * GROUP_TIMEOUT_S,
        grace_s=5.0,
    )
    if not all(outcome.ok for outcome in outcomes):
        notes = [
            [line for line in outcome.log.splitlines() if line.startswith(("gloo: ", "cgx: "))] for outcome in outcomes
        ]
        last = "\n".join(f"rank {rank} was last seen in {lines[-1:]}" for rank, lines in enumerate(notes))
        return Tried(differences=(Difference((len(sequence.steps) - 1,), f"{last}\n{describe(outcomes)}"),))
    by_rank: list[Tried] = [outcome.value for outcome in outcomes]
    differences = [
        replace(found, text=f"rank {rank}: {found.text}")
        for rank, tried in enumerate(by_rank)
        for found in tried.differences
    ]
    differences.sort(key=lambda found: found.where)
    calls = sum(len(calls_of(step)) for step in sequence.steps)
    return Tried(calls, max(tried.refused for tried in by_rank), by_rank[0].models, tuple(differences))


def empty(world: int) -> Sequence:
    return Sequence(world, (tuple(range(world)),), ())


# ---- shrinking ----


def shrunk(kind: str, sequence: Sequence, starts: int = SHRINKING_STARTS) -> Sequence:
    """Leave out and simplify what the difference does not need. Each trial is a fresh start of ranks."""
    left = starts

    def differs(steps: tuple[Step, ...]) -> bool:
        nonlocal left
        left -= 1
        return bool(attempt(kind, replace(sequence, steps=steps)).differences)

    steps = sequence.steps
    width = max(1, len(steps) // 2)
    while left > 0:
        removed = False
        start = 0
        while start < len(steps) and left > 0:
            fewer = steps[:start] + steps[start + width :]
            if fewer and differs(fewer):
                steps, removed = fewer, True
            else:
                start += width
        if width == 1 and not removed:
            break
        width = max(1, width // 2)
    for number in range(len(steps)):
        for simplify in _SIMPLIFICATIONS:
            simpler = simplify(steps[number])
            if left > 0 and simpler != steps[number] and differs((*steps[:number], simpler, *steps[number + 1 :])):
                steps = (*steps[:number], simpler, *steps[number + 1 :])
    return replace(sequence, steps=steps)


def _alone(thread: int, number: int) -> Callable[[Step], Step]:
    """Keep one call of two threads."""

    def simplify(step: Step) -> Step:
        calls = (step.first, step.second)[thread] if isinstance(step, Both) else ()
        return calls[number] if number < len(calls) else step

    return simplify


def _plain(*names: str) -> Callable[[Step], Step]:
    """Give a call the defaults of these fields."""

    def simplify(step: Step) -> Step:
        if isinstance(step, Both):
            return step
        plain = Call(step.operation)
        return replace(step, **{name: getattr(plain, name) for name in names})

    return simplify


_FIELDS = ("way", "waited_after", "late", "layout", "into", "dtype", "shape", "op", "form", "counts", "team", "flaw")
_SIMPLIFICATIONS = (
    *(_alone(thread, number) for thread in range(2) for number in range(3)),
    _plain(*_FIELDS),
    *(_plain(field_name) for field_name in _FIELDS),
)


# ---- scripts ----

SCRIPT = '''"""cgx differs from gloo: {title}. Run it with `python`; torch_cgx has to be installed."""

import os
import pprint
from datetime import timedelta

import torch.multiprocessing

{module}

{data}
WORLD = {world}
ENVIRON = {environ}
NODES = {nodes!r}


def main(me):
    import torch_cgx  # noqa: F401

    os.environ.update(ENVIRON, MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    if NODES:
        os.environ["CGX_NODE_ID"] = NODES[me]
    dist.init_process_group("cgx", rank=me, world_size=WORLD, timeout=timedelta(seconds=20))
    for backend in ("gloo", "cgx"):
        {run}
        print(f"rank {{me}}, {{backend}}:", pprint.pformat(found), flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=WORLD)
'''
RUN_CALLS = """groups = [dist.new_group(list(team), backend=backend) for team in TEAMS]
        found = Performance(TEAMS, groups, me).perform(PLANS[backend])"""
RUN_MODEL = """found = train(MODEL, dist.new_group(backend=backend), me, WORLD)"""


def script(kind: str, sequence: Sequence, title: str, model: Model | None = None) -> str:
    """Return a script that needs torch and torch_cgx alone."""
    module = models if model is not None else performing
    group = KINDS[kind]
    plans = "".join(f"PLANS[{backend!r}] = {_written(plan_of(sequence, backend))}\n" for backend in ("gloo", "cgx"))
    text = Path(module.__file__).read_text()
    return SCRIPT.format(
        title=title,
        module=text.replace("from __future__ import annotations\n", ""),
        data=f"MODEL = {model!r}" if model is not None else f"TEAMS = {sequence.teams!r}\nPLANS = {{}}\n{plans}",
        world=sequence.world,
        environ=group.environ,
        nodes=group.nodes,
        run=RUN_MODEL if model is not None else RUN_CALLS,
    )


def _written(plan: list[Any]) -> str:
    lines = ["["]
    for step in plan:
        lines.append("    [")
        for thread in step:
            lines.append("        [")
            for call in thread:
                others = {name: value for name, value in call.items() if name != "source"}
                lines.append(f'            {{**{others!r}, "source": """\n{call["source"]}\n"""}},')
            lines.append("        ],")
        lines.append("    ],")
    return "\n".join([*lines, "]"])


# ---- the command ----


def run(kind: str, calls: int, number_of_models: int, seed: int, keep_going: bool = False) -> Tried:
    """Draw until so many calls and models have been compared, or one differs. Prints each difference and its script."""
    total = Tried()
    worlds = KINDS[kind].worlds
    while total.calls < calls or total.models < number_of_models:
        world = worlds[seed % len(worlds)]
        sequence, drawn = empty(world), ()
        if total.calls < calls:
            sequence = collectives.draw(seed, world, min(CALLS_PER_START, calls - total.calls))
        if total.models < number_of_models:
            count = min(MODELS_PER_START, number_of_models - total.models)
            drawn = tuple(models.draw(seed * MODELS_PER_START + number) for number in range(count))
        tried = Tried()
        if sequence.steps:
            tried = attempt(kind, sequence)
            if tried.differences:
                _explain(kind, seed, sequence, tried)
        trained = attempt(kind, empty(world), drawn) if drawn else Tried()
        for found in trained.differences[:1]:
            model = drawn[found.where[0]] if found.where[0] >= 0 else None
            print(f"{kind}, seed {seed}: model {found.where}: {found.text}\n{model}", flush=True)
            if model is not None:
                print(script(kind, empty(world), f"{kind}, model of seed {seed}", model), flush=True)
        total += tried + trained
        print(
            f"{kind}, seed {seed}, {world} ranks: {total.calls} calls ({total.refused} refused), "
            f"{total.models} models, {len(total.differences)} differences",
            flush=True,
        )
        if total.differences and not keep_going:
            break
        seed += 1
    return total


def _explain(kind: str, seed: int, sequence: Sequence, tried: Tried) -> None:
    found = tried.differences[0]
    print(f"{kind}, seed {seed}: {sequence.steps[found.where[0]]}: {found.text}", flush=True)
    smallest = shrunk(kind, replace(sequence, steps=sequence.steps[: found.where[0] + 1]))
    again = attempt(kind, smallest)
    print(f"shrunk to {smallest.steps} of {smallest.teams}:", *(d.text for d in again.differences[:1]), flush=True)
    print(script(kind, smallest, f"{kind}, seed {seed}"), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=5000, help="per kind of group")
    parser.add_argument("--models", type=int, default=200, help="per kind of group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=KINDS, help="a kind of group")
    parser.add_argument("--keep-going", action="store_true", help="after a difference, too")
    parser.add_argument("--json", type=Path, help="where to write the counts")
    options = parser.parse_args()
    results = {}
    try:
        for kind in options.only or KINDS:
            tried = run(kind, options.calls, options.models, options.seed, options.keep_going)
            counts = {"calls": tried.calls, "refused": tried.refused, "models": tried.models}
            results[kind] = {**counts, "differences": len(tried.differences), "seed": options.seed}
    finally:
        close()
    if options.json:
        kept = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps({**kept, **results}, indent=2) + "\n")
    return 1 if any(counts["differences"] for counts in results.values()) else 0


if __name__ == "__main__":
    from tests.fuzz.against_gloo import main as main_of_the_module

    sys.exit(main_of_the_module())
