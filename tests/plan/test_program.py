"""The checker: right programs pass with the right bill, and every kind of wrong program is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from torch_cgx.errors import CGXError, ProgramError
from torch_cgx.plan import checker
from torch_cgx.plan.checker import Message, Report
from torch_cgx.plan.program import Add, Decode, Encode, Program, Receive, Reduce, Send, Step, Sum, format_program


def filled_in(programs: Sequence[Program]) -> list[Program]:
    """Let every receive that meets a send say how its payload is coded, and a level above that of the send."""
    codings = {s.slot: s.exact for program in programs for s in program if isinstance(s, Encode | Reduce)}
    filled: list[list[Step]] = [[] for _ in programs]
    levels = [0] * len(programs)
    sent: dict[tuple[int, int, str], int] = {}
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while len(filled[rank]) < len(program):
                step = program[len(filled[rank])]
                if isinstance(step, Send):
                    sent[rank, step.peer, step.slot] = levels[rank]
                if isinstance(step, Receive):
                    if (step.peer, rank, step.slot) not in sent:
                        break
                    levels[rank] = max(levels[rank], sent[step.peer, rank, step.slot] + 1)
                    step = replace(step, level=levels[rank], exact=codings.get(step.slot, False))
                filled[rank].append(step)
                moved = True
    return [(*steps, *program[len(steps) :]) for steps, program in zip(filled, programs, strict=True)]


def check(programs: Sequence[Program], *lengths: Sequence[int]) -> Report:
    return checker.check(filled_in(programs), *lengths)


def check_reduce_scatter(programs: Sequence[Program], *lengths: Sequence[int]) -> Report:
    return checker.check_reduce_scatter(filled_in(programs), *lengths)


def check_all_gather(programs: Sequence[Program], *lengths: Sequence[int]) -> Report:
    return checker.check_all_gather(filled_in(programs), *lengths)


# Two ranks, one chunk, which rank 0 reduces.
OWNER: Program = (Receive("part", 1), Reduce(("part",), 0, "sum"), Send("sum", 1))
OTHER: Program = (Encode(0, "part"), Send("part", 0), Receive("sum", 0), Decode("sum", 0))
# The same, but rank 0 adds up first, and then encodes what it has got.
ADDING: tuple[Program, Program] = (
    (Receive("part", 1), Add("part", 0), Reduce((), 0, "sum"), Send("sum", 1)),
    OTHER,
)

# Two ranks, each of which sums up its own share, and each of which sends its share to the other.
SCATTERING: tuple[Program, Program] = (
    (Encode(1, "p0"), Send("p0", 1), Receive("p1", 1), Sum(("p1",), 0)),
    (Encode(0, "p1"), Send("p1", 0), Receive("p0", 0), Sum(("p0",), 1)),
)
GATHERING: tuple[Program, Program] = (
    (Encode(0, "s0"), Send("s0", 1), Decode("s0", 0), Receive("s1", 1), Decode("s1", 1)),
    (Encode(1, "s1"), Send("s1", 0), Decode("s1", 1), Receive("s0", 0), Decode("s0", 0)),
)


def chain(first_final: bool = False, last_final: bool = True, exact: bool = False) -> list[Program]:
    """Three ranks that hand a growing sum from one to the next."""
    return [
        (Encode(0, "a", exact), Send("a", 1), Receive("c", 2), Decode("c", 0)),
        (
            *(Receive("a", 0), Reduce(("a",), 0, "b", final=first_final, exact=exact)),
            *(Send("b", 2), Receive("c", 2), Decode("c", 0)),
        ),
        (Receive("b", 1), Reduce(("b",), 0, "c", final=last_final, exact=exact), Send("c", 0), Send("c", 1)),
    ]


def reject(*programs: Program, by: Callable[[Sequence[Program]], Report] = check) -> str:
    with pytest.raises(ProgramError) as caught:
        by(programs)
    return str(caught.value)


def test_a_right_pair_of_programs_passes_with_its_bill() -> None:
    assert check([OWNER, OTHER], [24]) == Report(
        quantizations={0: 2},
        messages=(1, 1),
        sent_nbytes=(24, 24),
        sent=(Message(0, 1, (0,), exact=False), Message(1, 0, (0,), exact=False)),
    )
    assert check([OWNER, OTHER]).sent_nbytes is None


def test_ranks_that_do_nothing_have_nothing_to_agree_on() -> None:
    assert check([(), (), ()]) == Report(quantizations={}, messages=(0, 0, 0), sent_nbytes=None, sent=())


def test_a_receive_that_is_not_above_its_send_is_refused() -> None:
    late = (OTHER[0], OTHER[1], replace(OTHER[2], level=1), OTHER[3])
    with pytest.raises(ProgramError, match=r"expected a level above 1, at which it is sent, got 1"):
        checker.check([OWNER, late])


def test_a_receive_of_another_coding_is_refused() -> None:
    owner = (replace(OWNER[0], exact=True), *OWNER[1:])
    with pytest.raises(ProgramError, match="expected exact, got compressed"):
        checker.check([owner, OTHER])


def test_a_chain_quantizes_the_first_contribution_once_a_hop() -> None:
    """Rank 0's values are encoded once there, and once more at each of two reductions."""
    assert check(chain()).quantizations == {0: 3}


