"""Random sequences of torch.distributed calls, as data and as the Python source that makes them.

A *call* is one use of torch.distributed by all members of a *team*, a group of ranks. Its source reads these names:
`rank` and `size` within the team, `members` (global ranks), `group`, and the functions `given` and `blank` of
performing.py. It assigns `out`, the results, `kept`, tensors that must not change, and `work`, what to wait for.

The source is the same on all ranks, so a sequence can be executed here or printed as a script of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Both", "Call", "Sequence", "Step", "calls_of", "draw", "source"]

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int32", "int64")
DTYPES = (*FLOATS, *FLOATS, *INTEGERS, "bool", "complex64", "complex128", "int16")
OPS = ("SUM", "SUM", "SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
SHAPES = ((), (0,), (1,), (7,), (3, 5), (0, 3), (2, 3, 4), (1, 3, 4, 4), (16,), (1000,), (4, 1250), (5001,), (70_001,))
DENSE = ("contiguous", "contiguous", "contiguous", "offset", "transposed", "channels_last")
LAYOUTS = (*DENSE, *DENSE, "gaps")
SYNCHRONOUS = ("functional", "objects", "chain", "any_source", "object_lists")  # without a handle to wait for


@dataclass(frozen=True)
class Call:
    """One call, made by all members of a team."""

    operation: str
    team: int = 0
    dtype: str = "float32"
    shape: tuple[int, ...] = (4,)
    layout: str = "contiguous"  # of what is sent, and of what is changed in place
    into: str = "contiguous"  # of outputs
    op: str = "SUM"
    root: int = 0  # rank in the team
    way: str = "sync"  # "wait" and "future": asynchronous, and how it is waited for
    waited_after: int = 0  # so many steps after this one, if asynchronous
    form: int = 0  # which of an operation's variants
    counts: tuple[int, ...] = ()  # of values, by distance from the receiver: all_to_all
    flaw: str = ""  # why it has to be refused
    late: int = -1  # the member that sleeps a little first


@dataclass(frozen=True)
class Both:
    """Calls of two teams, made by two threads at the same time."""

    first: tuple[Call, ...]
    second: tuple[Call, ...]


Step = Call | Both


@dataclass(frozen=True)
class Sequence:
    """What the ranks of one world do. The first team is the world itself."""

    world: int
    teams: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]


def calls_of(step: Step) -> tuple[Call, ...]:
    return (step,) if isinstance(step, Call) else (*step.first, *step.second)


# ---- the source of each operation ----


def _dtype(name: str) -> str:
    return f"torch.{name}"


def _x(call: Call, shape: str | None = None) -> str:
    scale = ", scale=size" if call.op == "AVG" else ""
    return f"given(rank, {shape or call.shape}, {_dtype(call.dtype)}, {call.layout!r}{scale})"


def _y(call: Call, shape: str | None = None) -> str:
    """Return the source of an output, which a flaw makes unfit."""
    fit = shape or str(call.shape)
    if call.flaw == "shape":
        # No dimension more: gloo looks for its length behind the end of the input's shape, and takes what it finds.
        fit = f"(*{fit}[:-1], {fit}[-1] + 1)" if call.shape or shape else "(2,)"
    # Torch hands over complex numbers as pairs of real ones, so of these it sees no other dtype in float32.
    other = "int64" if call.dtype in ("float32", "complex64") else "float32"
    return f"blank({fit}, {_dtype(other if call.flaw == 'dtype' else call.dtype)}, {call.into!r})"


def _outputs(call: Call, shape: str | None = None) -> str:
    number = "range(size + 1)" if call.flaw == "count" else "range(size)"
    return f"[{_y(call, shape)} for r in {number}]"


def _how(call: Call) -> str:
    return f"group=group, async_op={call.way != 'sync'}"


def _op(call: Call) -> str:
    return f"dist.ReduceOp.{call.op}"


def _root(call: Call) -> str:
    return "99" if call.flaw == "root" else f"members[{call.root}]"


def _all_reduce(call: Call) -> str:
    if call.flaw == "list":
        return f"dist.all_reduce([{_x(call)}], group=group)"
    return f"x = {_x(call)}\nwork = dist.all_reduce(x, {_op(call)}, {_how(call)})\nout = [x]"


def _all_reduce_sparse(call: Call) -> str:
    return (
        "x = torch.sparse_coo_tensor(torch.tensor([[rank, 6]]), torch.tensor([1.0, 2.0]), (9,))\n"
        f"work = dist.all_reduce(x, {_how(call)})\nout = [x]"
    )


def _all_reduce_coalesced(call: Call) -> str:
    second = f"given(rank + 1, (5,), {_dtype('int32' if call.flaw == 'dtype' else call.dtype)})"
    return (
        f"xs = [{_x(call)}, {second}, {_x(call)}]\n"
        f"work = dist.all_reduce_coalesced(xs, {_op(call)}, {_how(call)})\nout = xs"
    )


def _reduce(call: Call) -> str:
    return (
        f"x = {_x(call)}\nwork = dist.reduce(x, {_root(call)}, {_op(call)}, {_how(call)})\n"
        f"out = [x] if rank == {call.root} else []"
    )


def _broadcast(call: Call) -> str:
    return f"x = {_x(call)}\nwork = dist.broadcast(x, {_root(call)}, {_how(call)})\nout = [x]"


def _all_gather(call: Call) -> str:
    if call.flaw == "uneven":
        call_source = f"x = given(rank, (rank + 2,), {_dtype(call.dtype)})\n"
        call_source += f"ys = [blank((r + 2,), {_dtype(call.dtype)}) for r in range(size)]\n"
    else:
        call_source = f"x = {_x(call)}\nys = {_outputs(call)}\n"
    return f"{call_source}work = dist.all_gather(ys, x, {_how(call)})\nout, kept = ys, [x]"


def _all_gather_coalesced(call: Call) -> str:
    ys = f"[[{_y(call)} for _ in range(2)] for _ in range(size)]"
    return (
        f"xs = [{_x(call)}, {_x(call)}]\nys = {ys}\n"
        f"work = dist.all_gather_coalesced(ys, xs, {_how(call)})\nout, kept = ys, xs"
    )


def _whole(call: Call) -> str:
    """Return the source of the shape of all ranks' shares: one after the other, or stacked."""
    if not call.form or not call.shape:
        return f"(size, *{call.shape})"
    return f"(size * {call.shape[0]}, *{call.shape[1:]})"


