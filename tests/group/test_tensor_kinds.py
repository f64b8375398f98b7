"""Every collective with every kind of tensor: the right values on all ranks, or an error that says what is allowed.

Gloo runs the same cases. Where it raises (torch often does, before any backend is asked), cgx may raise the same; where
it computes nonsense, waits or crashes, cgx may not.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_cgx
from tests.support.harness import Rank, run_ranks
from tests.support.tensor_kinds import COLLECTIVES, KINDS, expected, outcome

pytestmark = pytest.mark.ranks

# What kills gloo's process, writes where it must not, or waits for ever, with torch 2.13.
GLOO_DIES = {
    *(("0-dim", collective) for collective in COLLECTIVES if collective.startswith("reduce_scatter_tensor")),
    *(("overlapping", collective) for collective in COLLECTIVES),
}
# Where torch itself raises on the root alone, before any backend is asked, so that the ranks lose step.
UNEVEN = {("conjugate view", "scatter"), ("quantized", "gather"), ("mkldnn", "gather")}
CASES = [(kind, collective) for kind in KINDS for collective in COLLECTIVES if (kind, collective) not in UNEVEN]
COMPRESSED = ("all_reduce", "all_reduce_async", "coalesced", "twice_in_a_list")
WITHOUT_VALUES = ("nested", "quantized", "meta")  # nobody adds them up
SAYS_WHAT_IS_ALLOWED = re.compile(r"expected .*got .*", re.DOTALL)

Outcomes = dict[tuple[str, str], tuple[str, Any]]


def try_all(me: Rank, bits: int, left_out: set[tuple[str, str]]) -> Outcomes:
    torch_cgx.set_default(bits=bits)
    group = dist.group.WORLD
    found = {case: outcome(*case, me.rank, group) for case in CASES if case not in left_out}
    dist.barrier()  # the group has stayed in step
    return found


def is_right(values: Any, kind: str, collective: str, rank: int, tolerance: float) -> bool:
    if kind in WITHOUT_VALUES:
        return False
    wanted = expected(kind, collective, rank)
    if values == wanted:
        return True
    if not tolerance or collective not in COMPRESSED:
        return False
    pairs = list(zip(values, wanted, strict=True))
    return all((torch.tensor(got) - torch.tensor(want)).abs().max() <= tolerance for got, want in pairs)


@pytest.fixture(scope="module")
def by_gloo() -> list[Outcomes]:
    return run_ranks(try_all, 2, "gloo", 32, GLOO_DIES, group_timeout_s=20.0)


@pytest.mark.parametrize(("bits", "tolerance"), [(32, 0.0), (4, 3.0)])
@pytest.mark.parametrize("inner", ["SHM", "TCP"])
def test_every_kind_of_tensor_is_reduced_rightly_or_refused_in_words(
    bits: int, tolerance: float, inner: str, by_gloo: list[Outcomes]
) -> None:
    environ = {"CGX_INNER_COMMUNICATOR_TYPE": inner}
    by_rank = run_ranks(try_all, 2, "cgx", bits, set(), group_timeout_s=20.0, env=environ)
    wrong = []
    for case in CASES:
        for rank, found in enumerate(by_rank):
            what, ours = found[case]
            theirs = by_gloo[rank].get(case, ("death", ""))
            if what == "values":
                good = is_right(ours, *case, rank, tolerance)
            else:
                named = what in ("ValueError", "TypeError", "RuntimeError") and SAYS_WHAT_IS_ALLOWED.search(ours)
                good = bool(named) or (what, ours) == theirs
            if not good:
                wrong.append(f"{case} on rank {rank}: {what}: {str(ours)[:200]}; gloo: {theirs[0]} {theirs[1][:60]}")
        if by_rank[0][case][0] != by_rank[1][case][0]:
            wrong.append(f"{case}: ranks differ: {by_rank[0][case][0]}, {by_rank[1][case][0]}")
    assert not wrong, "\n".join(wrong)
    taken = sum(what == "values" for what, _ in by_rank[0].values())
    assert taken > 250, f"only {taken} of {len(CASES)} cases were carried out"