def test_a_payload_may_be_forwarded() -> None:
    relay: Program = (Encode(0, "p1"), Send("p1", 0), Receive("sum", 0), Send("sum", 2), Decode("sum", 0))
    programs: list[Program] = [
        (Receive("p1", 1), Receive("p2", 2), Reduce(("p1", "p2"), 0, "sum"), Send("sum", 1)),
        relay,
        (Encode(0, "p2"), Send("p2", 0), Receive("sum", 1), Decode("sum", 0)),
    ]
    assert check(programs, [8]).sent_nbytes == (8, 16, 8)


def test_a_send_that_nobody_receives_is_refused() -> None:
    assert "got 1 and 0" in reject(OWNER, OTHER[:2])


def test_a_receive_that_nobody_serves_is_refused() -> None:
    assert "got 0 and 1" in reject(OWNER[:2], OTHER)


def test_a_message_sent_twice_is_refused() -> None:
    assert "got 2 and 1" in reject((*OWNER, Send("sum", 1)), OTHER)


def test_a_message_received_twice_is_refused() -> None:
    assert "got 1 and 2" in reject(OWNER, (*OTHER, Receive("sum", 0)))


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_is_oneself_or_not_there_is_refused(peer: int) -> None:
    assert "expected another of the 2 ranks" in reject((*OWNER, Send("sum", peer)), OTHER)


def test_a_circular_wait_is_refused_and_shown() -> None:
    text = reject(
        (Receive("b", 2), Encode(0, "a"), Send("a", 1)),
        (Receive("a", 0), Encode(0, "c"), Send("c", 2)),
        (Receive("c", 1), Encode(0, "b"), Send("b", 0)),
    )
    assert text.startswith("circular wait") and all(f"rank {rank} waits at step 1" in text for rank in range(3))


def test_only_the_ranks_of_the_circle_are_shown() -> None:
    text = reject(
        (Receive("x", 1),),
        (Receive("y", 2), Encode(0, "z"), Encode(1, "x"), Send("x", 0), Send("z", 2)),
        (Receive("z", 1), Encode(0, "y"), Send("y", 1)),
    )
    assert "rank 0" not in text and "rank 1 waits" in text and "rank 2 waits" in text


@pytest.mark.parametrize(
    "owner",
    [
        pytest.param((Send("sum", 1), *OWNER[:2]), id="send"),
        pytest.param((Decode("sum", 0), *OWNER), id="decode"),
        pytest.param((OWNER[1], OWNER[0], OWNER[2]), id="reduce"),
    ],
)
def test_a_slot_read_before_it_is_written_is_refused(owner: Program) -> None:
    assert "is read before it is written" in reject(owner, OTHER)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((OTHER[0], *OTHER), id="encode"),
        pytest.param((Encode(0, "sum"), *OTHER), id="receive"),
    ],
)
def test_a_slot_written_twice_is_refused(other: Program) -> None:
    assert "is written twice" in reject(OWNER, other)