def _all_gather_into_tensor(call: Call) -> str:
    return (
        f"x = {_x(call)}\ny = {_y(call, _whole(call))}\n"
        f"work = dist.all_gather_into_tensor(y, x, {_how(call)})\nout, kept = [y], [x]"
    )


def _gather(call: Call) -> str:
    return (
        f"x = {_x(call)}\nys = {_outputs(call)} if rank == {call.root} else None\n"
        f"work = dist.gather(x, ys, {_root(call)}, {_how(call)})\nout, kept = ys or [], [x]"
    )


def _scatter(call: Call) -> str:
    return (
        f"xs = [{_x(call).replace('(rank', '(r')} for r in range(size)] if rank == {call.root} else None\n"
        f"y = {_y(call)}\nwork = dist.scatter(y, xs, {_root(call)}, {_how(call)})\nout, kept = [y], xs or []"
    )


def _reduce_scatter(call: Call) -> str:
    number = "size + 1" if call.flaw == "count" else "size"
    return (
        f"xs = [{_x(call).replace('(rank', '(rank + r')} for r in range({number})]\ny = {_y(call)}\n"
        f"work = dist.reduce_scatter(y, xs, {_op(call)}, {_how(call)})\nout, kept = [y], xs"
    )


def _reduce_scatter_tensor(call: Call) -> str:
    return (
        f"x = {_x(call, _whole(call))}\ny = {_y(call)}\n"
        f"work = dist.reduce_scatter_tensor(y, x, {_op(call)}, {_how(call)})\nout, kept = [y], [x]"
    )


def _all_to_all(call: Call) -> str:
    counts = call.counts
    return (
        f"counts = {counts}\n"
        f"xs = [{_x(call, '(counts[(r - rank) % size], 3)')} for r in range(size)]\n"
        f"ys = {_outputs(call, '(counts[(rank - r) % size], 3)')}\n"
        f"work = dist.all_to_all(ys, xs, {_how(call)})\nout, kept = ys, xs"
    )


def _all_to_all_single(call: Call) -> str:
    if not call.counts:
        x, y = _x(call, f"(size * 2, *{call.shape})"), _y(call, f"(size * 2, *{call.shape})")
        call_source = f"x = {x}\ny = {y}\nwork = dist.all_to_all_single(y, x, {_how(call)})"
        return f"{call_source}\nout, kept = [y], [x]"
    rest = call.shape[1:2]
    lines = [
        f"counts = {call.counts}",
        "sent = [counts[(r - rank) % size] for r in range(size)]",
        "received = [counts[(rank - r) % size] for r in range(size)]",
        f"x = {_x(call, f'(sum(sent), *{rest})')}",
        f"y = {_y(call, f'(sum(received), *{rest})')}",
    ]
    unfit = {"splits": "sent[0] += 1", "float splits": "sent[0] = float(sent[0])", "count": "sent.append(0)"}
    if call.flaw in unfit:
        lines.append(unfit[call.flaw])
    lines.append(f"work = dist.all_to_all_single(y, x, received, sent, {_how(call)})")
    return "\n".join([*lines, "out, kept = [y], [x]"])


