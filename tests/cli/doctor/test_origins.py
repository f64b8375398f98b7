"""Where each setting came from, as `cgx doctor` tells it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

import torch_cgx
from torch_cgx import config
from torch_cgx.cli.doctor.origins import Setting, in_force


class Noted(dict[str, str]):
    """Variables that know which of them were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        self.read.add(name)
        return default


VALUES = {
    "CGX_COMPRESSION_QUANTIZATION_BITS": "3",
    "CGX_COMPRESSION_BUCKET_SIZE": "64",
    "CGX_COMPRESSION_QUANTIZER": "rotated",
    "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS": "1",
    "CGX_COMPRESSION_MINIMAL_SIZE": "1000",
    "CGX_COMPRESSION_STOCHASTIC": "1",
    "CGX_COMPRESSION_SEED": "7",
    "CGX_FUSION_BUFFER_SIZE_MB": "8",
    "CGX_INNER_COMMUNICATOR_TYPE": "GLOO",
    "CGX_CROSS_COMMUNICATOR_TYPE": "GLOO",
    "CGX_INNER_REDUCTION_TYPE": "RING",
    "CGX_CROSS_REDUCTION_TYPE": "RING",
    "CGX_LINK_COSTS": "1gbit",
    "CGX_INTRA_BROADCAST": "0",
    "CGX_INTRA_COMPRESS": "0",
    "CGX_STREAMS": "2",
    "CGX_SOCKET_IFNAME": "lo",
    "CGX_NODE_ID": "here",
    "CGX_NUM_THREADS": "2",
    "CGX_SIMD": "scalar",
    "CGX_TRACE_DIR": ".",
}
"""None of them the default."""


@pytest.fixture(autouse=True)
def nothing_asked() -> Iterator[None]:
    torch_cgx.set_default()
    yield
    torch_cgx.set_default()


def by_name(environ: dict[str, str]) -> dict[str, Setting]:
    settings, complaints = in_force(environ)
    assert not complaints
    return {setting.name: setting for setting in settings}


def test_the_table_of_variables_is_all_that_is_read_and_every_field() -> None:
    environ = Noted()
    config.Settings.from_environ(environ)
    config.compression_from_environ(environ)
    assert environ.read - {"GLOO_SOCKET_IFNAME"} == VALUES.keys()
    assert set(config.VARIABLES.values()) == VALUES.keys()
    fields = [*dataclasses.fields(config.Compression), *dataclasses.fields(config.Settings)]
    assert [field.name for field in fields] == list(config.VARIABLES)


def test_without_variables_all_are_defaults() -> None:
    settings = by_name({})
    assert {setting.origin for setting in settings.values()} == {"default"}
    assert (settings["bits"].text, settings["fusion_nbytes"].text, settings["intra_compress"].text) == ("32", "64", "1")


@pytest.mark.parametrize("variable", VALUES)
def test_what_a_variable_changes_is_said_to_come_from_it(variable: str) -> None:
    before, after = by_name({}), by_name({variable: VALUES[variable]})
    changed = {name for name in after if after[name].value != before[name].value}
    assert changed
    for name, setting in after.items():
        assert setting.origin == ("variable" if setting.variable == variable else "default")
        of_the_quantizer = variable == "CGX_COMPRESSION_QUANTIZER" and name == "block"  # each has its own default
        assert name not in changed or setting.variable == variable or of_the_quantizer


@pytest.mark.parametrize("variable", [name for name in VALUES if name not in ("CGX_TRACE_DIR", "CGX_SIMD")])
def test_a_value_is_shown_as_its_variable_would_have_it(variable: str) -> None:
    settings = by_name({variable: VALUES[variable]}).values()
    shown = [setting.text for setting in settings if setting.label == variable]  # of CUDA: what it makes of it
    assert shown and set(shown) == {VALUES[variable]}


def test_an_empty_variable_counts_as_unset() -> None:
    assert by_name({"CGX_COMPRESSION_SEED": " "})["seed"].origin == "default"


def test_what_the_program_asked_for_goes_before_the_variable() -> None:
    torch_cgx.set_default(bits=2)
    settings = by_name({"CGX_COMPRESSION_QUANTIZATION_BITS": "3", "CGX_COMPRESSION_BUCKET_SIZE": "64"})
    assert (settings["bits"].value, settings["bits"].origin) == (2, "program")
    assert (settings["block"].value, settings["block"].origin) == (64, "variable")


def test_a_wrong_value_hides_no_other() -> None:
    settings, complaints = in_force({"CGX_SIMD": "mmx", "CGX_NUM_THREADS": "0", "CGX_COMPRESSION_SEED": "5"})
    assert len(complaints) == 2
    assert any("CGX_SIMD='mmx'" in each for each in complaints)
    assert any("CGX_NUM_THREADS='0'" in each for each in complaints)
    origins = {setting.name: (setting.origin, setting.value) for setting in settings}
    assert origins["simd"] == origins["num_threads"] == ("not valid", None)
    assert origins["seed"] == ("variable", 5)


def test_variables_that_are_right_by_themselves_but_not_together_are_one_complaint() -> None:
    given = {"CGX_COMPRESSION_QUANTIZATION_BITS": "6", "CGX_COMPRESSION_QUANTIZER": "rotated", "CGX_STREAMS": "2"}
    settings, (complaint,) = in_force(given)
    for words in ("CGX_COMPRESSION_QUANTIZATION_BITS=6", "CGX_COMPRESSION_QUANTIZER=rotated", "expected 1 to 4"):
        assert words in complaint
    found = {setting.name: (setting.origin, setting.value) for setting in settings}
    assert found["bits"] == found["quantizer"] == ("not valid", None)
    assert found["streams"] == ("variable", 2) and found["block"] == ("default", 512)


def test_values_that_a_terminal_cannot_show_are_escaped_and_long_ones_cut() -> None:
    assert by_name({"CGX_NODE_ID": "a\udcffb"})["node_id"].text == r"'a\udcffb'"
    assert by_name({"CGX_NODE_ID": "x" * 200})["node_id"].text == "x" * 60 + "..."