def test_a_chunk_quantized_twice_by_one_rank_is_refused() -> None:
    other = (*OTHER, Encode(0, "again"))
    assert "rank 1 quantizes it 2 times" in reject(OWNER, other)


def test_a_slot_reduced_into_its_own_input_is_refused() -> None:
    owner = (OWNER[0], Reduce(("part",), 0, "part"), Send("part", 1))
    other = (OTHER[0], OTHER[1], Receive("part", 0), Decode("part", 0))
    assert "is written twice" in reject(owner, other)


def test_a_payload_of_another_chunk_is_refused() -> None:
    assert "holds chunk 0, not 1" in reject(OWNER, (*OTHER[:3], Decode("sum", 1)))


def test_a_contribution_summed_twice_is_refused() -> None:
    assert "rank 1 is summed twice" in reject((OWNER[0], Reduce(("part", "part"), 0, "sum"), OWNER[2]), OTHER)


def test_own_values_summed_twice_are_refused() -> None:
    owner: Program = (Encode(0, "mine"), OWNER[0], Reduce(("part", "mine"), 0, "sum"), OWNER[2])
    assert "rank 0 is summed twice" in reject(owner, OTHER)


def test_a_sum_encoded_again_and_added_again_is_refused() -> None:
    owner: Program = (*OWNER[:2], Encode(0, "again"), Reduce(("again",), 0, "twice"), *OWNER[2:])
    assert "is summed twice" in reject(owner, OTHER)


def test_a_missing_contribution_is_refused() -> None:
    owner: Program = (OWNER[0], Reduce((), 0, "sum"), OWNER[2])
    assert "misses the contributions of ranks [1]" in reject(owner, OTHER)


def test_ranks_that_end_with_different_payloads_are_refused() -> None:
    owner: Program = (*OWNER, Encode(0, "again"), Decode("again", 0))
    text = reject(owner, OTHER)
    assert "the bits differ" in text
    assert "rank 0 ends with the payload of slot again of rank 0" in text
    assert "rank 1 with the payload of slot sum of rank 0" in text


def test_two_ranks_that_each_sum_up_for_themselves_are_refused() -> None:
    """The same sums to the eye, but added in another order."""
    programs = [
        (
            Encode(0, f"p{rank}"),
            Send(f"p{rank}", peer),
            Receive(f"p{peer}", peer),
            Reduce((f"p{peer}",), 0, "sum"),
        )
        for rank, peer in ((0, 1), (1, 0))
    ]
    assert "the bits differ" in reject(*programs)


def test_a_rank_that_never_decodes_is_refused() -> None:
    assert "rank 1 ends with its own values" in reject(OWNER, OTHER[:3])


def test_what_is_added_counts_as_a_contribution() -> None:
    assert check(ADDING).quantizations == {0: 2}


def test_an_exact_payload_is_no_quantization() -> None:
    other: Program = (Encode(0, "part", exact=True), *OTHER[1:])
    assert check([ADDING[0], other]).quantizations == {0: 1}
    assert check(chain(exact=True)).quantizations == {0: 0}


def test_exact_and_compressed_payloads_have_lengths_of_their_own() -> None:
    programs = [ADDING[0], (Encode(0, "part", exact=True), *OTHER[1:])]
    report = check(programs, [24], [1000])
    assert report.sent_nbytes == (24, 1000)
    assert report.sent == (Message(0, 1, (0,), exact=False), Message(1, 0, (0,), exact=True))
    with pytest.raises(ValueError, match=r"exact_nbytes: expected .*, got None"):
        check(programs, [24])