def _barrier(call: Call) -> str:
    return f"work = dist.barrier({_how(call)})\nout = []"


def _ring(call: Call) -> str:
    names = "right, left = members[(rank + 1) % size], members[rank - 1]\n"
    tensors = f"x, y = {_x(call)}, {_y(call)}\n"
    if call.form == 0:
        call_source = (
            f"work = [dist.irecv(y, left, group=group, tag={call.root}), "
            f"dist.isend(x, right, group=group, tag={call.root})]"
        )
    else:
        call_source = (
            "work = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right, group), "
            "dist.P2POp(dist.irecv, y, left, group)])"
        )
    return f"{names}{tensors}{call_source}\nout, kept = [y], [x]"


def _chain(call: Call) -> str:
    return (
        f"x, y = {_x(call)}, {_y(call)}\n"
        "if rank > 0:\n    dist.recv(y, members[rank - 1], group=group)\n"
        "if rank < size - 1:\n    dist.send(x, members[rank + 1], group=group)\n"
        "out, kept = [y], [x]"
    )


def _any_source(call: Call) -> str:
    return (
        f"x, got = {_x(call)}, {{}}\n"
        "if rank:\n    dist.send(x, members[0], group=group)\n"
        f"for _ in range(0 if rank else size - 1):\n    y = {_y(call)}\n"
        "    got[dist.recv(y, group=group)] = y\n"
        # Without an answer, the next call of a rank that is ahead could come before this one of a rank that is late.
        "for r in range(1, size):\n"
        "    if rank == 0:\n        dist.send(x, members[r], group=group)\n"
        "    if rank == r:\n        dist.recv(blank(x.shape, x.dtype), members[0], group=group)\n"
        "out, kept = [got[sender] for sender in sorted(got)], [x]"
    )


def _objects(call: Call) -> str:
    mine = f"{{'rank': rank, 'x': {_x(call)}, 'text': 'cgx' * rank}}"
    return [
        f"out = [None] * size\ndist.all_gather_object(out, {mine}, group=group)",
        f"out = [{mine}, rank] if rank == {call.root} else [None, None]\n"
        f"dist.broadcast_object_list(out, {_root(call)}, group=group)",
        f"out = [None] * size if rank == {call.root} else None\n"
        f"dist.gather_object({mine}, out, {_root(call)}, group=group)\nout = out or []",
        f"out = [None]\ndist.scatter_object_list(out, [{mine}] * size, {_root(call)}, group=group)",
    ][call.form % 4]


def _coalescing(call: Call) -> str:
    """Return the source of calls in torch's coalescing manager."""
    body = [
        f"xs = [{_x(call)} for _ in range(3)]\nout = xs",
        f"dist.all_reduce(x, {_op(call)}, group=group)",
        f"xs, ys = [{_x(call)} for _ in range(2)], [{_y(call, _whole(call))} for _ in range(2)]\nout, kept = ys, xs",
        "dist.all_gather_into_tensor(y, x, group=group)",
        f"xs, ys = [{_x(call, _whole(call))} for _ in range(2)], [{_y(call)} for _ in range(2)]\nout, kept = ys, xs",
        f"dist.reduce_scatter_tensor(y, x, {_op(call)}, group=group)",
    ]
    variant = call.form % 3
    names = "for x in xs" if variant == 0 else "for x, y in zip(xs, ys)"
    return (
        f"{body[2 * variant]}\n"
        f"with dist._coalescing_manager(group=group, async_ops={call.way != 'sync'}) as manager:\n"
        f"    {names}:\n        {body[2 * variant + 1]}\n"
        f"work = {'None' if call.way == 'sync' else '[manager]'}"
    )


def _functional(call: Call) -> str:
    op = "avg" if call.op == "AVG" else call.op.lower()
    made = [
        f"funcol.all_reduce(x, {op!r}, group)",
        "funcol.all_gather_tensor(x, 0, group)",
        f"funcol.reduce_scatter_tensor(x, {op!r}, 0, group)",
        "funcol.all_to_all_single(x, None, None, group)",
        f"funcol.broadcast(x, {call.root}, group)",
    ][call.form % 5]
    x = _x(call, f"(size * 2, *{call.shape[1:]})") if call.form % 5 in (2, 3) else _x(call)
    return f"x = {x}\nout, kept = [funcol.wait_tensor({made})], [x]"


