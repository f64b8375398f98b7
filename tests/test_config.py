"""The variables: defaults, ranges, and errors that name the variable, the value and what is allowed."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_cgx.config import (
    VARIABLES,
    Asked,
    Compression,
    LinkCosts,
    Settings,
    compression_from_environ,
    unknown_variables,
)

BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"
BUCKET = "CGX_COMPRESSION_BUCKET_SIZE"
QUANTIZER = "CGX_COMPRESSION_QUANTIZER"


def test_without_variables_the_defaults_hold_and_nothing_is_compressed() -> None:
    assert Settings.from_environ({}) == Settings()
    assert compression_from_environ({}) == Compression(bits=32, block=512)
    assert Settings().fusion_nbytes == 64 * 1024 * 1024


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS", "1", "skip_incomplete", True),
        ("CGX_COMPRESSION_MINIMAL_SIZE", "1024", "minimal_numel", 1024),
        ("CGX_COMPRESSION_MINIMAL_SIZE", "3", "minimal_numel", 16),
        ("CGX_COMPRESSION_STOCHASTIC", "1", "stochastic", True),
        ("CGX_COMPRESSION_STOCHASTIC", "0", "stochastic", False),
        ("CGX_COMPRESSION_SEED", "18446744073709551615", "seed", 2**64 - 1),
        ("CGX_FUSION_BUFFER_SIZE_MB", "8", "fusion_nbytes", 8 << 20),
        ("CGX_INNER_REDUCTION_TYPE", "SRA", "inner_reduction", "SRA"),
        ("CGX_INNER_REDUCTION_TYPE", "RING", "inner_reduction", "RING"),
        ("CGX_CROSS_REDUCTION_TYPE", "sra", "cross_reduction", "SRA"),
        ("CGX_CROSS_REDUCTION_TYPE", "Ring", "cross_reduction", "RING"),
        ("CGX_CROSS_REDUCTION_TYPE", "auto", "cross_reduction", "AUTO"),
        ("CGX_LINK_COSTS", "25gbit,8.5us", "link_costs", "25gbit,8.5us"),
        ("CGX_INTRA_BROADCAST", "1", "intra_broadcast", True),
        ("CGX_INTRA_BROADCAST", "0", "intra_broadcast", False),
        ("CGX_INTRA_COMPRESS", "1", "intra_compress", True),
        ("CGX_INTRA_COMPRESS", "0", "intra_compress", False),
        ("CGX_STREAMS", "16", "streams", 16),
        ("CGX_SOCKET_IFNAME", " eth0 ", "socket_interface", "eth0"),
        ("GLOO_SOCKET_IFNAME", "ib0", "socket_interface", "ib0"),
        ("GLOO_SOCKET_IFNAME", " , ib0 ,eth1", "socket_interface", "ib0"),
        ("CGX_NODE_ID", "node-7", "node_id", "node-7"),
        ("CGX_NUM_THREADS", "1", "num_threads", 1),
        ("CGX_SIMD", "scalar", "simd", "scalar"),
        ("CGX_NUM_THREADS", "4", "num_threads", 4),
        ("CGX_SIMD", "AVX2", "simd", "avx2"),
        ("CGX_SIMD", "avx512", "simd", "avx512"),
        ("CGX_SIMD", "neon", "simd", "neon"),
    ],
)
def test_a_variable_sets_its_field_and_no_other(variable: str, value: str, field: str, expected: object) -> None:
    settings = Settings.from_environ({variable: value})
    assert getattr(settings, field) == expected
    others = [f.name for f in fields(Settings) if f.name != field]
    assert all(getattr(settings, name) == getattr(Settings(), name) for name in others)


@pytest.mark.parametrize(
    ("inner", "cross", "on_cpu", "on_cuda"),
    [
        ("", "", ("SHM", None), "NCCL"),
        ("nccl", "NCCL", ("SHM", None), "NCCL"),
        ("SHM", "", ("SHM", None), "SHM"),
        ("Gloo", "", ("GLOO", None), "NCCL"),
        ("MPI", "GLOO", ("MPI", "GLOO"), "NCCL"),
        ("", "GLOO", ("SHM", "GLOO"), "NCCL"),
        ("SHM", "NCCL", ("SHM", None), "SHM"),
        ("tcp", "", ("TCP", None), "NCCL"),
        ("", "TCP", ("SHM", "TCP"), "NCCL"),
        ("TCP", "MPI", ("TCP", "MPI"), "NCCL"),
    ],
)
def test_cuda_tensors_go_over_nccl_unless_told_otherwise_and_cpu_tensors_never(
    inner: str, cross: str, on_cpu: tuple[str, str | None], on_cuda: str
) -> None:
    given = {"CGX_INNER_COMMUNICATOR_TYPE": inner, "CGX_CROSS_COMMUNICATOR_TYPE": cross}
    settings = Settings.from_environ(given)
    assert (settings.inner_communicator, settings.cross_communicator) == on_cpu
    assert settings.cuda_communicator == on_cuda


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS", "yes"),
        ("CGX_COMPRESSION_MINIMAL_SIZE", "-1"),
        ("CGX_COMPRESSION_MINIMAL_SIZE", "1e3"),
        ("CGX_COMPRESSION_STOCHASTIC", "2"),
        ("CGX_COMPRESSION_SEED", "18446744073709551616"),
        ("CGX_COMPRESSION_SEED", "0x10"),
        ("CGX_FUSION_BUFFER_SIZE_MB", "0"),
        ("CGX_FUSION_BUFFER_SIZE_MB", "1_0"),
        ("CGX_INNER_COMMUNICATOR_TYPE", "UDP"),
        ("CGX_CROSS_COMMUNICATOR_TYPE", "SHM"),
        ("CGX_INNER_REDUCTION_TYPE", "TREE"),
        ("CGX_CROSS_REDUCTION_TYPE", "ALL_TO_ALL"),
        ("CGX_LINK_COSTS", "10"),
        ("CGX_LINK_COSTS", "10gbit,8"),
        ("CGX_LINK_COSTS", "1000tbit"),
        ("CGX_LINK_COSTS", "0mbit"),
        ("CGX_INTRA_BROADCAST", "true"),
        ("CGX_INTRA_COMPRESS", "-1"),
        ("CGX_STREAMS", "0"),
        ("CGX_STREAMS", "17"),
        ("CGX_SOCKET_IFNAME", "e" * 256),
        ("CGX_NUM_THREADS", "0"),
        ("CGX_SIMD", "sse"),
    ],
)
def test_a_value_outside_its_range_is_refused_with_what_is_allowed(variable: str, value: str) -> None:
    with pytest.raises(ValueError) as caught:
        Settings.from_environ({variable: value})
    text = str(caught.value)
    assert variable in text and repr(value)[:100] in text and "allowed is" in text and "yet" not in text


def test_our_own_variable_for_the_interface_wins_over_gloo_s() -> None:
    both = {"CGX_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "ib0"}
    assert Settings.from_environ(both).socket_interface == "eth0"
    assert Settings.from_environ({**both, "CGX_SOCKET_IFNAME": " "}).socket_interface == "ib0"
    assert Settings.from_environ({"GLOO_SOCKET_IFNAME": " , "}).socket_interface is None


def test_an_empty_variable_counts_as_unset() -> None:
    variables = ["CGX_SIMD", "CGX_NODE_ID", "CGX_COMPRESSION_SEED", "CGX_INTRA_BROADCAST", "CGX_NUM_THREADS"]
    assert Settings.from_environ(dict.fromkeys(variables, "")) == Settings()
    assert compression_from_environ({BITS: "", BUCKET: " "}) == Compression()


def test_variables_of_others_and_unknown_ones_are_left_alone() -> None:
    assert Settings.from_environ({"CGX_UNKNOWN": "/x", "MPI_HOME": "/y", "OMP_NUM_THREADS": "7"}) == Settings()


def test_this_process_s_variables_are_read_where_no_mapping_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGX_COMPRESSION_SEED", "42")
    monkeypatch.setenv(BITS, "4")
    monkeypatch.setenv(BUCKET, "1024")
    assert Settings.from_environ().seed == 42
    assert compression_from_environ() == Compression(4, 1024)
    monkeypatch.setenv(BITS, "8")
    assert compression_from_environ() == Compression(8, 1024)
    monkeypatch.delenv(BITS)
    assert compression_from_environ() == Compression(32, 1024)


@given(bits=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 32]), block=st.integers(1, 65536))
def test_every_width_and_block_size_in_range_is_read(bits: int, block: int) -> None:
    assert compression_from_environ({BITS: str(bits), BUCKET: str(block)}) == Compression(bits, block)


@pytest.mark.parametrize("value", ["0", "9", "16", "31", "33", "-4", "4.0", "four", "\u0664"])
def test_a_width_outside_its_range_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="1 to 8, or 32") as caught:
        compression_from_environ({BITS: value})
    assert BITS in str(caught.value) and value in str(caught.value)


@pytest.mark.parametrize("value", ["0", "65537", "-1", "big"])
def test_a_bucket_size_outside_its_range_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="1 to 65536") as caught:
        compression_from_environ({BUCKET: value})
    assert BUCKET in str(caught.value) and value in str(caught.value)


@pytest.mark.parametrize(("bits", "block"), [(0, 512), (16, 512), (4, 0), (4, 65537)])
def test_a_compression_outside_its_range_cannot_be_made(bits: int, block: int) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got"):
        Compression(bits, block)


def test_the_variable_for_the_quantizer_brings_its_own_bucket_size_unless_one_is_set() -> None:
    assert compression_from_environ({QUANTIZER: "Rotated"}) == Compression(32, 1024, "rotated")
    assert compression_from_environ({QUANTIZER: "rotated", BITS: "2"}) == Compression(2, 1024, "rotated")
    assert compression_from_environ({QUANTIZER: "rotated", BUCKET: "256"}) == Compression(32, 256, "rotated")
    assert compression_from_environ({QUANTIZER: "maxmin"}) == compression_from_environ({QUANTIZER: ""}) == Compression()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({QUANTIZER: "maxmax"}, f"{QUANTIZER}='maxmax' is not valid: allowed is maxmin or rotated"),
        (
            {QUANTIZER: "rotated", BITS: "5"},
            f"{BITS}=5 {QUANTIZER}=rotated: bits of the rotated quantizer: expected 1 to 4",
        ),
        (
            {QUANTIZER: "rotated", BITS: "4", BUCKET: "100"},
            f"{BITS}=4 {BUCKET}=100 {QUANTIZER}=rotated: bucket size of the rotated quantizer: expected one of "
            "64, 128, 256, 512, 1024, 2048, 4096, got 100",
        ),
    ],
)
def test_a_quantizer_that_does_not_go_with_the_others_is_refused_with_what_does(
    given: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError) as caught:
        compression_from_environ(given)
    assert words in str(caught.value)


@pytest.mark.parametrize(("bits", "block"), [(5, 1024), (8, 64), (0, 64), (2, 100), (2, 32), (2, 8192)])
def test_a_rotated_compression_outside_its_range_cannot_be_made(bits: int, block: int) -> None:
    with pytest.raises(ValueError, match=r"of the rotated quantizer: expected .*, got"):
        Compression(bits, block, "rotated")


def test_what_one_asks_for_goes_over_what_another_does_part_by_part() -> None:
    usual = Asked(4, 512, "maxmin")
    assert Asked().over(usual) == usual
    assert Asked(bits=2, quantizer="rotated").over(usual) == Asked(2, 512, "rotated")
    assert Asked(bits=2, quantizer="rotated").over(Asked(8)).compression() == Compression(2, 1024, "rotated")


def test_the_fingerprint_is_what_ranks_must_share_and_goes_through_json() -> None:
    mine = Settings(node_id="a", num_threads=1, simd="scalar", socket_interface="eth0", link_costs="1gbit")
    theirs = Settings(node_id="b", num_threads=4, simd="avx2", socket_interface="eth1")
    assert mine.fingerprint() == theirs.fingerprint()
    assert json.loads(json.dumps(mine.fingerprint())) == mine.fingerprint()
    others = {
        "seed": 1,
        "stochastic": True,
        "minimal_numel": 99,
        "fusion_nbytes": 1,
        "inner_communicator": "GLOO",
        "cross_communicator": "MPI",
        "cuda_communicator": "SHM",
        "inner_reduction": "RING",
        "cross_reduction": "RING",
        "intra_broadcast": False,
        "intra_compress": False,
        "streams": 2,
    }
    for name, other in others.items():
        assert Settings(**{name: other}).fingerprint() != mine.fingerprint()  # type: ignore[arg-type]


def test_costs_of_a_link_are_a_rate_and_microseconds_per_message() -> None:
    assert LinkCosts.parse(None) == LinkCosts.parse("") == LinkCosts()
    assert LinkCosts.parse("100mbit") == LinkCosts(12.5e6, None)
    assert LinkCosts.parse("1.6Tbit,8.5us") == LinkCosts(200e9, pytest.approx(8.5e-6))


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("CGX_COMPRESSION_BITS", "CGX_COMPRESSION_QUANTIZATION_BITS"),
        ("CGX_BITS", "CGX_COMPRESSION_QUANTIZATION_BITS"),
        ("CGX_COMPRESSION_QUANTISATION_BIT", "CGX_COMPRESSION_QUANTIZATION_BITS"),
        ("CGX_BUCKET_SIZE", "CGX_COMPRESSION_BUCKET_SIZE"),
        ("CGX_QUANTIZATION_BUCKET_SIZE", "CGX_COMPRESSION_BUCKET_SIZE"),
        ("CGX_COMPRESION_BUCKET_SIZE", "CGX_COMPRESSION_BUCKET_SIZE"),
        ("CGX_SEED", "CGX_COMPRESSION_SEED"),
        ("CGX_SIMDD", "CGX_SIMD"),
        ("CGX_THREADS", "CGX_NUM_THREADS"),
        ("CGX_INNER_COMMUNICATOR", "CGX_INNER_COMMUNICATOR_TYPE"),
        ("CGX_REDUCTION_TYPE", "CGX_CROSS_REDUCTION_TYPE or CGX_INNER_REDUCTION_TYPE"),
    ],
)
def test_an_unknown_variable_is_told_with_the_one_that_shares_its_words(wrong: str, meant: str) -> None:
    told = f"{wrong} is set, but there is no such variable. Did you mean {meant}?"
    assert unknown_variables({wrong: "4", "CGX_SIMD": "scalar", "OTHER": "1"}) == [told]


@pytest.mark.parametrize("wrong", ["CGX_WEATHER", "CGX_COMPRESSION", "CGX_COMPRESSION_WIDTH", "CGX_", "CGX_TYPE"])
def test_an_unknown_variable_that_is_like_no_other_is_told_without_a_guess(wrong: str) -> None:
    (told,) = unknown_variables({wrong: "1"})
    assert told == f"{wrong} is set, but there is no such variable. docs/variables.md lists all names."


def test_every_variable_is_the_nearest_to_a_misspelling_of_its_own() -> None:
    for name in set(VARIABLES.values()):
        wrong = name[:-1] + "Z"
        assert f"Did you mean {name}?" in unknown_variables({wrong: "1"})[0]