def test_a_sum_that_is_scaled_twice_is_refused() -> None:
    assert "rank 2, step 2" in (text := reject(*chain(first_final=True))) and "was scaled already" in text
    assert "was scaled already" in reject(*chain(first_final=True, last_final=False))


def test_a_sum_that_is_never_scaled_is_refused() -> None:
    assert "chunk 0: the sum is never scaled" in reject(*chain(last_final=False))


def test_adding_to_what_is_scaled_is_refused() -> None:
    programs = chain(first_final=True)
    programs[2] = (Receive("b", 1), Add("b", 0), Reduce((), 0, "c"), Send("c", 0), Send("c", 1))
    assert "was scaled already" in reject(*programs)


def test_a_rank_that_adds_and_never_reduces_is_refused() -> None:
    owner: Program = (Encode(0, "mine"), *ADDING[0][:2], Send("mine", 1))
    other: Program = (*OTHER[:2], Receive("mine", 0), Add("mine", 0))
    assert "rank 0 ends with its own values" in reject(owner, other)


def test_a_contribution_added_twice_is_refused() -> None:
    owner = ADDING[0]
    assert "rank 1 is summed twice" in reject((*owner[:2], Add("part", 0), *owner[2:]), OTHER)


def test_payloads_of_both_codings_in_one_sum_are_refused() -> None:
    exact: Program = (Encode(0, "part", exact=True), *OTHER[1:])
    assert "slot part is exact, and the others are compressed" in reject(OWNER, exact)
    owner: Program = (OWNER[0], Reduce(("part",), 0, "sum", exact=True), OWNER[2])
    assert "slot part is compressed, and the others are exact" in reject(owner, OTHER)


def test_what_is_added_has_been_written_and_is_of_the_same_chunk() -> None:
    assert "is read before it is written" in reject((Add("part", 0), *OWNER), OTHER)
    assert "holds chunk 0, not 1" in reject((OWNER[0], Add("part", 1), *OWNER[1:]), OTHER)


# ---- reduce-scatters ----


def test_a_reduce_scatter_passes_with_its_bill() -> None:
    assert check_reduce_scatter(SCATTERING, [24, 40]) == Report(
        quantizations={0: 1, 1: 1},
        messages=(1, 1),
        sent_nbytes=(40, 24),
        sent=(Message(0, 1, (1,), exact=False), Message(1, 0, (0,), exact=False)),
    )
    assert check_reduce_scatter(SCATTERING).sent_nbytes is None
    exact: tuple[Program, ...] = tuple((Encode(1 - r, f"p{r}", exact=True), *SCATTERING[r][1:]) for r in (0, 1))
    assert check_reduce_scatter(exact).quantizations == {0: 0, 1: 0}


def test_of_a_reduce_scatter_a_share_may_be_empty() -> None:
    assert check_reduce_scatter([SCATTERING[0][2:], SCATTERING[1][:2]]).quantizations == {0: 1}
    assert check_reduce_scatter([(), (), ()]).quantizations == {}