SOURCES: dict[str, Callable[[Call], str]] = {
    "all_reduce": _all_reduce,
    "all_reduce_sparse": _all_reduce_sparse,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "ring": _ring,
    "chain": _chain,
    "any_source": _any_source,
    "objects": _objects,
    "coalescing": _coalescing,
    "functional": _functional,
}

# What all ranks have to refuse, without a message to another. The root alone sees the lists of gather and scatter.
FLAWS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("list",),
    "all_reduce_coalesced": ("dtype",),
    "reduce": ("root",),
    "broadcast": ("root",),
    "gather": ("root",),
    "scatter": ("root",),
    "all_gather": ("shape", "dtype", "count", "uneven"),
    "all_gather_into_tensor": ("shape", "dtype"),
    "reduce_scatter": ("shape", "dtype", "count"),
    "reduce_scatter_tensor": ("shape", "dtype"),
    "all_to_all": ("count", "dtype"),
    "all_to_all_single": ("splits", "float splits", "count", "dtype"),
}
# A tensor that is refused here is refused by one rank of two, and the other would wait.
BETWEEN_TWO = ("ring", "chain", "any_source")
REDUCING = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *(("coalescing", 0), ("coalescing", 2), ("functional", 0), ("functional", 2)),
)


def source(call: Call) -> str:
    return SOURCES[call.operation](call)


# ---- drawing ----


def draw(seed: int, world: int, length: int) -> Sequence:
    """Draw `length` calls for `world` ranks. The same seed draws the same sequence on every machine."""
    dice = random.Random(f"calls {seed} {world}")
    everybody = tuple(range(world))
    subsets = [tuple(sorted(dice.sample(everybody, dice.randint(min(2, world - 1), world)))) for _ in range(2)]
    teams = (everybody, *subsets, everybody)  # two groups of the same ranks, too
    steps: list[Step] = []
    drawn = 0
    while drawn < length:
        if dice.random() < 0.08 and length - drawn >= 6:
            first, second = dice.sample(range(len(teams)), 2)
            both = Both(*(tuple(_draw_call(dice, teams, team) for _ in range(3)) for team in (first, second)))
            steps.append(both)
            drawn += 6
        else:
            steps.append(_draw_call(dice, teams, dice.choice((0, 0, 1, 2, 3))))
            drawn += 1
    return Sequence(world, teams, tuple(steps))


def _draw_call(dice: random.Random, teams: tuple[tuple[int, ...], ...], team: int) -> Call:
    operation = dice.choice(tuple(SOURCES))
    size = len(teams[team])
    flaw = dice.choice(FLAWS[operation]) if operation in FLAWS and dice.random() < 0.12 else ""
    form = dice.randrange(60)
    variant = (operation, form % {"coalescing": 3, "functional": 5}.get(operation, 1))
    reducing = operation in REDUCING or variant in REDUCING
    op = dice.choice(OPS) if reducing else "SUM"
    shape = dice.choice(SHAPES)
    counts: tuple[int, ...] = ()
    if operation == "all_to_all" or (operation == "all_to_all_single" and (flaw or dice.random() < 0.6)):
        counts = tuple(dice.choice((0, 1, 2, 5)) for _ in range(size))
    if operation in ("reduce_scatter_tensor", "coalescing") and not shape:
        shape = (1,)  # of 0 dimensions, gloo's process dies
    if 0 in shape and flaw == "shape":
        flaw = ""  # of no values, any shape fits
    asynchronous = operation not in SYNCHRONOUS and dice.random() < 0.5
    layout = dice.choice(LAYOUTS if reducing or operation == "broadcast" else (*LAYOUTS, "expanded"))
    into = dice.choice(LAYOUTS)
    if operation in BETWEEN_TWO:
        layout, into = (dice.choice(("contiguous", "offset")) for _ in range(2))
        shape = dice.choice([shape for shape in SHAPES if 0 not in shape])  # gloo waits for ever for nothing
    dtype = dice.choice(DTYPES)
    if operation == "coalescing" and dtype.startswith("complex"):
        op = "SUM"  # torch refuses others inside of its manager, which then keeps the group's later calls to itself
    return Call(
        operation,
        team,
        dtype,
        shape,
        layout,
        into,
        op,
        dice.randrange(size),
        dice.choice(("wait", "wait", "future")) if asynchronous else "sync",
        dice.choice((0, 1, 2, 4, 7)) if asynchronous else 0,
        form,
        counts,
        flaw,
        dice.randrange(size) if dice.random() < 0.1 else -1,
    )
