"""The checker: right programs pass with the right bill, and every kind of wrong program is refused."""

from __future__ import annotations

import pytest

from torch_cgx.errors import CGXError, ProgramError
from torch_cgx.program import Decode, Encode, Program, Receive, Reduce, Report, Send, check, format_program

# Two ranks, one chunk, which rank 0 reduces.
OWNER: Program = (Receive("part", 1), Reduce(("part",), 0, "sum"), Send("sum", 1))
OTHER: Program = (Encode(0, "part"), Send("part", 0), Receive("sum", 0), Decode("sum", 0))


def reject(*programs: Program) -> str:
    with pytest.raises(ProgramError) as caught:
        check(programs)
    return str(caught.value)


def test_a_right_pair_of_programs_passes_with_its_bill() -> None:
    assert check([OWNER, OTHER], [24]) == Report(quantizations={0: 2}, messages=(1, 1), sent_nbytes=(24, 24))
    assert check([OWNER, OTHER]).sent_nbytes is None


def test_ranks_that_do_nothing_have_nothing_to_agree_on() -> None:
    assert check([(), (), ()]) == Report(quantizations={}, messages=(0, 0, 0), sent_nbytes=None)


def test_a_chain_quantizes_the_first_contribution_once_a_hop() -> None:
    """Rank 0's values are encoded once there, and once more at each of two reductions."""
    programs = [
        (Encode(0, "a"), Send("a", 1), Receive("c", 2), Decode("c", 0)),
        (Receive("a", 0), Reduce(("a",), 0, "b"), Send("b", 2), Receive("c", 2), Decode("c", 0)),
        (Receive("b", 1), Reduce(("b",), 0, "c"), Send("c", 0), Send("c", 1)),
    ]
    assert check(programs).quantizations == {0: 3}


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
    assert "the bits differ" in reject(owner, OTHER)


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