def test_a_reduce_scatter_is_no_allreduce_and_no_all_gather_nor_the_other_way_round() -> None:
    assert "ends with its own values" in reject(*SCATTERING)
    assert "expected what rank 0 encoded, got None" in reject(*SCATTERING, by=check_all_gather)
    assert "misses the contributions of ranks [1]" in reject(*GATHERING, by=check_reduce_scatter)
    assert "the sum misses the contributions" in reject(*GATHERING)
    assert "misses the contributions of ranks [1]" in reject(OWNER, OTHER, by=check_reduce_scatter)
    assert "expected what rank 0 encoded, got the payload of slot sum" in reject(OWNER, OTHER, by=check_all_gather)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        pytest.param(SCATTERING[0][:3], "misses the contributions of ranks [1]", id="no sum"),
        pytest.param((*SCATTERING[0][:3], Sum((), 0)), "expected at least one slot", id="a sum of nothing"),
        pytest.param((*SCATTERING[0][:3], Sum(("p1", "p1"), 0)), "rank 1 is summed twice", id="an input twice"),
        pytest.param((*SCATTERING[0], Sum(("p1",), 0)), "rank 1 is summed twice", id="a sum twice"),
        pytest.param(
            (Encode(0, "own"), *SCATTERING[0][:3], Sum(("p1", "own"), 0)),
            "rank 0 is summed twice",
            id="own values twice",
        ),
        pytest.param((SCATTERING[0][3], *SCATTERING[0][:3]), "is read before it is written", id="too early"),
        pytest.param((*SCATTERING[0][:3], Sum(("p0",), 0)), "holds chunk 1, not 0", id="another chunk's payload"),
        pytest.param((*SCATTERING[0], Sum(("p0",), 1)), "chunk 1 is not in this rank's share", id="another's share"),
        pytest.param((*SCATTERING[0], Decode("p1", 0)), "rank 0 writes over its values", id="values changed"),
        pytest.param((*SCATTERING[0], Encode(1, "again")), "rank 0 quantizes it 2 times", id="quantized twice"),
        pytest.param((*SCATTERING[0], Encode(2, "more")), "one in the share of one of the 2 ranks", id="no such share"),
    ],
)
def test_a_wrong_reduce_scatter_is_refused(first: Program, said: str) -> None:
    assert said in reject(first, SCATTERING[1], by=check_reduce_scatter)


def test_a_sum_that_is_reduced_where_values_are_instead_of_in_the_share_is_no_reduce_scatter() -> None:
    """Executors sum up in a tensor of its own: what a reduce leaves in the values, nobody would see."""
    first: Program = (*SCATTERING[0][:3], Reduce(("p1",), 0, "sum", exact=True))
    second: Program = (Encode(0, "p1", exact=True), *SCATTERING[1][1:])
    assert "misses the contributions of ranks [1]" in reject(first, second, by=check_reduce_scatter)


def test_what_was_added_to_the_values_is_not_in_the_share() -> None:
    others: list[Program] = [(Encode(0, slot), Send(slot, 0)) for slot in ("a", "b")]
    right: Program = (Receive("a", 1), Receive("b", 2), Sum(("a", "b"), 0))
    assert check_reduce_scatter([right, *others]).quantizations == {0: 1}
    added: Program = (Receive("a", 1), Add("a", 0), Receive("b", 2), Sum(("b",), 0))
    assert "misses the contributions of ranks [1]" in reject(added, *others, by=check_reduce_scatter)


def test_a_contribution_that_comes_by_another_rank_is_quantized_once_too_often() -> None:
    programs: list[Program] = [
        (Receive("b", 1), Sum(("b",), 0)),
        (Receive("c", 2), Reduce(("c",), 0, "b", final=False), Send("b", 0)),
        (Encode(0, "c"), Send("c", 1)),
    ]
    assert "a contribution is quantized 2 times" in reject(*programs, by=check_reduce_scatter)


def test_payloads_of_both_codings_or_scaled_ones_in_a_share_s_sum_are_refused() -> None:
    others: list[Program] = [(Encode(0, "a"), Send("a", 0)), (Encode(0, "b", exact=True), Send("b", 0))]
    first: Program = (Receive("a", 1), Receive("b", 2), Sum(("a", "b"), 0))
    assert "slot b is exact, and the others are compressed" in reject(first, *others, by=check_reduce_scatter)
    scaled: Program = (Reduce((), 0, "p1"), *SCATTERING[1][1:])
    assert "was scaled already" in reject(SCATTERING[0], scaled, by=check_reduce_scatter)


# ---- all-gathers ----


def test_an_all_gather_passes_with_its_bill() -> None:
    assert check_all_gather(GATHERING, [24, 40]) == Report(
        quantizations={0: 1, 1: 1},
        messages=(1, 1),
        sent_nbytes=(24, 40),
        sent=(Message(0, 1, (0,), exact=False), Message(1, 0, (1,), exact=False)),
    )
    assert check_all_gather([GATHERING[0][:3], GATHERING[1][3:]]).quantizations == {0: 1}
    exact: Program = (Encode(0, "s0", exact=True), *GATHERING[0][1:])
    assert check_all_gather([exact, GATHERING[1]]).quantizations == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("first", "said"),
    [
        pytest.param((*GATHERING[0][:2], *GATHERING[0][3:]), "chunk 0: the bits differ", id="own values kept"),
        pytest.param(GATHERING[0][:4], "chunk 1: the bits differ", id="another's never decoded"),
        pytest.param((*GATHERING[0], Encode(0, "t0"), Decode("t0", 0)), "chunk 0: the bits differ", id="encoded again"),
        pytest.param((*GATHERING[0], Encode(0, "t0")), "rank 0 quantizes it 2 times", id="quantized twice"),
        pytest.param((*GATHERING[0][:4], Add("s1", 1)), "chunk 1: the bits differ", id="added instead"),
        pytest.param((*GATHERING[0][:4], Decode("s1", 0)), "holds chunk 1, not 0", id="over another chunk"),
        pytest.param((*GATHERING[0][2:], *GATHERING[0][:2]), "is read before it is written", id="too early"),
        pytest.param((GATHERING[0][0], *GATHERING[0]), "is written twice", id="a slot twice"),
    ],
)
def test_a_wrong_all_gather_is_refused(first: Program, said: str) -> None:
    assert said in reject(first, GATHERING[1], by=check_all_gather)


def test_a_share_that_somebody_else_encoded_or_nobody_decoded_is_refused() -> None:
    """The same bits on all ranks, and the wrong ones."""
    stolen: tuple[Program, Program] = (
        (Encode(1, "s0"), Send("s0", 1), Decode("s0", 1)),
        (Receive("s0", 0), Decode("s0", 1)),
    )
    text = reject(*stolen, by=check_all_gather)
    assert "chunk 1: expected what rank 1 encoded, got the payload of slot s0 of rank 0" in text
    kept = tuple(tuple(step for step in program if not isinstance(step, Decode)) for program in GATHERING)
    assert "chunk 0: expected what rank 0 encoded, got None" in reject(*kept, by=check_all_gather)


@pytest.mark.parametrize("checked", [check_reduce_scatter, check_all_gather])
def test_messages_and_waits_are_checked_alike(checked: Callable[[Sequence[Program]], Report]) -> None:
    programs = SCATTERING if checked is check_reduce_scatter else GATHERING
    first, second = programs
    assert "got 1 and 0" in reject(first, tuple(s for s in second if not isinstance(s, Receive)), by=checked)
    early = sorted(first, key=lambda step: not isinstance(step, Receive))
    also_early = sorted(second, key=lambda step: not isinstance(step, Receive))
    assert reject(tuple(early), tuple(also_early), by=checked).startswith("circular wait: rank 0 waits")


def test_program_errors_are_errors_of_ours_and_runtime_errors() -> None:
    assert issubclass(ProgramError, CGXError) and issubclass(CGXError, RuntimeError)


def test_a_printed_program_has_one_numbered_line_a_step() -> None:
    assert format_program(OTHER) == "\n".join(
        [
            "1  encode  chunk 0 into part",
            "2  send    part to 0",
            "3  receive sum from 0",
            "4  decode  sum over chunk 0",
        ]
    )
    assert format_program(OWNER).splitlines()[1] == "2  reduce  chunk 0 with part into sum"
    assert format_program(SCATTERING[0]).splitlines()[3] == "4  sum     chunk 0 with p1"
    assert str(Sum(("a", "b"), 3)) == "sum     chunk 3 with a, b"
    assert format_program(ADDING[0]).splitlines()[1:3] == [
        "2  add     part to chunk 0",
        "3  reduce  chunk 0 with nothing into sum",
    ]
    assert str(Reduce(("a",), 0, "b", final=False)) == "reduce  chunk 0 with a into b, unscaled"
    assert str(Encode(0, "a", exact=True)) == "encode  chunk 0 into a, exact"
